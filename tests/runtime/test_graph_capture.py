"""Captures at startup: progress, and the executors that have none."""

from __future__ import annotations

from pathlib import Path

import torch

from swiftspec.backends import unfused
from swiftspec.config import EngineConfig
from swiftspec.model.loader import load_model
from swiftspec.runtime.graph_capture import CAPTURE_PHASE, capture_graphs, num_captures
from tests.support.fake_cuda_graphs import Recorder
from tests.support.roles import make_drafter, make_runner, make_verifier
from tests.support.tiny_checkpoints import make_checkpoint


def test_progress_counts_the_graphs_of_both_models(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    model = load_model(tmp_path, dtype=torch.float32, ops=unfused, max_positions=64)
    config, seen = EngineConfig("serial", verify_batch=4, draft_leaves=2, draft_steps=2), list[tuple[str, int, int]]()
    runners = [make_runner(model, unfused, context=32, tree_slots=18) for _ in range(4)]
    verifier = make_verifier(runners[0], capture=Recorder())
    drafter = make_drafter(runners[1], config, Recorder())
    capture_graphs(verifier, drafter, config, lambda *step: seen.append(step))
    # 1, 2 and 4 rows three times; chains of 1, 2 and 4 rows, and 2 rows over masks of 8 (again), 16 and 32 slots
    count = 9 + 5
    assert seen == [(CAPTURE_PHASE, step, count) for step in range(count)]
    assert num_captures(verifier, drafter) == count and num_captures(None, None) == 0
    plain = make_verifier(runners[2]), make_drafter(runners[3], config)
    capture_graphs(*plain, config, None)
    assert num_captures(*plain) == 0
