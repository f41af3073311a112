"""A file of packed weights: a layer, or the head. Written whole or not at all, and checked before it is used.

Bytes: `MAGIC`; the length of the JSON after it, 8 bytes; the BLAKE2b of that JSON, 32 bytes; the JSON; then the
tensors, each at a multiple of 64. The JSON holds `told`, and each tensor's name, dtype, shape, place and check sum.
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
from swiftspec.file_io import Fields, decoded, parse_json

MAGIC = b"SWPACK01"
HEAD = len(MAGIC) + 8 + 32
MOST_HEADER, LINE = 1 << 20, 64
PIECE = 1 << 20  # bytes that are summed, or written, before somebody may say stop
KINDS = {
    "int32": torch.int32, "uint8": torch.uint8, "bfloat16": torch.bfloat16, "float16": torch.float16,
    "float32": torch.float32,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors that belong together, and what else is to be known of them."""

    tensors: Mapping[str, Tensor]
    told: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def read(file: Path) -> Unit | None:
    """The unit in a file, whose pages are mapped; None where there is none, or it is not as it was written."""
    try:
        size = file.stat().st_size
        if size < HEAD or not file.is_file():
            return None
        whole = torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
        return _parsed(whole)
    except (OSError, RuntimeError, LookupError, ValueError, UserError):  # whatever it is: it is no unit
        return None


def _parsed(whole: Tensor) -> Unit:
    """Raises ValueError or UserError on what no unit has."""
    head = whole[:HEAD].numpy().tobytes()
    length = int.from_bytes(head[len(MAGIC) : len(MAGIC) + 8], "little")
    if not head.startswith(MAGIC) or length > min(MOST_HEADER, len(whole) - HEAD):
        raise ValueError("no unit")
    words = whole[HEAD : HEAD + length].numpy().tobytes()
    if hashlib.blake2b(words, digest_size=32).digest() != head[-32:]:
        raise ValueError("a damaged header")
    fields = Fields(parse_json(decoded(words, "it"), "it"))
    tensors: dict[str, Tensor] = {}
    for entry in fields.objects("tensors"):
        kind, shape = KINDS[entry.text("dtype")], entry.wholes("shape", least=0, most=len(whole))
        start, count = entry.whole("start", least=0, most=len(whole)), math.prod(shape) * kind.itemsize
        if start % LINE or start + count > len(whole):
            raise ValueError("a tensor outside the file")
        part = whole[start : start + count]
        if _digest(_C.sums_of(part)) != entry.text("sum"):
            raise ValueError("damaged numbers")
        tensors[entry.text("name")] = part.view(kind).view(shape)
    return Unit(tensors, fields.object("told").data)


def write(file: Path, unit: Unit, go: Callable[[], None]) -> None:
    """Writes a unit under another name, then renames it. `go` is called before each piece, and may raise to stop.
    Raises OSError where it cannot be written. In neither case anything is left."""
    entries, start = list[dict[str, object]](), 0
    for name, tensor in unit.tensors.items():
        kind = str(tensor.dtype).removeprefix("torch.")
        entries.append({"name": name, "dtype": kind, "shape": [*tensor.shape], "start": start, "sum": _digest(b"")})
        start += -(-tensor.nbytes // LINE) * LINE
    part = file.with_name(f".{file.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with part.open("wb") as stream:
            stream.write(bytes(len(_header(entries, unit.told))))
            for entry, tensor in zip(entries, unit.tensors.values()):
                sums = list[bytes]()
                for piece in _pieces(tensor, go):
                    sums.append(_C.sums_of(piece))
                    stream.write(piece.numpy().data)
                stream.write(bytes(-tensor.nbytes % LINE))
                entry["sum"] = _digest(b"".join(sums))
            stream.seek(0)
            stream.write(_header(entries, unit.told))
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def _header(entries: list[dict[str, object]], told: Mapping[str, Any]) -> bytes:
    """All before the tensors, whose places are counted from its end at first, and then from the file's beginning."""
    length = 0
    while True:  # a longer number may make the header longer
        moved = [entry | {"start": int(str(entry["start"])) + length} for entry in entries]
        words = json.dumps({"told": dict(told), "tensors": moved}).encode()
        if -(-(HEAD + len(words)) // LINE) * LINE == length:
            break
        length = -(-(HEAD + len(words)) // LINE) * LINE
    words += b" " * (length - HEAD - len(words))
    return MAGIC + len(words).to_bytes(8, "little") + hashlib.blake2b(words, digest_size=32).digest() + words


def _pieces(tensor: Tensor, go: Callable[[], None]) -> Iterator[Tensor]:
    """The bytes of a contiguous tensor."""
    for piece in tensor.flatten().view(torch.uint8).split(PIECE):
        go()
        yield piece


def _digest(sums: bytes) -> str:
    return hashlib.blake2b(sums, digest_size=16).hexdigest()
