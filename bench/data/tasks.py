"""Prompts of the paper's six task families from the published files, and a few prompts of this project.

Files: MT-bench `question.jsonl`, `HumanEval.jsonl`, GSM8K `test.jsonl`, Alpaca `alpaca_data.json`, CNN/DailyMail as
JSONL with a field `article`, Natural Questions simplified (`question_text`) or NQ-open (`question`). The fields of a
record determine its family. Nothing is downloaded.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from swiftspec.errors import UserError
from swiftspec.lab.profile import PROMPTS

FAMILIES = ("mtbench", "humaneval", "gsm8k", "alpaca", "cnndm", "nq")
SUMMARIZE = "Summarize the following article in three sentences.\n\n"


def own(family: str | None = None) -> list[str]:
    """Returns this project's prompts, of one family or of all. Raises UserError on an unknown family."""
    if family is not None and family not in FAMILIES:
        raise UserError(f"task family {family!r} is not one of {', '.join(FAMILIES)}")
    lines = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    return [line["prompt"] for line in lines if family in (None, line["family"])]


def load(file: Path) -> list[str]:
    """Reads the prompts of a published file. Raises UserError if its fields match no family."""
    try:
        records = list(_records(file))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise UserError(f"{file} is neither JSON nor JSONL") from None
    if not records:
        raise UserError(f"{file} contains no prompt")
    return [prompt_of(record, f"{file}, record {number}") for number, record in enumerate(records, 1)]


def prompt_of(record: Any, where: str = "record") -> str:
    """Returns the prompt in one record. Raises UserError, with `where`, if its fields match no family."""
    if isinstance(record, Mapping):
        if record.get("turns"):  # MT-bench: only the first turn
            return str(record["turns"][0])
        if "instruction" in record:  # Alpaca
            more = f"\n\n{record['input']}" if record.get("input") else ""
            return f"{record['instruction']}{more}"
        if "article" in record:  # CNN/DailyMail
            return f"{SUMMARIZE}{record['article']}"
        for name in ("prompt", "question_text", "question"):  # HumanEval, own; Natural Questions; GSM8K, NQ-open
            if record.get(name):
                return str(record[name])
    raise UserError(f"{where} has no field of a task family (turns, prompt, question, instruction, article)")


def numbers_of(text: str) -> list[str]:
    """Returns the numbers in a text as GSM8K compares them: without commas and without a fraction of zeros."""
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return [re.sub(r"\.0+$", "", number.replace(",", "")) for number in found]


def _records(file: Path) -> Iterator[Any]:
    """Yields the records of a file with JSON lines or one JSON array, gzipped or not."""
    data = file.read_bytes()
    text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8")
    if text.lstrip().startswith("["):
        yield from json.loads(text)
        return
    for line in text.splitlines():
        if line.strip():
            yield json.loads(line)
