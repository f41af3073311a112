"""Reasoning parser: separates reasoning between two markers from the content of streamed text."""

from __future__ import annotations

THINK = ("<think>", "</think>")  # the markers of most models


def partial_marker_length(text: str, marker: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `marker`."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if marker.startswith(text[-n:])), 0)


class ReasoningParser:
    """Parser that separates reasoning from content in streamed text. The result does not depend on how the text is
    split into pieces. Newlines next to the markers are dropped.

    `markers`: the opening and the closing marker.
    `opened_by_prompt`: whether the prompt ends with the opening marker, so that the text begins with reasoning.
    """

    def __init__(self, opened_by_prompt: bool, markers: tuple[str, str] = THINK) -> None:
        self._open, self._close = markers
        self._opened_by_prompt = opened_by_prompt
        self._state = self._before_reasoning
        self._buffer = ""
        self._num_chars = 0
        self.reasoning_end: int | None = None  # characters up to the end of the closing marker

    def push(self, text: str, last: bool = False) -> tuple[str, str]:
        """Adds text. Returns the new reasoning and content that later text cannot change. `last`: no text follows, so
        that all buffered text is returned."""
        self._buffer += text
        self._num_chars += len(text)
        reasoning = content = ""
        while True:
            state = self._state
            more_reasoning, more_content = state(last)
            reasoning, content = reasoning + more_reasoning, content + more_content
            if self._state == state:
                return reasoning, content

    @property
    def in_reasoning(self) -> bool:
        """Whether reasoning has begun and its closing marker has not been read."""
        return self._state in (self._in_reasoning, self._at_reasoning_start)

    def _before_reasoning(self, last: bool) -> tuple[str, str]:
        text = self._buffer.lstrip()
        if text.startswith(self._open):
            self._buffer, self._state = text[len(self._open) :], self._at_reasoning_start
        elif last or not self._open.startswith(text):
            self._state = self._at_reasoning_start if self._opened_by_prompt else self._in_content
        return "", ""

    def _at_reasoning_start(self, last: bool) -> tuple[str, str]:
        self._buffer = self._buffer.lstrip("\n")
        if self._buffer:
            self._state = self._in_reasoning
        return "", ""

    def _in_reasoning(self, last: bool) -> tuple[str, str]:
        reasoning, closed, remaining = self._buffer.partition(self._close)
        if closed:
            self._buffer, self._state = remaining, self._after_marker
            self.reasoning_end = self._num_chars - len(remaining)
            return reasoning.rstrip("\n"), ""
        certain = (
            reasoning
            if last
            else reasoning[: len(reasoning) - partial_marker_length(reasoning, self._close)].rstrip("\n")
        )
        self._buffer = reasoning[len(certain) :]
        return certain, ""

    def _after_marker(self, last: bool) -> tuple[str, str]:
        self._buffer = self._buffer.lstrip("\n")
        if self._buffer:
            self._state = self._in_content
        return "", ""

    def _in_content(self, last: bool) -> tuple[str, str]:
        content, self._buffer = self._buffer, ""
        return "", content
