"""Writes a width-expanded model as a checkpoint with one file per layer."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from swiftspec.model.config import ModelConfig
from swiftspec.model.formats.int4 import AWQ_ORDER, Int4Weight, pack_int4, unpack_int4
from swiftspec.model.weights import DenseWeight, LayerWeights, Weight
from tools.width_expand.model import Grown
from tools.width_expand.shapes import DTYPES, Kind, grown_config


def write_config(path: str | Path, sizes: dict[str, Any], kind: Kind, out: Path) -> None:
    """Writes the width-expanded model's config.json, and the small model's tokenizer if it has one."""
    out.mkdir(parents=True, exist_ok=True)
    config = grown_config(path, sizes, kind)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (Path(path) / name).is_file():
            shutil.copy(Path(path) / name, out / name)


def write(path: str | Path, sizes: dict[str, Any], kind: Kind, out: Path, device: str = "cpu", seed: int = 0) -> None:
    """Writes the width-expanded model as a checkpoint with one file per layer, in int4 as AutoAWQ "gemm"."""
    grown = Grown.of(path, sizes, kind, device, seed)
    write_config(path, sizes, kind, out)
    weights, where, count = grown.weights(), dict[str, str](), len(grown.large.spec.layers)
    names = grown.large.names
    rest = {f"{names.embedding}.weight": weights.embedding, f"{names.norm}.weight": weights.norm}
    if not grown.large.spec.tie_word_embeddings:
        rest[f"{names.head}.weight"] = weights.head().dequantize(DTYPES[kind])
    files = itertools.chain([rest], (_named(grown.large, i, read()) for i, read in enumerate(weights.layers)))
    for number, tensors in enumerate(files):
        file = f"model-{number:05}-of-{count:05}.safetensors"
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, out / file)
        where |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": where}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _named(config: ModelConfig, number: int, layer: LayerWeights) -> dict[str, Tensor]:
    """Returns a layer's tensors by their Hugging Face names."""
    spec, names = config.spec, config.names
    q, kv, inner = spec.layer.attention.q_size, spec.layer.attention.kv_size, spec.layer.mlp.intermediate_size
    prefix = names.layer(number)
    modules: list[tuple[str, Weight, int, int]] = [
        (names.q, layer.qkv, 0, q),
        (names.k, layer.qkv, q, q + kv),
        (names.v, layer.qkv, q + kv, q + 2 * kv),
        (names.o, layer.o, 0, spec.hidden_size),
        (names.gate, layer.gate_up, 0, inner),
        (names.up, layer.gate_up, inner, 2 * inner),
        (names.down, layer.down, 0, spec.hidden_size),
    ]
    norms = {names.input_norm: layer.input_norm, names.mlp_norm: layer.mlp_norm}
    tensors = {f"{prefix}.{name}.weight": norm for name, norm in norms.items() if norm is not None}
    for name, weight, start, stop in modules:
        tensors |= {f"{prefix}.{name}.{part}": tensor for part, tensor in _parts(weight, start, stop).items()}
    return tensors


def _parts(weight: Weight, start: int, stop: int) -> dict[str, Tensor]:
    """Returns rows start to stop of a matrix in the form of a file."""
    tensors = {} if weight.bias is None else {"bias": weight.bias[start:stop]}
    if isinstance(weight, DenseWeight):
        return tensors | {"weight": weight.weight[start:stop]}
    assert isinstance(weight, Int4Weight)
    words = slice(start // 8, stop // 8)
    for name, packed in (("qweight", weight.packed), ("qzeros", weight.zeros)):
        tensors[name] = pack_int4(unpack_int4(packed[:, words]), AWQ_ORDER)
    return tensors | {"scales": weight.scales[:, start:stop]}
