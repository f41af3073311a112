"""Captures at startup: progress, and the executors that have none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from swiftspec.backends.reference import reference
from swiftspec.backends.unfused import unfused
from swiftspec.builder.rules import resolve_config
from swiftspec.config import EngineConfig
from swiftspec.errors import RankLost
from swiftspec.model.loader import load_model
from swiftspec.runtime import graph_capture
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
    adaptive = resolve_config(EngineConfig("serial", verify_batch=4, adapt_batch=True), "draft", "cuda")
    assert len(target_captures(verifier.executors, adaptive)) == 3 * 6, "up to 32 rows"
    several = EngineConfig("serial", verify_batch=4, max_num_seqs=4)
    assert len(target_captures(verifier.executors, several)) == 9 + 2, "joint forwards of 8 and 16 rows"


@pytest.mark.parametrize("lost", [RankLost("group target: GPU rank 1 waited too long for rank 0"), None])
def test_an_error_that_another_rank_has_caused_is_not_one_of_this_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: RankLost | None
) -> None:
    """So that it is not recorded as a fault of its operators, which later starts would not use."""
    make_checkpoint(tmp_path)
    model = load_model(tmp_path, dtype=torch.float32, ops=unfused, max_positions=64)
    runner = make_runner(model, unfused, context=32, tree_slots=18)
    verifier = make_verifier(runner)
    fault = RuntimeError("CUDA error: unspecified launch failure")

    def fails() -> None:
        raise fault

    monkeypatch.setattr(model, "group", SimpleNamespace(lost=lambda error: lost if error is fault else None))
    monkeypatch.setattr(graph_capture, "target_captures", lambda executors, config: [fails])
    with pytest.raises(RankLost if lost is not None else RuntimeError) as raised:
        capture_graphs(verifier, None, EngineConfig("ar", verify_batch=1), None)
    assert raised.value is (lost or fault) and raised.value.__cause__ is None
