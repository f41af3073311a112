"""Third-party kernels in the GPU benchmark: fakes of their packages are called as documented; a missing package is
reported in one line."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench.baselines import kernels as rivals
from bench.baselines.kernels import Absent, Tree
from bench.gpu.cases import random_int4
from tests.bench.baselines.fakes import MARLIN_UTILS, flashinfer, install, sgl_kernel, vllm

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


@pytest.mark.parametrize("package", [vllm, sgl_kernel])
@pytest.mark.parametrize("group", [128, 64])
def test_marlin_is_called_as_documented(
    package: Any, group: int, monkeypatch: pytest.MonkeyPatch, processors: None
) -> None:
    install(monkeypatch, package())
    found = rivals.find()
    assert found.product is not None and f"marlin: {package.__name__}'s" in found.said
    weights = [random_int4(192, 256, group, "cpu") for _ in range(3)]
    x = torch.randn(5, 256).bfloat16()
    calls = rivals.product_calls(found.product, x, weights)
    for call, weight in zip(calls, weights, strict=True):
        want = x.float() @ weight.dequantize(torch.float32).T
        assert (call().float() - want).norm() < 0.01 * want.norm()


def test_the_original_marlin_is_called_as_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    def multiply(a: Tensor, b: Tensor, c: Tensor, s: Tensor, workspace: Tensor) -> None:
        assert {a.dtype, c.dtype, s.dtype} == {torch.half} and b.dtype == torch.int32
        (m, k), n = a.shape, c.shape[1]
        assert (b.shape, s.shape, len(workspace)) == ((k // 16, 2 * n), (k // 128, n), n // 128 * 16)
        c.fill_(m)

    install(monkeypatch, {"marlin": {"mul": multiply}})
    product = rivals.marlin()
    assert product.package == "marlin" and not product.exact
    (call,) = rivals.product_calls(product, torch.randn(5, 256).bfloat16(), [random_int4(256, 256, 128, "cpu")])
    assert bool((call() == 5).all())


def test_a_wrong_product_is_not_timed(monkeypatch: pytest.MonkeyPatch, processors: None) -> None:
    modules = sgl_kernel()
    monkeypatch.setattr(rivals, "TILES", list(range(64)))
    install(monkeypatch, modules)
    product = rivals.marlin()
    with pytest.raises(ValueError, match="result differs from torch"):
        rivals.product_calls(product, torch.randn(2, 256).bfloat16(), [random_int4(64, 256, 128, "cpu")])


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


def test_each_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "flexattention", lambda: (_ for _ in ()).throw(Absent("triton is not importable")))
    found = rivals.find()
    assert found.said == [
        "marlin: not importable (vllm, sgl_kernel, marlin)",
        "flashinfer: not importable",
        "flexattention: triton is not importable",
    ]
    assert found.product is None and not found.attention


def test_each_package_that_fails_to_load_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refused: list[str]
) -> None:
    """A package without the symbol, one whose library is missing, and one that needs another: none of them stops the
    remaining ones."""
    modules = vllm()
    del modules[MARLIN_UTILS]["marlin_permute_scales"]
    install(monkeypatch, modules)
    broken = {"marlin": "raise OSError('libx.so: no such file\\nand more')", "flashinfer": "import no_such"}
    for name, code in broken.items():
        refused.remove(name)
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    messages = rivals.find().said
    assert "vllm API differs from its documentation" in messages[0] and "'marlin_permute_scales'" in messages[0]
    assert "; sgl_kernel not importable; marlin not importable (libx.so: no such file)" in messages[0]
    assert messages[1] == "flashinfer: not importable (No module named 'no_such')"
    assert all("\n" not in line for line in messages)


def test_flexattention_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(rivals.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Absent, match="triton"):
        rivals.flexattention()


@pytest.mark.long
def test_flexattention_compiles_for_more_shapes_than_torch_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the CPU's compiler instead of triton."""
    import torch._dynamo

    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 1)
    make = rivals.flexattention()
    for rows in (1, 2):
        rivals.attention_calls(make, tree(4, 2, 64, rows))
