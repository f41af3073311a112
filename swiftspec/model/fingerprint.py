"""What tells one model directory from another."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from swiftspec import file_io

LARGEST = 256 << 20  # bytes of a tokenizer; no configuration comes near
HEAD = 1 << 20


def fingerprint(path: Path) -> str:
    """What tells one model directory from another: its configs, and of its weights the names, sizes and first bytes.
    Raises UserError where one of them cannot be read; what is no regular file belongs to no model."""
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
