"""Records the rounds of the embedded pair for the predictor (swiftspec/lab/acceptance.json).

    torchrun --standalone --nproc-per-node 2 -m tools.demo.record_acceptance

Rounds of a fixed d are the same on every machine up to near-ties; held-out prompts, greedy.
"""

from __future__ import annotations

import json
import tempfile
from itertools import product
from pathlib import Path

import torch
from transformers import AutoTokenizer

from bench.data.heldout import DEMO, read_prompts
from swiftspec.config import EngineConfig
from swiftspec.distributed.world import join_world
from swiftspec.lab import measure, predict
from swiftspec.lab.pool import Order, Pair, WorkerPool
from swiftspec.lab.timeline import Trace

DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
WIDE = (4, 6, 8, 10, 12)  # what a draft far away comes to
SHAPES = {(8, 8): DEPTHS, (16, 16): DEPTHS, (16, 32): WIDE}  # bs and w, and each d
PROMPTS, TOKENS = 12, 128


def main() -> None:
    """Rank 0 records, the other rank follows."""
    pool = WorkerPool(Pair(DEMO / "target", DEMO / "draft", {"dtype": torch.bfloat16}), world := join_world())
    if world is None:
        command = "torchrun --standalone --nproc-per-node 2 -m tools.demo.record_acceptance"
        raise SystemExit(f"start it on two ranks: {command}")
    if world.rank > 0:
        pool.follow()
        return
    prompts, records = read_prompts(AutoTokenizer.from_pretrained(DEMO / "target"))[:PROMPTS], []
    trees = [(nodes, leaves, d) for (nodes, leaves), depths in SHAPES.items() for d in depths]
    for mode, (nodes, leaves, d) in product(("serial", "async"), trees):
        plan = {"mode": mode, "verify_batch": nodes, "draft_leaves": leaves, "draft_steps": d}
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rounds.jsonl"
            config = EngineConfig(mode, verify_batch=nodes, draft_leaves=leaves, draft_steps=d)
            with pool.engine(Order(config, trace=str(file))) as llm:
                measure.decode_all(llm, prompts, TOKENS)
            rounds = measure.rounds_of(Trace.read(file))
        records.append({"plan": plan, "rounds": rounds})
        made = sum(accepted + 1 for accepted, _ in rounds) / len(rounds)
        print(f"{mode} bs {nodes} w {leaves} d {d}: {made:.3f} tokens a round", flush=True)
    pool.dismiss()
    note = f"embedded pair, {PROMPTS} held-out prompts, {TOKENS} tokens each, greedy, bfloat16"
    lines = ",\n ".join(json.dumps(record, separators=(",", ":")) for record in records)
    predict.ACCEPTANCE.write_text(f'{{"note": "{note}",\n "rounds": [\n {lines}]}}\n')


if __name__ == "__main__":
    main()
