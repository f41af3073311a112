"""Profiles a model pair: measures splits, modes and tree shapes on this machine and saves the fastest plan for `serve`.

python -m swiftspec.profile [flags]                              one process
torchrun --standalone --nproc-per-node 4 -m swiftspec.profile    every split of four ranks
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftspec import file_io
from swiftspec.builder.rules import resolve_config
from swiftspec.capabilities import check_features
from swiftspec.errors import UserError
from swiftspec.model.checkpoint_files import read_config
from swiftspec.serve.__main__ import join_launched_world, run_guarded
from swiftspec.settings.flags import SETTINGS

if TYPE_CHECKING:
    from swiftspec.distributed.launch.world import World
    from swiftspec.lab.sweep import Sweep
    from swiftspec.lab.sweep_runs import SweepRequest
    from swiftspec.lab.worker_pool import Pair
    from swiftspec.settings.settings import Settings
    from swiftspec.startup.model_resolution import ResolvedModels

MAX_PROMPTS_BYTES = 64 << 20
PROMPTS = Path(__file__).with_name("prompts.jsonl")
MOVED_COMMANDS = {
    "trace": "python -m bench.timeline",
    "report": "python -m bench.profile_report",
    "predict": "python -m bench.prediction",
}


def main(argv: Sequence[str] | None = None, prog: str = "python -m swiftspec.profile") -> int:
    """Runs the command `profile` and returns its exit code. `prog`: name of the command in help texts."""
    return run_guarded(lambda first: _run(list(sys.argv[1:] if argv is None else argv), prog))


def _run(argv: list[str], prog: str) -> int:
    from swiftspec.settings.settings import UsageError

    try:
        if argv and argv[0] in MOVED_COMMANDS:
            raise UsageError(f"`profile {argv[0]}` is now `{MOVED_COMMANDS[argv[0]]}`, in SwiftSpec's source directory")
        return sweep(build_profile_parser(prog).parse_args(argv))
    except UsageError as error:
        raise UserError(str(error)) from None  # exit code 1 instead of 2, as for every other error of a sweep
    except KeyboardInterrupt:
        print("swiftspec: interrupted; continue with --resume", file=sys.stderr)
        return 130


def build_profile_parser(prog: str = "python -m swiftspec.profile") -> argparse.ArgumentParser:
    """Builds the parser of the flags of a sweep."""
    from swiftspec.cli.arguments import FlagParser

    made = FlagParser(prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.positional = "model"
    for name in model_settings():
        made.add_argument("--" + name.replace("_", "-"), dest=name, metavar="X", help=SETTINGS[name].setting.help)
    made.add_argument("--splits", default="all", help="all, or target+draft such as 3+1,2+2 (default: all)")
    made.add_argument("--modes", default="ar,serial,async,smc", help="modes to measure (default: ar,serial,async,smc)")
    made.add_argument(
        "--prompts", type=Path, help="JSONL file with field prompt (default: built-in ones of six kinds of tasks)"
    )
    made.add_argument("--limit", type=int, default=6, help="number of prompts to use (default: 6)")
    made.add_argument("--max-tokens", type=int, default=64, help="tokens per answer (default: 64)")
    made.add_argument("--repeats", type=int, default=3, help="repeats of every measurement (default: 3)")
    made.add_argument("--budget", default="10m", help="time limit, such as 90s, 10m or 1h (default: 10m)")
    made.add_argument("--output", type=Path, default=Path("profiles"), help="output folder (default: profiles)")
    made.add_argument("--dry-run", action="store_true", help="print what would be measured and exit")
    made.add_argument("--resume", action="store_true", help="continue an interrupted sweep")
    return made


def model_settings() -> list[str]:
    """Returns the names of the settings that a sweep accepts as flags."""
    return [name for name, flag in SETTINGS.items() if flag.setting.profile]


def sweep(args: argparse.Namespace) -> int:
    """Runs a sweep on every rank and returns the exit code: rank 0 measures, the other ranks follow it.

    Raises UserError if a flag is invalid, there is no draft model, or nothing could be measured.
    """
    from swiftspec.cli.config_sources import load_settings
    from swiftspec.cli.terminal import StartupProgress
    from swiftspec.lab.worker_pool import Pair, RankPool
    from swiftspec.settings.settings import check_usage
    from swiftspec.startup.model_resolution import ResolvedModels
    from swiftspec.startup.session import load_options

    given = {name: getattr(args, name) for name in model_settings() if getattr(args, name) is not None}
    settings = load_settings({**given, "plan": "none"})
    if settings.drafts_without_model:
        check_usage({"profile sweep", "suffix lookup"})
    world = join_launched_world()
    found = ResolvedModels.resolve(settings, 1, StartupProgress(quiet=True))
    if found.draft is None:
        check_usage({"profile sweep", "no draft"})
    assert found.draft is not None
    pool = RankPool(Pair(found.target, found.draft, load_options(settings), settings.threads), world)
    if world is not None and world.rank > 0:
        pool.follow()
        return 0
    try:
        made = _prepare(args, settings, pool, found, world)
        return 0 if made is None else _measure(made)
    finally:
        pool.dismiss()


def _prepare(
    args: argparse.Namespace, settings: Settings, pool: Any, found: ResolvedModels, world: World | None
) -> Sweep | None:
    """Builds the sweep for these flags. With --dry-run, prints what it would measure and returns None."""
    from swiftspec.lab import sweep as sweeps
    from swiftspec.lab.progress import SweepProgressBar
    from swiftspec.profiles import store
    from swiftspec.startup.built_in_models import DEMO_MODELS
    from swiftspec.startup.model_resolution import profile_key

    pair = pool.pair
    demo = found.built_in is DEMO_MODELS
    request = _request(args, settings, pool.ranks, pair, found)
    key = profile_key(settings, pair.target, pair.draft, pool.ranks)
    file = args.output / f"{store.file_stem(key, 'embedded' if demo else Path(found.model).name)}.json"
    if args.dry_run:
        print("\n".join([*sweeps.describe_trials(request, pool.ranks), f"output {file}, budget {request.budget:g} s"]))
        return None
    profile = sweeps.Sweep.empty(json.loads(json.dumps(asdict(key))), store.environment(), request)
    if args.resume:
        profile = sweeps.load_resumed(file, profile)
    bar = SweepProgressBar()
    if world is not None and not world.spin:
        bar.note(
            f"{world.local_size} ranks share {len(world.cores)} cores and wait for each other, so the figures hold for"
            " this machine only, not for one with a core per rank"
        )
    return sweeps.Sweep(pool, request, profile, file, bar)


def _request(
    args: argparse.Namespace, settings: Settings, ranks: int, pair: Pair, found: ResolvedModels
) -> SweepRequest:
    """Returns what the flags ask to measure."""
    from swiftspec.builder.hardware import resolve_device
    from swiftspec.control.step_times import GREEDY
    from swiftspec.lab import sweep_runs
    from swiftspec.lab.sweep_runs import USUAL, SweepRequest
    from swiftspec.startup.model_resolution import generation_defaults

    for name in ("limit", "max_tokens", "repeats"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1")
    if ranks == 1 and args.splits != "all":
        raise UserError("--splits requires several ranks: start it with torchrun --standalone --nproc-per-node N")
    device = resolve_device(settings.device).type
    configs = read_config(pair.target), read_config(pair.draft)
    pairs, reasons = sweep_runs.splits(args.splits, ranks, *configs) if ranks > 1 else ([], [])
    for reason in reasons:
        print(f"swiftspec: skipped split {reason}", file=sys.stderr)
    whole = all(sweep_runs.shard_error(config, ranks) is None for config in configs)
    modes = sweep_runs.check_modes(args.modes)
    if "async" in modes and ranks == 1 and device == "cuda":
        pairs = [(1, 0)]  # both models on one GPU
    elif "async" in modes and ranks == 1:
        modes = [mode for mode in modes if mode != "async"]
    if not modes:
        check_features({"one rank", "mode async"})
    code_only = found.built_in is not None and found.built_in.completes_code
    texts = read_prompts(args.prompts or PROMPTS, "humaneval" if code_only and not args.prompts else None, args.limit)
    sampling = settings.sampling_params(generation_defaults(found.generation_config))
    return SweepRequest(
        modes=modes,
        pairs=pairs,
        shards_on_all_ranks=whole,
        prompts=encode_prompts(pair.target, texts, chat=not code_only),
        max_tokens=args.max_tokens,
        repeats=args.repeats,
        budget=seconds(args.budget),
        samplings=(GREEDY,) if sampling.greedy else (GREEDY, sampling),
        draft_leaves=resolve_config(USUAL, pair.draft, device).leaves_per_expansion,
        base_ops="unfused" if device == "cuda" else "reference",
    )


def encode_prompts(target: Path, texts: Sequence[str], *, chat: bool) -> list[list[int]]:
    """Encodes prompts as requests of `serve` are encoded: each as the only turn of a chat, or as raw text if `chat` is
    False or the target has no chat template."""
    from swiftspec.text.codec import TextCodec

    codec = TextCodec(target)
    try:
        if chat and codec.has_template:
            return [codec.encode_chat([{"role": "user", "content": text}]) for text in texts]
        return [codec.encode(text) for text in texts]
    finally:
        codec.close()


def _measure(sweep: Sweep) -> int:
    from swiftspec.lab import results

    try:
        sweep.run()
    finally:
        sweep.close()
    print(results.format_profile(sweep.profile))
    for file in results.write_outputs(sweep.profile, sweep.file):
        print(f"wrote {file}")
    return 0


def read_prompts(file: Path, family: str | None = None, limit: int | None = None) -> list[str]:
    """Returns the field `prompt` of the lines of a JSONL file, at most `limit` of them.

    Lines have a field `family`, the kind of their task, or all lack it. The prompts are taken from the families in
    turn, so that the first ones belong to as many families as possible. `family`: skips lines of other families; None:
    skips none. Raises UserError if a line is invalid, a prompt is empty, or no prompt is found.
    """
    name, families = f"--prompts {file}", dict[str, list[str]]()
    for number, line in enumerate(file_io.read_lines(file, name, max_bytes=MAX_PROMPTS_BYTES), 1):
        where = f"{name}, line {number},"
        text = file_io.decode_utf8(line, where).strip()
        if text:
            data = file_io.parse_json(text, where)
            if not isinstance(data, dict) or not isinstance(data.get("prompt"), str):
                raise UserError(f'{name} must contain a JSON object with field "prompt" on every line')
            if family in (None, data.get("family")):
                families.setdefault(str(data.get("family")), []).append(data["prompt"])
    turns = zip_longest(*families.values())
    texts = [text for turn in turns for text in turn if text is not None][:limit]
    if not texts or not all(texts):
        raise UserError(f"--prompts {file} contains no prompt, or an empty one")
    return texts


def seconds(text: str) -> float:
    """Converts text such as `90s`, `10m` or `1h` to seconds. Raises UserError if it is not a positive time."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if found is None or float(found[1]) <= 0:
        raise UserError(f"--budget must be a time such as 90s, 10m or 1h, not {text!r}")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]
