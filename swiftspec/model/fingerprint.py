"""Fingerprint of a model directory."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from swiftspec import file_io

LARGEST = 256 << 20  # bytes; bound of tokenizer.json, the largest JSON file
HEAD = 1 << 20


def fingerprint(path: Path) -> str:
    """SHA-256 that identifies a model directory: the contents of its JSON files, and the names, sizes and first bytes
    of its weights. Raises UserError if one of them cannot be read. Files that are not regular are ignored."""
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
