"""GGUF files of the demo models, parsed by hand: names, metadata, and every kind of block."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.baselines.checkpoint import Weights
from bench.baselines.gguf_file import ENCODINGS, encoded
from bench.baselines.to_gguf import write_gguf
from bench.data.heldout import DEMO
from swiftspec.errors import UserError
from swiftspec.model.checkpoint_files import read_config

TARGET, DRAFT = DEMO / "target", DEMO / "draft"


@dataclass
class Read:
    """A parsed file, after the description of the format."""

    data: bytes
    at: int = 0

    def number(self, kind: str) -> Any:
        found = struct.unpack_from("<" + kind, self.data, self.at)[0]
        self.at += struct.calcsize("<" + kind)
        return found

    def text(self) -> str:
        size = self.number("Q")
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == 8:
            return self.text()
        if kind == 9:
            inner, count = self.number("I"), self.number("Q")
            return [self.value(inner) for _ in range(count)]
        return self.number({4: "I", 5: "i", 6: "f"}[kind])

    def file(self) -> tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...], np.ndarray]]]:
        """Metadata, and encoding, shape and bytes of each tensor."""
        self.at = 4
        assert self.data[:4] == b"GGUF" and self.number("I") == 3
        tensors, facts = self.number("Q"), self.number("Q")
        found = {self.text(): self.value(self.number("I")) for _ in range(facts)}
        places: list[tuple[str, tuple[int, ...], str, int]] = []
        numbers = {encoding.number: name for name, encoding in ENCODINGS.items()}
        for _ in range(tensors):
            name, sizes = self.text(), self.number("I")
            shape = tuple(self.number("Q") for _ in range(sizes))[::-1]
            places.append((name, shape, numbers[self.number("I")], self.number("Q")))
        start = -(-self.at // 32) * 32
        held: dict[str, tuple[str, tuple[int, ...], np.ndarray]] = {}
        for name, shape, kind, offset in places:
            assert offset % 32 == 0
            size = int(np.prod(shape)) // ENCODINGS[kind].block * ENCODINGS[kind].size
            held[name] = kind, shape, np.frombuffer(self.data, np.uint8, size, start + offset)
        return found, held


def decoded(kind: str, shape: tuple[int, ...], data: np.ndarray) -> np.ndarray:
    """The dequantised weights, after llama.cpp's description of the format."""
    if kind == "f32":
        return data.view(np.float32).reshape(shape)
    if kind == "bf16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
    blocks = data.reshape(-1, ENCODINGS[kind].size)
    d = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if kind == "q8_0":
        return (blocks[:, 2:].view(np.int8) * d).reshape(shape)
    codes = blocks[:, -16:]
    q = np.concatenate((codes & 15, codes >> 4), 1).astype(np.float32)
    if kind == "q4_0":
        return ((q - 8) * d).reshape(shape)
    m = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    return (q * d + m).reshape(shape)


def neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows half a head apart become adjacent, as llama.cpp rotates them."""
    half = len(rows) // heads // 2
    order = [head * 2 * half + part * half + i for head in range(heads) for i in range(half) for part in (0, 1)]
    return rows[order]


def theirs(name: str, weights: Weights) -> np.ndarray:
    """The tensor of the checkpoint as its GGUF should contain it."""
    config = read_config(TARGET)
    dense = weights.dense(name, torch.float32).numpy()
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
    return dense if heads is None else neighbours(dense, heads)


def test_q4_1_has_the_codes_of_awq(tmp_path: Path) -> None:
    """Every int4 weight is restored, except for the rounding of its minimum to fp16."""
    write_gguf(TARGET, tmp_path / "out.gguf", "q4_1")
    facts, held = Read((tmp_path / "out.gguf").read_bytes()).file()
    weights, config = Weights(TARGET), read_config(TARGET)
    pairs = {"q_proj": "attn_q", "k_proj": "attn_k", "o_proj": "attn_output", "down_proj": "ffn_down"}
    for layer in (0, config.num_layers - 1):
        for ours, name in pairs.items():
            room = "mlp" if ours == "down_proj" else "self_attn"
            wanted = theirs(f"model.layers.{layer}.{room}.{ours}.weight", weights)
            kind, shape, data = held[f"blk.{layer}.{name}.weight"]
            assert kind == "q4_1" and shape == wanted.shape
            scales = data.reshape(-1, 20)[:, :2].copy().view(np.float16).astype(np.float32)
            least = np.repeat(15 * np.abs(scales), 32).reshape(shape) * 2.0**-11  # |m| <= 15 d, half a unit of fp16
            assert (np.abs(decoded(kind, shape, data) - wanted) <= least + 1e-7).all()
    assert len(held) == len(weights.names) and held["token_embd.weight"][0] == "q8_0"
    assert facts["llama.block_count"] == config.num_layers and facts["llama.attention.head_count_kv"] == 2
    assert len(facts["tokenizer.ggml.tokens"]) == len(facts["tokenizer.ggml.token_type"]) == config.vocab_size


def test_q4_0_is_close_and_norms_are_exact(tmp_path: Path) -> None:
    write_gguf(TARGET, tmp_path / "out.gguf", "q4_0")
    held = Read((tmp_path / "out.gguf").read_bytes()).file()[1]
    wanted = theirs("model.layers.1.mlp.up_proj.weight", Weights(TARGET))
    kind, shape, data = held["blk.1.ffn_up.weight"]
    scales = np.abs(data.reshape(-1, 18)[:, :2].copy().view(np.float16).astype(np.float32))
    # half a step, or a whole one where the largest weight's opposite has no code; and the rounding to bf16 before
    bound = np.repeat(1.05 * scales, 32).reshape(shape)
    assert kind == "q4_0" and (np.abs(decoded(kind, shape, data) - wanted) <= bound + 1e-7).all()
    name = "model.layers.1.input_layernorm.weight"
    np.testing.assert_array_equal(decoded(*held["blk.1.attn_norm.weight"]), theirs(name, Weights(TARGET)))


@pytest.mark.parametrize("kind", ["bf16", "q8_0"])
def test_dense_kinds(tmp_path: Path, kind: str) -> None:
    write_gguf(DRAFT, tmp_path / "out.gguf", kind)
    held = Read((tmp_path / "out.gguf").read_bytes()).file()[1]
    stored, shape, data = held["token_embd.weight"]
    wanted = Weights(DRAFT).dense("model.embed_tokens.weight", torch.float32).numpy()
    bound = 0 if kind == "bf16" else np.abs(wanted).max(1, keepdims=True) / 200
    assert stored == kind and (np.abs(decoded(stored, shape, data) - wanted) <= bound).all()


def test_blocks_of_zeros() -> None:
    """There is no scale to divide by."""
    for kind in ("q8_0", "q4_0"):
        (data,) = encoded(torch.zeros(2, 64), kind)
        assert not decoded(kind, (2, 64), data.numpy().reshape(-1)).any()


def test_dense_weights_are_not_written_as_int4(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="q4_1 requires int4 weights, but these are dense; use bf16 or q8_0"):
        write_gguf(DRAFT, tmp_path / "out.gguf", "q4_1")
