"""Models that do not fit the GPU are refused before their weights are downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from swiftspec.backends import cuda
from swiftspec.errors import UserError
from swiftspec.serve.session import open_session
from swiftspec.serve.settings.settings import Settings
from swiftspec.serve.terminal import StartupProgress
from swiftspec.serve.text import codec
from tests.builder.test_memory_estimate import AWQ, LLAMA_8B

CONFIG = ["config.json", "generation_config.json"]


class Hub:
    """A hub with configurations only, and an empty cache."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.downloads = folder, list[tuple[str, list[str]]]()

    def snapshot_download(self, name: str, *, local_files_only: bool = False, **options: Any) -> str:
        here = self.folder / name
        if local_files_only and not here.exists():
            raise FileNotFoundError(name)
        if not local_files_only:
            self.downloads.append((name, options["allow_patterns"]))
            here.mkdir(parents=True, exist_ok=True)
            small = {"hidden_size": 2048, "num_hidden_layers": 16, "head_dim": 64, "intermediate_size": 8192}
            config = LLAMA_8B | (small if name.endswith("1b") else AWQ)
            (here / "config.json").write_text(json.dumps(config))
        return str(here)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **options: None)
    for name, value in (
        ("is_available", True), ("set_device", None), ("current_device", 0), ("device_count", 1),
        ("memory_reserved", 0), ("memory_allocated", 0),
        ("get_device_name", "RTX 4090"), ("get_device_capability", (8, 9)), ("mem_get_info", (int(23.5e9), int(24e9))),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *args, result=value: result)
    monkeypatch.setattr(cuda, "require_usable", torch.device)
    return hub


def start(**given: Any) -> None:
    settings = Settings(model="some/8b", draft_model="some/1b", raw=True, **given)
    open_session(settings, StartupProgress(quiet=True))


def test_a_context_that_does_not_fit_is_refused_before_a_download(hub: Hub) -> None:
    for _ in range(2):  # the second time the cache has the configurations
        hub.downloads.clear()
        with pytest.raises(UserError, match=r"131072 tokens the models need .* use --max-model-len \d+, which fits"):
            start(device="cuda", max_model_len=131072)
        assert hub.downloads == [("some/8b", CONFIG), ("some/1b", CONFIG)]


def test_weights_are_downloaded_if_a_shorter_context_fits(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no tokenizer"):
        start(device="cuda")
    assert [list(files) for _, files in hub.downloads] == [CONFIG, CONFIG, [*codec.HUB_FILES], [*codec.HUB_FILES]]


def test_nothing_is_checked_on_a_cpu(hub: Hub) -> None:
    with pytest.raises(UserError, match="no tokenizer"):
        start(device="cpu", max_model_len=131072)
