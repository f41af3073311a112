"""Differences of backends/unfused from reference/: torch's int4 product, and a plan without host reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.data.heldout import DEMO
from swiftspec.backends.cpu import cpu
from swiftspec.backends.cuda import cuda
from swiftspec.backends.reference import reference
from swiftspec.backends.unfused import unfused
from swiftspec.config import EngineConfig
from swiftspec.llm_engine import LLMEngine
from swiftspec.model.batch import Batch
from swiftspec.model.formats.int4 import Int4Weight, pack_int4
from swiftspec.model.loader import load_model
from swiftspec.model.packed_model import AttentionOptions
from swiftspec.model.weights import DenseWeight
from swiftspec.params import SamplingParams

BF16 = torch.bfloat16


@dataclass
class Cache:
    k: Tensor
    v: Tensor


@dataclass
class Caches:
    kv: Cache
    delta: None = None

    @property
    def kinds(self) -> list[Cache]:
        return [self.kv]


class NoHost(TorchDispatchMode):
    """Fails if a value is read on the host or a size depends on one, which a graph could not replay."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.name() not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal"), func.name()
        return func(*args, **(kwargs or {}))


def int4(outputs: int, inputs: int, group: int, bias: bool = False) -> Int4Weight:
    noise = torch.Generator().manual_seed(outputs + inputs)
    codes = torch.randint(0, 16, (inputs, outputs), generator=noise, dtype=torch.uint8)
    zeros = torch.randint(0, 16, (inputs // group, outputs), generator=noise, dtype=torch.uint8)
    scales = torch.rand(inputs // group, outputs, generator=noise).half()
    shift = torch.randn(outputs, generator=noise) if bias else None
    return Int4Weight(pack_int4(codes), scales, pack_int4(zeros), group, shift)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 33])
def test_int4_products(group: int, bias: bool, rows: int) -> None:
    weight, x = int4(96, 256, group, bias), torch.randn(rows, 256).to(BF16)
    want = x.double() @ weight.dequantize(torch.float64).T + (0 if weight.bias is None else weight.bias.double())
    got = unfused.pack(weight, BF16, "cpu")(x)
    assert got.dtype == BF16 and (got.double() - want).norm() <= 1e-2 * want.norm()  # scales of 8 bits


def test_other_weights_and_dtypes_use_the_reference() -> None:
    x = torch.randn(3, 256, dtype=torch.float64)
    for weight in (int4(96, 256, 64), DenseWeight(torch.randn(40, 256))):
        want = reference.pack(weight, torch.float64, "cpu")(x)
        assert torch.equal(unfused.pack(weight, torch.float64, "cpu")(x), want)


def batch_of(kv_len: int, width: int, slots: list[int], max_kv_len: int | None = None) -> Batch:
    places, rows = torch.tensor(slots), len(slots)
    mask = torch.rand(rows, width) < 0.5
    for row, slot in enumerate(slots):
        mask[row, slot - kv_len + width] = True
    sequence = torch.zeros(rows, dtype=torch.int64)
    return Batch(places, places + 3, places, mask, sequence, torch.tensor([kv_len]), max_kv_len)


@pytest.mark.parametrize(
    ("kv_len", "width", "slots"),
    [(7, 16, [4, 5, 6]), (20, 8, [12, 13, 17, 19]), (31, 8, [30]), (32, 32, [29, 30, 31]), (1, 8, [0])],
)
@pytest.mark.parametrize(("normed", "sunk"), [(False, False), (True, True)])
def test_attention_equals_the_reference_without_host_reads(
    kv_len: int, width: int, slots: list[int], normed: bool, sunk: bool
) -> None:
    """`sunk`: with attention sinks."""
    heads, kv_heads, dim, capacity = 6, 2, 16, 32
    tables = torch.randn(2, 64, dim, dtype=torch.float64)
    batch, cached = batch_of(kv_len, width, slots), torch.randn(2, 3, 1, kv_heads, capacity, dim, dtype=torch.float64)
    qkv = torch.randn(len(slots), (heads + 2 * kv_heads) * dim, dtype=torch.float64)
    weight = torch.randn(heads + kv_heads, dim, dtype=torch.float64)
    norm = unfused.pack_norm(weight, 1e-6, torch.float64, "cpu") if normed else None
    one, other = Cache(*cached.clone()), Cache(*cached.clone())
    sinks = torch.randn(heads, dtype=torch.float64) if sunk else None
    plan = reference.prepare(batch, one, tables[0], tables[1], heads)
    want = [reference.tree_attention(qkv, plan, layer, norm, sinks) for layer in range(3)]
    with NoHost():
        static = unfused.prepare(batch, other, tables[0], tables[1], heads)
        got = [unfused.tree_attention(qkv, static, layer, norm, sinks) for layer in range(3)]
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() < 1e-12
    assert torch.equal(one.k, other.k) and torch.equal(one.v, other.v)


@pytest.mark.parametrize("window", [None, 5, 300])
@pytest.mark.parametrize(("kv_len", "read"), [(1, 256), (255, 256), (256, 256), (257, 512), (513, 600), (600, 600)])
def test_attention_reads_a_power_of_two_of_slots(kv_len: int, read: int, window: int | None) -> None:
    """Up to the capacity of 600. Only the last bits depend on their number."""
    (cos, sin), options = torch.randn(2, 640, 16, dtype=torch.float64), AttentionOptions(window=window)
    batch = batch_of(kv_len, 8, [kv_len - 1], kv_len)
    cache, qkv = Cache(*torch.randn(2, 1, 1, 2, 600, 16, dtype=torch.float64)), torch.randn(1, 160, dtype=torch.float64)
    want = reference.tree_attention(qkv, reference.prepare(batch, cache, cos, sin, 6, options), 0)
    plan = unfused.prepare(batch, cache, cos, sin, 6, options)
    assert [x.shape[-2] for x in (plan.parts[0].keys[0], plan.parts[0].values[0])] == [read, read]
    assert plan.parts[0].mask is not None and plan.parts[0].mask.shape[-1] == read
    assert (unfused.tree_attention(qkv, plan, 0) - want).abs().max() < 1e-12


def test_buckets_of_captured_forwards() -> None:
    assert [unfused.capture_bucket(count) for count in (1, 256, 257, 131072)] == [256, 256, 512, 131072]
    assert unfused.capture_bucket(None) is None
    assert {ops.capture_bucket(1000) for ops in (reference, cpu, cuda)} == {None}


def test_int4_weights_that_torch_cannot_multiply_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = int4(96, 256, 64)
    assert unfused.kept_int4_group(256, 64, BF16) == 64 and unfused.int4_needs(BF16, "cpu") is None
    assert unfused.kept_int4_group(256, 64, torch.float16) == 0
    assert unfused.int4_needs(torch.float16, "cuda") == "dtype bfloat16"
    assert unfused.kept_int4_group(192, 64, BF16) == 0  # no whole block of the layout
    assert unfused.kept_int4_group(256, 16, BF16) == 0  # as in a shard with small heads
    assert unfused.pack(weight.regroup(16), BF16, "cpu")(torch.ones(1, 256, dtype=BF16)).isfinite().all()
    for capability, kept in (((7, 5), False), ((8, 6), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert (unfused.int4_needs(BF16, "cuda") is None) == kept


def test_a_whole_forward_has_no_host_reads() -> None:
    model = load_model(DEMO / "draft", dtype=torch.float32, ops=unfused, max_positions=64)
    shape = (2, 1, 1, 32, 32)
    with NoHost():
        caches = Caches(Cache(torch.zeros(shape), torch.zeros(shape)))
        logits = model.forward(batch_of(20, 8, [12, 13, 17, 19]), caches).logits
    assert logits is not None and logits.isfinite().all()


def test_host_reads_of_the_reference_are_detected() -> None:
    """NoHost detects host reads; otherwise it would prove nothing."""
    batch, cache = batch_of(7, 16, [4, 5, 6]), Cache(*torch.zeros(2, 1, 1, 1, 16, 16))
    with NoHost(), pytest.raises(AssertionError):
        reference.prepare(batch, cache, torch.zeros(64, 16), torch.zeros(64, 16), 1)


@pytest.mark.slow
def test_the_demo_models_decode_the_same_text() -> None:
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompt = list(range(50, 90))
    plain = LLMEngine(DEMO / "target", dtype=torch.float64, max_model_len=128).generate(prompt, sampling)
    pair = (DEMO / "target", DEMO / "draft", EngineConfig())
    tree = LLMEngine(*pair, dtype=torch.float64, max_model_len=128, ops="unfused").generate(prompt, sampling)
    assert tree.token_ids == plain.token_ids
