"""Fingerprints of regular files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from swiftspec.model.fingerprint import fingerprint


def test_the_fingerprint_depends_on_the_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"{}")
    (tmp_path / "model.safetensors").write_bytes(b"x" * (2 << 20))
    want = hashlib.sha256(b"config.json{}" + b"model.safetensors 2097152" + b"x" * (1 << 20)).hexdigest()
    assert fingerprint(tmp_path) == want


def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    empty = fingerprint(tmp_path)
    os.mkfifo(tmp_path / "x.json")
    os.mkfifo(tmp_path / "x.safetensors")
    (tmp_path / "y.json").mkdir()
    assert fingerprint(tmp_path) == empty


def test_file_names_that_are_not_unicode(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff.json")).write_bytes(b"{}")
    assert fingerprint(tmp_path) == hashlib.sha256(b"\xff.json{}").hexdigest()
