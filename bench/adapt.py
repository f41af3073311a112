"""Adaptation on against off, over prompts whose text is predictable at first and hardly so afterwards.

    python -m bench.adapt [--limit 8] [--max-tokens 128] [--repeats 2] [--self-switch]
    torchrun --standalone --nproc-per-node 2 -m bench.adapt          mode async

The embedded pair at emulated step times, so that the machine hardly matters: whatever differs is d and bs. The
predictable half goes on with a table (greedy), the other is held-out code at temperature 1.5. Off keeps d = 3 in turn, and
growing ahead the d that was measured at the start. The two take turns.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import AutoTokenizer

from bench.heldout import DEMO, read_prompts
from swiftspec.engine import LLM, World, join_world, serve_rank
from swiftspec.params import Plan, SamplingParams
from swiftspec.worker.paced import Emulation, StepTimes
from swiftspec.worker.roles import Options

TIMES = {  # milliseconds: target over 1 and over 8 rows, an expansion
    "a dear draft (the paper's Table 6)": (10.34, 10.34, 3.73),
    "a cheap draft": (10.0, 10.0, 0.8),
    "rows that cost": (4.0, 10.0, 1.0),
}
ROW = "    [" + ", ".join(["{0}"] * 8) + "],\n"


@dataclass(frozen=True, slots=True)
class Half:
    """Prompts and how they are sampled."""

    name: str
    prompts: list[list[int]]
    sampling: SamplingParams


def halves(limit: int, max_tokens: int) -> list[Half]:
    """The predictable one, then the other."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    repeated = [tokenizer("table = [\n" + ROW.format(n) * 10)["input_ids"] for n in range(limit)]
    ends = {"max_tokens": max_tokens, "ignore_eos": True}
    return [
        Half("predictable", repeated, SamplingParams(temperature=0, **ends)),
        Half("unpredictable", read_prompts(tokenizer)[:limit], SamplingParams(temperature=1.5, **ends)),
    ]


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one half: tokens a second, tokens a round, and the shape at its end."""

    rate: float
    per_round: float
    shape: str


def measured(llm: LLM, half: Half) -> Speed:
    """Decodes a half."""
    tokens = rounds = seconds = 0.0
    for prompt in half.prompts:
        stats = llm.generate(prompt, half.sampling).stats
        tokens, rounds, seconds = tokens + stats.tokens, rounds + stats.rounds, seconds + stats.decode_time
    end = llm.stats.steering
    return Speed(tokens / seconds, tokens / rounds, f"d {end.steps} bs {end.nodes}" if end else f"d {llm.plan.steps}")


def emulation(times: Sequence[float]) -> Emulation:
    """Step times in milliseconds: target over 1 and over 8 rows, draft."""
    one, eight, draft = (1e-3 * t for t in times)
    return Emulation(StepTimes(((1, 1, one), (1, 8, eight))), StepTimes(((1, 8, draft),)))


@contextmanager
def engine(plan: Plan, world: World | None, options: Options) -> Iterator[LLM | None]:
    """Rank 0's engine; the other rank lives its life and gets none."""
    if world is not None and world.rank > 0:
        serve_rank(world, DEMO / "target", DEMO / "draft", plan, **options)
        yield None
        return
    llm = LLM(DEMO / "target", DEMO / "draft", plan, world=world, **options)
    try:
        yield llm
    finally:
        llm.close()


def main() -> None:
    """Every kind of step times, on and off in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=8, help="prompts a half")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--self-switch", action="store_true", help="both may decode plainly for a while")
    args = parser.parse_args()
    world = join_world()
    torch.set_num_threads(1)
    texts = halves(args.limit, args.max_tokens)
    mode = "serial" if world is None else "async"
    for name, times in TIMES.items():
        options: Options = {"dtype": torch.bfloat16, "emulate": emulation(times)}
        found: dict[tuple[bool, str], list[Speed]] = {}
        for _ in range(args.repeats):
            for on in (False, True):
                plan = Plan(mode, self_switch=args.self_switch, adapt_steps=on, adapt_batch=on)
                with engine(plan, world, options) as llm:
                    for half in texts if llm is not None else ():
                        assert llm is not None
                        found.setdefault((on, half.name), []).append(measured(llm, half))
        if world is None or world.rank == 0:
            show(f"{mode}, {name}", texts, found)


def show(title: str, texts: Sequence[Half], found: dict[tuple[bool, str], list[Speed]]) -> None:
    """The two halves and their ratios."""
    print(title)
    for half in texts:
        off, on = (found[kind, half.name] for kind in (False, True))
        rates = [statistics.median(speed.rate for speed in side) for side in (off, on)]
        print(
            f"  {half.name:13} off {rates[0]:6.1f} tok/s ({off[-1].per_round:.2f} a round, {off[-1].shape}),"
            f" on {rates[1]:6.1f} ({on[-1].per_round:.2f}, at the end {on[-1].shape}): {rates[1] / rates[0]:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
