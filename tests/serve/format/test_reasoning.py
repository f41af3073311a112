"""Reasoning and content, independent of how the text is split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftspec.serve.format.reasoning import ReasoningParser

WORDS = st.lists(st.sampled_from(["<think>", "</think>", "<", "</th", "\n", " ", "a", "<thin", ">"]), max_size=12)


def split(text: str, begun: bool, cuts: list[int]) -> tuple[str, str, int | None]:
    reasoning, thought, content, at = ReasoningParser(begun), "", "", 0
    for end in sorted({min(cut, len(text)) for cut in cuts}):
        more = reasoning.push(text[at:end])
        thought, content, at = thought + more[0], content + more[1], end
    more = reasoning.push(text[at:], last=True)
    return thought + more[0], content + more[1], reasoning.reasoning_end


@pytest.mark.parametrize(
    ("text", "begun", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nfine\n", False, "hm", "fine\n"),
        (" \n<think>a</think>b", False, "a", "b"),
        ("hm\n</think>fine", True, "hm", "fine"),
        ("<think>hm</think>fine", True, "hm", "fine"),
        ("\nfine <think>a</think>", False, "", "\nfine <think>a</think>"),
        ("<think>a\n\nb</th", False, "a\n\nb</th", ""),
        ("<think>a\n", False, "a\n", ""),
        ("<think></think>\n", False, "", ""),
        ("<thin", False, "", "<thin"),
        ("", True, "", ""),
    ],
)
def test_reasoning_and_content(text: str, begun: bool, reasoning: str, content: str) -> None:
    assert split(text, begun, [])[:2] == (reasoning, content)


@given(WORDS, st.booleans(), st.lists(st.integers(0, 60), max_size=60))
def test_the_result_does_not_depend_on_the_split(words: list[str], begun: bool, cuts: list[int]) -> None:
    text = "".join(words)
    assert split(text, begun, cuts) == split(text, begun, [])


@given(WORDS, st.integers(0, 60))
def test_unambiguous_text_is_not_delayed(words: list[str], cut: int) -> None:
    """After the reasoning, content is returned immediately."""
    reasoning = ReasoningParser(False)
    reasoning.push("<think>a</think>b")
    assert reasoning.push("".join(words)) == ("", "".join(words))
    assert reasoning.reasoning_end == len("<think>a</think>")
