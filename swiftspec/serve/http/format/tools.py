"""Calls of tools in a model's answer, as the chat templates of today have models write them."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from swiftspec.serve.http.format.reasoning import may_begin

NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Call:
    """A call, and its arguments by name."""

    id: str
    name: str
    values: dict[str, Any]

    @property
    def arguments(self) -> str:
        """As JSON."""
        return json.dumps(self.values, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Format:
    """How calls stand in a text. `begin` and `end` are around each; without an `end` the rest of the text is calls.
    `arguments`: the key they have. `leading`: calls stand at the very beginning or not at all."""

    begin: str
    end: str | None
    arguments: str
    leading: bool = False


HERMES = Format("<tool_call>", "</tool_call>", "arguments")
MISTRAL = Format("[TOOL_CALLS]", None, "arguments")
LLAMA = Format("", None, "parameters", leading=True)
LLAMA_SHOWN = re.compile(r"""["']name\\?["']:.{1,60}["']parameters\\?["']:""")
OTHERS = ("<function=", "<arg_key>", "[ARGS]")  # calls that are no JSON, or with their name before it


def format_of(template: str) -> Format | None:
    """The format that a chat template shows to its model; None where it takes no tools, or writes them otherwise."""
    if "tools" not in template or any(other in template for other in OTHERS):
        return None
    for format in (HERMES, MISTRAL):
        if format.begin in template:
            return format
    return LLAMA if LLAMA_SHOWN.search(template) else None


class Calls:
    """Tells calls from what is said, in text that comes in pieces. A call comes as soon as it is whole; what turns out
    to be none is said. `names`: of the tools there are, without one of which a bare object is no call."""

    def __init__(self, format: Format, names: Collection[str]) -> None:
        self._format, self._names = format, names
        self._held = ""
        self._inside = False
        self._said = False
        self._since = False  # something was said since the last call
        self.count = 0

    def push(self, text: str, last: bool = False) -> tuple[str, list[Call]]:
        """More of the text. Returns what is said and what is called, as far as it is certain; all of it with `last`."""
        self._held += text
        said, calls = "", []
        while True:
            if not self._inside:
                said += self._outside(last)
                if not self._inside:
                    return said, calls
            text, end = self._held, self._format.end
            found = self._calls(text, last)
            if found is None and not last:
                return said, calls
            self._inside = False
            if found is None:  # never closed, or no JSON
                self._held = ""
                return said + self._format.begin + text, calls
            calls += found[0]
            self._since = False
            self.count += len(found[0])
            self._held = found[1]
            if end is None:
                self._held = ""
                return said, calls

    def _outside(self, last: bool) -> str:
        """What is said before the next call. Whitespace before a call belongs to it."""
        if self._format.leading:
            text = self._held.lstrip()
            self._inside = not self._said and text.startswith("{")
            if self._inside or (not text and not last and not self._said):
                return ""
            self._said = True
            said, self._held = self._held, ""
            return said
        before, begun, rest = self._held.partition(self._format.begin)
        if begun:
            self._inside, self._held = True, rest
            return before.rstrip()
        sure = before if last else before[: len(before) - may_begin(before, self._format.begin)].rstrip()
        self._held = before[len(sure) :]
        if last:
            self._held = ""
            if self.count and not self._since and not sure.strip():
                return ""
        self._since = self._since or bool(sure)
        return sure

    def _calls(self, text: str, last: bool) -> tuple[list[Call], str] | None:
        """The calls of what stands inside, and the text after them. None: nothing that is whole by now."""
        end = self._format.end
        if end is None:
            calls = self._parsed(text) if last else None
            return None if calls is None else (calls, "")
        at = text.find(end)
        while at >= 0:
            calls = self._parsed(text[:at])
            if calls is not None:
                return calls, text[at + len(end) :]
            at = text.find(end, at + 1)  # this one stood in an argument
        calls = self._parsed(text) if last else None
        return None if calls is None else (calls, "")

    def _parsed(self, text: str) -> list[Call] | None:
        """One call, a list of them, or several with semicolons between."""
        found: list[Any] = []
        rest = text.strip()
        try:
            decoder = json.JSONDecoder(parse_constant=_no_number)
            while rest:
                value, at = decoder.raw_decode(rest)
                found += value if isinstance(value, list) else [value]
                rest = rest[at:].lstrip().removeprefix(";").lstrip()
            json.dumps(found, ensure_ascii=False).encode()  # half a surrogate is no text
        except (ValueError, RecursionError):
            return None
        calls = [self._call(one) for one in found]
        return None if not calls or None in calls else [call for call in calls if call is not None]

    def _call(self, value: Any) -> Call | None:
        if not isinstance(value, dict):
            return None
        name, given = value.get("name"), value.get(self._format.arguments, value.get("arguments", {}))
        if not isinstance(name, str) or not NAME.fullmatch(name) or not isinstance(given, dict):
            return None
        if self._format.leading and name not in self._names:
            return None
        # Mistral's templates take ids of nine characters only, and nobody minds.
        number = secrets.token_hex(5)[:9] if self._format == MISTRAL else f"call_{secrets.token_hex(12)}"
        return Call(number, name, given)


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no JSON")


def forced(format: Format, tools: dict[str, dict[str, Any]], marker: int | None) -> str:
    """A grammar (Lark, for llguidance) of exactly one call of one of these tools, by the schemas of their arguments.
    `marker`: the id of the token that begins a call, where that is a special one."""
    around = {"[": '"["', "]": '"]"'} if format is MISTRAL else {"[": "", "]": ""}
    begin = f"<[{marker}]>" if marker is not None else format.begin and json.dumps(format.begin)
    newline, end = ('"\\n"', json.dumps(format.end)) if format.end else ("", "")
    parts = (begin, newline, around["["], "call", around["]"], newline, end)
    lines = [f"start: {' '.join(filter(None, parts))}", f"call: {' | '.join(f'call_{at}' for at in range(len(tools)))}"]
    for at, (name, schema) in enumerate(tools.items()):  # a rule for each schema, which may refer to its own root
        head = json.dumps(f'{{"name": {json.dumps(name)}, "{format.arguments}": ')
        lines.append(f'call_{at}: {head} values_{at} "}}"')
        lines.append(f"values_{at}: %json {json.dumps(schema or {'type': 'object'})}")
    return "\n".join(lines)
