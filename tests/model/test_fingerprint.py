"""A fingerprint is of regular files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from swiftspec.model.fingerprint import fingerprint


def test_what_it_is_made_of(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"{}")
    (tmp_path / "model.safetensors").write_bytes(b"x" * (2 << 20))
    want = hashlib.sha256(b"config.json{}" + b"model.safetensors 2097152" + b"x" * (1 << 20)).hexdigest()
    assert fingerprint(tmp_path) == want


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    empty = fingerprint(tmp_path)
    os.mkfifo(tmp_path / "x.json")
    os.mkfifo(tmp_path / "x.safetensors")
    (tmp_path / "y.json").mkdir()
    assert fingerprint(tmp_path) == empty


def test_names_in_no_encoding(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff.json")).write_bytes(b"{}")
    assert fingerprint(tmp_path) == hashlib.sha256(b"\xff.json{}").hexdigest()
