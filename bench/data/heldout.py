"""Held-out prompts for the demo models, cut from the standard library of the running Python, and the path of the
models.

The models' provenance names the files that were held out of training. Each file gives two prompts of about `SIZE`
characters in whole lines, one from its start and one from its middle.
"""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "swiftspec" / "demo"
SIZE = 700
TOKENS = Path(__file__).with_name("prompts.json")


def texts() -> list[str]:
    """Returns all held-out prompts: those from the start of each file, then those from the middle.

    Files that this Python lacks are left out.
    """
    names = json.loads((DEMO / "provenance.json").read_text())["data"]["held_out_files"]
    files = [Path(sysconfig.get_path("stdlib")) / name for name in names]
    lines = [file.read_text(encoding="utf-8").splitlines(keepends=True) for file in files if file.is_file()]
    return [_cut(file) for file in lines] + [_cut(file[len(file) // 2 :]) for file in lines]


def _cut(lines: list[str]) -> str:
    """Returns leading lines with at least SIZE characters, or all lines."""
    text = ""
    for line in lines:
        text += line
        if len(text) >= SIZE:
            break
    return text


def read_prompts(tokenizer: Any, file: Path | None = None) -> list[list[int]]:
    """Returns token ids of the held-out prompts or, if `file` is given, of the field `prompt` of a JSONL file."""
    found = texts() if file is None else [json.loads(line)["prompt"] for line in file.read_text().splitlines()]
    return [tokenizer(text)["input_ids"] for text in found]


def read_token_ids(count: int) -> list[list[int]]:
    """Returns the first `count` held-out prompts from TOKENS, a file of token ids for machines without a tokenizer."""
    return json.loads(TOKENS.read_text(encoding="utf-8"))[:count]
