"""Speedup by tensor parallelism: a model sharded over the ranks of one machine against the same model on one core.

    torchrun --standalone --nproc-per-node 2 -m bench.ranks [--limit 8] [--passes 3]

Runs modes ar and serial. The systems alternate pass by pass; "alone" is rank 0 with one thread while the other ranks
sleep. The figures cover decoding without prefill. With `--device cuda` (not run yet) every rank has its own GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoTokenizer

from bench.common.device import add_device_flag, check_device
from bench.data.heldout import DEMO, read_prompts
from swiftspec.builder.load_options import LoadOptions
from swiftspec.config import EngineConfig
from swiftspec.distributed.launch.world import World, join_world, pin_to_cores
from swiftspec.llm_engine import LLMEngine, serve_rank
from swiftspec.params import SamplingParams

# without a GPU trial: what is measured are the operators that are asked for
OPTIONS: LoadOptions = {"dtype": torch.bfloat16, "threads": 1, "gpu_trial": "off"}
DRAFT_STEPS = 3


@dataclass
class System:
    """A decoding mode on all ranks, or on rank 0 alone.

    `passes` has per pass: tokens per second, and milliseconds per round in the target, in the draft, and outside both.
    """

    name: str
    config: EngineConfig
    alone: bool = False
    passes: list[tuple[float, float, float, float]] = field(default_factory=list)

    @property
    def models(self) -> tuple[Path, Path | None]:
        return DEMO / "target", DEMO / "draft" if self.config.mode == "serial" else None

    def median(self, column: int = 0) -> float:
        return statistics.median(one[column] for one in self.passes)


def systems(size: int) -> list[System]:
    """Returns each mode on one rank, then on `size` ranks."""
    serial = {"mode": "serial", "draft_steps": DRAFT_STEPS}
    return [
        System("ar, alone", EngineConfig("ar"), alone=True),
        System("ar", EngineConfig("ar", target_tp=size)),
        System("serial, alone", EngineConfig(**serial), alone=True),
        System("serial", EngineConfig(**serial, target_tp=size)),
    ]


def measure(llm: LLMEngine, prompts: list[list[int]]) -> tuple[float, float, float, float]:
    """Runs one pass over the prompts and returns its entry of `System.passes`."""
    sampling = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
    tokens = rounds = 0
    spent = target = draft = 0.0
    llm.generate(prompts[0], sampling)  # warm-up
    for prompt in prompts:
        stats = llm.generate(prompt, sampling).stats
        tokens, rounds, spent = tokens + stats.tokens, rounds + stats.rounds, spent + stats.decode_time
        target, draft = target + stats.target_busy_time, draft + stats.draft_busy_time
    each = 1000 / rounds
    return tokens / spent, each * target, each * draft, each * (spent - target - draft)


def run(system: System, world: World, prompts: list[list[int]], device: str) -> None:
    """Runs a pass on rank 0. The other ranks join when the engine is built."""
    pin_to_cores(world.own_cores())  # closing an engine resets the affinity to all cores
    if not system.alone:
        world.store.set(f"turn {len(system.passes)} of {system.name}", "")
    options: LoadOptions = {**OPTIONS, "device": device}
    llm = LLMEngine(*system.models, system.config, world=None if system.alone else world, **options)
    system.passes.append(measure(llm, prompts))
    llm.close()


def follow(world: World, passes: int, device: str) -> None:
    """Runs the main loop of the other ranks: joins each engine that rank 0 builds on all ranks."""
    for number in range(passes):
        for system in systems(world.size):
            if not system.alone:
                world.store.get(f"turn {number} of {system.name}")
                pin_to_cores(world.own_cores())
                options: LoadOptions = {**OPTIONS, "device": device}
                serve_rank(world, *system.models, system.config, **options)


def main() -> None:
    """Prints one line per system: its passes, and their median relative to the mode on one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=8, help="prompts")
    parser.add_argument("--passes", type=int, default=3)
    add_device_flag(parser)
    args = parser.parse_args()
    check_device(parser, args.device)
    world = join_world()
    if world is None:
        sys.exit("requires several ranks; start it with torchrun --standalone --nproc-per-node 2 -m bench.ranks")
    check_device(parser, args.device, world.local_size)
    if world.rank:
        follow(world, args.passes, args.device)
        return
    prompts = read_prompts(AutoTokenizer.from_pretrained(DEMO / "target"))[: args.limit]
    all_systems = systems(world.size)
    for _ in range(args.passes):
        for system in all_systems:
            run(system, world, prompts, args.device)
    for system in all_systems:
        alone = next(s for s in all_systems if s.alone and s.config.mode == system.config.mode)
        rates = " ".join(f"{one[0]:.0f}" for one in system.passes)
        target, draft, rest = (system.median(column) for column in (1, 2, 3))
        print(
            f"{system.name:20} {rates} tok/s, median {system.median() / alone.median():.2f}x alone;"
            f" ms per round: target {target:.3f}, draft {draft:.3f}, rest {rest:.3f}"
        )


if __name__ == "__main__":
    main()
