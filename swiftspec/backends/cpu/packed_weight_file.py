"""File of packed weights (one unit: a layer, the LM head or the embedding): written atomically, and verified by
checksums when it is read.

Layout: `MAGIC` (8 bytes), length of the JSON (8 bytes, little-endian), BLAKE2b hash of the JSON (32 bytes), the JSON,
then the tensors, each at a multiple of 64 bytes. The JSON contains the metadata and, for each tensor, its name, dtype,
shape, file offset and checksum.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.errors import UserError
from swiftspec.file_io import Fields, decode_utf8, parse_json

MAGIC = b"SWPACK01"
PREAMBLE_BYTES = len(MAGIC) + 8 + 32
MAX_HEADER_BYTES, ALIGNMENT_BYTES = 1 << 20, 64
CHUNK_BYTES = 1 << 20  # bytes written between two calls of `check_stop`
DTYPES = {
    "int32": torch.int32, "uint8": torch.uint8, "bfloat16": torch.bfloat16, "float16": torch.float16,
    "float32": torch.float32,
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
        size = file.stat().st_size
        if size < PREAMBLE_BYTES or not file.is_file():
            return None
        whole = torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
        return _parsed(whole)
    except (OSError, RuntimeError, LookupError, ValueError, UserError):  # not a valid unit
        return None


def _parsed(whole: Tensor) -> PackedUnit:
    """Returns the unit in the bytes of a mapped file. Raises ValueError, LookupError or UserError if it is not a valid
    unit."""
    head = whole[:PREAMBLE_BYTES].numpy().tobytes()
    length = int.from_bytes(head[len(MAGIC) : len(MAGIC) + 8], "little")
    if not head.startswith(MAGIC) or length > min(MAX_HEADER_BYTES, len(whole) - PREAMBLE_BYTES):
        raise ValueError("not a packed unit")
    words = whole[PREAMBLE_BYTES : PREAMBLE_BYTES + length].numpy().tobytes()
    if hashlib.blake2b(words, digest_size=32).digest() != head[-32:]:
        raise ValueError("damaged header")
    fields = Fields(parse_json(decode_utf8(words, "it"), "it"))
    tensors: dict[str, Tensor] = {}
    for entry in fields.objects("tensors"):
        kind, shape = DTYPES[entry.string("dtype")], entry.integers("shape", ge=0, le=len(whole))
        start, count = entry.integer("start", ge=0, le=len(whole)), math.prod(shape) * kind.itemsize
        if start % ALIGNMENT_BYTES or start + count > len(whole):
            raise ValueError("tensor outside the file")
        part = whole[start : start + count]
        if _digest(_C.checksums(part)) != entry.string("sum"):
            raise ValueError("damaged tensor")
        tensors[entry.string("name")] = part.view(kind).view(shape)
    return PackedUnit(tensors, fields.object("told").data)


def write(file: Path, unit: PackedUnit, check_stop: Callable[[], None]) -> None:
    """Writes a unit to a temporary file and renames that to `file`.

    `check_stop`: called before each chunk; may raise to stop. Raises OSError if the file cannot be written. The
    temporary file is deleted after any exception.
    """
    entries, start = list[dict[str, object]](), 0
    for name, tensor in unit.tensors.items():
        kind = str(tensor.dtype).removeprefix("torch.")
        entries.append({"name": name, "dtype": kind, "shape": [*tensor.shape], "start": start, "sum": _digest(b"")})
        start += -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    part = file.with_name(f".{file.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with part.open("wb") as stream:
            stream.write(bytes(len(_header(entries, unit.metadata))))
            for entry, tensor in zip(entries, unit.tensors.values()):
                sums = list[bytes]()
                for piece in _chunks(tensor, check_stop):
                    sums.append(_C.checksums(piece))
                    stream.write(piece.numpy().data)
                stream.write(bytes(-tensor.nbytes % ALIGNMENT_BYTES))
                entry["sum"] = _digest(b"".join(sums))
            stream.seek(0)
            stream.write(_header(entries, unit.metadata))
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def _header(entries: list[dict[str, object]], metadata: Mapping[str, Any]) -> bytes:
    """Returns the bytes before the tensors. `entries`: JSON entries of the tensors, whose `start` counts from the end
    of these bytes; the result contains file offsets."""
    length = 0
    while True:  # larger offsets can lengthen the header itself
        moved = [entry | {"start": int(str(entry["start"])) + length} for entry in entries]
        words = json.dumps({"told": dict(metadata), "tensors": moved}).encode()
        if -(-(PREAMBLE_BYTES + len(words)) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES == length:
            break
        length = -(-(PREAMBLE_BYTES + len(words)) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    words += b" " * (length - PREAMBLE_BYTES - len(words))
    return MAGIC + len(words).to_bytes(8, "little") + hashlib.blake2b(words, digest_size=32).digest() + words


def _chunks(tensor: Tensor, check_stop: Callable[[], None]) -> Iterator[Tensor]:
    """Yields the bytes of a contiguous tensor in chunks, and calls `check_stop` before each."""
    for piece in tensor.flatten().view(torch.uint8).split(CHUNK_BYTES):
        check_stop()
        yield piece


def _digest(sums: bytes) -> str:
    return hashlib.blake2b(sums, digest_size=16).hexdigest()
