"""Task files in the formats in which they are published."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from bench.data import tasks
from swiftspec.errors import UserError

PUBLISHED: list[tuple[dict[str, Any], str]] = [
    ({"question_id": 81, "category": "writing", "turns": ["First?", "Second?"]}, "First?"),
    (
        {"task_id": "X/0", "prompt": "def f():\n", "canonical_solution": "", "test": "", "entry_point": "f"},
        "def f():\n",
    ),
    ({"question": "How many?", "answer": "#### 3"}, "How many?"),
    ({"instruction": "Sort.", "input": "b a", "output": "a b"}, "Sort.\n\nb a"),
    ({"instruction": "Sing.", "input": "", "output": "la"}, "Sing."),
    ({"article": "It rained.", "highlights": "Rain.", "id": "1"}, tasks.SUMMARIZE + "It rained."),
    ({"question_text": "who was it", "document_text": "..."}, "who was it"),
    ({"question": "who was it", "answer": ["he"]}, "who was it"),
]


@pytest.mark.parametrize(("record", "prompt"), PUBLISHED)
def test_every_family_as_published(record: dict[str, Any], prompt: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps(record) + "\n\n" + json.dumps(record) + "\n")
    assert tasks.load(tmp_path / "t.jsonl") == [prompt, prompt]
    (tmp_path / "t.json").write_text(json.dumps([record], indent=1))
    assert tasks.load(tmp_path / "t.json") == [prompt]
    (tmp_path / "t.gz").write_bytes(gzip.compress(json.dumps(record).encode()))
    assert tasks.load(tmp_path / "t.gz") == [prompt]


@pytest.mark.parametrize(
    ("record", "conversation"),
    [
        (
            {"question_id": 81, "category": "mt_bench", "turns": ["First?", "Second?"]},
            tasks.Conversation(["First?", "Second?"], "mt_bench"),
        ),
        (
            {
                "question_id": "a1", "category": "rag", "messages": [
                    {"role": "system", "content": "Be brief."}, {"role": "user", "content": "First?"},
                    {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Second?"},
                ],
            },
            tasks.Conversation(["First?", "Second?"], "rag", "Be brief."),
        ),
        ({"question": "How many?", "answer": "#### 3"}, tasks.Conversation(["How many?"])),
    ],
    ids=["Spec-Bench", "SPEED-Bench", "GSM8K"],
)  # fmt: skip
def test_conversations_as_published(record: dict[str, Any], conversation: tasks.Conversation, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps(record))
    assert tasks.load_conversations(tmp_path / "t.jsonl") == [conversation]


INVALID = [
    "", "[]", "nonsense", "{}", '{"turns": []}', "[3]", '{"messages": ["a"]}',
    json.dumps({"turns": [f"{tasks.PLACEHOLDER} USING A TOOL"]}),
]  # fmt: skip


@pytest.mark.parametrize("text", INVALID)
def test_an_invalid_task_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(UserError) as caught:
        tasks.load(tmp_path / "t.jsonl")
    assert "\n" not in str(caught.value)


def test_our_own_prompts_cover_every_family() -> None:
    assert all(len(tasks.own(family)) >= 3 for family in tasks.FAMILIES)
    assert len(tasks.own()) == sum(len(tasks.own(family)) for family in tasks.FAMILIES)
    with pytest.raises(UserError, match="not one of mtbench"):
        tasks.own("squad")
