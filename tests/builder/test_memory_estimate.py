"""The GPU memory estimate, compared with the shapes that a rank loads, and the context length that fits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftspec.backends.cuda import cuda
from swiftspec.backends.cuda.devices import is_device_error, is_out_of_gpu_memory
from swiftspec.backends.reference import Backend, reference
from swiftspec.backends.unfused import unfused
from swiftspec.builder import hardware, memory_estimate
from swiftspec.builder.memory_estimate import (
    BYTES_PER_GB,
    MemoryEstimate,
    fit_context,
    kv_bytes_per_token,
    memory_by_purpose,
)
from swiftspec.builder.plan import Plan
from swiftspec.builder.rules import Choices
from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.errors import UserError, is_out_of_memory
from swiftspec.model.config import ModelConfig
from swiftspec.model.config_json import parse_config
from swiftspec.model.formats.int4 import Int4Weight
from swiftspec.model.shard import Shard
from swiftspec.model.weights import DenseWeight, LayerWeights, ModelWeights, Weight
from swiftspec.smc.limits import DEFAULT_REGION_SLOTS
from swiftspec.tree.mask import MASK_WIDTHS

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "torch_dtype": "bfloat16",
    "max_position_embeddings": 131072,
}  # fmt: skip
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672
}  # fmt: skip
AWQ: dict[str, Any] = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
GPU = torch.device("cuda", 0)
BF16, CAPACITY = torch.bfloat16, 131104


def need(capacity: int = 8192, ranks: int = 1, fields: dict[str, Any] = LLAMA_8B, **more: Any) -> MemoryEstimate:
    return MemoryEstimate(parse_config(fields), BF16, capacity, ranks, **more)


def int4(outputs: int, inputs: int) -> Int4Weight:
    groups = inputs // 128
    codes, zeros = (torch.empty(rows, outputs // 8, dtype=torch.int32, device="meta") for rows in (inputs, groups))
    return Int4Weight(codes, torch.empty(groups, outputs, dtype=torch.float16, device="meta"), zeros, 128)


def dense(outputs: int, inputs: int) -> DenseWeight:
    return DenseWeight(torch.empty(outputs, inputs, dtype=BF16, device="meta"))


def shard_weights(config: ModelConfig, make: Callable[[int, int], Weight], rank: int, size: int) -> ModelWeights:
    """Returns the weights of a rank on the meta device, which the sharding of the product has cut."""
    spec, hidden = config.spec, config.spec.hidden_size
    mixer, inner = spec.layer.attention, spec.layer.mlp.intermediate_size
    norm = torch.empty(hidden, dtype=BF16, device="meta")
    layer = LayerWeights(
        norm, make(mixer.q_size + 2 * mixer.kv_size, hidden), make(hidden, mixer.q_size), norm,
        make(2 * inner, hidden), make(hidden, inner),
    )  # fmt: skip
    whole = ModelWeights(
        torch.empty(spec.vocab_size, hidden, dtype=BF16, device="meta"), [lambda: layer] * len(spec.layers), norm,
        lambda: dense(spec.vocab_size, hidden),
    )  # fmt: skip
    return Shard.of(config, rank, size).cut(whole)


def stored_bytes(weight: Weight) -> float:
    """Returns the bytes of a matrix as the CUDA operators and torch's int4 product keep it: codes, and for each group a
    scale and a zero point of two bytes each."""
    if isinstance(weight, Int4Weight):
        return weight.packed.nbytes + 4 * weight.scales.numel()
    assert isinstance(weight, DenseWeight)
    return weight.weight.nbytes


@pytest.mark.sampled(6)
@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("fields", [LLAMA_8B, LLAMA_70B], ids=["8B", "70B"])
@pytest.mark.parametrize("quantised", [False, True], ids=["bf16", "awq"])
@pytest.mark.parametrize("ops", [cuda, unfused], ids=["cuda", "unfused"])
def test_weights_and_cache_are_those_of_the_shards(
    size: int, fields: dict[str, Any], quantised: bool, ops: Backend
) -> None:
    config = parse_config(fields | (AWQ if quantised else {}))
    last = size - 1  # has the most padding
    weights, part = shard_weights(config, int4 if quantised else dense, last, size), Shard.of(config, last, size)
    layer = weights.layers[0]()
    held = weights.embedding.nbytes + stored_bytes(weights.head()) + len(weights.layers) * sum(
        stored_bytes(matrix) for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down)
    )  # fmt: skip
    found = MemoryEstimate(config, BF16, CAPACITY, size, ops=ops)
    assert found.weights == pytest.approx(held, rel=0.05)
    cache = 2 * len(part.layers) * part.layers[0].kv_heads * part.layers[0].head_dim * CAPACITY * 2
    assert found.cache == cache
    counted = sum(memory_by_purpose([found]).values())
    reserve = memory_estimate.RESERVE_BYTES + (memory_estimate.GROUP_RESERVE_BYTES if size > 1 else 0)
    assert counted == pytest.approx(held + cache + found.scratch + found.graphs + reserve, rel=0.05)


def test_weights_that_operators_keep_dense() -> None:
    """int4 weights in another dtype, with other operators, on an old GPU, or of a permuted matrix are expanded."""
    act_order = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}}
    whole, quantised = need().weights, need(fields=LLAMA_8B | AWQ).weights
    assert whole == pytest.approx(2 * 8.03e9, rel=0.01)
    assert quantised == pytest.approx(6.98e9 * 4.25 / 8 + 2 * 1.05e9, rel=0.01)
    for ops, kept in ((cuda, True), (unfused, True), (reference, False)):
        assert need(fields=LLAMA_8B | AWQ, ops=ops).weights == (quantised if kept else whole)
    half = replace(need(fields=LLAMA_8B | AWQ, ops=unfused), dtype=torch.float16)
    assert half.weights == need(fields=LLAMA_8B | AWQ, ops=unfused, int4_kernels=False).weights == whole
    assert need(fields=LLAMA_8B | act_order).weights == whole
    assert need(fields=LLAMA_8B | act_order, ops=unfused).weights == quantised
    assert quantised < need(fields=LLAMA_8B | act_order, ops=unfused, ranks=2).weights * 2 < whole
    head = 128256 * 4096
    assert whole - need(int4_head=True).weights == head * (2 - 4.25 / 8)


def test_shared_kv_layers_and_per_layer_embeddings() -> None:
    """Shared KV layers have no cache; table and projections of per-layer embeddings are whole on every rank."""
    plain = LLAMA_8B | {"architectures": ["Gemma4ForCausalLM"], "sliding_window": 512, "head_dim": 128}
    plain |= {"global_head_dim": 256, "hidden_size_per_layer_input": 0}
    shared, embedded = plain | {"num_kv_shared_layers": 20}, plain | {"hidden_size_per_layer_input": 64}
    embedded |= {"vocab_size_per_layer_input": 128256}
    full = [index % 6 == 5 or index == 31 for index in range(32)]
    token = [2 * 8 * (256 if each else 128) * 2 for each in full]  # bytes of keys and values in a layer
    assert need(fields=plain).kv_token == sum(token) and need(fields=shared).kv_token == sum(token[:12])
    assert memory_estimate.kv_bytes_per_token(parse_config(shared).spec, BF16) == sum(token[:12])
    for ranks in (1, 2):
        more = need(fields=embedded, ranks=ranks).weights - need(fields=plain, ranks=ranks).weights
        assert more == 32 * 64 * (128256 + 3 * 4096) * 2


def test_scratch_of_attention() -> None:
    """For each of 256 rows and 32 heads the CUDA operators keep as many partial results as clusters or blocks run
    concurrently for the 8 KV heads; torch's keep a mask for the 4 query heads that share keys."""
    short, long = need(capacity=1024), need(capacity=131073)
    partial, tables = 256 * 32 * 130 * 4, 2 * 128 * 2
    assert long.scratch - short.scratch == partial * (10 - 4) + tables * (131073 - 1024)
    blocks = replace(long, clusters=False)
    assert blocks.scratch - long.scratch == partial * (20 - 10)
    masks = need(capacity=131072, ops=unfused).scratch - need(capacity=65536, ops=unfused).scratch
    assert masks == 65536 * (256 * (3 + 2 * 5) + tables)
    stored = need(capacity=131072, ops=unfused, cache_dtype=torch.float8_e4m3fn)
    sinks = LLAMA_8B | {"architectures": ["GptOssForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 1}
    sinks |= {"head_dim": 128}
    parts = [need(capacity=size, fields=sinks, ops=unfused).scratch for size in (131072, 65536)]
    window = 256 * (2 * (3 + 2 * 5) + 3 * 8)  # masks with and without a window
    assert parts[0] - parts[1] == 65536 * (window + 256 * 32 * (3 * 4 + 2 * 2) + 2 * tables), "scores"
    assert stored.scratch - need(capacity=131072, ops=unfused).scratch == 131072 * 2 * 8 * 128 * 2
    assert stored.cache == need(capacity=131072).cache / 2
    native = need(capacity=131072, cache_dtype=torch.float8_e4m3fn)
    assert native.scratch - need(capacity=131072).scratch == 131072 * 2 * 8 * 128 * 2


def test_reserve_and_prefix_cache() -> None:
    kept = memory_by_purpose([need(prefix_tokens=1000)])
    assert kept["the prefix cache"] == 1000 * 128 * 1024
    assert need(ops=reference).graphs == 0 and need(ops=unfused).graphs == need().graphs > 2**26
    alone, grouped = memory_by_purpose([need()]), memory_by_purpose([need(ranks=2), need(ranks=2)])
    shared = grouped["CUDA graphs and libraries"] - alone["CUDA graphs and libraries"]
    assert shared == memory_estimate.GROUP_RESERVE_BYTES + need().graphs


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A GPU that the CUDA operators can use. Returns a function that sets its free memory in GB."""

    def set_free(gigabytes: float) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _=None: (int(gigabytes * BYTES_PER_GB), int(80e9)))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "RTX 4090")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    monkeypatch.setattr("swiftspec.backends.cuda.require_usable", torch.device)
    set_free(23.5)
    return set_free


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Configurations of an 8B and a 1B, without weights."""
    target, draft = (tmp_path_factory.mktemp(name) for name in ("target", "draft"))
    small = {"hidden_size": 2048, "num_hidden_layers": 16, "head_dim": 64, "intermediate_size": 8192}
    (target / "config.json").write_text(json.dumps(LLAMA_8B | AWQ))
    (draft / "config.json").write_text(json.dumps(LLAMA_8B | small | {"tie_word_embeddings": True}))
    return target, draft


def create(models: tuple[Path, Path], plan: EngineConfig, notes: list[str], **options: Any) -> Plan:
    ranks: Any = type("Ranks", (), {"size": plan.num_ranks, "local_rank": 0, "local_size": plan.num_ranks})
    given: Any = {"device": "cuda:0", "note": notes.append, "gpu_trial": "off", **options}
    return Plan.create(*models, plan, None if plan.num_ranks == 1 else ranks, given)


def test_the_context_that_fits_is_selected(models: tuple[Path, Path], gpu: Callable[[float], None]) -> None:
    """An 8B in int4 with a 1B on 24 GB: not the 131072 tokens of the model."""
    notes: list[str] = []
    found = create(models, EngineConfig("serial"), notes).max_model_len
    assert 32768 < found < 131072 and found % 256 == 0
    assert notes == [
        f"the context is limited to {found} of 131072 tokens, which fit the 23.5 GB of GPU memory that are free;"
        " --max-model-len sets the limit"
    ]
    notes.clear()
    assert create(models, EngineConfig("serial"), notes, max_model_len=found).max_model_len == found and not notes
    with pytest.raises(UserError, match=f"use --max-model-len {found}, which fits, "):
        create(models, EngineConfig("serial"), notes, max_model_len=found + 256)
    gpu(80.0)
    assert create(models, EngineConfig("serial"), notes).max_model_len == 131072 and not notes


def test_a_context_that_was_given_or_is_shared_is_refused(
    models: tuple[Path, Path], gpu: Callable[[float], None]
) -> None:
    """Ranks may have different amounts of free memory, but must have the same context."""
    notes: list[str] = []
    for plan, given in ((EngineConfig("serial"), {"max_model_len": 131072}), (EngineConfig("async"), {})):
        gpu(23.5 if plan.num_ranks == 1 else 12.0)
        with pytest.raises(UserError) as error:
            create(models, plan, notes, **given)
        line = str(error.value)
        assert line.startswith("with a context of 131072 tokens the models need ") and "\n" not in line
        assert "GB of GPU memory (" in line and "use --max-model-len " in line and not notes
    gpu(1.0)
    with pytest.raises(UserError, match=r"1\.0 GB free: use int4 weights, --kv-cache-dtype fp8, "):
        create(models, EngineConfig("serial"), notes)


@pytest.mark.parametrize(
    ("more", "advice"),
    [({"cache_dtype": torch.float8_e4m3fn}, "more GPUs"), ({}, "--kv-cache-dtype fp8, or more GPUs")],
)
def test_the_advice_names_what_is_left(gpu: Callable[[float], None], more: dict[str, Any], advice: str) -> None:
    held = [[need(fields=LLAMA_8B | AWQ, **more)]]
    line = memory_estimate._refusal(held, 0, 8192, 1e9, GPU)
    assert line.endswith(f"has 1.0 GB free: use {advice} (--target-tp N)")


def test_each_rank_is_checked_for_the_models_that_it_holds(
    models: tuple[Path, Path], gpu: Callable[[float], None]
) -> None:
    gpu(80.0)
    serial, apart = (create(models, EngineConfig(mode), []) for mode in ("serial", "async"))
    assert [[*held] for held in serial.memory_needs(EngineConfig("serial"))] == [["target", "draft"]]
    assert [[*held] for held in apart.memory_needs(EngineConfig("async"))] == [["target"], ["draft"]]
    [[target, draft]] = [list(held.values()) for held in serial.memory_needs(EngineConfig("serial"))]
    assert draft.int4_head and not target.int4_head and target.ops is cuda and not target.clusters


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_particles_use_the_memory_that_is_left(
    models: tuple[Path, Path], gpu: Callable[[float], None], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to N different texts of the whole context, and at least two rounds."""

    def region(gigabytes: float, particles: int = 64, context: int = 8192, steps: int = 4) -> int:
        gpu(gigabytes)
        monkeypatch.setattr(hardware, "memory_bytes", lambda: int(gigabytes * BYTES_PER_GB))
        engine = EngineConfig("smc", population=PopulationConfig(particles, steps))
        plan = create(models, engine, [], device=device, max_model_len=context)
        slots = plan.tree_slots("target", engine)
        assert slots % MASK_WIDTHS[-1] == 0 and slots >= 2 * particles * (steps + 1)
        assert slots * kv_bytes_per_token(plan.specs(engine)[0], BF16) < gigabytes * BYTES_PER_GB
        return slots

    assert DEFAULT_REGION_SLOTS <= region(24) < region(40) < region(80) < 64 * 8192
    assert 64 * 512 <= region(80, context=512) < 64 * 512 + 4 * 64 * 5  # the request's limit, and two rounds
    assert region(200) >= 64 * 8192 and region(80, 1024, 2048, 64) > DEFAULT_REGION_SLOTS
    with pytest.raises(UserError, match="fewer particles"):
        region(14, 1024, 2048, 64)


@pytest.mark.parametrize(("contexts", "requests"), [(0.5, 1), (2, 1), (4.5, 2), (7, 3), (100, 4)])
def test_the_contexts_of_a_servers_requests_fit_half_of_the_memory(
    models: tuple[Path, Path], contexts: float, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`contexts`: memory, in contexts of both models."""
    options: Any = {"device": "cpu", "max_model_len": 512}
    lone = Plan.create(*models, EngineConfig("serial"), None, options)
    size = sum(kv_bytes_per_token(spec, lone.dtype) for spec in lone.specs(lone.engine)) * 512
    monkeypatch.setattr(hardware, "memory_bytes", lambda: int(contexts * size))
    plan = Plan.create(*models, Choices({}, models[1], 1, serves=True), None, options)
    assert plan.engine.max_num_seqs == plan.reasons["max_num_seqs"].value == requests


def test_memory_in_torchs_cache_counts_as_free(gpu: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an earlier engine of this process."""
    gpu(2.0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: int(20 * BYTES_PER_GB))
    sizes: Any = {"adjust": False, "note": pytest.fail}
    assert fit_context(lambda tokens: [[need(tokens, fields=LLAMA_8B | AWQ)]], 8192, GPU, **sizes) == 8192
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: int(18 * BYTES_PER_GB))
    with pytest.raises(UserError, match=r"has 4\.0 GB free"):
        fit_context(lambda tokens: [[need(tokens, fields=LLAMA_8B | AWQ)]], 8192, GPU, **sizes)


def test_errors_of_exhausted_memory(gpu: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a capture, where another error replaces the first. An invalid access is none, whatever its words."""
    texts = ("CUDA out of memory. Tried to allocate 2.00 GiB", "DefaultCPUAllocator: can't allocate memory",
             "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")  # fmt: skip
    assert all(is_out_of_memory(RuntimeError(text)) for text in texts) and is_out_of_memory(MemoryError())
    assert not any(is_device_error(RuntimeError(text)) for text in texts)
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    after = RuntimeError("operation failed due to a previous error during capture")
    after.__context__ = RuntimeError(texts[0])
    assert is_out_of_memory(after)
    invalid = RuntimeError("operation failed due to a previous error during capture")
    assert not is_out_of_gpu_memory(invalid)
    gpu(0.1)
    assert is_out_of_gpu_memory(invalid) and not is_out_of_memory(invalid)
    assert not is_out_of_gpu_memory(RuntimeError("something else"))
    reported = RuntimeError(f"CUDA error: {invalid}")
    assert not is_device_error(reported)
    gpu(20.0)
    assert is_device_error(reported), "of a GPU with free memory it is a fault"

    def lost(*of: Any) -> Any:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lost)
    assert is_device_error(reported), "the GPU does not say how much memory is free"
