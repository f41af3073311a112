"""Int8 and int16 activations: every ISA level is bitwise identical to the reference, and rows are independent."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import swiftspec
from swiftspec import _C
from swiftspec.backends.cpu import cpu as host
from swiftspec.backends.cpu.linear import CpuNorm
from swiftspec.backends.cpu.packing import PackedLinear
from swiftspec.config import EngineConfig
from swiftspec.llm_engine import LLMEngine
from swiftspec.model.formats.activation_quantization import quantize_rows
from swiftspec.model.formats.int4 import Int4Weight
from swiftspec.model.formats.int8 import Int8Weight, LazyInt8Weight, LoadTimeQuantization
from swiftspec.model.weights import DenseWeight, LayerWeights, ModelWeights, Weight
from swiftspec.params import SamplingParams
from tests.backends.test_cpu import BF16, F32, dense, int4, random
from tests.support.cases import examples

pytestmark = pytest.mark.skipif(_C.level() == "none", reason="this CPU has no AVX2")

DEMO = Path(swiftspec.__file__).parent / "demo"
LEVELS = _C.levels()
SCALES = [torch.float16, BF16, F32]


def rounded_int8(n: int, k: int, seed: int, bias: bool = False) -> Int8Weight:
    made = Int8Weight.of(dense(n, k, seed).weight, random(n, seed=seed) if bias else None)
    assert made is not None
    return made


def native(weight: Weight, x: Tensor) -> Tensor:
    """x W^T + b in the dtype of x, by the native operators."""
    packed = host.pack(weight, x.dtype, "cpu")
    return host.linear_residual(x, packed, torch.zeros(x.shape[0], packed.outputs, dtype=x.dtype))


def oracle(weight: Weight, x: Tensor) -> Tensor:
    product = weight.product("cpu")
    assert product is not None
    return product(x)


@settings(max_examples=examples(60))
@given(data=st.data())
def test_every_isa_level_is_bitwise_identical_to_the_reference(data: st.DataObject) -> None:
    group = data.draw(st.sampled_from([32, 64, 128]))
    n, k = 8 * data.draw(st.integers(1, 36)), group * data.draw(st.integers(1, 4))
    seed, bias = data.draw(st.integers(0, 99)), data.draw(st.booleans())
    parts = data.draw(st.sampled_from([1, 2]))
    weight: Weight = replace(rounded_int8(n, k, seed, bias), int8_activations=parts)
    if data.draw(st.booleans()):
        four = int4(n, k, group, seed, bias)
        weight = replace(four, scales=four.scales.to(data.draw(st.sampled_from(SCALES))), int8_activations=parts)
    rows = data.draw(st.one_of(st.integers(1, 19), st.sampled_from([32, 33, 150])))
    x = random(rows, k, seed=seed, dtype=data.draw(st.sampled_from([BF16, F32])))
    x[data.draw(st.integers(0, x.shape[0] - 1))] *= data.draw(st.sampled_from([0.0, 1e-36, 1e-3, 1e4]))
    want = oracle(weight, x)
    try:
        for level in LEVELS:
            assert _C.use_level(level)
            assert torch.equal(native(weight, x), want), level
    finally:
        _C.use_level(LEVELS[0])


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_affects_only_its_row(level: str, bad: float, parts: int) -> None:
    for weight in (replace(int4(48, 128, 64, 1), int8_activations=parts), rounded_int8(48, 128, 1)):
        x = random(11, 128, seed=2)
        clean = native(weight, x)
        x[4, 70] = bad
        spoilt = native(weight, x)
        assert spoilt[4].isnan().all() and oracle(weight, x)[4].isnan().all()
        assert torch.equal(spoilt[5:], clean[5:]) and torch.equal(spoilt[:4], clean[:4])


@pytest.mark.parametrize("parts", [1, 2])
def test_rows_are_independent(level: str, parts: int) -> None:
    for weight in (replace(int4(208, 256, 128, 3), int8_activations=parts), rounded_int8(208, 256, 3)):
        packed, norm = host.pack(weight, BF16, "cpu"), host.pack_norm(torch.ones(256), 1e-5, BF16, "cpu")
        x = random(21, 256, seed=1)

        def run(part: slice, x: Tensor = x, packed: PackedLinear = packed, norm: CpuNorm = norm) -> list[Tensor]:
            mine = x[part].contiguous()
            return [op(mine, norm, packed) for op in (host.norm_linear, host.norm_swiglu, host.norm_head)]

        together = run(slice(None))
        for start, end in ((0, 1), (3, 9), (5, 6), (7, 21)):
            for alone, whole in zip(run(slice(start, end)), together, strict=True):
                assert torch.equal(alone, whole[start:end])


def test_threads_change_nothing() -> None:
    weight, x = replace(int4(640, 384, 128, 4), int8_activations=1), random(40, 384, seed=1)
    alone = native(weight, x)
    host.set_threads(3)
    try:
        assert all(torch.equal(native(weight, x), alone) for _ in range(10))
    finally:
        host.set_threads(1)


@pytest.mark.parametrize(("parts", "steps"), [(1, 1), (2, 254)])
def test_the_rounding_error_is_at_most_half_a_step(parts: int, steps: int) -> None:
    x = random(5, 256, seed=1, dtype=F32)
    pairs = quantize_rows(x, 64, parts)
    assert pairs[0][0].abs().amax(2).eq(127).all()  # the largest of each group
    assert all(codes.abs().max() <= 127 and torch.equal(codes, codes.round()) for codes, _ in pairs)
    back = sum((codes.double() * scales.double().unsqueeze(2)).flatten(1) for codes, scales in pairs)
    assert float((back - x).abs().max()) <= float(pairs[0][1].max()) / steps / 2 * 1.02


@pytest.mark.parametrize(("parts", "dtype", "error"), [(1, BF16, 1e-2), (2, BF16, 3e-3), (2, F32, 5e-5)])
def test_the_product_is_close_to_that_of_unquantised_rows(parts: int, dtype: torch.dtype, error: float) -> None:
    weight, x = int4(128, 512, 128, 5), random(8, 512, seed=1, dtype=dtype)
    exact = x.double() @ weight.dequantize(torch.float64).T
    got = native(replace(weight, int8_activations=parts), x).double()
    assert float((got - exact).norm() / exact.norm()) < error


def test_eight_bits_are_close_to_dense_weights() -> None:
    weight = rounded_int8(96, 320, 5)
    exact = dense(96, 320, 5).weight.double()
    assert weight.group_size == 64
    assert float((weight.dequantize(torch.float64) - exact).norm() / exact.norm()) < 8e-3
    assert Int8Weight.of(torch.zeros(4, 40)) is None  # no group divides 40
    zeros = Int8Weight.of(torch.zeros(4, 64))
    assert zeros is not None and torch.equal(zeros.dequantize(F32), torch.zeros(4, 64))


def test_a_shard_has_the_weights_of_the_whole_matrix() -> None:
    weight = rounded_int8(24, 256, 2, bias=True)
    rows = torch.tensor([3, 4, -1, 23])
    want = torch.where((rows < 0).unsqueeze(1), 0.0, weight.dequantize(F32)[rows])
    assert torch.equal(weight.outputs(rows).dequantize(F32), want)
    columns = torch.cat((torch.arange(32, 64), torch.full((32,), -1)))
    cut = weight.inputs(columns, 32)
    assert torch.equal(cut.dequantize(F32)[:, :32], weight.dequantize(F32)[:, 32:64])
    assert not cut.dequantize(F32)[:, 32:].any()
    four = replace(int4(64, 256, 128, 2), int8_activations=1)
    parts = [four.outputs(torch.arange(16, 32)), four.inputs(torch.arange(64, 128), 64), four.stack([four], None)]
    assert all(part.int8_activations for part in parts)


def read_layers(model: ModelWeights) -> list[LayerWeights]:
    return [read() for read in model.layers]


def test_only_the_supported_weights_of_a_model_are_quantised() -> None:
    def layer(weight: Weight) -> LayerWeights:
        return LayerWeights(torch.ones(64), weight, weight, torch.ones(64), weight, weight)

    def model(weight: Weight) -> ModelWeights:
        return ModelWeights(torch.ones(8, 64), [lambda: layer(weight)], torch.ones(64), lambda: dense(8, 64, 1))

    four = int4(64, 64, 32, 1)
    both = LoadTimeQuantization(activations=1, head="int8", head_activations=2).of_weights(model(four))
    head = both.head()
    assert isinstance(head, LazyInt8Weight) and head.int8_activations == 2
    for read in read_layers(both):
        assert isinstance(read.down, Int4Weight) and read.down.int8_activations and read.qkv.product("cpu")
    small = LoadTimeQuantization(activations=1, head="int4").of_weights(model(four)).head()
    assert isinstance(small, Int4Weight) and small.int8_activations
    neither = LoadTimeQuantization().of_weights(model(four))
    assert isinstance(neither.head(), DenseWeight) and [read().o for read in neither.layers] == [four]
    bf16 = LoadTimeQuantization(activations=1).of_weights(model(dense(64, 64, 1)))
    assert isinstance(bf16.head(), DenseWeight) and all(x.o.product("cpu") is None for x in read_layers(bf16))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_changes_no_token(temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=5, max_tokens=48, ignore_eos=True)
    plain = LLMEngine(DEMO / "target", None, EngineConfig(mode="ar"), dtype=BF16, head="int8")
    tree = LLMEngine(DEMO / "target", DEMO / "draft", EngineConfig(), dtype=BF16, head="int8")
    prompt = list(range(40, 60))
    assert tree.generate(prompt, sampling).token_ids == plain.generate(prompt, sampling).token_ids


def test_reference_and_native_operators_agree_on_likely_tokens() -> None:
    """On a quantised model; roundings differ outside of products."""
    likely = []
    for ops in ("auto", "reference"):
        options = {"dtype": BF16, "ops": ops, "activations": "int8", "head": "int8"}
        llm = LLMEngine(DEMO / "target", None, EngineConfig(mode="ar"), **options)  # type: ignore[arg-type]
        sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
        (chunk,) = llm.stream(list(range(40, 60)), sampling)
        assert chunk.logprobs is not None
        likely.append(dict(chunk.logprobs[0].top))
    assert likely[0] == pytest.approx(likely[1], abs=0.1)  # logits above 8 have a step of 0.06 in bfloat16
