"""Width expansion: the expanded model computes the function of the small one, and the added weights are random."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.data.heldout import DEMO
from swiftspec.backends.reference import reference
from swiftspec.builder.load_options import LoadOptions
from swiftspec.cache.kv import KVCache
from swiftspec.cache.model_cache import ModelCache
from swiftspec.config import EngineConfig
from swiftspec.errors import UserError
from swiftspec.llm_engine import LLMEngine
from swiftspec.model.checkpoint_files import read_config
from swiftspec.model.config_json import parse_config
from swiftspec.model.formats.int4 import Int4Weight, unpack_int4
from swiftspec.model.formats.int8 import LoadTimeQuantization
from swiftspec.model.loader import load_model
from swiftspec.params import SamplingParams
from tests.support.cases import fast_first
from tests.support.thread_group import ThreadGroup, on_ranks
from tests.support.tiny_checkpoints import ROPES, chain, make_checkpoint
from tools.width_expand.checkpoint import write
from tools.width_expand.maps import map_layer, spread
from tools.width_expand.model import Grown, load
from tools.width_expand.shapes import FIELDS, SHAPES, Kind, grown_config, read_shape

TARGET, DRAFT = DEMO / "target", DEMO / "draft"
PROMPT = list(range(40, 100))
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def shape(*sizes: int, tie: bool = False) -> dict[str, Any]:
    return dict(zip(FIELDS, (*sizes, tie), strict=True))


# 4 / 2 kv heads of 3 and 5 query heads each: one fits a group of 4, the other needs two groups of 3
LARGE_TARGET = shape(1024, 10, 16, 4, 128, 1280, 4608)
LARGE_DRAFT = shape(512, 3, 6, 2, 128, 512, 4608, tie=True)


def logits(model: Any, tokens: list[int]) -> Tensor:
    mixer, layers = model.spec.layer.attention, len(model.spec.layers)
    kv = KVCache(layers, mixer.num_kv_heads, mixer.head_dim, 64, reference.make_slot_mover, dtype=model.dtype)
    return model.forward(chain(tokens), ModelCache(kv)).logits


def both(path: Path, sizes: dict[str, Any], kind: Kind, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits of the small and of the expanded model."""
    small = load_model(path, dtype=dtype, ops=reference, max_positions=64)
    large = load(path, sizes, kind, device="cpu", ops=reference, max_positions=64, dtype=dtype)
    tokens = torch.randint(0, small.spec.vocab_size, (24,), generator=torch.Generator().manual_seed(1)).tolist()
    return logits(small, tokens), logits(large, tokens)


def same(small: Tensor, large: Tensor, bound: float) -> None:
    """Equal up to a constant, which a tied head adds; the additional tokens of the expanded model are far below."""
    known, extra = large[:, : small.shape[1]], large[:, small.shape[1] :]
    apart = known - small
    assert (apart - apart.median(1, keepdim=True).values).abs().max() <= bound * small.abs().max()
    assert extra.shape[1] == 0 or extra.max() < known.min() - 100


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_every_family_and_rope(tmp_path: Path, family: str, rope: str) -> None:
    extra = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    make_checkpoint(tmp_path, family=family, rope=ROPES[rope], **extra)
    # heads of 8 in heads of 16, groups of 2 query heads in groups of 3, with room for one more
    same(*both(tmp_path, shape(128, 5, 24, 8, 16, 128, 80), "f32", torch.float32), 1e-5)


@pytest.mark.parametrize("vocab", [64, 72])
def test_tied_embeddings_and_an_equal_vocabulary(tmp_path: Path, vocab: int) -> None:
    make_checkpoint(tmp_path, tie=True)
    for tie in (True, False):
        same(*both(tmp_path, shape(128, 2, 16, 4, 8, 128, vocab, tie=tie), "f32", torch.float32), 1e-5)


def test_a_key_value_head_with_too_many_query_heads_is_duplicated(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, num_attention_heads=8, num_key_value_heads=2, head_dim=8)
    same(*both(tmp_path, shape(128, 2, 24, 8, 16, 128, 64), "f32", torch.float32), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "bound"), [("f32", 1e-5), ("int4", 5e-3), ("bf16", 0.05)])
def test_the_demo_target(kind: Kind, bound: float) -> None:
    """Int4 keeps its codes; the scales of the query and the embedding (fp16 there) are rounded once more."""
    same(*both(TARGET, LARGE_TARGET, kind, torch.float32), bound)


@pytest.mark.parametrize(
    "kind", [pytest.param("int4", marks=pytest.mark.slow), pytest.param("bf16", marks=pytest.mark.long)]
)
def test_the_pair_gives_the_same_text_in_mode_serial(tmp_path: Path, kind: Kind) -> None:
    """Written to disk, loaded, and decoded with the tree of the expanded draft."""
    write(TARGET, LARGE_TARGET, kind, tmp_path / "target")
    write(DRAFT, LARGE_DRAFT, kind, tmp_path / "draft")
    for dtype in (torch.float32, torch.bfloat16):
        options: LoadOptions = {"dtype": dtype, "max_model_len": 128}
        plain = LLMEngine(TARGET, **options).generate(PROMPT, GREEDY)
        tree = LLMEngine(tmp_path / "target", tmp_path / "draft", EngineConfig(), **options).generate(PROMPT, GREEDY)
        assert tree.token_ids == plain.token_ids, dtype
        assert tree.stats.rounds < plain.stats.rounds


def test_loading_in_memory_equals_loading_from_disk(tmp_path: Path) -> None:
    write(DRAFT, LARGE_DRAFT, "int4", tmp_path, seed=3)
    options: dict[str, Any] = {"ops": reference, "max_positions": 64, "dtype": torch.float32}
    written = load_model(tmp_path, **options)
    made = load(DRAFT, LARGE_DRAFT, "int4", device="cpu", seed=3, **options)
    assert torch.equal(logits(written, PROMPT), logits(made, PROMPT))


@pytest.mark.slow
def test_added_weights_are_random() -> None:
    """Dense weights multiplied by zeros are nonzero; all codes of int4 are about equally frequent; no layer copies
    another one."""
    grown = Grown.of(TARGET, LARGE_TARGET, "bf16", "cpu", 0)
    dense = list(grown.layers())
    quiet = grown.maps.input < 0
    assert quiet.sum() == 1024 - 384
    for layer in dense:
        for weight in (layer.qkv, layer.gate_up):
            # of torch 2.11's normal numbers in bfloat16, six in a thousand are zero
            assert (weight.dequantize(torch.float32)[:, quiet] == 0).float().mean() < 1e-2
    assert not torch.equal(dense[1].down.dequantize(torch.float32), dense[2].down.dequantize(torch.float32))
    for layer in Grown.of(TARGET, LARGE_TARGET, "int4", "cpu", 0).layers():
        for weight in (layer.qkv, layer.o, layer.gate_up, layer.down):
            assert isinstance(weight, Int4Weight)
            share = torch.bincount(unpack_int4(weight.packed).flatten().int(), minlength=16) / weight.packed.numel() / 8
            assert share.min() > 0.04 and share.max() < 0.1


@pytest.mark.slow
def test_blank_layers_add_exact_zeros() -> None:
    """The outputs of V and up are zero; O and down, which are multiplied by these zeros, are random throughout."""
    layers = list(Grown.of(TARGET, LARGE_TARGET, "bf16", "cpu", 0).layers())
    numbers = spread(8, 10, -2)
    blank = [layer for layer, number in zip(layers, numbers.tolist(), strict=True) if number < 0]
    assert len(blank) == 2
    for layer in blank:
        x = torch.zeros(1, 1024)
        x[:, spread(384, 1024, -1, 128, 128) >= 0] = torch.randn(1, 384)
        v = layer.qkv.dequantize(torch.float32)[-4 * 128 :]
        up = layer.gate_up.dequantize(torch.float32)[1280:]
        assert not (x @ v.T).any() and not (x @ up.T).any()
        assert (layer.o.dequantize(torch.float32) == 0).float().mean() < 0.01


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (shape(512, 10, 16, 4, 128, 896, 4608), "do not fit 896"),
        (shape(1024, 4, 16, 4, 128, 1280, 4608), "do not fit 4"),
        (shape(1024, 10, 16, 4, 96, 1280, 4608), "not a multiple"),
        (shape(1024, 10, 16, 4, 128, 1280, 4000), "cannot shrink"),
        (shape(1000, 10, 16, 4, 128, 1280, 4608), "multiples of 128"),
        (shape(1024, 10, 16, 4, 64, 1280, 4608), "use bf16"),
    ],
)
def test_shapes_that_are_too_small_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        list(Grown.of(TARGET, sizes, "int4", "cpu", 0).layers())


def test_a_norm_of_heads_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family="qwen3")
    with pytest.raises(UserError, match=r"\(qk_norm\) cannot be width-expanded"):
        Grown.of(tmp_path, shape(128, 2, 16, 4, 8, 128, 64), "f32", "cpu", 0)


def test_shapes(tmp_path: Path) -> None:
    """By name, or from a config.json; every named shape has room for the demo models, or reports that it has not."""
    config = grown_config(TARGET, read_shape("Llama-3-70B"), "int4")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_shape(str(tmp_path / "config.json")) == read_shape("Llama-3-70B")
    for name in SHAPES:
        large = parse_config(grown_config(DRAFT, read_shape(name), "int4"))
        map_layer(read_config(DRAFT), large)
    with pytest.raises(UserError, match="or the path of a config"):
        read_shape("Llama-4")


@pytest.mark.slow
@pytest.mark.parametrize("size", fast_first([2, 3], 1))
def test_shards_compute_the_function_of_the_whole_model(size: int) -> None:
    """Each rank builds its shard by itself, with a quantised head as the draft of an engine has it."""
    options: Any = {"device": "cpu", "ops": reference, "max_positions": 64, "dtype": torch.float64}
    head = LoadTimeQuantization(head="int4")
    whole = load(DRAFT, LARGE_DRAFT, "int4", quantization=head, **options)
    tokens = torch.randint(0, whole.spec.vocab_size, (16,), generator=torch.Generator().manual_seed(1)).tolist()

    def run(group: ThreadGroup) -> Tensor:
        model = load(DRAFT, LARGE_DRAFT, "int4", quantization=head, group=group, **options)
        kv_heads, mixer = model.cache_shapes[0][1], model.spec.layer.attention
        kv = KVCache(len(model.spec.layers), kv_heads, mixer.head_dim, 64, reference.make_slot_mover, dtype=model.dtype)
        found = model.forward(chain(tokens), ModelCache(kv)).logits
        assert found is not None
        return group.all_gather(found)

    want = logits(whole, tokens)
    for parts in on_ranks(size, run):
        found = torch.cat([*parts], dim=1)[:, : want.shape[1]]
        assert torch.allclose(found, want, atol=1e-8, rtol=1e-8)
    plain = logits(load(DRAFT, LARGE_DRAFT, "int4", **options), tokens)
    assert not torch.allclose(plain, want, atol=1e-3), "the head is rounded"
