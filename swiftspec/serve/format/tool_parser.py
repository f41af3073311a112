"""Tool-call parsing: separates the calls in generated text from its content, in the format of the chat template."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from swiftspec.serve.format.call_reader import CallReader, CallText, NotACall, Steps
from swiftspec.serve.format.reasoning import partial_marker_length
from swiftspec.serve.format.tool_format import ToolCallFormat


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """Tool call in generated text.

    `arguments`: values by parameter name; empty if the call was cut.
    `cut_json`: the text of the arguments as far as it was generated, if a limit cut the call; else None.
    `is_closed`: whether the closing marker was read, if there is one.
    """

    id: str
    name: str
    arguments: dict[str, Any]
    cut_json: str | None = None
    is_closed: bool = True

    @property
    def arguments_json(self) -> str:
        """The arguments as JSON, which is incomplete if the call was cut."""
        return json.dumps(self.arguments, ensure_ascii=False) if self.cut_json is None else self.cut_json


AllowedText = Literal["any", "calls", "answer", "calls_or_answer"]


class ToolCallParser:
    """Parser that separates tool calls from content in streamed text. A call is returned when it is complete. Text that
    turns out not to be a call is returned as content, unchanged; blanks next to a call are dropped.

    `tools`: JSON schemas of the arguments by name of the tool. In a format without markers, a JSON object is a call
        only if its name is one of these.
    `allowed`: what a grammar restricts the text to, either calls or an answer without calls. Text with calls has no
        content then.
    `keep_cut_call`: whether a call that a limit cut after its name is returned if a grammar restricts the text to
        calls; otherwise it is dropped.
    """

    def __init__(
        self,
        format: ToolCallFormat,
        tools: Mapping[str, Any],
        allowed: AllowedText = "any",
        keep_cut_call: bool = False,
    ) -> None:
        self._format, self._tools, self._allowed = format, tools, allowed
        self._keep_cut_call = keep_cut_call
        self._buffer = ""
        self._reader: CallReader | None = None  # reads the calls that begin the buffer
        self._steps: Steps | None = None
        self._trigger_length = 0
        self._blanks_before_call = ""  # dropped if the text after them is a call
        self._has_content = False
        self._content_since_call = False  # content was returned since the last call
        self.num_calls = 0

    def push(self, text: str, last: bool = False) -> list[str | ParsedToolCall]:
        """Adds text. Returns the new content and the calls that later text cannot change, in their order. `last`: no
        text follows, so that all buffered text is returned."""
        self._buffer += text
        parts: list[str | ParsedToolCall] = []
        if self._allowed == "calls_or_answer":
            self._allowed = self._first_kind(last)
        if self._allowed == "calls_or_answer":
            return parts
        if self._allowed == "answer":
            self._append_content(parts, self._buffer)
            self._buffer = ""
            return parts
        while True:
            if self._steps is None:
                self._append_content(parts, self._read_content(last))
                if self._steps is None:
                    return parts
            if not self._read_calls(parts, last):
                return parts

    def _read_calls(self, parts: list[str | ParsedToolCall], last: bool) -> bool:
        """Adds the calls that are complete. Returns whether the reader has ended."""
        reader, steps = self._reader, self._steps
        assert reader is not None and steps is not None
        reader.text, reader.last = self._buffer, last
        try:
            for call in steps:
                if call is None:
                    return False
                self._append_call(parts, call)
        except NotACall:
            if last and self._allowed == "calls":
                cut = reader.cut_call() if self._keep_cut_call else None
                if cut is not None:
                    self._append_call(parts, cut)
                reader.end = len(self._buffer)
            elif reader.end == 0:  # the text after the trigger is read again: a call can follow
                reader.end = self._trigger_length
                self._append_content(parts, self._blanks_before_call + self._buffer[: reader.end])
        self._buffer = self._buffer[reader.end :]
        self._reader = self._steps = None
        self._blanks_before_call = ""
        return True

    def _first_kind(self, last: bool) -> AllowedText:
        """Returns whether the text begins with a call or with an answer; the argument of the parser while both are
        possible."""
        text = self._buffer
        if not self._format.triggers:
            return "any"
        begins = [trigger for trigger, _ in self._format.triggers]
        if any(text.startswith(begin) or (last and text and begin.startswith(text)) for begin in begins):
            return "calls"
        return "calls_or_answer" if any(begin.startswith(text) for begin in begins) and not last else "answer"

    def _append_content(self, parts: list[str | ParsedToolCall], content: str) -> None:
        if not content or self._allowed == "calls":
            return
        self._content_since_call = True
        if parts and isinstance(parts[-1], str):
            parts[-1] += content
        else:
            parts.append(content)

    def _append_call(self, parts: list[str | ParsedToolCall], call: CallText) -> None:
        parts.append(ParsedToolCall(self._call_id(call), call.name, call.arguments, call.cut_json, call.is_closed))
        self._content_since_call = False
        self.num_calls += 1

    def _call_id(self, call: CallText) -> str:
        if self._format.id_style == "name":
            return self._format.id_prefix + call.id
        return secrets.token_hex(5)[:9] if self._format.id_style == "short" else f"call_{secrets.token_hex(12)}"

    def _read_content(self, last: bool) -> str:
        """Returns the content before the next call, without whitespace at its end, and starts the reader of calls if a
        call may begin."""
        triggers = self._format.triggers
        if not triggers:
            return self._content_without_markers(last)
        found = [(at, -len(trigger), piece) for trigger, piece in triggers if (at := self._buffer.find(trigger)) >= 0]
        if found:
            at, negative_length, piece = min(found)
            content = self._buffer[:at].rstrip()
            self._blanks_before_call = self._buffer[len(content) : at]
            self._start_reader(at, -negative_length, piece)
            return content
        held = max(partial_marker_length(self._buffer, trigger) for trigger, _ in triggers)
        certain = self._buffer if last else self._buffer[: len(self._buffer) - held].rstrip()
        self._buffer = "" if last else self._buffer[len(certain) :]
        is_blank_after_call = last and self.num_calls and not self._content_since_call and not certain.strip()
        return "" if is_blank_after_call else certain

    def _content_without_markers(self, last: bool) -> str:
        """As `_read_content`, for a format whose calls occur only at the beginning of the text."""
        text = self._buffer.lstrip()
        if not text and not (last or self._has_content):
            return ""
        if not self._has_content and text.startswith("{"):
            self._blanks_before_call = self._buffer[: len(self._buffer) - len(text)]
            self._has_content = True
            self._start_reader(len(self._blanks_before_call), 0, 0)
            return ""
        self._has_content = True
        content, self._buffer = self._buffer, ""
        return "" if last and self.num_calls and not self._content_since_call and not text else content

    def _start_reader(self, at: int, trigger_length: int, first_piece: int) -> None:
        self._buffer, self._trigger_length = self._buffer[at:], trigger_length
        self._reader = CallReader(self._format, self._tools)
        self._steps = self._reader.read(0, first_piece)
