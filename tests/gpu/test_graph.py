"""Replays of real graphs against the forwards that they were captured from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bench.heldout import DEMO
from swiftspec.engine import LLM
from swiftspec.model.loader import load_model
from swiftspec.ops import unfused
from swiftspec.params import Plan, SamplingParams
from swiftspec.spec import mask as tree_mask
from swiftspec.worker.graph import CudaCapture
from swiftspec.worker.runner import Runner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_replay_equals_eager_twice_in_a_row(dtype: torch.dtype) -> None:
    model = load_model(DEMO / "target", dtype=dtype, device="cuda", ops=unfused, max_positions=256)
    eager, graphed = runners = [
        Runner(model, unfused, context=160, tree_slots=32, capture=capture) for capture in (None, CudaCapture())
    ]
    noise = np.random.default_rng(1)
    prefix = noise.integers(0, 4096, 70).tolist()
    for runner in runners:
        runner.prefill(prefix)
    for rows in (8, 8, 3, 1, 8):
        tokens = noise.integers(0, 4096, rows)
        mask = tree_mask.from_parents([-1, *(int(noise.integers(0, i)) for i in range(1, rows))])
        want, got = (runner.forward_tree(tokens, mask.sum(1) - 1, mask).clone() for runner in (eager, graphed))
        # added rows may change how a library adds up
        assert (want - got).norm() <= (1e-5 if dtype == torch.float32 else 3e-2) * want.norm()
        for runner in runners:
            runner.cache.commit([0])


def test_the_pair_says_on_the_gpu_what_it_says_on_the_cpu() -> None:
    sampling = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    prompt = list(range(50, 90))
    plain = LLM(DEMO / "target", dtype=torch.float32, max_model_len=128).generate(prompt, sampling)
    pair: tuple[Path, Path, Plan] = (DEMO / "target", DEMO / "draft", Plan())
    tree = LLM(*pair, dtype=torch.float32, max_model_len=128, ops="unfused", device="cuda").generate(prompt, sampling)
    assert tree.token_ids == plain.token_ids
