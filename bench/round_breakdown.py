"""Time of a round on one core: the forwards of both models, and the host time by function.

    python -m bench.round_breakdown [--temperature 0] [--steps 1,2,4,8]

Host time is everything except the forwards: tree, sampling, masks, cache moves, the loop. Times are this thread's CPU
time, which other work on the machine affects less. The breakdown is a separate run, because timing it costs time.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoTokenizer

from bench.data.heldout import DEMO, read_prompts
from swiftspec.builder.load_options import LoadOptions
from swiftspec.cache.model_cache import ModelCache
from swiftspec.config import EngineConfig
from swiftspec.llm_engine import LLMEngine
from swiftspec.params import SamplingParams
from swiftspec.sampling.sampler import Sampler
from swiftspec.tree import acceptance as tree_walk
from swiftspec.tree import mask
from swiftspec.tree.tree import DraftTree

OPTIONS: LoadOptions = {"dtype": torch.bfloat16, "device": "cpu", "threads": 1}
PARTS: list[tuple[Any, str]] = [
    (DraftTree, "best_leaves"),
    (DraftTree, "add_children"),
    (DraftTree, "best_subtree"),
    (DraftTree, "match_prefix"),
    (DraftTree, "reroot"),
    (Sampler, "children"),
    (Sampler, "draw"),
    (ModelCache, "commit"),
    (mask, "from_parents"),
    (mask, "pad_left"),
    (tree_walk, "match_path"),
]


def decode(llm: LLMEngine, prompts: list[list[int]], sampling: SamplingParams) -> dict[str, float]:
    """Returns the mean milliseconds per round in target, draft and host, the tokens per round, and the number of
    rounds."""
    total: defaultdict[str, float] = defaultdict(float)
    for prompt in prompts:
        stats = llm.generate(prompt, sampling).stats
        total["rounds"] += stats.rounds
        total["tokens"] += stats.tokens
        total["target"] += 1000 * stats.target_busy_time
        total["draft"] += 1000 * stats.draft_busy_time
        total["host"] += 1000 * (stats.decode_time - stats.target_busy_time - stats.draft_busy_time)
    per_round = {name: total[name] / total["rounds"] for name in ("target", "draft", "host")}
    return {**per_round, "tokens": total["tokens"] / total["rounds"], "rounds": total["rounds"]}


def breakdown(llm: LLMEngine, prompts: list[list[int]], sampling: SamplingParams) -> list[tuple[str, float, float]]:
    """Returns name, calls per round and milliseconds per round of each function in PARTS, the slowest first."""
    spent: defaultdict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            result = function(*args, **kwargs)
            spent[name] += time.thread_time() - began
            calls[name] += 1
            return result

        return wrapper

    originals = [(owner, name, getattr(owner, name)) for owner, name in PARTS]
    try:
        for owner, name, function in originals:
            setattr(owner, name, timed(f"{owner.__name__.rpartition('.')[2]}.{name}", function))
        rounds = decode(llm, prompts, sampling)["rounds"]
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)
    return [
        (name, calls[name] / rounds, 1000 * seconds / rounds)
        for name, seconds in sorted(spent.items(), key=lambda part: -part[1])
    ]


def main() -> None:
    """Prints one line per number of expansions, then the breakdown at d = 4."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--steps", default="1,2,4,8")
    parser.add_argument("--limit", type=int, default=6)
    args = parser.parse_args()
    time.perf_counter = time.thread_time  # clock of the engine; one thread does all the work here
    prompts = read_prompts(AutoTokenizer.from_pretrained(DEMO / "target"))[: args.limit]
    sampling = SamplingParams(temperature=args.temperature, max_tokens=128, ignore_eos=True)
    for d in map(int, args.steps.split(",")):
        llm = LLMEngine(DEMO / "target", DEMO / "draft", EngineConfig(draft_steps=d), **OPTIONS)
        decode(llm, prompts[:1], sampling)
        best = min((decode(llm, prompts, sampling) for _ in range(3)), key=lambda r: r["host"])
        budget = 0.4 + 0.15 * d
        print(
            f"d={d}: {best['tokens']:.2f} tok/round; ms per round: target {best['target']:.2f},"
            f" draft {best['draft']:.2f}, host {best['host']:.2f} (budget {budget:.2f})"
        )
    llm = LLMEngine(DEMO / "target", DEMO / "draft", EngineConfig(draft_steps=4), **OPTIONS)
    for name, count, milliseconds in breakdown(llm, prompts, sampling):
        print(f"  {name:24} {count:5.2f} per round  {milliseconds:.3f} ms")


if __name__ == "__main__":
    main()
