"""Captures at startup: progress, and the executors that have none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swiftspec.backends import reference, unfused
from swiftspec.config import EngineConfig
from swiftspec.model.loader import load_model
from swiftspec.runtime.executors.available import target_captures
from swiftspec.runtime.executors.graph_verifications import GraphVerificationExecutor
from swiftspec.runtime.graph_capture import CAPTURE_PHASE, capture_graphs, num_captures
from tests.support.fake_cuda_graphs import Recorder
from tests.support.roles import make_drafter, make_runner, make_verifier
from tests.support.tiny_checkpoints import make_checkpoint


def test_graphs_are_captured_for_each_number_of_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the capacity of the cache, here 50, with operators whose graphs hold the number of slots."""
    make_checkpoint(tmp_path)
    model = load_model(tmp_path, dtype=torch.float32, ops=unfused, max_positions=64)
    monkeypatch.setattr(unfused, "MIN_BUCKET_SLOTS", 16)
    runner = make_runner(model, unfused, context=32, tree_slots=18)
    executor, config = make_verifier(runner, capture=Recorder()).executors[0], EngineConfig("ar", verify_batch=1)
    assert isinstance(executor, GraphVerificationExecutor) and executor.captured_lengths() == [16, 32, 50]
    for capture in target_captures([executor], config):
        capture()
    assert executor.graphs.captures == 2 * 3
    monkeypatch.setattr(runner, "ops", reference)
    assert executor.captured_lengths() == [0]


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
