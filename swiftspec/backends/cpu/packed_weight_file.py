"""File of packed weights (one unit: a layer, the LM head or the embedding): a safetensors file, written atomically, and
verified by a checksum when it is read.

The file's metadata has two entries: `unit`, the metadata of the unit as JSON, and `checksum`, a BLAKE2b hash of that
text and of the names, dtypes, shapes and bytes of all tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from swiftspec import _C
from swiftspec.errors import UserError
from swiftspec.file_io import open_file, parse_json

ALIGNMENT_BYTES = 64  # a cache line
CHUNK_BYTES = 1 << 20  # bytes written between two calls of `check_stop`
LENGTH_BYTES = 8  # of the header's length
DTYPES = {
    torch.int32: "I32", torch.uint8: "U8", torch.int8: "I8", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.float32: "F32",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PackedUnit:
    """Packed tensors of a layer, of the LM head or of the embedding, with metadata that is stored as JSON."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def read(file: Path) -> PackedUnit | None:
    """Maps a file and returns its unit. Returns None if the file is missing, damaged or not a unit."""
    try:
        open_file(file).close()  # a pipe would block `safe_open`
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 # not a dict
        unit = PackedUnit(tensors, parse_json(metadata["unit"], "it"))
        checksum = _start_checksum(unit)
        for _, tensor in _in_file_order(unit):
            checksum.update(_C.checksums(_bytes(tensor)))
        return unit if checksum.hexdigest() == metadata["checksum"] else None
    except (OSError, RuntimeError, LookupError, ValueError, SafetensorError, UserError):  # not a valid unit
        return None


def write(file: Path, unit: PackedUnit, check_stop: Callable[[], None]) -> None:
    """Writes a unit to a temporary file and renames that to `file`. `safetensors.torch.save_file` would write the whole
    file in one call, which cannot pause or stop.

    `check_stop`: called before each chunk; may raise to stop. Raises OSError if the file cannot be written. The
    temporary file is deleted after any exception.
    """
    checksum = _start_checksum(unit)
    part = file.with_name(f".{file.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with part.open("wb") as stream:
            stream.write(_header(unit, checksum.hexdigest()))
            for _, tensor in _in_file_order(unit):
                for piece in _bytes(tensor).split(CHUNK_BYTES):
                    check_stop()
                    checksum.update(_C.checksums(piece))
                    stream.write(piece.numpy().data)
            stream.seek(0)
            stream.write(_header(unit, checksum.hexdigest()))
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def _header(unit: PackedUnit, checksum: str) -> bytes:
    """Returns the bytes before the tensors: the length of the JSON, and the JSON, padded with spaces."""
    entries: dict[str, object] = {"__metadata__": {"unit": _metadata_text(unit), "checksum": checksum}}
    end = 0
    for name, tensor in _in_file_order(unit):
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _in_file_order(unit: PackedUnit) -> list[tuple[str, Tensor]]:
    """Returns names and tensors in the order in which they are in the file. A safetensors file has no gaps, so tensors
    of a multiple of ALIGNMENT_BYTES come first, which aligns all of them: those are the matrices."""
    return sorted(
        unit.tensors.items(), key=lambda item: (item[1].nbytes % ALIGNMENT_BYTES != 0, -item[1].itemsize, item[0])
    )


def _start_checksum(unit: PackedUnit) -> hashlib.blake2b:
    """Returns the hash of everything but the tensors' bytes."""
    tensors = [(name, DTYPES[tensor.dtype], [*tensor.shape]) for name, tensor in _in_file_order(unit)]
    return hashlib.blake2b(json.dumps([_metadata_text(unit), tensors]).encode(), digest_size=32)


def _metadata_text(unit: PackedUnit) -> str:
    return json.dumps(dict(unit.metadata), sort_keys=True)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)
