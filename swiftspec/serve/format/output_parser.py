"""Parser of a model's output: the protocol, and the parser of text with <think> and markers of tool calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from swiftspec.serve.format.reasoning import ReasoningParser
from swiftspec.serve.format.tool_parser import ParsedToolCall, ToolCallParser


@dataclass(frozen=True, slots=True)
class OutputText:
    """A piece of reasoning or content."""

    kind: Literal["reasoning", "content"]
    text: str


OutputPart = OutputText | ParsedToolCall


class OutputParser(Protocol):
    """Parser that separates reasoning, content and tool calls in streamed text. The result does not depend on how the
    text is split into pieces."""

    def push(self, text: str, last: bool = False) -> list[OutputPart]:
        """Adds text. Returns the parts that later text cannot change, in their order. `last`: no text follows."""
        ...

    @property
    def reasoning_ranges(self) -> Sequence[tuple[float, float]]:
        """The characters [begin, end) of reasoning with its markers; the end is infinite while it is open."""
        ...


class MarkupParser:
    """Parser of text in which <think> and the markers of a tool-call format occur.

    `reasoning`, `tool_calls`: the parsers; None if the output has no such part.
    """

    def __init__(self, reasoning: ReasoningParser | None = None, tool_calls: ToolCallParser | None = None) -> None:
        self._reasoning, self._tool_calls = reasoning, tool_calls

    def push(self, text: str, last: bool = False) -> list[OutputPart]:
        """Adds text; see `OutputParser.push`."""
        reasoning, content = ("", text) if self._reasoning is None else self._reasoning.push(text, last)
        parts: list[str | ParsedToolCall] = [content] if content else []
        if self._tool_calls is not None:
            parts = self._tool_calls.push(content, last)
        thoughts: list[OutputPart] = [OutputText("reasoning", reasoning)] if reasoning else []
        return thoughts + [OutputText("content", part) if isinstance(part, str) else part for part in parts]

    @property
    def reasoning_ranges(self) -> Sequence[tuple[float, float]]:
        """The characters of reasoning, which begins with the text."""
        if self._reasoning is None:
            return ()
        if self._reasoning.reasoning_end is not None:
            return ((0, self._reasoning.reasoning_end),)
        return ((0, math.inf),) if self._reasoning.in_reasoning else ()
