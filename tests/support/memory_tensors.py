"""A checkpoint whose tensors are in memory."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from swiftspec.model.checkpoint import FLOATS


class MemoryTensors:
    """Tensors by name; implements `swiftspec.model.checkpoint.Source`."""

    folder = Path("memory")

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def shape_of(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def take(self, name: str, *shape: int, kinds: tuple[torch.dtype, ...] = FLOATS) -> Tensor:
        found = self.tensors[name]
        assert found.shape == shape and found.dtype in kinds
        return found

    def skip(self, prefix: str) -> None:
        self.tensors = {name: tensor for name, tensor in self.tensors.items() if not name.startswith(prefix)}
