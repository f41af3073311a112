"""Population rounds replayed as graphs equal the same rounds run eagerly."""

from __future__ import annotations

from threading import Lock
from typing import Any

import pytest
import torch

from bench.data.heldout import DEMO
from swiftspec.backends.cuda import cuda
from swiftspec.backends.unfused import unfused
from swiftspec.config import PopulationConfig
from swiftspec.model.loader import load_model
from swiftspec.params import SamplingParams
from swiftspec.runtime.executors.graph import CudaCapture
from swiftspec.smc.group_result import GroupResult
from tests.gpu.device import DEVICE, EMULATED, most, needs_kernels, real
from tests.gpu.test_graph import VOCAB, group_of_one, new_capture, random_model
from tests.support.roles import SequentialScheduler, make_runner, make_scheduler, request_start

pytestmark = pytest.mark.gpu
PENALISED: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.3}


@real
@pytest.mark.parametrize("exact", [0, 2])
@pytest.mark.parametrize("shaped", [{}, {"top_k": 20, "top_p": 0.9}, PENALISED], ids=str)
def test_replay_equals_eager_twice_in_a_row(exact: int, shaped: dict[str, Any]) -> None:
    """In float32, with the host one round behind; the second request replays the graphs of the first."""
    models = [load_model(DEMO / side, dtype=torch.float32, device="cuda", ops=unfused, max_positions=1024)
              for side in ("target", "draft")]  # fmt: skip
    workers: list[SequentialScheduler] = []
    for captured in (False, True):
        turn = Lock()
        captures = (CudaCapture(turn, DEVICE), CudaCapture(turn, DEVICE)) if captured else (None, None)
        target, draft = (make_runner(model, unfused, context=256, tree_slots=768) for model in models)
        config = PopulationConfig(4, 4, 0.5, 1.0, exact)
        workers.append(make_scheduler(target, draft, config, max_tokens=128, lag=1, captures=captures))
    for seed in (1, 2):
        sampling = SamplingParams(temperature=0.7, seed=seed, **shaped)
        eager, graphed = (answer(worker, sampling, range(50, 90), 60) for worker in workers)
        assert graphed.tokens == eager.tokens
        assert graphed.log_z == pytest.approx(eager.log_z, abs=1e-3)


CASES: list[tuple[int, int, dict[str, Any], int]] = [  # the last: rows that a group sums, which the logits outgrow
    (4, 1, {}, 8), (4, 1, PENALISED, 0), (4, 3, {"top_k": 9, "min_p": 0.01}, 32), (16, 3, {}, 0), (16, 3, {}, 32),
]  # fmt: skip
SEEDS, LIMIT = ((1,), 4) if EMULATED else ((1, 2), 16)


@needs_kernels
@pytest.mark.parametrize(("particles", "steps", "shaped", "grouped"), most(CASES, 2, 1), ids=str)
def test_rounds_of_the_kernels_as_one_graph(particles: int, steps: int, shaped: dict[str, Any], grouped: int) -> None:
    """Bitwise, since rows do not depend on each other. Also in a group, whose logits a kernel gathers in chunks inside
    the graph."""
    models = [random_model(group_of_one(rows=grouped) if grouped else None, seed) for seed in (1, 2)]
    workers = [population(models, particles, steps, capture) for capture in (None, new_capture())]
    assert [worker.executors[0].name for worker in workers] == ["eager", "graph"]
    for seed in SEEDS:
        sampling = SamplingParams(temperature=1.5, seed=seed, **shaped)
        eager, graphed = (answer(worker, sampling, range(7), LIMIT) for worker in workers)
        assert graphed == eager


def population(models: list[Any], particles: int, steps: int, capture: Any) -> SequentialScheduler:
    """A population of two models on the CUDA operators, with the host one round behind."""
    target, draft = (make_runner(model, cuda, VOCAB, context=64, tree_slots=256) for model in models)
    config = PopulationConfig(particles, steps, 0.9, 1.0)
    return make_scheduler(target, draft, config, max_tokens=24, lag=1, captures=(capture, capture))


def answer(worker: SequentialScheduler, sampling: SamplingParams, prompt: range, limit: int) -> GroupResult:
    worker.open(request_start(prompt, sampling), (), limit)
    while worker.launch():
        worker.collect()
    return worker.answer()
