"""Reader of a GGUF file's header: metadata and the list of tensors.

GGUF is llama.cpp's file format (docs/gguf.md of ggml). The reader of the package `gguf` trusts the sizes in the file;
this one checks each against the file's size and bounds what it keeps in memory.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from swiftspec import file_io
from swiftspec.errors import UserError, truncated_repr
from swiftspec.model.formats.blocks import FILE_TYPES

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_ENTRIES = 1 << 16  # entries of the metadata, and tensors; several times those of the largest models
MAX_KEY_BYTES = 1 << 10
MAX_ELEMENTS = 1 << 22  # elements of all arrays; three times those of a vocabulary of 262,144 tokens with merges
MAX_STRING_BYTES = 64 << 20  # of all strings in the metadata
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 16  # bytes
DEFAULT_ALIGNMENT = 32  # bytes
ALIGNMENT_UNIT = 8  # bytes, of which every alignment is a multiple
STRING, ARRAY = 8, 9  # numbers of the value types that are not scalars
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # struct formats
TENSOR_TYPES = {  # numbers of ggml_type
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
DENSE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # bytes per number


STRING_TOO_LONG = "damaged: strings are longer than the file, or longer than any that are supported"
LENGTH = struct.Struct("<Q")  # of a string


@dataclass(frozen=True, slots=True)
class GgufStrings:
    """A list of strings in the metadata, which is decoded only when it is used: a configuration needs no vocabulary."""

    data: bytes  # each string after its length
    count: int

    def decode(self) -> list[str]:
        """Returns the strings. Some vocabularies have tokens that are not UTF-8; their invalid bytes become U+FFFD."""
        strings: list[str] = []
        at = 0
        for _ in range(self.count):
            end = at + LENGTH.size + LENGTH.unpack_from(self.data, at)[0]
            strings.append(self.data[at + LENGTH.size : end].decode("utf-8", "replace"))
            at = end
        return strings


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in the file. Its type is in DENSE_BYTES or in FILE_TYPES."""

    name: str
    shape: tuple[int, ...]  # as in torch: the contiguous dimension last
    type: str
    offset: int  # bytes from the start of the file
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Header of a GGUF file."""

    path: Path
    metadata: Mapping[str, Any]  # numbers, strings, GgufStrings, and numpy arrays of numbers
    tensors: Mapping[str, GgufTensor]

    @staticmethod
    def read(path: Path) -> GgufFile:
        """Reads a header. Raises UserError if the file is not a GGUF file, is damaged, or has a type of tensors that is
        not supported."""
        try:
            with file_io.open_file(path) as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                header = _Header(data)
                metadata = header.metadata()
                return GgufFile(path, metadata, header.tensors(_alignment(metadata)))
        except (UserError, ValueError, OSError, struct.error, UnicodeDecodeError) as error:
            reason = str(error) if isinstance(error, UserError) else "damaged or truncated; download it again"
            if isinstance(error, ValueError | OSError) and "empty file" in str(error):
                reason = "an empty file, not a GGUF file"
            shown = file_io.one_line(UserError(str(path)))
            raise UserError(reason if reason.startswith(shown) else f"{shown}: {reason}") from None


def is_gguf(path: str | Path) -> bool:
    """Returns whether a path is a file that is named or begins like a GGUF file."""
    if not file_io.is_file(path):
        return False
    if str(path).endswith(".gguf"):
        return True
    try:
        with file_io.open_file(Path(path)) as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except (UserError, OSError):
        return False


def _alignment(metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    valid = type(value) is int and ALIGNMENT_UNIT <= value <= MAX_ALIGNMENT and value & (value - 1) == 0
    if not valid:
        raise UserError(
            f"general.alignment must be a power of two in {ALIGNMENT_UNIT}..{MAX_ALIGNMENT}, not"
            f" {truncated_repr(value)}"
        )
    return value


class _Header:
    """Parser of a header at a position that advances. Raises UserError, or struct.error at the end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at, self._elements, self._string_bytes = data, 0, 0, 0  # the last two: so far
        if data[: len(MAGIC)] != MAGIC:
            raise UserError("not a GGUF file")
        self._at = len(MAGIC)
        version = self._scalar("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            what = "big-endian" if swapped in VERSIONS else f"version {version}"
            raise UserError(f"a {what} GGUF file is not supported; convert the model again with a current llama.cpp")
        self._num_tensors, self._num_entries = self._scalar("Q"), self._scalar("Q")
        if max(self._num_tensors, self._num_entries) > MAX_ENTRIES:
            raise UserError(
                f"damaged: {self._num_tensors} tensors and {self._num_entries} entries of metadata; at most"
                f" {MAX_ENTRIES} are supported"
            )

    def metadata(self) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for _ in range(self._num_entries):
            key = self._key()
            if key in entries:
                raise UserError(f"damaged: metadata {truncated_repr(key)} occurs twice")
            entries[key] = self._value(self._scalar("I"), key)
        return entries

    def tensors(self, alignment: int) -> dict[str, GgufTensor]:
        found: dict[str, tuple[tuple[int, ...], str, int]] = {}
        for _ in range(self._num_tensors):
            name = self._key()
            if name in found:
                raise UserError(f"damaged: tensor {truncated_repr(name)} occurs twice")
            count = self._scalar("I")
            if not 1 <= count <= MAX_DIMENSIONS:
                raise UserError(f"damaged: tensor {truncated_repr(name)} has {count} dimensions")
            shape = tuple(self._scalar("Q") for _ in range(count))
            found[name] = shape[::-1], _tensor_type(self._scalar("I"), name), self._scalar("Q")
        start = -(-self._at // alignment) * alignment
        return {
            tensor.name: tensor
            for tensor in (_located(name, *found[name], start, alignment, len(self._data)) for name in found)
        }

    def _scalar(self, kind: str) -> Any:
        (value,) = struct.unpack_from(f"<{kind}", self._data, self._at)
        self._at += struct.calcsize(f"<{kind}")
        return value

    def _bytes(self, most: int) -> bytes:
        size, start = self._scalar("Q"), self._at
        if size > min(most, len(self._data) - start):
            raise UserError(STRING_TOO_LONG)
        self._at += size
        return self._data[start : self._at]

    def _key(self) -> str:
        return self._bytes(MAX_KEY_BYTES).decode()

    def _value(self, kind: int, key: str) -> Any:
        if kind == STRING:
            text = self._bytes(MAX_STRING_BYTES - self._string_bytes)
            self._string_bytes += len(text)
            return text.decode("utf-8", "replace")
        if kind != ARRAY:
            return self._scalar(self._scalar_format(kind, key))
        kind, count = self._scalar("I"), self._scalar("Q")
        self._elements += count
        if self._elements > MAX_ELEMENTS:
            raise UserError(f"damaged: metadata {truncated_repr(key)} has {count} elements")
        if kind == STRING:
            return self._strings(count)
        numbers = np.dtype(f"<{self._scalar_format(kind, key)}")
        size, start = count * numbers.itemsize, self._at
        if size > len(self._data) - start:
            raise UserError(f"damaged: metadata {truncated_repr(key)} is longer than the file")
        self._at += size
        return np.frombuffer(self._data[start : self._at], numbers)

    def _strings(self, count: int) -> GgufStrings:
        data, start, end = self._data, self._at, self._at
        most = min(len(data), start + MAX_STRING_BYTES - self._string_bytes)
        for _ in range(count):
            end += LENGTH.size + LENGTH.unpack_from(data, end)[0]
            if end > most:
                raise UserError(STRING_TOO_LONG)
        self._at = end
        self._string_bytes += end - start
        return GgufStrings(data[start:end], count)

    def _scalar_format(self, kind: int, key: str) -> str:
        if kind not in SCALARS:
            raise UserError(f"damaged: metadata {truncated_repr(key)} has the unknown type {kind}")
        return SCALARS[kind]


def _tensor_type(number: int, name: str) -> str:
    found = TENSOR_TYPES.get(number, f"number {number}")
    if found not in DENSE_BYTES and found not in FILE_TYPES:
        raise UserError(
            f"tensor {truncated_repr(name)} has type {found}, which is not supported; use a file of type"
            f" {', '.join((*DENSE_BYTES, *FILE_TYPES))}"
        )
    return found


def _located(
    name: str, shape: tuple[int, ...], kind: str, offset: int, start: int, alignment: int, file_bytes: int
) -> GgufTensor:
    """Returns a tensor after checking that it lies in the file. `start`: of the tensors' data, in bytes."""
    numbers = 1
    for size in shape:
        numbers *= size
    if kind in DENSE_BYTES:
        nbytes, fits = numbers * DENSE_BYTES[kind], True
    else:
        block = FILE_TYPES[kind]
        nbytes, fits = block.row_bytes(numbers), shape[-1] % block.inputs == 0
    if not fits or numbers == 0 or offset % alignment:
        raise UserError(f"damaged: tensor {truncated_repr(name)} [{', '.join(map(str, shape))}] {kind} at {offset}")
    if start + offset + nbytes > file_bytes:
        raise UserError(f"truncated: tensor {truncated_repr(name)} ends behind the file; download it again")
    return GgufTensor(name, shape, kind, start + offset, nbytes)
