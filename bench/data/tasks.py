"""Prompts of the paper's six task families from the published files, and a few prompts of this project.

Files: MT-bench `question.jsonl`, `HumanEval.jsonl`, GSM8K `test.jsonl`, Alpaca `alpaca_data.json`, CNN/DailyMail as
JSONL with a field `article`, Natural Questions simplified (`question_text`) or NQ-open (`question`). Benchmarks of
speculative decoding: Spec-Bench `question.jsonl` and SPEED-Bench as JSONL, with `turns` as in the published data or
`messages` as NeMo-Skills prepares it; both have a `category`. The fields of a record determine its family. Nothing is
downloaded.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftspec.errors import UserError
from swiftspec.lab.profile import PROMPTS

FAMILIES = ("mtbench", "humaneval", "gsm8k", "alpaca", "cnndm", "nq")
SUMMARIZE = "Summarize the following article in three sentences.\n\n"
# A turn of SPEED-Bench that its own preparation has to fill with text of another data set begins with this.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


@dataclass(frozen=True, slots=True)
class Conversation:
    """The user's turns of one record, the system message before them (None: no such message), and the category."""

    turns: list[str]
    category: str = "all"
    system: str | None = None


def own(family: str | None = None) -> list[str]:
    """Returns this project's prompts, of one family or of all. Raises UserError on an unknown family."""
    return [conversation.turns[0] for conversation in own_conversations(family)]


def own_conversations(family: str | None = None) -> list[Conversation]:
    """Returns this project's prompts as conversations of one turn, whose category is the family. Raises UserError on an
    unknown family."""
    if family is not None and family not in FAMILIES:
        raise UserError(f"task family {family!r} is not one of {', '.join(FAMILIES)}")
    lines = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    return [Conversation([line["prompt"]], line["family"]) for line in lines if family in (None, line["family"])]


def load(file: Path) -> list[str]:
    """Reads the prompts of a published file, of conversations the first turn. Raises UserError if its fields match no
    family."""
    return [conversation.turns[0] for conversation in load_conversations(file)]


def load_conversations(file: Path) -> list[Conversation]:
    """Reads the conversations of a published file; a record with a prompt is a conversation of one turn. Raises
    UserError if its fields match no family."""
    try:
        records = list(_records(file))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise UserError(f"{file} is neither JSON nor JSONL") from None
    if not records:
        raise UserError(f"{file} contains no prompt")
    return [_conversation(record, f"{file}, record {number}") for number, record in enumerate(records, 1)]


def _conversation(record: Any, where: str) -> Conversation:
    """Returns the conversation in one record. Raises UserError, with `where`, if its fields match no family."""
    turns, system = list[str](), None
    if isinstance(record, Mapping) and record.get("messages"):
        try:
            texts = [(message["role"], str(message["content"])) for message in record["messages"]]
        except (KeyError, TypeError):
            raise UserError(f"{where}: each message needs a role and a content") from None
        turns = [text for role, text in texts if role == "user"]  # a server's own answers replace the assistant's
        system = next((text for role, text in texts if role == "system"), None)
    elif isinstance(record, Mapping) and record.get("turns"):
        turns = [str(turn) for turn in record["turns"]]
    turns = turns or [prompt_of(record, where)]
    if any(turn.startswith(PLACEHOLDER) for turn in turns):
        raise UserError(f"{where} is a placeholder of SPEED-Bench: fill the file with SPEED-Bench's own preparation")
    return Conversation(turns, str(record.get("category", "all")), system)


def prompt_of(record: Any, where: str = "record") -> str:
    """Returns the prompt in one record. Raises UserError, with `where`, if its fields match no family."""
    if isinstance(record, Mapping):
        if "instruction" in record:  # Alpaca
            more = f"\n\n{record['input']}" if record.get("input") else ""
            return f"{record['instruction']}{more}"
        if "article" in record:  # CNN/DailyMail
            return f"{SUMMARIZE}{record['article']}"
        for name in ("prompt", "question_text", "question"):  # HumanEval, own; Natural Questions; GSM8K, NQ-open
            if record.get(name):
                return str(record[name])
    raise UserError(f"{where} has no field of a task family (turns, messages, prompt, question, instruction, article)")


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
