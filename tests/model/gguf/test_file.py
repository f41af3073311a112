"""The header of a GGUF file: what it contains, and one line for each kind of damage."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from swiftspec.errors import UserError
from swiftspec.model.gguf.file import MAX_ELEMENTS, GgufFile, GgufStrings, is_gguf


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(
    entries: list[bytes], tensors: list[bytes], data: bytes = bytes(64), *, version: int = 3,
    counts: tuple[int, int] | None = None, alignment: int = 32,
) -> bytes:  # fmt: skip
    made = struct.pack("<QQ", *(counts or (len(tensors), len(entries))))
    start = b"GGUF" + struct.pack("<I", version) + made + b"".join(entries) + b"".join(tensors)
    return start + bytes(-len(start) % alignment) + data


def read(path: Path, data: bytes) -> GgufFile:
    path.write_bytes(data)
    return GgufFile.read(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.gguf"


def test_what_the_package_gguf_writes(path: Path) -> None:
    writer = GGUFWriter(path, "llama")
    writer.add_uint32("a", 7)
    writer.add_float32("b", 0.5)
    writer.add_bool("c", True)
    writer.add_array("d", ["x", "yy", "\u20ac"])
    writer.add_array("e", [1, 2, 3])
    writer.add_custom_alignment(64)
    writer.add_tensor("t", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("u", np.ones(2, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile.read(path)
    assert (file.metadata["a"], file.metadata["b"], file.metadata["c"]) == (7, 0.5, True)
    words = file.metadata["d"]
    assert isinstance(words, GgufStrings) and words.decode() == ["x", "yy", "\u20ac"]
    assert file.metadata["e"].tolist() == [1, 2, 3]
    found = file.tensors["t"]
    assert (found.shape, found.type, found.nbytes, found.offset % 64) == ((3, 4), "F32", 48, 0)
    data = path.read_bytes()
    assert np.frombuffer(data[found.offset :][: found.nbytes], "<f4").tolist() == list(range(12))
    assert file.tensors["u"].offset == found.offset + 64


ARRAY = struct.pack("<IQ", 4, 2**61)
BIG_ENDIAN = b"GGUF" + struct.pack(">IQQ", 3, 0, 0)
DAMAGES: dict[str, tuple[bytes, str]] = {
    "an empty file": (b"", "an empty file"),
    "another file": (b"PK\3\4" + bytes(64), "not a GGUF file"),
    "four bytes": (b"GGUF", "damaged or truncated; download it again"),
    "version 1": (header([], [], version=1), "version 1 GGUF file is not supported"),
    "big-endian": (BIG_ENDIAN, "a big-endian GGUF file is not supported"),
    "counts": (header([], [], counts=(2**63, 2**63)), "at most 65536 are supported"),
    "missing entries": (header([], [], b"", counts=(0, 5)), "damaged or truncated"),
    "a long key": (header([struct.pack("<Q", 2**64 - 1)], []), "strings are longer than the file"),
    "a key that is not UTF-8": (header([struct.pack("<Q", 1) + b"\xff" + bytes(8)], []), "damaged or truncated"),
    "a long string": (header([entry("a", 8, struct.pack("<Q", 2**40))], []), "strings are longer than the file"),
    "a long array": (header([entry("a", 9, ARRAY)], []), f"metadata 'a' has {2**61} elements"),
    "an array beyond the end": (
        header([entry("a", 9, struct.pack("<IQ", 4, MAX_ELEMENTS))], []), "metadata 'a' is longer than the file"),
    "strings beyond the end": (header([entry("a", 9, struct.pack("<IQ", 8, 1000))], []), "damaged"),
    "an array of arrays": (header([entry("a", 9, struct.pack("<IQ", 9, 1))], []), "'a' has the unknown type 9"),
    "an unknown type": (header([entry("a", 77, b"")], []), "metadata 'a' has the unknown type 77"),
    "a key twice": (header([entry("a", 4, bytes(4))] * 2, []), "metadata 'a' occurs twice"),
    "alignment 0": (header([entry("general.alignment", 4, bytes(4))], []), "general.alignment must be a power of two"),
    "alignment 24": (
        header([entry("general.alignment", 4, struct.pack("<I", 24))], []), "a power of two in 8..65536, not 24"),
    "an alignment in words": (header([entry("general.alignment", 8, text("x"))], []), "not 'x'"),
    "a tensor twice": (header([], [tensor("t", (4,))] * 2), "tensor 't' occurs twice"),
    "no dimensions": (header([], [tensor("t", ())]), "tensor 't' has 0 dimensions"),
    "many dimensions": (header([], [tensor("t", (1,) * 5)]), "tensor 't' has 5 dimensions"),
    "a huge tensor": (header([], [tensor("t", (2**40, 2**40))]), "tensor 't' ends behind the file"),
    "an offset beyond the end": (header([], [tensor("t", (4,), offset=2**62)]), "tensor 't' ends behind the file"),
    "an odd offset": (header([], [tensor("t", (4,), offset=1)]), "damaged: tensor 't' [4] F32 at 1"),
    "an empty tensor": (header([], [tensor("t", (0,))]), "damaged: tensor 't' [0] F32 at 0"),
    "part of a block": (header([], [tensor("t", (33,), 2)]), "damaged: tensor 't' [33] Q4_0 at 0"),
    "IQ4_XS": (header([], [tensor("t", (256,), 23)]), "'t' has type IQ4_XS, which is not supported; use a file of"),
    "type 99": (header([], [tensor("t", (256,), 99)]), "tensor 't' has type number 99"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_gets_one_line(path: Path, name: str) -> None:
    data, words = DAMAGES[name]
    with pytest.raises(UserError) as caught:
        read(path, data)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and message.isprintable() and len(message) < 400
    assert words in message, message


def test_each_truncation_is_found(path: Path) -> None:
    whole = header([entry("a", 9, struct.pack("<IQ", 8, 2) + text("x") + text("y"))], [tensor("t", (16,))])
    assert read(path, whole).tensors["t"].nbytes == 64
    for size in range(len(whole)):
        with pytest.raises(UserError):
            read(path, whole[:size])


def test_is_gguf(tmp_path: Path) -> None:
    checks: dict[str, tuple[Callable[[Path], object], bool]] = {
        "a.gguf": (lambda file: file.write_bytes(b""), True),
        "named_otherwise": (lambda file: file.write_bytes(b"GGUF123"), True),
        "other": (lambda file: file.write_bytes(b"no"), False),
        "folder.gguf": (lambda file: file.mkdir(), False),
    }
    for name, (make, want) in checks.items():
        make(tmp_path / name)
        assert is_gguf(tmp_path / name) == want, name
    assert not is_gguf(tmp_path / "none.gguf")
