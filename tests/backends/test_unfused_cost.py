"""Operators and bytes of a forward on torch's operators, counted with fake tensors on "cuda" at real sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from swiftspec.backends.unfused import unfused
from swiftspec.cache.kv import KVCache
from swiftspec.cache.model_cache import ModelCache
from swiftspec.distributed.collectives import torch_dist
from swiftspec.distributed.collectives.torch_dist import TorchDistGroup
from swiftspec.model.batch import Batch
from swiftspec.model.config import ModelConfig
from swiftspec.model.config_json import parse_config
from swiftspec.model.formats.int4 import Int4Weight
from swiftspec.model.shard import LayerShard, Shard
from swiftspec.model.transformer import Transformer
from swiftspec.model.weights import DenseWeight, LayerWeights, ModelWeights, Weight

LLAMA_8B = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
LLAMA_70B = {"hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672}
CAPACITY, ROWS, BF16, GPU = 131072, 8, torch.bfloat16, torch.device("cuda", 0)
# Two norms of 5, four products, RoPE 3, cache 2, attention, SwiGLU 2, two residuals. Not counted: two copies in another
# order around attention, since a reshape may be a view.
LAYER_OPERATORS = 24
FORWARD_OPERATORS = 22  # mask 12, tables 2, embedding, final norm 5, LM head, logits in float32
BY_ROW = ("aten::index_select", "aten::index_put_", "aten::_index_put_impl_")  # touch as many rows as there are indices


class Counts(TorchDispatchMode):
    """Counts the operators that launch kernels, and the bytes of the tensors that they read."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []
        self.bytes_read = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name, aliases = func._schema.name, [each.alias_info for each in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        if not is_view and not name.startswith(("aten::empty", "aten::new_empty", "prim::")):
            self.operators.append(name)
            read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            if name in BY_ROW:
                read = [*read[1:], *([] if "put" in name else [out])]
            self.bytes_read += sum(map(distinct_bytes, read))
        return out


def distinct_bytes(x: Tensor) -> int:
    """Returns the bytes of the distinct elements of a tensor, which may be expanded."""
    sizes = (size for size, stride in zip(x.shape, x.stride(), strict=True) if stride != 0)
    return math.prod(sizes) * x.dtype.itemsize


@contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU whose tensors have no contents; a gather is one operator."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def gather(parts: Tensor, x: Tensor) -> Tensor:
        return torch.cat((x,) * (len(parts) // len(x)), out=parts)

    monkeypatch.setattr(torch_dist, "gather_into_tensor", gather)
    with FakeTensorMode(allow_non_fake_inputs=True):  # the index tensors of a shard are real
        yield


def config(shape: dict[str, int], int4: bool) -> ModelConfig:
    quantization: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128}
    return parse_config(
        {
            "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "vocab_size": 128256,
            "torch_dtype": "bfloat16", **shape, "quantization_config": quantization if int4 else None,
        }
    )  # fmt: skip


def matrix(outputs: int, inputs: int, int4: bool) -> Weight:
    if not int4:
        return DenseWeight(torch.empty(outputs, inputs, dtype=BF16))
    codes, zeros = (torch.empty(count, outputs // 8, dtype=torch.int32) for count in (inputs, inputs // 128))
    return Int4Weight(codes, torch.empty(inputs // 128, outputs, dtype=BF16), zeros, 128)


def make_model(found: ModelConfig, shard: Shard, int4: bool, capacity: int) -> Transformer:
    hidden = found.spec.hidden_size

    def layer(part: LayerShard) -> LayerWeights:
        norm = torch.empty(hidden, dtype=BF16)
        shapes = (len(part.qkv), hidden), (hidden, len(part.o)), (len(part.gate_up), hidden), (hidden, len(part.down))
        qkv, o, gate_up, down = (matrix(*each, int4) for each in shapes)
        return LayerWeights(norm, qkv, o, norm, gate_up, down)

    table, norm = torch.empty(found.spec.vocab_size, hidden, dtype=BF16), torch.empty(hidden, dtype=BF16)
    head = DenseWeight(torch.empty(shard.head_rows, hidden, dtype=BF16))
    weights = ModelWeights(table, [partial(layer, part) for part in shard.layers], norm, lambda: head)
    group = None if shard.size == 1 else TorchDistGroup("target", 0, shard.size, nccl=True)
    return Transformer(found.spec, weights, unfused, GPU, BF16, capacity, shard=shard, group=group)


def count_forward(model: Transformer, capacity: int, kv_len: int) -> Counts:
    """Counts a forward of ROWS rows over `kv_len` slots in use."""
    shape = model.cache_shapes[0]
    cache = ModelCache(KVCache(*shape, capacity, unfused.make_slot_mover, dtype=BF16, device=GPU))
    rows = torch.empty(ROWS, dtype=torch.int64, device=GPU)
    mask = torch.empty(ROWS, 16, dtype=torch.bool, device=GPU)
    batch = Batch(rows, rows, rows, mask, rows, torch.empty(1, dtype=torch.int64, device=GPU), kv_len)
    with Counts() as counts:
        model.forward(batch, cache)
    return counts


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("shape", "size", "int4"),
    [
        (LLAMA_8B, 1, False), (LLAMA_8B, 1, True), (LLAMA_8B, 2, True), (LLAMA_70B, 1, True), (LLAMA_70B, 2, True),
        (LLAMA_70B, 6, True),
    ],
)  # fmt: skip
def test_operators_and_bytes_of_a_forward(
    shape: dict[str, int], size: int, int4: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are read once, in their format, and keys and values of the slots in use only, whatever the capacity."""
    found = config(shape, int4)
    shard, hidden = Shard.of(found, 0, size), found.spec.hidden_size
    [part] = shard.layers
    with fake_gpu(monkeypatch):
        model = make_model(found, shard, int4, CAPACITY)
        count_forward(model, CAPACITY, 1000)  # a group makes its constant
        sizes = (CAPACITY, 1000), (2048, 1000), (CAPACITY, 1500)
        counts, small, longer = (count_forward(model, *each) for each in sizes)
    weights = (len(part.qkv) + len(part.o) + len(part.gate_up) + len(part.down)) * hidden
    least = weights * (0.5 + 4 / 128 if int4 else 2) + 2 * shard.head_rows * hidden
    slot = 2 * 2 * part.kv_heads * part.head_dim  # bytes of the keys and values of a slot
    assert least + 1024 * slot < counts.bytes_read < 1.03 * (least + 1024 * slot)
    assert (small.bytes_read, small.operators) == (counts.bytes_read, counts.operators)
    masks = longer.bytes_read - counts.bytes_read - 1024 * slot
    assert 0 < masks < 1024 * 64 * ROWS
    sums = 0 if size == 1 else 2 * size  # of attention and MLP: a gather, and one addition for each further rank
    assert len(counts.operators) == FORWARD_OPERATORS + LAYER_OPERATORS + sums
    assert counts.operators.count("aten::_scaled_dot_product_efficient_attention") == 1
    assert counts.operators.count("aten::_weight_int4pack_mm") == (4 if int4 else 0)
