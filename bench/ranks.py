"""What ranks gain: a model cut over the ranks of one machine, against the same model on one of their cores.

    torchrun --standalone --nproc-per-node 2 -m bench.ranks [--limit 8] [--passes 3]

Modes ar and serial. The systems take turns, pass for pass; "alone" is rank 0 by itself with one thread while the others
sleep. Decoding is counted, without the prefill.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoTokenizer

from bench.data.heldout import DEMO, read_prompts
from swiftspec.backends import cpu as host
from swiftspec.builder.load_options import LoadOptions
from swiftspec.config import EngineConfig
from swiftspec.distributed.launch.world import World, join_world, pin_to_cores
from swiftspec.llm import LLM, serve_rank
from swiftspec.params import SamplingParams

OPTIONS: LoadOptions = {"dtype": torch.bfloat16}
DRAFT_STEPS = 3


@dataclass
class System:
    """A mode over all ranks, or alone; and of each pass tokens a second, milliseconds a round in either model, and
    what is neither's."""

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
    """Each mode alone, then over `size` ranks."""
    serial = {"mode": "serial", "draft_steps": DRAFT_STEPS}
    return [
        System("ar, alone", EngineConfig("ar"), alone=True),
        System("ar", EngineConfig("ar", target_tp=size)),
        System("serial, alone", EngineConfig(**serial), alone=True),
        System("serial", EngineConfig(**serial, target_tp=size)),
    ]


def measure(llm: LLM, prompts: list[list[int]]) -> tuple[float, float, float, float]:
    """One pass; see System."""
    sampling = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
    tokens = rounds = 0
    spent = target = draft = 0.0
    llm.generate(prompts[0], sampling)  # warms up
    for prompt in prompts:
        stats = llm.generate(prompt, sampling).stats
        tokens, rounds, spent = tokens + stats.tokens, rounds + stats.rounds, spent + stats.decode_time
        target, draft = target + stats.target_busy_time, draft + stats.draft_busy_time
    each = 1000 / rounds
    return tokens / spent, each * target, each * draft, each * (spent - target - draft)


def run(system: System, world: World, prompts: list[list[int]]) -> None:
    """A pass of rank 0's. The others begin with the engine, when its turn has come."""
    pin_to_cores(world.own_cores())  # leaving an engine gives them all back
    if not system.alone:
        world.store.set(f"turn {len(system.passes)} of {system.name}", "")
    llm = LLM(*system.models, system.config, world=None if system.alone else world, **OPTIONS)
    system.passes.append(measure(llm, prompts))
    llm.close()


def follow(world: World, passes: int) -> None:
    """The life of the other ranks."""
    for number in range(passes):
        for system in systems(world.size):
            if not system.alone:
                world.store.get(f"turn {number} of {system.name}")
                pin_to_cores(world.own_cores())
                serve_rank(world, *system.models, system.config, **OPTIONS)


def main() -> None:
    """Prints a line for each system: its passes, and what their median is of the mode alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=8, help="prompts")
    parser.add_argument("--passes", type=int, default=3)
    args = parser.parse_args()
    world = join_world()
    if world is None:
        sys.exit("start it on several ranks: torchrun --standalone --nproc-per-node 2 -m bench.ranks")
    torch.set_num_threads(1)
    host.set_threads(1)
    if world.rank:
        follow(world, args.passes)
        return
    prompts = read_prompts(AutoTokenizer.from_pretrained(DEMO / "target"))[: args.limit]
    all_systems = systems(world.size)
    for _ in range(args.passes):
        for system in all_systems:
            run(system, world, prompts)
    for system in all_systems:
        alone = next(s for s in all_systems if s.alone and s.config.mode == system.config.mode)
        rates = " ".join(f"{one[0]:.0f}" for one in system.passes)
        target, draft, rest = (system.median(column) for column in (1, 2, 3))
        print(
            f"{system.name:20} {rates} tok/s, median {system.median() / alone.median():.2f}x alone;"
            f" ms a round: target {target:.3f}, draft {draft:.3f}, rest {rest:.3f}"
        )


if __name__ == "__main__":
    main()
