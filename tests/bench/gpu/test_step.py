"""How bench/gpu/step.py computes its figures; tests/tools/test_gpu_check.py has a whole run of it."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch

from bench.data.heldout import DEMO, read_token_ids
from bench.gpu import step
from swiftspec.backends import unfused
from swiftspec.config import EngineConfig
from swiftspec.model.loader import load_model
from swiftspec.runtime.executors.graph import FORWARD_GRAPHS, GraphForwardExecutor
from tests.support.fake_cuda_graphs import Rerun
from tests.support.roles import make_drafter, make_runner


def test_prompts_use_the_demo_tokenizer() -> None:
    from transformers import AutoTokenizer

    tokenizer, prompts = AutoTokenizer.from_pretrained(DEMO / "target"), read_token_ids(8)
    assert len(prompts) == 8 and all(tokenizer(tokenizer.decode(ids))["input_ids"] == ids for ids in prompts)


def test_agreement() -> None:
    assert step.agreement([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]]) == pytest.approx(4 / 6)


def test_particles_are_measured_after_a_warm_up_on_shared_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """At temperature 0 nothing would be sampled, and mode smc refuses it."""
    made: list[object] = []
    whole = step.load_model

    def counted(*path: Any, **options: Any) -> Any:
        made.append(path)
        return whole(*path, **options)

    monkeypatch.setattr(step, "load_model", counted)
    args = Namespace(prompts=1, tokens=5, context=64, device="cpu", ops="auto", particles=[2, 3])
    calls: list[set[str]] = []
    found = step.measure_particles("demo", args, lambda result: calls.append(set(result)))
    assert [found[f"smc {count}"]["tok/s"] > 0 for count in (2, 3)] == [True, True] and len(made) == 2
    assert "smc 3" in calls[0] and "smc 2" not in calls[0] and found["rounds"] in ("native", "eager")


def test_a_step_is_timed_as_a_graph_if_the_model_can_be_captured() -> None:
    """One capture for all repetitions, and another one after the graphs are dropped."""
    model = load_model(DEMO / "draft", dtype=torch.float32, ops=unfused, max_positions=128)
    config, capture = EngineConfig(verify_batch=4, draft_leaves=4, draft_steps=2), Rerun()
    for given in (None, capture):
        drafter = make_drafter(make_runner(model, unfused, context=96, tree_slots=32), config, given)
        assert step.step_time(drafter, 4, 64) > 0
        assert drafter.runner.cache.kv_len()[0] == 0
        for steps in drafter.executors:
            if isinstance(steps, GraphForwardExecutor):
                steps.graphs.evict(FORWARD_GRAPHS)
                step.step_time(drafter, 4, 64)
    assert capture.captures == 2 and capture.replays == 2 * (step.REPEATS + 2)
