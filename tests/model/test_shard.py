"""The rows of each shard: every row exactly once, each query head with its own keys."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swiftspec.errors import UserError
from swiftspec.model.config import ModelConfig
from swiftspec.model.config_json import parse_config
from swiftspec.model.shard import HeadPartition, Shard
from tests.support.cases import examples


def config(
    heads: int, kv_heads: int, *, width: int = 8, inner: int = 48, vocab: int = 64, group: int = 0
) -> ModelConfig:
    quant = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"} if group else None
    return parse_config(
        {
            "architectures": ["LlamaForCausalLM"], "vocab_size": vocab, "hidden_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": width,
            "intermediate_size": inner, "quantization_config": quant,
        }
    )  # fmt: skip


def held(index: Tensor) -> list[int]:
    return index[index >= 0].tolist()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "width", "per_rank"),
    [
        (64, 8, 6, 4, 3),  # the paper's: 12 query heads on 3 key-value heads a rank, not 16 on 2
        (64, 8, 8, 8, 1),
        (64, 8, 4, 8, 2),
        (64, 8, 7, 4, 3),
        (28, 4, 6, 7, 1),
        (14, 2, 4, 4, 1),
        (7, 1, 3, 3, 1),
        (12, 4, 5, 3, 1),
        (32, 32, 6, 1, 6),
    ],
)
def test_the_smallest_shard(heads: int, kv_heads: int, size: int, width: int, per_rank: int) -> None:
    assert HeadPartition.of(heads, kv_heads, size) == HeadPartition(width, per_rank)


models = st.tuples(st.integers(1, 8), st.integers(1, 9)).map(lambda shape: (shape[0] * shape[1], shape[0]))


@given(models, st.integers(1, 9))
@settings(max_examples=examples(300))
def test_heads_by_brute_force(model: tuple[int, int], size: int) -> None:
    """Each query head is on one rank, with the key-value head that the model assigns to it."""
    heads, kv_heads = model
    cut, found = HeadPartition.of(heads, kv_heads, size), []
    for rank in range(size):
        q, kv = cut.heads_of(rank, heads, kv_heads)
        assert len(q) == cut.width * cut.per_rank and len(kv) == cut.per_rank
        for place, head in enumerate(q):
            if head >= 0:
                found.append(head)
                assert kv[place // cut.width] == head // (heads // kv_heads)
    assert found == list(range(heads))
    weight = (2 * cut.width + 2) * cut.per_rank
    group = heads // kv_heads
    for width in range(1, group + 1):
        units = kv_heads * math.ceil(group / width)
        assert weight <= (2 * width + 2) * math.ceil(units / size)


@given(models, st.integers(1, 8), st.integers(1, 300), st.integers(1, 300), st.sampled_from([0, 32, 128]))
@settings(max_examples=examples(200))
def test_every_row_and_column_is_on_a_rank(
    model: tuple[int, int], size: int, inner: int, vocab: int, group: int
) -> None:
    heads, kv_heads = model
    size, width = min(size, heads), 8
    c = config(heads, kv_heads, width=width, inner=inner, vocab=vocab, group=group)
    shards = [Shard.of(c, rank, size) for rank in range(size)]
    layers = [shard.layers[0] for shard in shards]
    for name in ("qkv", "o", "gate_up", "down"):
        assert len({getattr(layer, name).shape for layer in layers}) == 1, "the ranks have one shape"
    assert len({shard.vocab.shape for shard in shards}) == 1
    q, kv = heads * width, kv_heads * width
    for shard in layers:
        own_q, own_k, own_v = shard.qkv.split([n * width for n in (shard.num_heads, shard.kv_heads, shard.kv_heads)])
        assert torch.equal(own_q, shard.o)
        assert torch.equal(own_k >= 0, own_v >= 0) and held(own_v) == [row + kv for row in held(own_k)]
        gate, up = shard.gate_up.chunk(2)
        assert torch.equal(gate, shard.down) and held(up) == [row + inner for row in held(gate)]
        assert shard.down.numel() % shard.inner_unit == 0 and shard.inner_unit == (group or 16)
    assert [row for layer in layers for row in held(layer.o)] == list(range(q))
    assert {row for layer in layers for row in held(layer.qkv)} == set(range(q + 2 * kv))
    assert [row for layer in layers for row in held(layer.down)] == list(range(inner))
    whole = torch.cat([shard.vocab for shard in shards])
    assert whole[:vocab].tolist() == list(range(vocab)) and held(whole) == list(range(vocab)), "padding comes last"
    assert len(whole) < vocab + 8 * size
    counted = [head for layer in layers for head in layer.k_heads[layer.counted].tolist()]
    assert sorted(counted) == list(range(kv_heads)), "each key head is counted once"


def test_models_that_cannot_be_sharded() -> None:
    with pytest.raises(UserError, match="4 query heads cannot be sharded over 5 ranks; use at most 4"):
        Shard.of(config(4, 2), 0, 5)
    with pytest.raises(UserError, match="divisible by 8, not 12"):
        Shard.of(config(4, 2, width=12, group=32), 0, 2)
    assert Shard.of(config(4, 2, width=12), 0, 2).layers[0].head_dim == 12
    assert Shard.of(config(4, 2, width=12, group=32), 0, 1).layers[0].num_heads == 4
