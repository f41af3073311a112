"""GGUF files of hybrids: names, the order of value heads, norms and decay rates, and both types of blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, dequantize

from bench import random_pairs
from bench.baselines.checkpoint import Weights
from bench.baselines.hybrid_gguf import write_gguf
from swiftspec.errors import UserError

DELTA, MIXER = "model.layers.0.linear_attn", "model.layers.3.self_attn"
KEYS, VALUES, SIZE = 2, 6, 128
SHAPE = {
    "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "linear_num_key_heads": KEYS, "linear_num_value_heads": VALUES,
}  # fmt: skip
TILED = [0, 3, 1, 4, 2, 5]  # the first value head of each key head, then the second, then the third


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    random_pairs.write_checkpoint(tmp_path / "tiny", random_pairs.HYBRID | SHAPE | {"vocab_size": 64}, 0.75)
    return tmp_path / "tiny"


def decoded(file: Path) -> dict[str, np.ndarray]:
    """The tensors of a file in float32."""
    return {t.name: dequantize(t.data, t.tensor_type).reshape(t.shape[::-1]) for t in GGUFReader(file).tensors}


def test_every_tensor_has_its_values_in_the_order_of_llama_cpp(checkpoint: Path, tmp_path: Path) -> None:
    write_gguf(checkpoint, tmp_path / "q4_1.gguf", "q4_1")
    weights, found = Weights(checkpoint), decoded(tmp_path / "q4_1.gguf")
    assert len(found) == len(weights.names)

    def dense(name: str) -> np.ndarray:
        return weights.dense(name, torch.float32).squeeze().numpy()

    def tiled(values: np.ndarray) -> np.ndarray:
        return values.reshape(VALUES, -1, *values.shape[1:])[TILED].reshape(values.shape)

    qkv, conv, first = dense(f"{DELTA}.in_proj_qkv.weight"), dense(f"{DELTA}.conv1d.weight"), 2 * KEYS * SIZE
    wanted = {
        "blk.0.attn_qkv.weight": np.concatenate((qkv[:first], tiled(qkv[first:]))),
        "blk.0.ssm_conv1d.weight": np.concatenate((conv[:first], tiled(conv[first:]))),
        "blk.0.attn_gate.weight": tiled(dense(f"{DELTA}.in_proj_z.weight")),
        "blk.0.ssm_out.weight": tiled(dense(f"{DELTA}.out_proj.weight").T).T,
        "blk.0.ssm_alpha.weight": tiled(dense(f"{DELTA}.in_proj_a.weight")),
        "blk.0.ssm_beta.weight": tiled(dense(f"{DELTA}.in_proj_b.weight")),
        "blk.0.ssm_dt.bias": tiled(dense(f"{DELTA}.dt_bias")),
        "blk.0.ssm_a": -np.exp(tiled(dense(f"{DELTA}.A_log"))),
        "blk.0.ssm_norm.weight": dense(f"{DELTA}.norm.weight"),
        "blk.3.attn_q.weight": dense(f"{MIXER}.q_proj.weight"),
        "blk.3.attn_q_norm.weight": 1 + dense(f"{MIXER}.q_norm.weight"),
        "output_norm.weight": 1 + dense("model.norm.weight"),
    }
    for name, values in wanted.items():
        in_q8_0 = name.endswith(("ssm_alpha.weight", "ssm_beta.weight"))
        np.testing.assert_allclose(found[name], values, rtol=1e-3, atol=np.abs(values).max() / 200 * in_q8_0)


def test_q4_0_has_the_weights_of_q4_1(checkpoint: Path, tmp_path: Path) -> None:
    files = {kind: tmp_path / f"{kind}.gguf" for kind in random_pairs.KINDS}
    for kind, file in files.items():
        write_gguf(checkpoint, file, kind)
    kinds = {t.name: t.tensor_type for t in GGUFReader(files["q4_0"]).tensors}
    assert kinds["blk.0.ssm_out.weight"] == GGMLQuantizationType.Q4_0
    mine, theirs = (decoded(file) for file in files.values())
    assert all(np.array_equal(mine[name], theirs[name]) for name in mine)


def test_q4_0_requires_zero_points_of_8(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = torch.zeros(1, 1, 20, dtype=torch.uint8)
    blocks[..., 1] = 0x3C  # a scale of 1, a minimum of 0
    monkeypatch.setattr("bench.baselines.hybrid_gguf.int4_blocks", lambda *given: blocks)
    with pytest.raises(UserError, match="q4_0 requires zero points of 8"):
        write_gguf(checkpoint, tmp_path / "out.gguf", "q4_0")
