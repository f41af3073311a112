"""The paper's Table 6 at emulated step times: asynchronous mode on two groups against serial mode on one.

    torchrun --standalone --nproc-per-node 2 -m bench.table6 [--limit 6] [--max-tokens 96]

The models are the demo models and wait in each forward as long as a step of Qwen2-72B, or of its draft, would take;
everything else is real. Prints each d of both modes, the ratio of their best, and the cost of a round beyond both
models. With `--device cuda` (not run yet) every rank has its own GPU.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import torch
from transformers import AutoTokenizer

from bench.common.device import add_device_flag, check_device
from bench.data.heldout import DEMO, read_prompts
from swiftspec.builder.load_options import LoadOptions
from swiftspec.config import EngineConfig
from swiftspec.distributed.launch.world import join_world
from swiftspec.lab import measurement, round_costs
from swiftspec.lab.round_costs import Trace
from swiftspec.lab.worker_pool import EngineBuild, Pair, RankPool
from swiftspec.llm_engine import LLMEngine
from swiftspec.profiles import emulation

DEPTHS = (1, 2, 3, 4)


def spec(side: str) -> tuple[str, float, float]:
    """Returns the step times of one half of Table 6: in the format of `--emulate`, then target and draft in seconds.

    `side`: parallel or serial.
    """
    row = emulation.paper_figures()["table6"][side]
    text = f"target={row['target_ms']}ms,draft={row['draft_ms']}ms"
    return text, 1e-3 * row["target_ms"], 1e-3 * row["draft_ms"]


def show(name: str, d: int, run: measurement.Run, more: str = "") -> float:
    """Prints a line of the table and returns the speed."""
    print(f"{name:8} d {d}: {run.speed:6.1f} tok/s, {run.tokens_per_round:.2f} tok/round{more}", flush=True)
    return run.speed


def main() -> None:
    """Runs both modes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=6, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=96)
    add_device_flag(parser)
    args = parser.parse_args()
    check_device(parser, args.device)
    world = join_world()
    if world is None or world.size != 2:
        parser.error("requires two ranks; start it with torchrun --standalone --nproc-per-node 2 -m bench.table6")
    check_device(parser, args.device, world.local_size)
    torch.set_num_threads(1)
    text, target, draft = spec("parallel")
    options: LoadOptions = {"dtype": torch.bfloat16, "device": args.device, "threads": 1, "gpu_trial": "off"}
    options["emulate"] = emulation.parse_emulation(text)
    pool = RankPool(Pair(DEMO / "target", DEMO / "draft", options, threads=1), world)
    if world.rank > 0:
        pool.follow()
        return
    prompts = read_prompts(AutoTokenizer.from_pretrained(DEMO / "target"))[: args.limit]
    ahead, in_turn = [], []
    with tempfile.TemporaryDirectory() as folder:
        for d in DEPTHS:
            file = Path(folder) / "rounds.jsonl"
            with pool.engine(EngineBuild(EngineConfig("async", draft_steps=d), trace=str(file))) as llm:
                run = measurement.decode_all(llm, prompts, args.max_tokens)
            costs = round_costs.costs(Trace.read(file))
            own = statistics.median(round_costs.host_overhead(costs, target, draft))
            length = statistics.median(cost.length for cost in costs)
            more = f", round {1e3 * length:.2f} ms, {1e3 * own:.3f} ms host overhead ({own / length:.1%})"
            ahead.append(show("parallel", d, run, more))
    pool.dismiss()
    options["emulate"] = emulation.parse_emulation(spec("serial")[0])
    for d in DEPTHS:
        llm = LLMEngine(DEMO / "target", DEMO / "draft", EngineConfig("serial", draft_steps=d), **options)
        in_turn.append(show("serial", d, measurement.decode_all(llm, prompts, args.max_tokens)))
    paper = emulation.paper_figures()["table6"]
    print(f"ratio of the best {max(ahead) / max(in_turn):.2f}; in the paper (quoted)"
          f" {paper['parallel']['tokens_per_second'] / paper['serial']['tokens_per_second']:.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
