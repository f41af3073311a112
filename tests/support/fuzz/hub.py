"""Answers of the hub: names of files, properties of a model, and the index of its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from hypothesis import strategies as st

from swiftspec.text.hub import locate_model
from tests.support.fuzz import Target
from tests.support.fuzz.json_text import mutated, texts

ANSWER = {
    "id": "a/b", "sha": "x", "gguf": {"architecture": "llama", "total": 5},
    "siblings": [{"rfilename": name} for name in ("config.json", "tokenizer.json", "b-Q4_K_M.gguf", "sub/b-Q8_0.gguf")],
}  # fmt: skip
SHARDED = {"id": "a/b", "siblings": [{"rfilename": name} for name in ("config.json", "model.safetensors.index.json")]}
INDEX = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
NAMES = st.sampled_from([
    "../../x.gguf", "/x.gguf", "\x1b[2J-Q4_K_M.gguf", "a\nb-Q4_K_M.gguf", "x" * 5000 + ".gguf", ".gguf",
    "b-Q4_K_M-00001-of-00002.gguf", "../config.json", "\ud800.gguf", "pytorch_model.bin", "model.safetensors",
    "model-00001-of-99999.safetensors",
])  # fmt: skip


@st.composite
def answers(draw: st.DrawFn) -> tuple[str, str, bytes]:
    """The name that a user gives, the hub's answer, and its index file."""
    answer: Any = draw(mutated(ANSWER, SHARDED))
    if isinstance(answer, dict) and isinstance(answer.get("siblings"), list):
        answer["siblings"] += [{"rfilename": name} for name in draw(st.lists(NAMES, max_size=2))]
    return draw(st.sampled_from(["a/b", "a/b:Q4_K_M", "hf.co/a/b:Q8_0"])), json.dumps(answer), draw(texts(INDEX))


def locate(given: tuple[str, str, bytes], folder: Path) -> None:
    """Finds the files of a model. What is located, and what is downloaded, stays within the folder of the model."""
    name, answer, index = given
    cache = folder / "cache"

    def download(name: str, *, allow_patterns: list[str], **options: object) -> str:
        for wanted in allow_patterns:
            if wanted == "model.safetensors.index.json":
                cache.mkdir(exist_ok=True)
                (cache / wanted).write_bytes(index)
        return str(cache)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub, "snapshot_download", download)
        patch.setattr(
            huggingface_hub.HfApi, "model_info",
            lambda api, name, **options: huggingface_hub.ModelInfo(**json.loads(answer)),
        )  # fmt: skip
        found = locate_model(name)
    assert found.resolve().is_relative_to(cache.resolve()), found


TARGETS = [Target("answers of the hub", answers(), locate)]
