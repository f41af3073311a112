"""Lazy access to a checkpoint's weights by their Hugging Face names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from swiftspec.model.checkpoint_files import read_config
from swiftspec.model.formats import awq, format_of
from swiftspec.model.formats.int4 import Int4Weight


class Weights:
    """Tensors of a checkpoint directory, read on demand from its safetensors files.

    An AutoAWQ "gemm" matrix has the name `module.weight`, like a dense one.
    """

    def __init__(self, path: Path) -> None:
        self._layout = format_of(read_config(path))
        assert self._layout is None or isinstance(self._layout, awq.Awq), f"{path}: expected dense or AutoAWQ weights"
        self._where: dict[str, Any] = {}
        for file in sorted(path.glob("*.safetensors")):
            handle = safe_open(file, framework="pt")
            self._where |= dict.fromkeys(handle.keys(), handle)
        parts = (name.removesuffix("qweight") + "weight" * name.endswith(".qweight") for name in self._where)
        self.names = [name for name in parts if not name.endswith((".qzeros", ".scales"))]

    @property
    def has_int4(self) -> bool:
        return any(name.endswith(".qweight") for name in self._where)

    def is_int4(self, name: str) -> bool:
        """Returns whether the tensor is an int4 matrix."""
        return name not in self._where

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of the tensor after dequantisation. Reads only the header of its file."""
        if name in self._where:
            return tuple(self._where[name].get_slice(name).get_shape())
        columns, words = self._slice(name, "qweight")
        return 8 * words, columns

    def dense(self, name: str, dtype: torch.dtype) -> Tensor:
        """Returns a tensor in `dtype`, dequantised if it is int4."""
        weight = self.int4(name)
        return self._take(name).to(dtype) if weight is None else weight.dequantize(dtype)

    def int4(self, name: str) -> Int4Weight | None:
        """Returns an int4 matrix, or None if the matrix is dense."""
        if not self.is_int4(name):
            return None
        assert isinstance(self._layout, awq.Awq)
        module = name.removesuffix("weight")
        words, zeros, scales = (self._take(module + part) for part in ("qweight", "qzeros", "scales"))
        return awq.from_awq(words, zeros, scales, self._layout.group_size).in_order()

    def _take(self, name: str) -> Tensor:
        return self._where[name].get_tensor(name)

    def _slice(self, name: str, part: str) -> list[int]:
        stored = name.removesuffix("weight") + part
        return self._where[stored].get_slice(stored).get_shape()
