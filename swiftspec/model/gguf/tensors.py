"""Tensors of a GGUF file, by name, as views of the memory-mapped file."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from swiftspec.errors import UserError, truncated_repr
from swiftspec.file_io import file_facts
from swiftspec.model.checkpoint import FLOATS
from swiftspec.model.formats.blocks import FILE_TYPES, BlockType, BlockWeight
from swiftspec.model.gguf.config import extra_layers, gguf_config
from swiftspec.model.gguf.families import gguf_architecture
from swiftspec.model.gguf.file import DENSE_BYTES, GgufFile, GgufTensor
from swiftspec.model.gguf.rope import ROPE_TENSORS

DENSE_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# ends of the names of all norms' weights; the last two are those of an MTP layer
NORMS = ("_norm.weight", ".enorm.weight", ".hnorm.weight")


def _layer_of(name: str, prefix: str) -> int:
    """Returns the index of the layer of a tensor; -1 for others. `prefix`: before the index."""
    index = name.removeprefix(prefix).partition(".")[0]
    return int(index) if name.startswith(prefix) and index.isascii() and index.isdecimal() else -1


class GgufTensors:
    """Tensors of a GGUF file. Each is a mapping of its own, so that its pages are released when it is freed.

    `progress`: called before each tensor; see `checkpoint_files.Progress`. `dtype`: that of a quantised matrix which is
    taken as a dense one, as the embedding is.
    """

    def __init__(
        self,
        path: Path,
        progress: Callable[[str, int, int], None] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.folder = path
        self.facts = {path.name: file_facts(path)}  # attributes that change with the contents
        self._file, self._progress, self._dtype = GgufFile.read(path), progress, dtype
        config, architecture = gguf_config(self._file), gguf_architecture(self._file)
        mixer, names = config.spec.attention_mixers[0], architecture.names
        self._heads: dict[str, int] = {}  # of the modules whose rows are reordered
        if architecture.rotates_pairs:
            self._heads = {names.q: mixer.num_heads, names.k: mixer.num_kv_heads}
        self._norms_plus_one, self._delta_norm = architecture.norms_plus_one, names.delta_norm
        extra, prefix = extra_layers(self._file, len(config.spec.layers)), f"{names.layers}."
        self._left = {name for name in self._file.tensors if _layer_of(name, prefix) not in extra} - {*ROPE_TENSORS}
        self._read, self._bytes = 0, file_facts(path)[0]

    def __contains__(self, name: str) -> bool:
        """Returns whether there is a dense tensor `name`."""
        return name in self._file.tensors and self._file.tensors[name].type in DENSE_BYTES

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Returns the shape of the tensor `name`, where the matrices of all experts of a layer are one below the other,
        and so are their biases. Raises UserError if it is missing."""
        if name not in self._file.tensors:
            raise UserError(f"{self.folder}: tensor {name} is missing")
        *rows, columns = shape = self._file.tensors[name].shape
        if name.endswith(".bias"):
            return (math.prod(shape),)
        return (math.prod(rows), columns) if len(rows) > 1 else (*rows, columns)

    def take(self, name: str, *shape: int, kinds: tuple[torch.dtype, ...] = FLOATS) -> Tensor:
        """Maps the tensor `name` and marks it as taken. A quantised one is dequantised. Raises UserError if it is
        missing, its shape is not `shape`, or its dtype is not in `kinds`."""
        tensor = self._find(name, shape)
        if tensor.type in FILE_TYPES and len(shape) != 2:
            raise UserError(f"{self.folder}: damaged: {name}, which is no matrix, has type {tensor.type}")
        if tensor.type in FILE_TYPES:
            return BlockWeight(*self.take_blocks(name, *shape)).dequantize(self._dtype)
        dtype = DENSE_TYPES[tensor.type]
        if dtype not in kinds:
            raise UserError(f"{self.folder}: {name} has unsupported dtype {dtype}")
        found = self._in_order(name, self._map(tensor).view(dtype).view(shape))
        if self._norms_plus_one and name.endswith(NORMS) and not name.endswith(self._delta_norm):
            return found.float() - 1  # 1 + (w - 1) is w again in float32, for any w above 0.5
        return found

    def take_blocks(self, name: str, rows: int, columns: int) -> tuple[Tensor, BlockType]:
        """Maps the quantised matrix `name` [rows, columns] as rows of blocks [rows, bytes] uint8, and returns them with
        their type. Raises UserError if it is missing or has another shape."""
        tensor = self._find(name, (rows, columns))
        kind = FILE_TYPES[tensor.type]
        return self._in_order(name, self._map(tensor).view(rows, kind.row_bytes(columns))), kind

    def skip(self, prefix: str) -> None:
        """Marks the tensors whose names begin with `prefix` as taken, because packed weights replace them."""
        names = [name for name in self._left if name.startswith(prefix)]
        self._read += sum(self._file.tensors[name].nbytes for name in names)
        self._left.difference_update(names)
        self._tell()

    def check_all_taken(self, prefixes: tuple[str, ...] = ("",)) -> None:
        """Raises UserError if a tensor whose name begins with one of `prefixes` was not taken: the file then has
        weights that this architecture lacks."""
        for name in sorted(each for each in self._left if each.startswith(prefixes)):
            shown = name if name.isprintable() and len(name) <= 200 else truncated_repr(name)
            raise UserError(f"{self.folder}: tensor {shown} is not part of the architecture in the metadata")

    def _find(self, name: str, shape: tuple[int, ...]) -> GgufTensor:
        """Returns the tensor `name`. Dimensions of size 1 are not compared, because a file may lack them."""
        found = self.shape_of(name)
        if [size for size in found if size != 1] != [size for size in shape if size != 1]:
            raise UserError(
                f"{self.folder}: {name} has shape {truncated_repr([*found])}, the metadata imply {[*shape]}"
            )
        return self._file.tensors[name]

    def _map(self, tensor: GgufTensor) -> Tensor:
        """Returns the bytes of a tensor, and marks it as taken. Raises UserError if the file has changed since it was
        opened."""
        self._tell()
        if file_facts(self.folder) != self.facts[self.folder.name]:
            raise UserError(f"{self.folder} was changed while it was read; restart")
        self._left.discard(tensor.name)
        self._read += tensor.nbytes
        # copy on write, because torch warns about memory that it could not write
        return torch.from_numpy(np.memmap(self.folder, np.uint8, "c", tensor.offset, (tensor.nbytes,)))

    def _in_order(self, name: str, tensor: Tensor) -> Tensor:
        """Returns the rows of queries and keys in the order of Hugging Face, for a RoPE that rotates rows which are
        half a head apart; other tensors unchanged."""
        heads = self._heads.get(name.split(".")[-2])
        if heads is None:
            return tensor
        size = math.prod(tensor.shape[:1])
        order = torch.arange(size).view(heads, -1, 2).transpose(1, 2).flatten()
        return tensor.index_select(0, order)

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self.folder.name, min(self._read, self._bytes), self._bytes)
