"""Large models on this machine: the demo models width-expanded to the shapes of an 8B and a 1B, compared with llama.cpp
on the same weights.

    python -m bench.large [--folder DIR] [--llama-python PYTHON] [--llama-bin DIR] [--json out.json]

Writes the width-expanded pair and llama.cpp's files of it (Q4_1 contains AutoAWQ's codes, scales and zero points; Q4_0
is quantised again). Then runs each configuration in its own process, one at a time, with the files in the page cache:

- starts: the pair without packed weights on disk, and again with those that the first start wrote;
- decode: the option sets in OUR_OPTIONS, without those whose flags this version lacks;
- llama: llama.cpp's plain decoding, with one thread and with all, through its Python package or else its server;
- server: `llama-server` with the width-expanded draft, for each number of drafted tokens per round in --drafts.

All systems answer the same short prompts greedily and read the same long ones; SwiftSpec with its LM head in int8 also
samples answers to the short ones, at COMMON_SAMPLING (bench/workload.py). Rates are tokens per second after the
prefill, as each system measures them; for the server they are the reported ones. A missing program is reported as one
line. The machine must be otherwise idle. A pass takes 20 minutes.

llama.cpp 0.3.36 crashes in its code for AMX. For a CPU with AMX, `python -m bench.baselines.build_llama DIR` builds it
without that code; the report names the build.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench import large_report as report
from bench.baselines.build_llama import crash_advice
from bench.baselines.llama_plain import CONTEXT, has_llama_cpp
from bench.baselines.llama_server import LlamaServer, find_server
from bench.data.heldout import ROOT, read_token_ids
from bench.large_report import FIRST, OURS, PEER, SECOND, Row
from bench.width_expanded import Model, check_room, warm
from bench.workload import Measured, Task, Work
from swiftspec.errors import UserError
from swiftspec.settings.flags import SETTINGS, flag_name

PARTS = ("starts", "decode", "llama", "server")
KINDS = ("q4_1", "q4_0")  # weight types of llama.cpp's files
LONG, SHORT = 3, 64  # number of long prompts; tokens of a short prompt
PEERS = 5  # maximum requests of a llama.cpp run: its rates vary little, and there are many runs
CACHE = "packed_cache"  # the setting for the folder of packed weights


@dataclass(frozen=True, slots=True)
class Options:
    """One run of SwiftSpec: its settings, and its kind in the report."""

    name: str
    kind: str
    settings: dict[str, str]
    sampled: bool = False  # also measure at COMMON_SAMPLING


OUR_OPTIONS = (
    Options("ar", "ar", {"mode": "ar", "head": "native"}),
    Options("ar, head int8", "head int8", {"mode": "ar", "head": "int8"}, sampled=True),
    Options("ar, native activations", "ar", {"mode": "ar", "activations": "native"}),
    Options("serial", "tree", {"mode": "serial", "head": "native"}),
    Options("serial, head int8", "tree", {"mode": "serial", "head": "int8"}, sampled=True),
)


@dataclass(slots=True)
class Bench:
    """One pass of the benchmark: configuration and results."""

    args: argparse.Namespace
    target: Model
    draft: Model
    work: Work
    folder: Path  # for task files and packed weights
    llama_server: LlamaServer | None
    rows: list[Row] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Runs all requested parts."""
        for part in self.args.only:
            getattr(self, part)()

    def starts(self) -> None:
        """Measures the first and the second start of the pair, with one short request each."""
        work, cache = replace(self.work.less(1), long=[]), self.folder / "packed"
        shutil.rmtree(cache, ignore_errors=True)
        if CACHE not in SETTINGS:
            self._skip(f"{SECOND}: this version has no {flag_name(CACHE)}, so it equals the first start")
        for name in (FIRST, SECOND):
            self._ours(Options(name, "start", {"mode": "serial"}), work, cache)
        shutil.rmtree(cache, ignore_errors=True)

    def decode(self) -> None:
        """Measures SwiftSpec with each option set."""
        for options in OUR_OPTIONS:
            self._ours(options, self.work, None)

    def llama(self) -> None:
        """Measures llama.cpp's plain decoding."""
        python, server = self.args.llama_python, self.llama_server
        if python is None and server is None:
            self._skip("llama.cpp plain: no Python package (--llama-python) and no llama-server (--llama-bin)")
            return
        for kind in KINDS:
            file, work = self.target.gguf(kind), self.work.less(PEERS)
            for threads in sorted({1, self.args.threads}):
                name = f"{kind}, {threads} thread{'s' if threads > 1 else ''}"
                with self._measured(PEER, name, "plain", [file]) as add:
                    if python is not None:
                        task = Task({"file": str(file), "threads": threads}, work)
                        add(self._child([python, "-m", "bench.baselines.llama_plain"], task, crash_advice()))
                    elif server is not None:
                        add(server.measure(work, file, threads))

    def server(self) -> None:
        """Measures llama.cpp's speculative decoding."""
        server = self.llama_server
        if server is None:
            self._skip("llama.cpp with its draft: no llama-server (--llama-bin)")
            return
        draft, threads, work = self.draft.gguf("q4_1"), self.args.threads, self.work.less(PEERS)
        for kind in KINDS:
            for count in self.args.drafts:
                file = self.target.gguf(kind)
                with self._measured(PEER, f"{kind}, draft of {count}", "draft", [file, draft]) as add:
                    add(server.measure(work, file, threads, (draft, count)))

    def _ours(self, options: Options, work: Work, cache: Path | None) -> None:
        """Measures one run of SwiftSpec, or records why it was skipped."""
        settings, known = dict(options.settings), SETTINGS
        settings |= {"model": str(self.target.folder), "plan": "none"}
        if settings["mode"] != "ar":
            settings["draft_model"] = str(self.draft.folder)
        if self.args.given_threads is not None:
            settings["threads"] = str(self.args.given_threads)
        if CACHE in known:
            settings[CACHE] = "off" if cache is None else str(cache)
        lacking = [flag_name(name) for name in settings if name not in known]
        if lacking:
            self._skip(f"{OURS} {options.name}: this version has no {' and no '.join(lacking)}")
            return
        files = self.target.files() + (self.draft.files() if "draft_model" in settings else [])
        kept = None if cache is None or CACHE not in known else str(cache)
        what = {"settings": settings, "cache": kept, "sampled": options.sampled}
        with self._measured(OURS, options.name, options.kind, files) as add:
            add(self._child([sys.executable, "-m", "bench.startup"], Task(what, work)))

    @contextmanager
    def _measured(self, system: str, name: str, kind: str, files: list[Path]) -> Iterator[Callable[[Measured], None]]:
        """Yields a function that adds the results of a run as a row.

        A run that fails is recorded as one line, and the other runs continue.
        """
        warm(files)
        say(f"{system} {name}")
        try:
            yield lambda measured: self.rows.append(Row(system, name, kind, measured))
        except UserError as error:
            self._skip(f"{system} {name}: {error}")

    def _child(self, command: list[str], task: Task, on_crash: str = "") -> Measured:
        """Runs a process and returns the measurements that it prints. Raises UserError if it fails. `on_crash`: added
        to the error if a signal has ended the process."""
        file = self.folder / "task.json"
        task.write(file)
        env = {name: value for name, value in os.environ.items() if not name.startswith("SWIFTSPEC_")}
        done = subprocess.run([*command, str(file)], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        file.unlink()
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or ["no output on stderr"]
            advice = on_crash if done.returncode < 0 else ""
            raise UserError(f"failed with code {done.returncode}: {last[0]}{advice}")
        return Measured(**json.loads(done.stdout.splitlines()[-1]))

    def _skip(self, line: str) -> None:
        self.skipped.append(line)
        say(f"skipped: {line}")

    def result(self) -> dict[str, Any]:
        """Returns the JSON document."""
        size = self.target.size + self.draft.size
        verdicts = report.verdicts(self.rows, size)
        settings = {name: str(v) if isinstance(v, Path) else v for name, v in vars(self.args).items() if name in SHOWN}
        return {
            "settings": settings, "machine": report.machine(), "weights_gb": round(size / 1e9, 3),
            "rows": [row.record() for row in self.rows], "skipped": self.skipped, "llama": report.builds(self.rows),
            "equal_tokens": report.agreement(self.rows),
            "aims": [asdict(v) | {"holds": v.holds} for v in verdicts],
        }  # fmt: skip

    def print(self) -> None:
        """Prints the tables, the skipped runs and the verdicts."""
        print(report.table(self.rows))
        for build in report.builds(self.rows):
            print(f"{PEER} {build}")
        for line in self.skipped:
            print(f"skipped: {line}")
        print("leading tokens of each text that equal SwiftSpec's autoregressive decoding:")
        for line in report.agreement(self.rows) or ["nothing to compare"]:
            print(f"  {line}")
        for verdict in report.verdicts(self.rows, self.target.size + self.draft.size):
            print(verdict.line())


SHOWN = ("shapes", "tokens", "prompt", "requests", "threads", "drafts", "only")


def say(line: str) -> None:
    """Prints progress to stderr, separate from the tables."""
    print(line, file=sys.stderr, flush=True)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="folder for models and files (default: a temporary one)")
    parser.add_argument("--shapes", type=_words, default=["8b", "1b"], help="target and draft: 1b, 3b, 8b, 70b, or any"
                        " shape of tools.width_expand")  # fmt: skip
    parser.add_argument("--tokens", type=int, default=64, help="tokens per answer")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a long prompt")
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--threads", type=int, dest="given_threads", help="threads (default: the system's own, or all)")
    parser.add_argument("--drafts", type=_numbers, default=[2, 4, 8], help="draft tokens per round of llama.cpp")
    parser.add_argument("--only", type=_words, default=list(PARTS), help=f"parts to run, of {','.join(PARTS)}")
    parser.add_argument("--llama-python", default=sys.executable, help="Python interpreter with the package llama_cpp")
    parser.add_argument("--llama-bin", type=Path, help="folder of llama-server (default: search PATH)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    args.threads = args.given_threads or len(os.sched_getaffinity(0))
    if len(args.shapes) != 2:
        parser.error("--shapes: expected two shapes, TARGET,DRAFT")
    if not set(args.only) <= set(PARTS):
        parser.error(f"--only: expected some of {','.join(PARTS)}")
    if min(args.tokens - 1, args.prompt, args.requests, args.threads, *args.drafts) < 1:
        parser.error("--tokens must be at least 2, the other numbers at least 1")
    if max(args.prompt + 1, SHORT + args.tokens) > CONTEXT - 64:
        parser.error(f"--prompt and --tokens must fit into {CONTEXT - 64} tokens")
    return args


def _words(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and prints the tables."""
    args = arguments(argv)
    try:
        with TemporaryDirectory(prefix="swiftspec-large-") as scratch:
            folder = Path(scratch) if args.folder is None else args.folder
            folder.mkdir(parents=True, exist_ok=True)
            bench = prepared(args, folder.resolve())
            bench.run()
            bench.print()
            if args.json is not None:
                args.json.write_text(json.dumps(bench.result(), indent=1) + "\n", encoding="utf-8")
    except (UserError, OSError) as error:
        sys.exit(f"bench.large: {error}")


def prepared(args: argparse.Namespace, folder: Path) -> Bench:
    """Finds llama.cpp, and creates the pair and the GGUF files that do not exist yet."""
    server = find_server(args.llama_bin)
    if not has_llama_cpp(args.llama_python):
        args.llama_python = None
    target, draft = (Model.of(folder, *side) for side in zip(("target", "draft"), args.shapes, strict=True))
    plain = "llama" in args.only and (args.llama_python or server) is not None
    spoken = "server" in args.only and server is not None
    kinds, theirs = KINDS if plain or spoken else (), ("q4_1",) if spoken else ()
    packed = target.bytes_grown + draft.bytes_grown if "starts" in args.only and CACHE in SETTINGS else 0
    check_room(folder, packed + target.bytes_missing(kinds) + draft.bytes_missing(theirs), say)
    target.make(kinds, say)
    draft.make(theirs, say)
    sizes = {"length": args.prompt, "requests": args.requests, "tokens": args.tokens}
    work = Work.of(read_token_ids(8), long=LONG, short=SHORT, **sizes)
    return Bench(args, target, draft, work, folder, server)


if __name__ == "__main__":
    main()
