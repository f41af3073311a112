"""Models that do not fit the GPU are refused before their weights are downloaded."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore

from swiftspec.backends import cuda
from swiftspec.builder.load_options import Side
from swiftspec.builder.model_pair import ModelPair
from swiftspec.config import GPU_DRAFT_LEAVES, EngineConfig
from swiftspec.distributed.launch.startup_barrier import Timeouts
from swiftspec.distributed.launch.world import World
from swiftspec.errors import UserError
from swiftspec.serve.cli.worker import run_worker
from swiftspec.serve.terminal import StartupProgress
from swiftspec.settings.settings import Settings
from swiftspec.startup.session import open_session, run_follower_rank
from swiftspec.text import codec
from tests.builder.test_memory_estimate import AWQ, LLAMA_8B

CONFIG = ["config.json", "generation_config.json"]
PHASES = StartupProgress(quiet=True)


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
    open_session(settings, PHASES)


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
    assert [list(files) for _, files in hub.downloads] == [[*codec.HUB_FILES]] * 2, "no configuration on its own"


def test_the_check_has_the_draft_tree_of_a_gpu(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = list[EngineConfig]()

    def create(target: Path, draft: Path, plan: EngineConfig, *of: Any) -> None:
        plans.append(plan)
        raise UserError("stop")

    monkeypatch.setattr(ModelPair, "create", create)
    with pytest.raises(UserError, match="stop"):
        start(device="cuda")
    assert [plan.leaves_per_expansion for plan in plans] == [GPU_DRAFT_LEAVES]


def test_workers_check_before_a_download(hub: Hub) -> None:
    def no_job() -> None:
        """A single process."""

    models: dict[Side, str] = {"target": "some/8b", "draft": "some/1b"}
    for side, model in models.items():
        hub.downloads.clear()
        settings = Settings(model=model, device="cuda", max_sessions=30, max_model_len=131072)
        with pytest.raises(UserError, match=r"131072 tokens the models need "):
            run_worker(side, settings, no_job)
        assert hub.downloads == [(model, CONFIG)]


def test_other_ranks_check_before_a_download(hub: Hub) -> None:
    """They may be on another machine. Rank 0 gets to know why, and the others what it has refused."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))
    first, second = (World(rank, 2, 0, 1, "here", store, timeouts=Timeouts(grace_s=0.05)) for rank in range(2))
    settings = Settings(model="some/8b", draft_model="some/1b", device="cuda", max_model_len=131072, raw=True)
    for refused in (lambda: run_follower_rank(settings, second), lambda: open_session(settings, PHASES, first)):
        hub.downloads.clear()
        with pytest.raises(UserError, match=r"131072 tokens the models need "):
            refused()
        assert hub.downloads == [("some/8b", CONFIG), ("some/1b", CONFIG)]
    started = PrefixStore("start", PrefixStore("job 0", store))
    assert b"131072 tokens" in started.get("said 1") and b"131072 tokens" in started.get("verdict")
