"""Sweep of a width-expanded pair over all splits of the ranks, without a tokenizer and without weights on disk.

    torchrun --standalone --nproc-per-node 8 -m bench.gpu.sweep [--pair Llama-3-8B,Llama-3.2-1B] [--budget 180]

What `swiftspec profile` measures (swiftspec/lab/sweep.py), on held-out prompts that are already tokenised: greedy, and
sampled at temperature 0.6 and top_p 0.9. Every rank builds its shards in memory, again for each engine. Writes the
profile to --json and prints its table. Requires pydantic. Not run on a GPU yet.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch

from bench.data.heldout import read_token_ids
from bench.gpu.step import models_of
from swiftspec.builder.hardware import DEVICE_TYPES
from swiftspec.builder.load_options import LoadOptions
from swiftspec.builder.rules import resolve_config
from swiftspec.control.step_times import GREEDY
from swiftspec.distributed.launch.world import join_world
from swiftspec.errors import UserError
from swiftspec.lab import results, sweep_runs
from swiftspec.lab.sweep import Sweep
from swiftspec.lab.sweep_runs import USUAL, SweepRequest
from swiftspec.lab.worker_pool import Pair, RankPool
from swiftspec.model.checkpoint_files import read_config
from swiftspec.params import SamplingParams
from swiftspec.profiles import store

SAMPLED = SamplingParams(temperature=0.6, top_p=0.9)


class PrintedProgress:
    """Progress display that prints lines, for a log."""

    def begin(self, what: str, done: int, total: int, left: float) -> None:
        print(f"[{done + 1}/{total}] {what}", flush=True)

    def best(self, what: str, speed: float) -> None:
        print(f"  fastest: {what}, {speed:.1f} tok/s", flush=True)

    def note(self, text: str) -> None:
        print(f"  {text}", flush=True)

    def close(self) -> None:
        """Nothing to close."""


def request_of(args: argparse.Namespace, pair: Pair, ranks: int) -> SweepRequest:
    """Returns what the sweep measures on `ranks` ranks."""
    configs = read_config(pair.target), read_config(pair.draft)
    pairs = sweep_runs.splits("all", ranks, *configs)[0] if ranks > 1 else [(1, 0)] if args.device == "cuda" else []
    whole = all(sweep_runs.shard_error(config, ranks) is None for config in configs)
    modes = ["ar", "serial", *(["async"] if pairs else [])]
    w = resolve_config(USUAL, pair.draft, args.device).leaves_per_expansion
    base = "unfused" if args.device == "cuda" else "reference"
    return SweepRequest(
        modes, pairs, whole, read_token_ids(args.prompts), args.tokens, args.repeats, args.budget, (GREEDY, SAMPLED), w,
        base,
    )  # fmt: skip


def run(args: argparse.Namespace, show: Any) -> dict[str, Any] | None:
    """Runs the sweep. Returns the profile on rank 0, None on the other ranks. Raises UserError if nothing could be
    measured."""
    world = join_world()
    with models_of(args.pair) as (paths, load):
        options: LoadOptions = {
            "device": args.device, "dtype": torch.bfloat16, "load": load, "max_model_len": 1024,
            "gpu_trial": "off",  # what is measured are the operators that are asked for
        }  # fmt: skip
        pair = Pair(paths[0], paths[1], options)
        pool = RankPool(pair, world)
        if world is not None and world.rank > 0:
            pool.follow()
            return None
        try:
            request = request_of(args, pair, pool.ranks)
            key: dict[str, Any] = {
                "hardware": store.hardware(args.device), "ranks": pool.ranks, "target": args.pair.partition(",")[0],
                "draft": args.pair.rpartition(",")[2], "dtype": "bfloat16", "ops": "auto",
                "emulate": {"target": None, "draft": None},
            }  # fmt: skip
            sweep = Sweep(pool, request, Sweep.empty(key, store.environment(), request), args.json, show)
            sweep.run()
            return sweep.profile
        finally:
            pool.dismiss()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="Llama-3-8B,Llama-3.2-1B", help="as in bench.gpu.step")
    parser.add_argument("--device", choices=DEVICE_TYPES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=48, help="tokens per request")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--budget", type=float, default=180.0, help="seconds for all measurements")
    parser.add_argument("--json", type=Path, default=Path("build/sweep.json"), help="file for the profile")
    args = parser.parse_args()
    if int(os.environ.get("RANK", "0")) == 0:
        args.json.parent.mkdir(parents=True, exist_ok=True)
    try:
        profile = run(args, PrintedProgress())
    except UserError as error:
        parser.error(str(error))
    if profile is not None:
        print(results.format_profile(profile))
        print(json.dumps({"stopped": profile["stopped"], "runs": len(profile["runs"])}))


if __name__ == "__main__":
    main()
