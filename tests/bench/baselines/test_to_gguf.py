"""GGUF files of the demo models: names, metadata, and every kind of block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, dequantize

from bench.baselines.checkpoint import Weights
from bench.baselines.to_gguf import write_gguf
from bench.data.heldout import DEMO
from swiftspec.errors import UserError
from swiftspec.model.checkpoint_files import read_config

TARGET, DRAFT = DEMO / "target", DEMO / "draft"


class Written:
    """The file that `write_gguf` writes."""

    def __init__(self, model: Path, kind: str, folder: Path) -> None:
        write_gguf(model, folder / "out.gguf", kind)
        self._reader = GGUFReader(folder / "out.gguf")
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def fact(self, name: str) -> Any:
        field = self._reader.get_field(name)
        assert field is not None, name
        return field.contents()

    def decoded(self, name: str) -> np.ndarray:
        tensor = self.tensors[name]
        return dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])

    def scales(self, name: str) -> np.ndarray:
        """The scale of each weight: the first two bytes of its block."""
        tensor = self.tensors[name]
        size = {GGMLQuantizationType.Q4_0: 18, GGMLQuantizationType.Q4_1: 20}[tensor.tensor_type]
        scales = tensor.data.reshape(-1, size)[:, :2].copy().view(np.float16).astype(np.float32)
        return np.repeat(np.abs(scales), 32).reshape(tensor.shape[::-1])


def neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows half a head apart become adjacent, as llama.cpp rotates them."""
    half = len(rows) // heads // 2
    order = [head * 2 * half + part * half + i for head in range(heads) for i in range(half) for part in (0, 1)]
    return rows[order]


def theirs(name: str, weights: Weights) -> np.ndarray:
    """The tensor of the checkpoint as its GGUF should contain it."""
    mixer = read_config(TARGET).spec.layer.attention
    dense = weights.dense(name, torch.float32).numpy()
    heads = {"q_proj": mixer.num_heads, "k_proj": mixer.num_kv_heads}.get(name.split(".")[-2])
    return dense if heads is None else neighbours(dense, heads)


def test_q4_1_has_the_codes_of_awq(tmp_path: Path) -> None:
    """Every int4 weight is restored, except for the rounding of its minimum to fp16."""
    file, weights, spec = Written(TARGET, "q4_1", tmp_path), Weights(TARGET), read_config(TARGET).spec
    pairs = {"q_proj": "attn_q", "k_proj": "attn_k", "o_proj": "attn_output", "down_proj": "ffn_down"}
    for layer in (0, len(spec.layers) - 1):
        for ours, place in pairs.items():
            room = "mlp" if ours == "down_proj" else "self_attn"
            wanted, name = theirs(f"model.layers.{layer}.{room}.{ours}.weight", weights), f"blk.{layer}.{place}.weight"
            assert file.tensors[name].tensor_type == GGMLQuantizationType.Q4_1
            least = 15 * file.scales(name) * 2.0**-11  # |m| <= 15 d, half a unit of fp16
            assert (np.abs(file.decoded(name) - wanted) <= least + 1e-7).all()
    assert len(file.tensors) == len(weights.names)
    assert file.tensors["token_embd.weight"].tensor_type == GGMLQuantizationType.Q8_0
    assert file.fact("llama.block_count") == len(spec.layers) and file.fact("llama.attention.head_count_kv") == 2
    tokens, types = file.fact("tokenizer.ggml.tokens"), file.fact("tokenizer.ggml.token_type")
    assert len(tokens) == len(types) == spec.vocab_size


@pytest.mark.slow
def test_q4_0_is_close_and_norms_are_exact(tmp_path: Path) -> None:
    file = Written(TARGET, "q4_0", tmp_path)
    wanted = theirs("model.layers.1.mlp.up_proj.weight", Weights(TARGET))
    assert file.tensors["blk.1.ffn_up.weight"].tensor_type == GGMLQuantizationType.Q4_0
    # half a step, or a whole one where the largest weight's opposite has no code; and the rounding to bf16 before
    bound = 1.05 * file.scales("blk.1.ffn_up.weight")
    assert (np.abs(file.decoded("blk.1.ffn_up.weight") - wanted) <= bound + 1e-7).all()
    norm = theirs("model.layers.1.input_layernorm.weight", Weights(TARGET))
    np.testing.assert_array_equal(file.decoded("blk.1.attn_norm.weight"), norm)


@pytest.mark.parametrize("kind", ["bf16", "q8_0"])
def test_dense_kinds(tmp_path: Path, kind: str) -> None:
    file = Written(DRAFT, kind, tmp_path)
    wanted = Weights(DRAFT).dense("model.embed_tokens.weight", torch.float32).numpy()
    bound = 0 if kind == "bf16" else np.abs(wanted).max(1, keepdims=True) / 200
    assert file.tensors["token_embd.weight"].tensor_type == GGMLQuantizationType[kind.upper()]
    assert (np.abs(file.decoded("token_embd.weight") - wanted) <= bound).all()


def test_dense_weights_are_not_written_as_int4(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="q4_1 requires int4 weights, but these are dense; use bf16 or q8_0"):
        write_gguf(DRAFT, tmp_path / "out.gguf", "q4_1")
