"""Prompts that the embedded pair has never seen, cut from the running Python's own library; and where the pair is.

The pair's provenance names the files that were held out of its training. Each gives two prompts of about `SIZE`
characters, one from its start and one from its middle, both whole lines.
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
    """All prompts, starts of files first. A file that this Python no longer has is left out."""
    names = json.loads((DEMO / "provenance.json").read_text())["data"]["held_out_files"]
    files = [Path(sysconfig.get_path("stdlib")) / name for name in names]
    lines = [file.read_text(encoding="utf-8").splitlines(keepends=True) for file in files if file.is_file()]
    return [_cut(file) for file in lines] + [_cut(file[len(file) // 2 :]) for file in lines]


def _cut(lines: list[str]) -> str:
    """Leading lines that make up SIZE characters."""
    text = ""
    for line in lines:
        text += line
        if len(text) >= SIZE:
            break
    return text


def read_prompts(tokenizer: Any, file: Path | None = None) -> list[list[int]]:
    """Token ids of the held-out prompts, or of those in a JSONL file with a field `prompt`."""
    found = texts() if file is None else [json.loads(line)["prompt"] for line in file.read_text().splitlines()]
    return [tokenizer(text)["input_ids"] for text in found]


def read_token_ids(count: int) -> list[list[int]]:
    """The first held-out prompts as they were tokenised beforehand, for machines without a tokenizer."""
    return json.loads(TOKENS.read_text(encoding="utf-8"))[:count]
