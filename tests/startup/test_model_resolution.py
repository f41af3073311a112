"""Models that cannot run, or do not fit the GPU, are refused before their weights are downloaded."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore

from swiftspec.builder.load_options import Side
from swiftspec.cli.terminal import StartupProgress
from swiftspec.cli.worker import run_worker
from swiftspec.distributed.launch.startup_barrier import Timeouts
from swiftspec.distributed.launch.world import World
from swiftspec.errors import UserError
from swiftspec.settings.settings import Settings
from swiftspec.startup.session import open_session, run_follower_rank
from tests.builder.test_memory_estimate import AWQ, LLAMA_8B
from tests.support.hub import FakeHub
from tests.support.toy_pair import SPECIAL, byte_level_tokenizer, write_tokenizer

SMALL = ["config.json", "tokenizer.json", "tokenizer_config.json"]
PHASES = StartupProgress(quiet=True)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """A hub with an 8B and a 1B that have a tokenizer, and a GPU of 24 GB."""
    hub = FakeHub(tmp_path, monkeypatch)
    small = {"hidden_size": 2048, "num_hidden_layers": 16, "head_dim": 64, "intermediate_size": 8192}
    for name, config in (("some/8b", AWQ), ("some/1b", small), ("some/other", small)):
        hub.add(name, {"config.json": LLAMA_8B | config, "model.safetensors": ""})
        special = ("<|x|>",) if name == "some/other" else SPECIAL
        write_tokenizer(hub.hub / name, byte_level_tokenizer(special))
    hub.add("some/unknown", {"config.json": {"architectures": ["MambaForCausalLM"]}, "model.safetensors": ""})
    hub.add("some/exl3", {"config.json": LLAMA_8B | {"quantization_config": {"quant_method": "exl3"}}})
    for name, value in (
        ("is_available", True), ("set_device", None), ("current_device", 0), ("device_count", 1),
        ("memory_reserved", 0), ("memory_allocated", 0),
        ("get_device_name", "RTX 4090"), ("get_device_capability", (8, 9)), ("mem_get_info", (int(23.5e9), int(24e9))),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *args, result=value: result)
    monkeypatch.setattr("swiftspec.backends.cuda.require_usable", torch.device)
    return hub


def start(**given: Any) -> None:
    settings = Settings(model="some/8b", draft_model="some/1b", raw=True, **given)
    open_session(settings, PHASES)


def test_a_context_that_does_not_fit_is_refused_before_a_download(hub: FakeHub) -> None:
    for downloads in ([("some/8b", SMALL), ("some/1b", SMALL)], []):  # the second time the cache has the small files
        hub.downloads.clear()
        with pytest.raises(UserError, match=r"131072 tokens the models need .* use --max-model-len \d+, which fits"):
            start(device="cuda", max_model_len=131072)
        assert hub.downloads == downloads


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("target", "draft", "words"),
    [
        ("some/unknown", "some/1b", "architecture 'MambaForCausalLM' is not supported"),
        ("some/8b", "some/unknown", "architecture 'MambaForCausalLM' is not supported"),
        ("some/exl3", "some/1b", "quantisation method 'exl3' is not supported"),
        ("some/8b", "some/other", "have different tokenizers|differ"),
    ],
)
def test_models_are_judged_before_their_weights_are_downloaded(
    hub: FakeHub, device: Literal["cpu", "cuda"], target: str, draft: str, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        open_session(Settings(model=target, draft_model=draft, raw=True, device=device, max_model_len=2048), PHASES)
    assert not any("model.safetensors" in files for _, files in hub.downloads)


def test_weights_are_downloaded_if_a_shorter_context_fits(hub: FakeHub) -> None:
    with pytest.raises(UserError, match=r"model\.safetensors: damaged"):
        start(device="cuda", gpu_trial="off")
    assert [files for _, files in hub.downloads] == [SMALL, SMALL, ["model.safetensors"], ["model.safetensors"]]


def test_workers_check_before_a_download(hub: FakeHub) -> None:
    def no_job() -> None:
        """A single process."""

    models: dict[Side, str] = {"target": "some/8b", "draft": "some/1b"}
    for side, model in models.items():
        hub.downloads.clear()
        settings = Settings(model=model, device="cuda", max_sessions=30, max_model_len=131072)
        with pytest.raises(UserError, match=r"131072 tokens the models need "):
            run_worker(side, settings, no_job)
        assert hub.downloads == [(model, SMALL)]


def test_other_ranks_check_before_a_download(hub: FakeHub) -> None:
    """They may be on another machine. Rank 0 gets to know why, and the others what it has refused."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))
    first, second = (World(rank, 2, 0, 1, "here", store, timeouts=Timeouts(grace_s=0.05)) for rank in range(2))
    settings = Settings(model="some/8b", draft_model="some/1b", device="cuda", max_model_len=131072, raw=True)
    for refused in (lambda: run_follower_rank(settings, second), lambda: open_session(settings, PHASES, first)):
        with pytest.raises(UserError, match=r"131072 tokens the models need "):
            refused()
    assert hub.downloads == [("some/8b", SMALL), ("some/1b", SMALL)]
    started = PrefixStore("start", PrefixStore("job 0", store))
    assert b"131072 tokens" in started.get("said 1") and b"131072 tokens" in started.get("verdict")
