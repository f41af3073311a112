"""Fingerprint of a model directory."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from swiftspec import file_io

LARGEST = 256 << 20  # bytes; limit of a JSON file (tokenizer.json is the largest one)
HEAD = 1 << 20  # bytes of a weight file that are hashed


def fingerprint(path: Path) -> str:
    """Returns a SHA-256 in hex that identifies a model directory. It covers the contents of the JSON files, and name,
    size and first MiB of each safetensors file. Raises UserError if a file cannot be read; ignores files that are not
    regular."""
    digest = hashlib.sha256()
    for file in _regular(path, "*.json"):
        digest.update(os.fsencode(file.name) + file_io.read_bytes(file, max_bytes=LARGEST))
    for file in _regular(path, "*.safetensors"):
        with file_io.open_file(file) as stream:
            digest.update(os.fsencode(file.name) + f" {os.fstat(stream.fileno()).st_size}".encode())
            digest.update(stream.read(HEAD))
    return digest.hexdigest()


def _regular(path: Path, pattern: str) -> list[Path]:
    return sorted(file for file in path.glob(pattern) if file_io.is_file(file))
