"""Native CPU operators at every ISA level: they match the reference, and rows are independent of each other."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import swiftspec
from swiftspec import _C
from swiftspec.backends.cpu import cpu as host
from swiftspec.backends.reference import linear as reference_linear
from swiftspec.backends.reference import reference
from swiftspec.builder.load_options import LoadOptions
from swiftspec.cache.kv import KVCache
from swiftspec.cache.model_cache import ModelCache
from swiftspec.capabilities import OPERATORS
from swiftspec.config import EngineConfig
from swiftspec.errors import UserError
from swiftspec.llm_engine import LLMEngine
from swiftspec.model.batch import Batch
from swiftspec.model.config_json import parse_config
from swiftspec.model.formats.blocks import BLOCK_TYPES, BlockWeight
from swiftspec.model.formats.int4 import Int4Weight, pack_int4
from swiftspec.model.formats.int8 import Int8Weight
from swiftspec.model.loader import load_model
from swiftspec.model.packed_model import PLAIN_ATTENTION, AttentionOptions, PackedMlp
from swiftspec.model.spec import Activation
from swiftspec.model.weights import DenseWeight
from swiftspec.params import SamplingParams
from tests.support.cases import fast_first
from tests.support.gguf_files import random_blocks
from tests.support.roles import drafter_of
from tests.support.tiny_checkpoints import make_checkpoint

pytestmark = pytest.mark.skipif(_C.level() == "none", reason="this CPU has no AVX2")

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
DTYPES = [BF16, F32]
SHAPE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
CONFIG = {**SHAPE, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "vocab_size": 8}
DEMO = Path(swiftspec.__file__).parent / "demo"
HEADS = [(4, 2, 64), (3, 3, 16), (5, 1, 32), (34, 2, 48), (4, 1, 128), (1, 1, 256), (4, 2, 512)]


def random(*shape: int, seed: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def close(ours: Tensor, theirs: Tensor) -> None:
    """Tolerance: bfloat16 against a reference with the same roundings, float32 against float64."""
    assert ours.shape == theirs.shape
    error = (ours.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-9)
    assert float(error) < (1.2e-2 if ours.dtype == BF16 else 2e-6)


def dense(n: int, k: int, seed: int, dtype: torch.dtype = BF16, bias: bool = False) -> DenseWeight:
    offset = random(n, seed=seed + 1, dtype=dtype) if bias else None
    return DenseWeight(random(n, k, seed=seed, scale=k**-0.5, dtype=dtype), offset)


def int4(n: int, k: int, group: int, seed: int, bias: bool = False) -> Int4Weight:
    noise = torch.Generator().manual_seed(seed)
    codes, zeros = (torch.randint(0, 16, (r, n), dtype=torch.uint8, generator=noise) for r in (k, k // group))
    scales = (0.5 + torch.rand(k // group, n, generator=noise)) * k**-0.5 / 4
    return Int4Weight(pack_int4(codes), scales.half(), pack_int4(zeros), group, random(n, seed=seed) if bias else None)


class Both:
    """A weight and a norm, packed for the native operators and for the reference."""

    def __init__(self, weight: Any, k: int, dtype: torch.dtype) -> None:
        scale = random(k, seed=3, dtype=dtype) + 1
        self.wide = F64 if dtype == F32 else dtype
        self.weight, self.exact = host.pack(weight, dtype, "cpu"), reference.pack(weight, self.wide, "cpu")
        self.norm = host.pack_norm(scale, 1e-5, dtype, "cpu")
        self.exact_norm = reference.pack_norm(scale, 1e-5, self.wide, "cpu")


def check_linear(both: Both, rows: int, k: int, n: int, dtype: torch.dtype) -> None:
    x, residual = random(rows, k, seed=rows, scale=3.0, dtype=dtype), random(rows, n, seed=2, dtype=dtype)
    wide = x.to(both.wide)
    close(host.norm_linear(x, both.norm, both.weight), reference.norm_linear(wide, both.exact_norm, both.exact))
    expected = reference.linear_residual(wide, both.exact, residual.to(both.wide))
    close(host.linear_residual(x, both.weight, residual), expected)
    doubled = reference.linear_residual(wide, both.exact, residual.to(both.wide), reduce=lambda product: product * 2)
    close(host.linear_residual(x, both.weight, residual, reduce=lambda product: product * 2), doubled)
    if n % 2 == 0:
        close(host.norm_swiglu(x, both.norm, both.weight), reference.norm_swiglu(wide, both.exact_norm, both.exact))
    logits = host.norm_head(x, both.norm, both.weight)
    assert logits.dtype == F32
    close(logits if dtype == F32 else logits.to(BF16), reference.norm_head(wide, both.exact_norm, both.exact))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 16), (34, 7), (130, 33), (272, 200), (640, 384)])
def test_dense(level: str, dtype: torch.dtype, n: int, k: int) -> None:
    plain, biased = (Both(dense(n, k, 4, dtype, bias), k, dtype) for bias in (False, True))
    for rows in (1, 2, 3, 5, 8, 9, 31):
        check_linear(plain, rows, k, n, dtype)
        check_linear(biased, rows, k, n, dtype)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k", "group"), [(8, 32, 32), (72, 128, 64), (160, 384, 128), (304, 96, 32)])
def test_int4(level: str, dtype: torch.dtype, n: int, k: int, group: int) -> None:
    plain, biased = (Both(int4(n, k, group, 4, bias), k, dtype) for bias in (False, True))
    for rows in (1, 2, 4, 7, 8, 17):
        check_linear(plain, rows, k, n, dtype)
        check_linear(biased, rows, k, n, dtype)


def test_two_hundred_rows(level: str) -> None:
    check_linear(Both(dense(96, 80, 4), 80, BF16), 200, 80, 96, BF16)
    check_linear(Both(int4(96, 128, 64, 4), 128, F32), 200, 128, 96, F32)


def test_the_error_of_int4_is_that_of_rounding_the_exact_product(level: str) -> None:
    """Scales are applied in float32; only the result is rounded to bfloat16 (kernels.md, numerics gate)."""
    weight, x = int4(128, 256, 128, 5), random(8, 256, seed=1)
    got = host.linear_residual(x, host.pack(weight, BF16, "cpu"), torch.zeros(8, 128, dtype=BF16))
    want = x.double() @ weight.dequantize(F64).T
    assert float((got.double() - want).norm() / want.norm()) < 2e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_mlp(level: str, dtype: torch.dtype) -> None:
    """Close to the reference; a row is bitwise identical in batches of any size."""
    both, down = Both(int4(208, 128, 64, 3), 128, dtype), dense(128, 104, 5, dtype, bias=True)
    mlp = PackedMlp(both.weight, host.pack(down, dtype, "cpu"))
    exact = PackedMlp(both.exact, reference.pack(down, both.wide, "cpu"))
    x, residual = random(21, 128, seed=1, scale=3.0, dtype=dtype), random(21, 128, seed=2, dtype=dtype)
    alone = torch.cat([host.mlp(x[r : r + 1], both.norm, mlp, residual[r : r + 1]) for r in range(21)])
    for count in (1, 2, 5, 8, 13, 21):
        part = slice(21 - count, 21)
        assert torch.equal(host.mlp(x[part], both.norm, mlp, residual[part]), alone[part])
    wide, added = x.to(both.wide), residual.to(both.wide)
    close(alone, reference.mlp(wide, both.exact_norm, exact, added))

    def double(product: Tensor) -> Tensor:
        return product * 2

    doubled = host.mlp(x, both.norm, mlp, residual, reduce=double)
    close(doubled, reference.mlp(wide, both.exact_norm, exact, added, reduce=double))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_projection_does_not_depend_on_the_others(level: str, dtype: torch.dtype) -> None:
    for weight, k, n in ((dense(208, 130, 3, dtype), 130, 208), (int4(208, 128, 64, 3), 128, 208)):
        both = Both(weight, k, dtype)
        x, residual = random(21, k, seed=1, dtype=dtype), random(21, n, seed=2, dtype=dtype)

        def run(part: slice, both: Both = both, x: Tensor = x, residual: Tensor = residual) -> list[Tensor]:
            mine = x[part].contiguous()
            return [
                host.norm_linear(mine, both.norm, both.weight),
                host.norm_swiglu(mine, both.norm, both.weight),
                host.norm_head(mine, both.norm, both.weight),
                host.linear_residual(mine, both.weight, residual[part].contiguous()),
            ]

        alone = [torch.cat(rows) for rows in zip(*(run(slice(r, r + 1)) for r in range(21)), strict=True)]
        for count in (2, 3, 5, 8, 13, 21):
            for start in (0, 21 - count):
                part = slice(start, start + count)
                assert all(torch.equal(t, a[part]) for t, a in zip(run(part), alone, strict=True))


class Cache:
    def __init__(self, sequences: int, kv_heads: int, capacity: int, dim: int, dtype: torch.dtype) -> None:
        self.k = random(2, sequences, kv_heads, capacity, dim, seed=8, dtype=dtype)
        self.v = random(2, sequences, kv_heads, capacity, dim, seed=9, dtype=dtype)


def tables(dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return reference.rope_tables(parse_config(CONFIG).spec.layer.attention.rope, dim, 200, dtype, "cpu")


def check_attention(
    batch: Batch, sequences: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype,
    options: AttentionOptions = PLAIN_ATTENTION, normed: int = 0, sinks: Tensor | None = None,
) -> None:  # fmt: skip
    """Native attention close to that of the reference. `normed`: heads that have a norm."""
    ours, theirs = (Cache(sequences, kv_heads, 128, dim, dtype) for _ in range(2))
    qkv, (cos, sin) = random(len(batch), (heads + 2 * kv_heads) * dim, seed=4, dtype=dtype), tables(dim, dtype)
    weight = 1 + 0.3 * random(normed, dim, seed=5)
    mine = host.pack_norm(weight, 1e-5, dtype, "cpu") if normed else None
    exact = reference.pack_norm(weight, 1e-5, dtype, "cpu") if normed else None
    got = host.tree_attention(qkv, host.prepare(batch, ours, cos, sin, heads, options), 1, mine, sinks)
    plan = reference.prepare(batch, theirs, cos, sin, heads, options)
    close(got, reference.tree_attention(qkv, plan, 1, exact, sinks))
    close(ours.k, theirs.k)
    close(ours.v, theirs.v)
    assert (normed > heads + kv_heads or torch.equal(ours.v, theirs.v)) and torch.equal(ours.k[0], theirs.k[0])


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize(
    ("rows", "length", "window"), [(1, 1, 8), (5, 41, 16), (9, 100, 64), (20, 33, 32), (70, 120, 96)]
)
def test_attention(
    level: str, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, rows: int, length: int, window: int
) -> None:
    slots = torch.arange(length - rows, length)
    columns = torch.arange(length - window, length)
    mask = torch.rand(rows, window, generator=torch.Generator().manual_seed(length)) < 0.5
    mask = mask & (columns < slots[:, None]) | (columns == slots[:, None])
    batch = Batch(slots, slots + 3, slots, mask, torch.zeros_like(slots), torch.tensor([length]))
    check_attention(batch, 1, heads, kv_heads, dim, dtype)


SINKS = torch.tensor([-1.0, 0.5, 6.0, -60.0])
OPTIONS = [
    (AttentionOptions(window=1), 0, SINKS),
    (AttentionOptions(window=9), 6, None),
    (AttentionOptions(window=20, softcap=2.0), 0, SINKS),
    (AttentionOptions(scale=0.4, softcap=3.0, query_scale=torch.linspace(0.5, 2, 200)), 8, None),
    (AttentionOptions(scale=0.4, query_scale=torch.linspace(0.5, 2, 200)), 0, SINKS),
    (AttentionOptions(window=300), 6, None),
    (AttentionOptions(norm_after_rope=True), 6, None),
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("options", "normed", "sinks"), OPTIONS)
@pytest.mark.parametrize(("rows", "length", "window"), [(1, 1, 8), (5, 41, 16), (20, 100, 64), (80, 120, 90)])
def test_attention_with_options(
    level: str, dtype: torch.dtype, options: AttentionOptions, normed: int, sinks: Tensor | None, rows: int,
    length: int, window: int,
) -> None:  # fmt: skip
    """Sliding windows that begin before, in and after the mask; 4 query heads on 2 key heads, some or all normed."""
    slots = torch.arange(length - rows, length)
    columns = torch.arange(length - window, length)
    mask = torch.rand(rows, window, generator=torch.Generator().manual_seed(length)) < 0.7
    mask = mask & (columns < slots[:, None]) | (columns == slots[:, None])
    batch = Batch(slots, slots, slots, mask, torch.zeros_like(slots), torch.tensor([length]))
    check_attention(batch, 1, 4, 2, 32, dtype, options, normed, sinks)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_to_the_keys_of_an_earlier_layer(level: str, dtype: torch.dtype) -> None:
    """With queries only, the rows attend to what the layer with keys and values has appended."""
    slots, mask, heads = torch.arange(20, 25), torch.ones(5, 5, dtype=torch.bool).tril(), 4
    batch = Batch(slots, slots, slots, mask, torch.zeros_like(slots), torch.tensor([25]))
    qkv, (cos, sin) = random(5, 8 * 32, seed=4, dtype=dtype), tables(32, dtype)
    weight = 1 + 0.3 * random(heads, 32, seed=5, dtype=torch.float32)
    cache = Cache(1, 2, 128, 32, dtype)
    whole = host.pack_norm(torch.cat((weight, torch.ones(2, 32))), 1e-5, dtype, "cpu")
    plan = host.prepare(batch, cache, cos, sin, heads)
    want, keys = host.tree_attention(qkv, plan, 1, whole), cache.k.clone()
    queries = qkv[:, : heads * 32].contiguous()
    got = host.tree_attention(queries, plan, 1, host.pack_norm(weight, 1e-5, dtype, "cpu"))
    assert torch.equal(got, want) and torch.equal(cache.k, keys)
    theirs = reference.prepare(batch, cache, cos, sin, heads)
    close(got, reference.tree_attention(queries, theirs, 1, reference.pack_norm(weight, 1e-5, dtype, "cpu")))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates_of_rows_that_are_not_adjacent(level: str, dtype: torch.dtype, activation: Activation) -> None:
    gates, rows = random(5, 37, seed=1, dtype=dtype, scale=3.0), random(5, 3 * 37, seed=2, dtype=dtype)[:, 37:74]
    want, got = reference_linear.activate(gates, activation) * rows, gates.clone()
    _C.apply_gates(rows, activation, got)
    close(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_over_two_sequences_with_slots_out_of_order(level: str, dtype: torch.dtype) -> None:
    sequence, slots = torch.tensor([1, 0, 1, 0, 1]), torch.tensor([6, 9, 4, 8, 5])
    mask = torch.ones(5, 8, dtype=torch.bool)
    check_attention(Batch(slots, slots, slots, mask, sequence, torch.tensor([10, 7])), 2, 4, 2, 32, dtype, sinks=SINKS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sink_far_above_the_scores_takes_the_whole_softmax(level: str, dtype: torch.dtype) -> None:
    slots, mask = torch.arange(3), torch.ones(3, 3, dtype=torch.bool).tril()
    batch = Batch(slots, slots, slots, mask, torch.zeros_like(slots), torch.tensor([3]))
    qkv, (cos, sin), cache = random(3, 128, seed=4, dtype=dtype), tables(32, dtype), Cache(1, 1, 128, 32, dtype)
    out = host.tree_attention(qkv, host.prepare(batch, cache, cos, sin, 2), 1, None, torch.tensor([1e4, -1e4]))
    assert (out[:, :32] == 0).all() and out[:, 32:].isfinite().all() and (out[:, 32:] != 0).any()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(12))
def test_a_row_of_attention_depends_only_on_its_own_keys(level: str, dtype: torch.dtype, seed: int) -> None:
    """A row's result is bitwise identical whether its keys are consecutive or scattered over a tree, without
    and with a sliding window."""
    noise = torch.Generator().manual_seed(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=noise))

    heads, kv_heads, dim, count = 6, 2, (32, 48, 64, 512)[seed // 3], pick(1, 70)
    path_k, path_v = (random(kv_heads, count, dim, seed=seed + s, dtype=dtype) for s in (50, 60))
    qkv, (cos, sin) = random(12, (heads + 2 * kv_heads) * dim, seed=seed, dtype=dtype), tables(dim, dtype)
    options = AttentionOptions(window=pick(1, 80)) if seed % 2 else PLAIN_ATTENTION
    sinks = random(heads, seed=seed, dtype=torch.float32) if seed % 4 > 1 else None

    def run(prefix: int, places: list[int], length: int, window: int, others: list[int]) -> Tensor:
        """`count` keys in the first `prefix` slots and in `places`, the last one the row's own; `others`: more rows."""
        cache = Cache(1, kv_heads, 160, dim, dtype)
        where = [*range(prefix), *places]
        cache.k[1, 0][:, where], cache.v[1, 0][:, where] = path_k, path_v
        mask = torch.rand(1 + len(others), window, generator=noise) < 0.6
        mask[:, : max(prefix - (length - window), 0)] = True
        mask[0] = torch.isin(torch.arange(length - window, length), torch.tensor(where))
        slots = torch.tensor([where[-1], *others])
        for row, slot in enumerate(slots.tolist()):
            mask[row, slot - length] = True
        rows = torch.randperm(len(slots), generator=noise)
        positions = torch.full_like(slots, count - 1)
        batch = Batch(slots, positions, slots[rows], mask[rows], torch.zeros_like(slots), torch.tensor([length]))
        plan = host.prepare(batch, cache, cos, sin, heads, options)
        return host.tree_attention(qkv[: len(slots)][rows].contiguous(), plan, 1, None, sinks)[rows == 0]

    alone = run(count - 1, [count - 1], count, min(8, count), [])
    for _ in range(6):
        prefix = pick(0, count - 1)
        free = prefix + torch.randperm(150 - prefix, generator=noise)[: count - prefix + 11].sort().values
        chosen = torch.zeros(len(free), dtype=torch.bool)
        chosen[torch.randperm(len(free), generator=noise)[: count - prefix]] = True
        places, others = free[chosen].tolist(), free[~chosen].tolist()[: pick(0, 11)]
        length = max(places[-1], *others, 0) + 1 + pick(0, 5)
        assert torch.equal(run(prefix, places, length, min(length - prefix + pick(0, 9), length), others), alone)


def test_unsupported_models_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(dtype: torch.dtype, device: str = "cpu", **fields: Any) -> None:
        host.check_supported(parse_config(CONFIG | fields).spec, dtype, device)

    for dtype in DTYPES:
        check(dtype)
        check(dtype, hidden_size=70, head_dim=16)
        for head_dim in (8, 528):
            with pytest.raises(UserError, match=f"a multiple of 16 and at most 512, not {head_dim}"):
                check(dtype, head_dim=head_dim)
        with pytest.raises(UserError, match="need a CPU, not meta"):
            check(dtype, "meta")
        check(dtype, architectures=["Qwen3ForCausalLM"])
    with pytest.raises(UserError, match="compute in bfloat16 or float32, not float64"):
        check(F64)
    monkeypatch.setitem(OPERATORS, "cpu", frozenset())
    with pytest.raises(UserError, match=r"no norm of query and key heads \(qk_norm\)"):
        check(BF16, architectures=["Qwen3ForCausalLM"])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_model_is_as_accurate_as_on_the_reference(tmp_path: Path, level: str, family: str) -> None:
    make_checkpoint(tmp_path, family=family, vocab=97, layers=3, dtype=F32, seed=6, **SHAPE)
    tokens, mask = torch.arange(30), torch.ones(30, 30, dtype=torch.bool).tril()
    batch = Batch(tokens, tokens, tokens, mask, torch.zeros_like(tokens), torch.tensor([30]))

    def logits(ops: Any, dtype: torch.dtype) -> Tensor:
        model = load_model(tmp_path, dtype=dtype, ops=ops, max_positions=64)
        out = model.forward(batch, ModelCache(KVCache(3, 2, 32, 64, ops.make_slot_mover, dtype=dtype))).logits
        assert out is not None
        return out.double()

    exact = logits(reference, F64)
    for dtype, bound in ((BF16, 0.3), (F32, 1e-5)):
        ours, theirs = ((logits(ops, dtype) - exact).norm() for ops in (host, reference))
        assert float(ours) < 1.5 * float(theirs) + 1e-6 and float(ours) < bound * float(exact.norm())


@pytest.mark.parametrize(
    ("options", "ops"),
    [
        ({"dtype": BF16}, host),
        ({"dtype": F32}, host),
        ({"dtype": F64}, reference),
        ({"dtype": BF16, "ops": "reference"}, reference),
    ],
)
def test_the_engine_uses_native_operators_if_possible(tmp_path: Path, options: LoadOptions, ops: Any) -> None:
    make_checkpoint(tmp_path, vocab=97, layers=2, dtype=F32, seed=6, **SHAPE)
    llm = LLMEngine(tmp_path, tmp_path, **options)
    assert drafter_of(llm).runner.ops is ops
    answer = llm.generate([5, 17, 3], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    assert len(answer.token_ids) == 24 and answer.stats.rounds < 24 and answer.stats.drafter_lost is None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("temperature", fast_first([1.0, 0.0], 1))
@pytest.mark.parametrize("dtype", DTYPES)
def test_speculation_changes_no_token_of_an_int4_model(dtype: torch.dtype, temperature: float) -> None:
    """A row's logits are bitwise identical in a tree and alone, also in bfloat16 with its many near-ties."""
    sampling = SamplingParams(temperature=temperature, seed=5, max_tokens=64, ignore_eos=True)
    prompts = [list(range(40, 60)), [7, 300, 12]]
    plain = LLMEngine(DEMO / "target", None, EngineConfig(mode="ar"), dtype=dtype)
    expected = [plain.generate(prompt, sampling).token_ids for prompt in prompts]
    for plan in (EngineConfig(), EngineConfig(draft_steps=5, draft_leaves=3, verify_batch=12)):
        llm = LLMEngine(DEMO / "target", DEMO / "draft", plan, dtype=dtype)
        assert [llm.generate(prompt, sampling).token_ids for prompt in prompts] == expected


@pytest.mark.slow
def test_threads_change_nothing() -> None:
    """Results do not depend on the number of threads, on a concurrent caller or on a fork, whose child starts with one
    thread."""
    weight, x = host.pack(dense(640, 384, 4), BF16, "cpu"), random(40, 384, seed=1)
    residual, alone = (
        torch.zeros(40, 640, dtype=BF16),
        host.linear_residual(x, weight, torch.zeros(40, 640, dtype=BF16)),
    )

    def same(_: int = 0) -> bool:
        return torch.equal(host.linear_residual(x, weight, residual), alone)

    host.set_threads(3)
    try:
        assert host.threads() == 3 and all(same() for _ in range(20))
        with ThreadPoolExecutor(2) as callers:
            assert all(callers.map(same, range(40)))
        child = os.fork()
        if child == 0:
            os._exit(0 if host.threads() == 1 and same() else 1)
        assert os.waitpid(child, 0)[1] == 0 and same()
    finally:
        host.set_threads(1)
    assert host.threads() == 1 and same()


def lm_heads() -> dict[str, Any]:
    """A matrix [48, 256] in each format that an LM head can have."""
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(-128, 128, (48, 256), generator=draw).to(torch.int8)
    scales, minima = torch.rand(2, 48, 16, generator=draw) / 100
    dense = torch.randn(48, 256, generator=draw)
    ordered = replace(Int4Weight.of(dense, 32), permutation=torch.randperm(256, generator=draw))
    noise = np.random.default_rng(0)
    blocks = {
        name: BlockWeight(torch.from_numpy(random_blocks(kind, 48, 256, noise)), kind)
        for name, kind in BLOCK_TYPES.items()
    }
    return {"dense": DenseWeight(dense), "int8": Int8Weight(codes, scales, None, minima), "int4": ordered, **blocks}


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("name", lm_heads())
def test_masked_outputs_are_impossible_and_the_others_keep_their_bits(name: str, softcap: float | None) -> None:
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1))
    backends: tuple[Any, ...] = (host, reference)
    for ops in backends:
        head, norm = ops.pack(lm_heads()[name], F32, "cpu"), ops.pack_norm(torch.ones(256), 1e-6, F32, "cpu")
        plain = ops.norm_head(x, norm, head, 1.0, softcap)
        masked = ops.norm_head(x, norm, ops.mask_outputs(head, [3, 39], "cpu"), 1.0, softcap)
        assert (masked[:, [3, 39]] == -torch.inf).all() and plain.isfinite().all()
        kept = [column for column in range(48) if column not in (3, 39)]
        assert torch.equal(masked[:, kept], plain[:, kept])


def test_caches_of_one_model_that_do_not_fit_each_other_are_refused() -> None:
    def cache(*shape: int, dtype: torch.dtype = BF16) -> _C.Cache:
        return _C.Cache(*(torch.zeros(shape, dtype=dtype) for _ in range(2)))

    first = cache(1, 2, 4, 8, 16)
    _C.ModelCache([first, cache(3, 2, 1, 8, 32)], None)  # layers, heads and head dimension may differ
    for other in (cache(1, 1, 4, 8, 16), cache(1, 2, 4, 9, 16), cache(1, 2, 4, 8, 16, dtype=torch.float32)):
        with pytest.raises(ValueError, match="differ in type, sequences or capacity"):
            _C.ModelCache([first, other], None)
    with pytest.raises(ValueError, match="needs a KV cache"):
        _C.ModelCache([], None)
