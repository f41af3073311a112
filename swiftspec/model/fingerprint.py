"""Fingerprint of a model's files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from swiftspec import file_io

LARGEST = 256 << 20  # bytes; limit of a JSON file (tokenizer.json is the largest one)
HEAD = 1 << 20  # bytes of a safetensors file that are hashed
GGUF_HEAD = 16 << 20  # bytes of a GGUF file that are hashed, which begins with the vocabulary


def fingerprint(path: Path) -> str:
    """Returns a SHA-256 in hex that identifies a model directory. It covers the contents of the JSON files, and name,
    size and first MiB of each safetensors file; of a GGUF file, name, size and the first 16 MiB. Raises UserError if a
    file cannot be read; ignores files that are not regular."""
    digest = hashlib.sha256()
    if file_io.is_file(path):
        _add_weights(digest, path, GGUF_HEAD)
    for file in _regular(path, "*.json"):
        digest.update(os.fsencode(file.name) + file_io.read_bytes(file, max_bytes=LARGEST))
    for file in _regular(path, "*.safetensors"):
        _add_weights(digest, file, HEAD)
    return digest.hexdigest()


def _add_weights(digest: hashlib._Hash, file: Path, head: int) -> None:
    with file_io.open_file(file) as stream:
        digest.update(os.fsencode(file.name) + f" {os.fstat(stream.fileno()).st_size}".encode())
        digest.update(stream.read(head))


def _regular(path: Path, pattern: str) -> list[Path]:
    return sorted(file for file in path.glob(pattern) if file_io.is_file(file))
