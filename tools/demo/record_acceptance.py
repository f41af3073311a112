"""Records rounds of the demo models for the predictor (bench/prediction/acceptance.json).

    torchrun --standalone --nproc-per-node 2 -m tools.demo.record_acceptance
    python -m tools.demo.record_acceptance --chains      # replaces only the rounds of chains

Rounds of a fixed d are the same on every machine except at near-ties. Prompts are held out, decoding is greedy.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from bench.data.heldout import DEMO, read_prompts
from bench.prediction import predictor
from swiftspec.config import EngineConfig
from swiftspec.distributed.launch.world import join_world
from swiftspec.lab import measurement
from swiftspec.lab.round_costs import Trace
from swiftspec.lab.worker_pool import EngineBuild, Pair, RankPool

DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
WIDE = (4, 6, 8, 10, 12)  # d for a remote draft
SHAPES = {(8, 8): DEPTHS, (16, 16): DEPTHS, (16, 32): WIDE}  # (bs, w) and the values of d
CHAINS = (1, 2, 3, 4, 6, 8)  # draft tokens
PROMPTS, TOKENS = 12, 128
NOTE = f"embedded pair, {PROMPTS} held-out prompts, {TOKENS} tokens each, greedy, bfloat16"


def main() -> None:
    """Records on rank 0. The other rank follows."""
    pool = RankPool(Pair(DEMO / "target", DEMO / "draft", {"dtype": torch.bfloat16}), world := join_world())
    if sys.argv[1:] == ["--chains"]:
        known = json.loads(predictor.ACCEPTANCE.read_text())["rounds"]
        write([*(record for record in known if record["plan"]["draft_leaves"] > 1), *chains(pool)])
        return
    if world is None:
        command = "torchrun --standalone --nproc-per-node 2 -m tools.demo.record_acceptance"
        raise SystemExit(f"requires two ranks; start it with {command}")
    if world.rank > 0:
        pool.follow()
        return
    shapes = [(nodes, leaves, d) for (nodes, leaves), depths in SHAPES.items() for d in depths]
    trees = [(mode, *shape) for mode, shape in product(("serial", "async"), shapes)]
    records = [*record(pool, trees), *chains(pool)]
    pool.dismiss()
    write(records)


def chains(pool: RankPool) -> list[dict[str, Any]]:
    """Records chains: a chain is a tree with one leaf whose nodes are all verified."""
    return record(pool, [("serial", d + 1, 1, d) for d in CHAINS])


def record(pool: RankPool, shapes: Sequence[tuple[str, int, int, int]]) -> list[dict[str, Any]]:
    """Records the rounds of trees. A shape is (mode, bs, w, d)."""
    prompts, records = read_prompts(AutoTokenizer.from_pretrained(DEMO / "target"))[:PROMPTS], []
    for mode, bs, w, d in shapes:
        plan = {"mode": mode, "verify_batch": bs, "draft_leaves": w, "draft_steps": d}
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rounds.jsonl"
            config = EngineConfig(mode, verify_batch=bs, draft_leaves=w, draft_steps=d)
            with pool.engine(EngineBuild(config, trace=str(file))) as llm:
                measurement.decode_all(llm, prompts, TOKENS)
            rounds = measurement.rounds_of(Trace.read(file))
        records.append({"plan": plan, "rounds": rounds})
        mean = sum(accepted + 1 for accepted, _ in rounds) / len(rounds)
        print(f"{mode} bs {bs} w {w} d {d}: {mean:.3f} tokens per round", flush=True)
    return records


def write(records: Sequence[dict[str, Any]]) -> None:
    """Writes the rounds in the format that the predictor reads."""
    lines = ",\n ".join(json.dumps(record, separators=(",", ":")) for record in records)
    predictor.ACCEPTANCE.write_text(f'{{"note": "{NOTE}",\n "rounds": [\n {lines}]}}\n')


if __name__ == "__main__":
    main()
