"""Location of models, and which files of a hub model are downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swiftspec.errors import UserError
from swiftspec.text.hub import locate_model, locate_small_files, needs_download
from tests.support.hub import FakeHub

SINGLE = "model.safetensors"
SMALL = ["config.json", "tokenizer.json"]
INDEX = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
SHARDS = sorted(INDEX["weight_map"].values())


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    return FakeHub(tmp_path, monkeypatch)


def test_locations_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert locate_model(str(tmp_path)) == tmp_path
    (tmp_path / "file").write_text("")
    for name, message in (
        (str(tmp_path / "file"), "is a file"),
        ("/no/such/place", "no such directory"),
        ("./no-such-place", "no such directory"),
        ("nobody/no-such-model", "cannot be downloaded from the Hugging Face Hub"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            locate_model(name, on_download=lambda: pytest.fail("nothing is downloaded"))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("files", "weights"),
    [
        (dict.fromkeys([SINGLE, "consolidated.safetensors", "original/model.safetensors"], ""), [SINGLE]),
        ({"model.safetensors.index.json": INDEX, **dict.fromkeys(SHARDS, ""), "consolidated.safetensors": ""}, SHARDS),
        (dict.fromkeys([*SHARDS, "consolidated.safetensors"], ""), SHARDS),
        (dict.fromkeys([SINGLE, "tiny-Q8_0.gguf", "onnx/config.json"], ""), [SINGLE]),
    ],
    ids=["single", "index", "shards without an index", "GGUF files besides"],
)  # fmt: skip
def test_only_the_weights_that_are_read_are_downloaded(hub: FakeHub, files: dict[str, Any], weights: list[str]) -> None:
    """After the small files, which are enough to judge a model. The hub need not be there for the next start."""
    hub.add("some/model", {**dict.fromkeys([*SMALL, "README.md"], "{}"), **files})
    announced: list[str] = []
    small = locate_small_files("some/model")
    first = sorted([*SMALL, *(name for name in files if name.endswith("index.json"))])
    assert small is not None and hub.downloads == [("some/model", first)]
    for hub.up in (True, True, False):
        assert locate_model("some/model", on_download=lambda: announced.append("download")) == small
        assert not needs_download("some/model") and locate_small_files("some/model") is None
    assert hub.downloads[1:] == [("some/model", weights)] and announced == ["download"]


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("some/ggufs", "tiny-Q4_K_M.gguf"),
        ("hf.co/some/ggufs:q8_0", "sub/tiny-Q8_0.gguf"),
        ("some/ggufs:Q4_K_S", "tiny.Q4_K_S.gguf"),
        ("some/ggufs:F16", "the type of one GGUF file"),
        ("some/ggufs:Q6_K", "divided into parts"),
        ("some/other:Q8_0", "does not exist"),
    ],
)
def test_a_gguf_file_of_a_hub_model(hub: FakeHub, name: str, file: str) -> None:
    names = ["tiny-Q4_K_M.gguf", "sub/tiny-Q8_0.gguf", "tiny.Q4_K_S.gguf", "mmproj-F16.gguf"]
    names += [f"tiny-Q6_K-0000{part}-of-00002.gguf" for part in (1, 2)]
    hub.add("some/ggufs", dict.fromkeys([*names, "README.md"], ""))
    if not file.endswith(".gguf"):
        with pytest.raises(UserError, match=file):
            locate_model(name)
        assert hub.downloads == []
        return
    for hub.up in (True, False):
        assert locate_model(name) == hub.cache / "some/ggufs" / file
    assert hub.downloads == [("some/ggufs", [file])]
    hub.up, hub.gguf = True, {"architecture": "mamba"}
    with pytest.raises(UserError, match="GGUF architecture 'mamba' is not supported"):
        locate_model(name)


def test_a_model_without_weights_that_are_read(hub: FakeHub) -> None:
    hub.add("some/old", {"config.json": {}, "pytorch_model.bin": ""})
    hub.add("some/empty", {"config.json": {}, "consolidated.safetensors": ""})
    for name, words in (("some/old", "pickle weights"), ("some/empty", "has no weights: expected model.safetensors")):
        with pytest.raises(UserError, match=words):
            locate_model(name)
    assert hub.downloads == []
