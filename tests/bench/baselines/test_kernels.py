"""Third-party kernels in the GPU benchmark: fakes of their packages are called as documented; a missing package is
reported in one line."""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench.baselines import kernels as rivals
from bench.baselines.kernels import Tree
from bench.gpu.cases import random_int4
from tests.bench.baselines.fakes import flashinfer, install, sgl_kernel

PACKAGES = ("vllm", "sgl_kernel", "marlin", "flashinfer")


@pytest.fixture(autouse=True)
def refused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes these packages unimportable, whether or not they are installed."""
    names: list[str] = list(PACKAGES)

    class Refuse:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> None:
            if name.partition(".")[0] in names:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Refuse, *sys.meta_path])
    return names


def tree(heads: int = 6, kv_heads: int = 2, context: int = 50, rows: int = 5, width: int = 64) -> Tree:
    dice = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(3, kv_heads, context, width, generator=dice).bfloat16() for _ in range(2))
    window = torch.rand(rows, 8, generator=dice) < 0.5
    window[:, -rows:] |= torch.eye(rows, dtype=torch.bool)
    return Tree(torch.randn(rows, heads, width, generator=dice).bfloat16(), keys, values, window)


@pytest.fixture
def processors(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)


def test_a_wrong_product_is_not_timed(monkeypatch: pytest.MonkeyPatch, processors: None) -> None:
    modules = sgl_kernel()
    monkeypatch.setattr(rivals, "TILES", list(range(64)))
    install(monkeypatch, modules)
    product = rivals.marlin()
    with pytest.raises(ValueError, match="result differs from torch"):
        rivals.product_calls(product, torch.randn(2, 256).bfloat16(), [random_int4(64, 256, 128, "cpu")])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_every_attention_kernel_computes_the_same_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """SDPA, FlashInfer by its documented arguments, and FlexAttention uncompiled, each compared with float64."""
    install(monkeypatch, flashinfer())
    given = tree()
    makers = {
        "sdpa": rivals.sdpa,
        "flashinfer": rivals.flashinfer(),
        "flexattention": partial(rivals.flex_calls, flex_attention, create_block_mask),
    }
    first = [rivals.attention_calls(make, given) for make in makers.values()]
    for calls in zip(*first, strict=True):
        outs = [call().float().flatten(1) for call in calls]
        assert all(torch.allclose(out, outs[0], atol=0.02) for out in outs)
    assert len(first[0]) == 3
    hidden = Tree(given.q, given.keys, given.values, torch.eye(5, 8, dtype=torch.bool))
    with pytest.raises(ValueError, match="result differs"):
        rivals.attention_calls(lambda other: rivals.sdpa(hidden), given)


@pytest.mark.long
def test_flexattention_compiles_for_more_shapes_than_torch_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the CPU's compiler instead of triton."""
    import torch._dynamo

    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 1)
    make = rivals.flexattention()
    for rows in (1, 2):
        rivals.attention_calls(make, tree(4, 2, 64, rows))
