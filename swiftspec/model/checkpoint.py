"""Reads a Hugging Face checkpoint: safetensors, in one file or several."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from swiftspec.errors import UserError
from swiftspec.model.config import ModelConfig
from swiftspec.model.weights import DenseWeight, LayerWeights, ModelWeights, Weight, fuse

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
        for file in files:  # reads the headers, so a file that was cut short is found before any tensor is read
            handle = _open(folder / file)
            self._where.update((name, (file, handle)) for name in handle.keys())  # noqa: SIM118
        self._left = set(self._where)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def take(self, name: str, *shape: int, kinds: tuple[torch.dtype, ...] = _FLOATS) -> Tensor:
        """Reads one tensor. Raises UserError unless it is there, with this shape and one of these dtypes."""
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

    def check_all_taken(self) -> None:
        """Raises UserError on a tensor that nobody has taken: this is another kind of model then."""
        # Old versions saved the rotary tables, and some the head that is the embedding. Both say nothing new.
        redundant = ("rotary_emb.inv_freq", "lm_head.weight")
        extra = sorted(name for name in self._left if not name.endswith(redundant))
        if extra:
            order = " (activation order is not supported)" if extra[0].endswith("g_idx") else ""
            raise UserError(f"{self.folder}: tensor {extra[0]} has no place in this model{order}")


class Format(Protocol):
    """How a checkpoint stores the matrices that are quantised (formats/)."""

    @property
    def group_size(self) -> int:
        """So many inputs of a matrix share a scale."""
        ...

    def linear(self, tensors: Tensors, module: str, rows: int, columns: int, bias: Tensor | None) -> Weight:
        """The matrix [rows, columns] of the layer that is named `module`."""
        ...


def open_tensors(path: str | Path, progress: Progress | None = None) -> Tensors:
    """Opens a directory's safetensors files. `progress` is called when the first tensor of a file is read."""
    folder = Path(path)
    if (folder / _INDEX).is_file():
        return Tensors(folder, _indexed_files(folder), progress)
    if (folder / _SINGLE).is_file():
        return Tensors(folder, [_SINGLE], progress)
    if any(any(folder.glob(pattern)) for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt")):
        raise UserError(f"{folder}: safetensors only, and these weights are pickles, which can run code; convert them")
    raise UserError(f"{folder}: no weights; {_SINGLE} or {_INDEX} is needed")


def _indexed_files(folder: Path) -> list[str]:
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


class Checkpoint:
    """A model's weights under the names that Hugging Face gives them. `layout`: of the quantised ones, if any are."""

    def __init__(self, config: ModelConfig, tensors: Tensors, layout: Format | None = None) -> None:
        self.config, self.tensors, self.layout = config, tensors, layout

    def read(self) -> ModelWeights:
        """The whole model. A layer is read when it is taken."""
        config, hidden = self.config, self.config.hidden_size
        embedding = self.tensors.take("model.embed_tokens.weight", config.vocab_size, hidden)
        norm = self.tensors.take("model.norm.weight", hidden)
        head: Weight = DenseWeight(embedding)
        if not config.tie_word_embeddings:
            head = self._linear("lm_head", config.vocab_size, hidden, bias=False)
        return ModelWeights(embedding, self._layers(), norm, head)

    def _layers(self) -> Iterator[LayerWeights]:
        for index in range(self.config.num_layers):
            yield self._layer(f"model.layers.{index}")

    def _layer(self, prefix: str) -> LayerWeights:
        config, hidden, inner = self.config, self.config.hidden_size, self.config.intermediate_size
        at, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        heads = (("q", q), ("k", kv), ("v", kv))
        qkv = [self._linear(f"{at}.{name}_proj", rows, hidden, config.qkv_bias) for name, rows in heads]
        gate_up = [self._linear(f"{mlp}.{name}_proj", inner, hidden, config.mlp_bias) for name in ("gate", "up")]
        return LayerWeights(
            input_norm=self.tensors.take(f"{prefix}.input_layernorm.weight", hidden),
            qkv=fuse(qkv),
            o=self._linear(f"{at}.o_proj", hidden, q, config.o_bias),
            post_norm=self.tensors.take(f"{prefix}.post_attention_layernorm.weight", hidden),
            gate_up=fuse(gate_up),
            down=self._linear(f"{mlp}.down_proj", hidden, inner, config.mlp_bias),
        )

    def _linear(self, module: str, rows: int, columns: int, bias: bool) -> Weight:
        """A matrix [rows, columns]; a quantised checkpoint may have left some of them dense."""
        shift = self.tensors.take(f"{module}.bias", rows) if bias else None
        if self.layout is None or f"{module}.weight" in self.tensors:
            return DenseWeight(self.tensors.take(f"{module}.weight", rows, columns), shift)
        return self.layout.linear(self.tensors, module, rows, columns, shift)
