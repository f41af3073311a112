"""Forwards of a checkpoint by the CUDA operators, from int4 files to logits, against the reference operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.data.heldout import DEMO
from swiftspec.backends.cuda import cuda
from swiftspec.backends.reference import reference
from swiftspec.model.loader import load_model
from swiftspec.runtime.runner import Runner
from swiftspec.tree import mask as tree_mask
from tests.gpu.device import DEVICE, needs_kernels
from tests.support.roles import make_runner

pytestmark = [pytest.mark.gpu, needs_kernels]


def open_runner(ops: Any, dtype: torch.dtype, device: torch.device) -> Runner:
    model = load_model(DEMO / "target", dtype=dtype, device=device, ops=ops, max_positions=128)
    return make_runner(model, ops, context=96, tree_slots=32)


def test_logits_of_the_demo_target() -> None:
    """Of a chunked prefill, of trees of any shape after it, and after commits of accepted paths."""
    ours, exact = open_runner(cuda, torch.bfloat16, DEVICE), open_runner(reference, torch.float32, torch.device("cpu"))
    dice = np.random.default_rng(1)
    prompt = dice.integers(5, 4096, 41).tolist()
    for runner in (ours, exact):
        runner.prefill(prompt)
    for rows, accepted in ((1, [0]), (8, [0, 1]), (3, [0])):
        tokens = dice.integers(5, 4096, rows)
        mask = tree_mask.from_parents([-1, *(int(dice.integers(0, i)) for i in range(1, rows))])

        def logits(runner: Runner, tokens: Any = tokens, mask: Any = mask) -> Tensor:
            return runner.logits(runner.tree_batch(tokens, mask.sum(1) - 1, mask)).cpu().float()

        got, want = logits(ours), logits(exact)
        assert (got - want).norm() <= 3e-2 * want.norm()
        assert (got.argmax(-1) == want.argmax(-1)).float().mean() > 0.6
        for runner in (ours, exact):
            runner.cache.commit(accepted)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_model_whose_qkv_appends_has_the_bits_of_separate_launches(family: str, tmp_path: Path) -> None:
    """Without and with biases: logits of a prompt and of a tree, and all keys and values."""
    pytest.importorskip("transformers", reason="a machine with a GPU may have torch only")
    from tests.support.tiny_checkpoints import make_checkpoint

    make_checkpoint(tmp_path, family=family, hidden_size=128, head_dim=64)
    separate = cuda.with_operators(pack_qkv=lambda weight, head_dim, *of: cuda.pack(weight, *of))
    found = list[tuple[Tensor, ...]]()
    for ops in (cuda, separate):
        model = load_model(tmp_path, dtype=torch.bfloat16, device=DEVICE, ops=ops, max_positions=32)
        runner = make_runner(model, ops, context=24, tree_slots=8)
        runner.prefill([3, 17, 60, 5, 22, 9, 41, 8, 2, 30, 11, 4])
        mask = tree_mask.from_parents([-1, 0, 0, 1, 2])
        out = runner.logits(runner.tree_batch(np.array([7, 9, 13, 5, 2]), mask.sum(1) - 1, mask))
        found.append((out.cpu(), runner.cache.kv.k.cpu(), runner.cache.kv.v.cpu()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_logits_of_a_model_with_norms_of_query_and_key_heads(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="a machine with a GPU may have torch only")
    from tests.support.tiny_checkpoints import make_checkpoint

    make_checkpoint(tmp_path, family="qwen3", hidden_size=128, head_dim=64)
    tokens, found = [3, 17, 60, 5, 22, 9, 41], list[Tensor]()
    settings: list[tuple[Any, torch.dtype, torch.device]] = [
        (cuda, torch.bfloat16, DEVICE), (reference, torch.float32, torch.device("cpu")),
    ]  # fmt: skip
    for ops, dtype, device in settings:
        model = load_model(tmp_path, dtype=dtype, device=device, ops=ops, max_positions=32)
        runner = make_runner(model, ops, context=24, tree_slots=8)
        found.append(runner.logits(runner.chain_batch(tokens)).cpu().float())
    got, want = found
    assert (got - want).norm() <= 3e-2 * want.norm()
