"""The Hugging Face Hub and its cache, in folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest


class FakeHub:
    """Models in `folder`/hub, by their ids; downloads go to `folder`/cache. `downloads`: ids and names of files. `up`:
    whether the hub can be reached. `gguf`: what the hub says about GGUF files."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hub, self.cache, self.up = folder / "hub", folder / "cache", True
        self.downloads: list[tuple[str, list[str]]] = []
        self.gguf: dict[str, Any] | None = None
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda api, name, **options: self.model_info(name))

    def add(self, name: str, files: Mapping[str, object]) -> Path:
        """Adds files to a model: texts, or objects as JSON."""
        for file, content in files.items():
            path = self.hub / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        return self.hub / name

    def names(self, name: str) -> list[str]:
        folder = self.hub / name
        return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())

    def model_info(self, name: str) -> SimpleNamespace:
        if not self.up:
            raise ConnectionError
        if not (self.hub / name).is_dir():
            raise type("RepositoryNotFoundError", (Exception,), {})
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in self.names(name)], gguf=self.gguf)

    def snapshot_download(
        self, name: str, *, allow_patterns: list[str], local_files_only: bool = False, **options: object
    ) -> str:
        here = self.cache / name
        if local_files_only and not here.exists():
            raise type("LocalEntryNotFoundError", (Exception,), {})
        if not local_files_only:
            new = [file for file in allow_patterns if not (here / file).exists()]
            self.downloads += [(name, new)] if new else []
            for file in new:
                (here / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(self.hub / name / file, here / file)
        return str(here)
