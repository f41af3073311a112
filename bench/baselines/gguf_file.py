"""Writer for GGUF, the file format of llama.cpp: metadata by key, then tensors, in the encodings that the benchmarks
need.

Each tensor is encoded when it is written, a few rows at a time, so memory does not grow with the file. A block is 32
adjacent weights of a row. Per block, Q8_0 stores a scale and 32 signed bytes; Q4_0 a scale and 16 bytes of codes; Q4_1
a scale d, a minimum m (w = d q + m) and 16 bytes of codes. Byte i of the codes holds weight i in its low half and
weight i + 16 in its high half.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

BLOCK = 32
ALIGNMENT = 32  # alignment of every tensor in bytes
Fact = int | float | str | Sequence[str] | Sequence[int]


@dataclass(frozen=True, slots=True)
class Encoding:
    """Encoding of tensors: `number` is its type in GGUF, and `block` adjacent weights of a row take `size` bytes."""

    number: int
    block: int
    size: int


ENCODINGS = {
    "f32": Encoding(0, 1, 4),
    "q4_0": Encoding(2, BLOCK, 18),
    "q4_1": Encoding(3, BLOCK, 20),
    "q8_0": Encoding(8, BLOCK, 34),
    "bf16": Encoding(30, 1, 2),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of the file. `parts` returns its encoded bytes as uint8 tensors, in order."""

    name: str
    shape: tuple[int, ...]
    kind: str  # a key of ENCODINGS
    parts: Callable[[], Iterable[Tensor]]

    @property
    def size(self) -> int:
        encoding, count = ENCODINGS[self.kind], torch.Size(self.shape).numel()
        assert self.shape[-1] % encoding.block == 0, f"{self.name}: rows of {self.shape[-1]} are not whole blocks"
        return count // encoding.block * encoding.size


def write_file(out: Path, facts: Mapping[str, Fact], entries: Sequence[Entry]) -> None:
    """Writes a GGUF file, version 3, with the metadata `facts` and the tensors `entries`."""
    with out.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(entries), len(facts)))
        for name, fact in facts.items():
            file.write(_text(name) + _value(fact))
        offset = 0
        for entry in entries:
            sizes = struct.pack(f"<{len(entry.shape)}Q", *reversed(entry.shape))
            number = ENCODINGS[entry.kind].number
            file.write(_text(entry.name) + struct.pack("<I", len(entry.shape)) + sizes)
            file.write(struct.pack("<IQ", number, offset))
            offset += entry.size + -entry.size % ALIGNMENT
        for entry in entries:
            _align(file)
            began = file.tell()
            for part in entry.parts():
                file.write(part.contiguous().numpy().data)
            assert file.tell() - began == entry.size, f"{entry.name}: size differs from the header"
        _align(file)


def encoded(values: Tensor, kind: str, rows: int = 4096) -> Iterator[Tensor]:
    """Yields the bytes of a matrix or vector rounded to f32, bf16, q8_0 or q4_0 (`kind`), `rows` rows at a time."""
    encode = {"f32": _f32, "bf16": _bf16, "q8_0": _q8_0, "q4_0": _q4_0}[kind]
    for part in values.split(rows):
        yield encode(part)


def q4_1(codes: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    """Packs codes 0..15 [outputs, inputs] with fp16 scales and minima [outputs, inputs / 32] into Q4_1 blocks, uint8
    [outputs, inputs / 32, 20]."""
    return torch.cat((_halves(scales), _halves(minima), _nibbles(codes.unflatten(1, (-1, BLOCK)))), 2)


def _f32(values: Tensor) -> Tensor:
    return values.float().contiguous().view(torch.uint8)


def _bf16(values: Tensor) -> Tensor:
    return values.bfloat16().contiguous().view(torch.uint8)


def _q8_0(values: Tensor) -> Tensor:
    blocks = values.float().unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(2) / 127
    codes = (blocks / torch.where(scales == 0, 1, scales).unsqueeze(2)).round().to(torch.int8)
    return torch.cat((_halves(scales), codes.view(torch.uint8)), 2)


def _q4_0(values: Tensor) -> Tensor:
    """Rounds as llama.cpp does: the weight with the largest magnitude gets code 0."""
    blocks = values.float().unflatten(1, (-1, BLOCK))
    largest = blocks.gather(2, blocks.abs().argmax(2, keepdim=True))
    scales = largest / -8
    codes = (blocks / torch.where(scales == 0, 1, scales) + 8.5).clamp_(0, 15).to(torch.uint8)
    return torch.cat((_halves(scales.squeeze(2)), _nibbles(codes)), 2)


def _halves(values: Tensor) -> Tensor:
    """Returns the two bytes of each value in fp16, uint8 [..., 2]."""
    return values.half().unsqueeze(2).contiguous().view(torch.uint8)


def _nibbles(blocks: Tensor) -> Tensor:
    low, high = blocks.chunk(2, 2)
    return low | high << 4


def _align(file: IO[bytes]) -> None:
    file.write(bytes(-file.tell() % ALIGNMENT))


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(fact: Fact) -> bytes:
    """Encodes a metadata value, preceded by its GGUF type: 4 uint32, 5 int32, 6 float32, 8 string, 9 array."""
    if isinstance(fact, str):
        return struct.pack("<I", 8) + _text(fact)
    if isinstance(fact, int):
        return struct.pack("<II", 4, fact)
    if isinstance(fact, float):
        return struct.pack("<If", 6, fact)
    texts = [item for item in fact if isinstance(item, str)]
    if len(texts) == len(fact):
        return struct.pack("<IIQ", 9, 8, len(texts)) + b"".join(map(_text, texts))
    return struct.pack(f"<IIQ{len(fact)}i", 9, 5, len(fact), *fact)
