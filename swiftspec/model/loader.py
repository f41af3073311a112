"""Hugging Face checkpoints: safetensors, one file or several, dense or int4 in either layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from swiftspec.errors import UserError
from swiftspec.model.config import ModelConfig
from swiftspec.model.group import Group
from swiftspec.model.linear import DenseWeight, Int4Weight, Weight, fuse
from swiftspec.model.shard import Shard
from swiftspec.model.transformer import LayerWeights, ModelWeights, Ops, Transformer

Progress = Callable[[str, int, int], None]  # file name, its number from 1, how many there are
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Tensors:
    """The tensors of a checkpoint directory by name, read from disk when they are taken."""

    def __init__(self, folder: Path, files: list[str], progress: Progress | None) -> None:
        self.folder = folder
        self._files, self._progress = files, progress
        self._opened: set[str] = set()
        self._where: dict[str, tuple[str, Any]] = {}
        for file in files:  # the headers only: a cut file shows here, not an hour later
            handle = _open(folder / file)
            self._where.update((name, (file, handle)) for name in handle.keys())  # noqa: SIM118
        self._left = set(self._where)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def left(self) -> list[str]:
        """The names that nobody has taken, sorted."""
        return sorted(self._left)

    def take(self, name: str, *shape: int, kinds: tuple[torch.dtype, ...] = _FLOATS) -> Tensor:
        """Reads one tensor, which must have this shape and one of these dtypes."""
        if name not in self._where:
            raise UserError(f"{self.folder}: tensor {name} is missing")
        file, handle = self._where[name]
        if self._progress is not None and file not in self._opened:
            self._opened.add(file)
            self._progress(file, len(self._opened), len(self._files))
        try:
            tensor: Tensor = handle.get_tensor(name)
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise UserError(f"{self.folder / file}: cannot read {name} ({_line(error)})") from None
        if tuple(tensor.shape) != shape:
            raise UserError(f"{self.folder / file}: {name} is {list(tensor.shape)}, config.json says {list(shape)}")
        if tensor.dtype not in kinds:
            raise UserError(f"{self.folder / file}: {name} is {tensor.dtype}, which is not supported here")
        self._left.discard(name)
        return tensor


def read_tensors(path: str | Path, progress: Progress | None = None) -> Tensors:
    """Opens a directory's safetensors files. `progress` hears of each when its first tensor is read."""
    folder = Path(path)
    if (folder / _INDEX).is_file():
        return Tensors(folder, _shards(folder), progress)
    if (folder / _SINGLE).is_file():
        return Tensors(folder, [_SINGLE], progress)
    if any(any(folder.glob(pattern)) for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt")):
        raise UserError(f"{folder}: safetensors only, and these weights are pickles, which can run code; convert them")
    raise UserError(f"{folder}: no weights; {_SINGLE} or {_INDEX} is needed")


def _shards(folder: Path) -> list[str]:
    """The files that the index names, in order."""
    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        files = sorted({str(file) for file in index.values()})
        if not files:
            raise ValueError("it names no file")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / _INDEX}: not a safetensors index ({_line(error)})") from None
    for file in files:
        if Path(file).name != file:
            raise UserError(f"{folder / _INDEX}: {file!r} is not a plain file name")
        if not (folder / file).is_file():
            raise UserError(f"{folder / file}: missing, though {_INDEX} names it")
    return files


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{file}: damaged or cut short ({_line(error)}); download it again") from None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    ops: Ops,
    max_positions: int,
    group: Group | None = None,
    progress: Progress | None = None,
) -> Transformer:
    """A checkpoint directory as a model, computing in `dtype`; None: the one that config.json says.

    With a group it is this rank's share, and every rank of the group must run the same forwards.
    """
    config = ModelConfig.from_dir(path)
    shard = None if group is None else _shard(path, config, group)
    tensors = read_tensors(path, progress)
    weights = _Reader(config, tensors, shard).model()
    kind: torch.dtype = dtype or getattr(torch, config.dtype)
    model = Transformer(config, weights, ops, device, kind, max_positions, shard=shard, group=group)
    # rotary tables were saved by old versions, and a tied head by some; neither carries anything
    extra = [name for name in tensors.left() if not name.endswith("rotary_emb.inv_freq") and name != "lm_head.weight"]
    if extra:
        order = " (activation order is not supported)" if extra[0].endswith("g_idx") else ""
        raise UserError(f"{path}: tensor {extra[0]} has no place in this model{order}")
    return model


def read_model(path: str | Path, progress: Progress | None = None) -> tuple[ModelConfig, ModelWeights]:
    """A checkpoint directory's weights as they are on disk; each layer is read when it is taken."""
    config = ModelConfig.from_dir(path)
    return config, _Reader(config, read_tensors(path, progress), None).model()


def _shard(path: str | Path, config: ModelConfig, group: Group) -> Shard:
    try:
        return Shard.of(config, group.rank, group.size)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _cut(layer: LayerWeights, shard: Shard) -> LayerWeights:
    """This rank's share of a layer. The ranks' outputs of O and down are added, so one rank holds their biases."""
    o, down = layer.o.inputs(shard.o, shard.head_dim), layer.down.inputs(shard.down, shard.inner_unit)
    if shard.rank > 0:
        o, down = replace(o, bias=None), replace(down, bias=None)
    qkv, gate_up = layer.qkv.outputs(shard.qkv), layer.gate_up.outputs(shard.gate_up)
    return replace(layer, qkv=qkv, o=o, gate_up=gate_up, down=down)


class _Reader:
    """Maps Hugging Face names to ours, and cuts out what a shard holds."""

    def __init__(self, config: ModelConfig, tensors: Tensors, shard: Shard | None) -> None:
        self.config, self.tensors, self.shard = config, tensors, shard

    def model(self) -> ModelWeights:
        config, hidden, shard = self.config, self.config.hidden_size, self.shard
        embedding = self.tensors.take("model.embed_tokens.weight", config.vocab_size, hidden)
        norm = self.tensors.take("model.norm.weight", hidden)
        if config.tie_word_embeddings:
            head: Weight = DenseWeight(embedding)
        else:
            head = self.linear("lm_head", config.vocab_size, hidden, bias=False)
        return ModelWeights(embedding, self.layers(), norm, head if shard is None else head.outputs(shard.vocab))

    def layers(self) -> Iterator[LayerWeights]:
        for index in range(self.config.num_layers):
            layer = self.layer(f"model.layers.{index}")
            yield layer if self.shard is None else _cut(layer, self.shard)

    def layer(self, prefix: str) -> LayerWeights:
        config, hidden, inner = self.config, self.config.hidden_size, self.config.intermediate_size
        at, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = [
            self.linear(f"{at}.{name}_proj", rows, hidden, config.qkv_bias)
            for name, rows in (("q", q), ("k", kv), ("v", kv))
        ]
        gate_up = [self.linear(f"{mlp}.{name}_proj", inner, hidden, config.mlp_bias) for name in ("gate", "up")]
        return LayerWeights(
            input_norm=self.tensors.take(f"{prefix}.input_layernorm.weight", hidden),
            qkv=fuse(qkv),
            o=self.linear(f"{at}.o_proj", hidden, q, config.o_bias),
            post_norm=self.tensors.take(f"{prefix}.post_attention_layernorm.weight", hidden),
            gate_up=fuse(gate_up),
            down=self.linear(f"{mlp}.down_proj", hidden, inner, config.mlp_bias),
        )

    def linear(self, module: str, rows: int, columns: int, bias: bool) -> Weight:
        """A matrix [rows, columns] in whichever form the files hold it."""
        shift = self.tensors.take(f"{module}.bias", rows) if bias else None
        quant = self.config.quant
        if quant is None or f"{module}.weight" in self.tensors:
            return DenseWeight(self.tensors.take(f"{module}.weight", rows, columns), shift)
        if rows % 8 or columns % quant.group_size:
            raise UserError(f"{self.tensors.folder}: {module} [{rows}, {columns}] does not divide into int4 groups")
        if quant.layout == "awq-gemm":
            return self.awq(module, rows, columns, quant.group_size, shift)
        return self.pack_quantized(module, rows, columns, quant.group_size, shift)

    def awq(self, module: str, rows: int, columns: int, group: int, bias: Tensor | None) -> Weight:
        take, words = self.tensors.take, (torch.int32,)
        qweight = take(f"{module}.qweight", columns, rows // 8, kinds=words)
        qzeros = take(f"{module}.qzeros", columns // group, rows // 8, kinds=words)
        return Int4Weight.from_awq(qweight, qzeros, take(f"{module}.scales", columns // group, rows), group, bias)

    def pack_quantized(self, module: str, rows: int, columns: int, group: int, bias: Tensor | None) -> Weight:
        take, words = self.tensors.take, (torch.int32,)
        packed = take(f"{module}.weight_packed", rows, columns // 8, kinds=words)
        scale = take(f"{module}.weight_scale", rows, columns // group)
        zeros = None
        if self.config.quant is not None and self.config.quant.zero_point:
            zeros = take(f"{module}.weight_zero_point", rows // 8, columns // group, kinds=words)
        shape = take(f"{module}.weight_shape", 2, kinds=(torch.int32, torch.int64))
        if shape.tolist() != [rows, columns]:
            raise UserError(
                f"{self.tensors.folder}: {module}.weight_shape says {shape.tolist()}, not [{rows}, {columns}]"
            )
        return Int4Weight.from_pack_quantized(packed, scale, zeros, group, bias)
