"""Rounds of a population as real graphs against the same rounds run eagerly."""

from __future__ import annotations

from threading import Lock
from typing import Any

import pytest
import torch

from bench.data.heldout import DEMO
from swiftspec.backends import library as unfused
from swiftspec.config import PopulationConfig
from swiftspec.model.loader import load_model
from swiftspec.params import SamplingParams
from swiftspec.runtime.steps.graph import CudaCapture
from swiftspec.smc.answer import Answer
from tests.support.roles import Alone, make_population, make_runner, opening

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]


@pytest.mark.parametrize("exact", [0, 2])
@pytest.mark.parametrize("filters", [{}, {"top_k": 20, "top_p": 0.9}], ids=str)
def test_replay_equals_eager_twice_in_a_row(exact: int, filters: dict[str, Any]) -> None:
    """In float32, with the host a round behind; the second request replays what the first has captured."""
    models = [load_model(DEMO / side, dtype=torch.float32, device="cuda", ops=unfused, max_positions=1024)
              for side in ("target", "draft")]  # fmt: skip
    workers: list[Alone] = []
    for captured in (False, True):
        turn = Lock()
        captures = (CudaCapture(turn), CudaCapture(turn)) if captured else (None, None)
        target, draft = (make_runner(model, unfused, context=256, tree_slots=768) for model in models)
        config = PopulationConfig(4, 4, 0.5, 1.0, exact)
        workers.append(make_population(target, draft, config, longest=128, lag=1, captures=captures))
    for seed in (1, 2):
        sampling = SamplingParams(temperature=0.7, seed=seed, **filters)
        eager, graphed = (answer(worker, sampling) for worker in workers)
        assert graphed.tokens == eager.tokens
        assert graphed.log_z == pytest.approx(eager.log_z, abs=1e-3)


def answer(worker: Alone, sampling: SamplingParams) -> Answer:
    worker.open(opening(range(50, 90), sampling), (), 60)
    while worker.launch():
        worker.collect()
    return worker.answer()
