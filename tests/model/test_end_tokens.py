"""End-of-text tokens: the union of what the files of a checkpoint name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swiftspec.errors import UserError
from swiftspec.model.end_tokens import end_tokens
from tests.model.test_config import LLAMA

IM_END = "<|im_end|>"


def write(folder: Path, name: str, **fields: object) -> None:
    (folder / name).write_text(json.dumps(fields))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose configuration has the end tokens 2 and 3, and 128 tokens."""
    write(tmp_path, "config.json", **LLAMA)
    return tmp_path


def test_the_union_of_all_files(folder: Path) -> None:
    assert end_tokens(folder) == (2, 3)
    write(folder, "generation_config.json", eos_token_id=[3, 5])
    assert end_tokens(folder) == (2, 3, 5)
    write(folder, "tokenizer_config.json", eos_token=IM_END, added_tokens_decoder={"9": {"content": IM_END}})
    assert end_tokens(folder) == (2, 3, 5, 9)


def test_all_tokens_of_a_list(folder: Path) -> None:
    """gpt-oss ends an answer with one of three tokens; a tool call with the last one."""
    write(folder, "config.json", **{**LLAMA, "eos_token_id": 102})
    write(folder, "generation_config.json", eos_token_id=[102, 99, 112])
    assert end_tokens(folder) == (102, 99, 112)


@pytest.mark.parametrize(
    "tokenizer",
    [{"added_tokens": [{"id": 7, "content": "<s>"}, {"id": 9, "content": IM_END}]}, {"model": {"vocab": {IM_END: 9}}}],
    ids=["added", "in the vocabulary"],
)
@pytest.mark.parametrize("named", [IM_END, {"content": IM_END, "special": True}], ids=["text", "object"])
def test_a_token_that_only_the_tokenizer_knows(folder: Path, tokenizer: dict[str, object], named: object) -> None:
    write(folder, "tokenizer.json", **tokenizer)
    write(folder, "tokenizer_config.json", eos_token=named)
    assert end_tokens(folder) == (2, 3, 9)


def test_a_token_that_the_model_lacks_is_ignored(folder: Path) -> None:
    for fields in ({}, {"eos_token": None}, {"eos_token": IM_END}):
        write(folder, "tokenizer_config.json", **fields)
        assert end_tokens(folder) == (2, 3)
    write(folder, "tokenizer_config.json", eos_token=IM_END, added_tokens_decoder={"128": {"content": IM_END}})
    assert end_tokens(folder) == (2, 3)


def test_a_damaged_file_is_reported(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config\.json is not valid JSON"):
        end_tokens(folder)
    write(folder, "tokenizer_config.json", eos_token=5)
    with pytest.raises(UserError, match=r"tokenizer_config\.json: eos_token must be a string"):
        end_tokens(folder)
