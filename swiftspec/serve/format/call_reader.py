"""Incremental reader of tool calls at one position of a generated text, in any `ToolCallFormat`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from swiftspec.serve.format.tool_format import (
    COUNT,
    ID,
    NAME_CHARS,
    PLACEHOLDERS,
    TYPE,
    ToolCallFormat,
    literal_pieces,
    piece_pattern,
)

TOOL_NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
KEY = re.compile(r"""[^\s"'<>=:{}(),\[\]]{0,256}""")
WORD = re.compile(r"[\w.+-]{0,400}")
WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
CDATA = ("<![CDATA[", "]]>")
MAX_DEPTH = 64  # of nested values
MAX_PLACEHOLDER_CHARS = 128  # text that a placeholder stands for, with what surrounds it


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is beyond the range of a float")
    return value


def _reject_constant(word: str) -> float:
    raise ValueError(f"{word} is not JSON")


# Rejects NaN and infinities, also numbers such as 1e400, which would be written as Infinity.
STRICT_JSON = json.JSONDecoder(parse_constant=_reject_constant, parse_float=_finite_float)


@dataclass(frozen=True, slots=True)
class CallText:
    """A tool call as it was read.

    `id`: the text that names the call, if ids of the format begin with the name.
    `cut_json`: the text of the arguments as far as it was generated, if a limit cut the call; else None.
    `is_closed`: whether the closing marker was read, if there is one.
    """

    name: str
    arguments: dict[str, Any]
    id: str = ""
    cut_json: str | None = None
    is_closed: bool = True


class NotACall(Exception):
    """The text is not a call, or it ends before the call does."""


Steps = Generator[CallText | None, None, int]  # yields calls, and None where text is missing; returns the end
Position = Generator[None, None, int | None]  # returns the position after a match, or None


def schema_types(schema: Any) -> set[str]:
    """Returns the JSON types that a JSON schema names; none if it does not restrict the type."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type")
    types = {named} if isinstance(named, str) else {one for one in named or () if isinstance(one, str)}
    for option in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        types |= schema_types(option)
    for value in (*(schema.get("enum") or ()), *((schema["const"],) if "const" in schema else ())):
        types.add("string" if isinstance(value, str) else "other")
    return types


def typed_value(text: str, schema: Any, is_string: bool | None = None) -> Any:
    """Returns the value of an argument that is written without quotes. `is_string`: whether its syntax marks it as
    a string; None if all types are written alike."""
    types = schema_types(schema)
    if is_string or types == {"string"}:
        return text
    word = text.strip()
    if word in WORDS:
        value: Any = WORDS[word]
    else:
        try:
            value = loose_value(word)
        except NotACall:
            return text
    if "string" in types and is_string is None and not (value is None and "null" in types):
        return text if not isinstance(value, dict | list) or not types & {"object", "array"} else value
    return text if isinstance(value, str) and not types else value


def loose_value(text: str) -> Any:
    """Returns a value in JSON or in Python's syntax. Raises NotACall if `text` is anything else."""
    try:
        return STRICT_JSON.decode(text)
    except (ValueError, RecursionError):
        pass
    reader = CallReader(ToolCallFormat("json"), {})
    reader.text, reader.last = text, True
    steps = reader.read_value(0, '"')
    try:
        while True:
            next(steps)
    except StopIteration as stop:
        value, end = stop.value
        if text[end:].strip():
            raise NotACall from None
        return value


class CallReader:
    """Reader of the calls at one position of a text that grows.

    `tools`: JSON schemas of the arguments by name of the tool.
    `text`, `last`: the text so far, and whether no more follows; set by the caller.
    `end`: end of the last complete call.
    """

    def __init__(self, format: ToolCallFormat, tools: Mapping[str, Any]) -> None:
        self.format, self.tools = format, tools
        self.text, self.last, self.end = "", False, 0
        # Name of the call that is being read, and where its JSON begins or the arguments that were read.
        self._cut: tuple[str, int | dict[str, Any]] | None = None
        self._json_begin = 0
        if format.parameters is not None:
            self._value_begin, self._string_begin = _value_begin(
                format.parameters.value_begins, format.parameters.quote
            )

    def read(self, at: int, first_piece: int) -> Steps:
        """Reads the calls at `at`, of whose opening the first pieces are missing. Raises NotACall after the last
        complete call if more of the text does not belong to calls."""
        self.end = at
        begin = yield from self._pieces(self.format.opening[first_piece:], at)
        if begin is None:
            raise NotACall
        return (yield from self._json_calls(begin) if self.format.style == "json" else self._named_calls(begin))

    def cut_call(self) -> CallText | None:
        """Returns the call that the end of the text cuts; None if its name is not complete."""
        if self._cut is None:
            keys = "|".join(map(re.escape, (self.format.arguments_key, "arguments", "parameters")))
            named = rf'\s*"{re.escape(self.format.name_key)}"\s*:' if self.format.name_key else ""
            then = rf'\s*,\s*"(?:{keys})"' if self.format.name_key else ""
            found = re.compile(rf'\{{{named}\s*"([^"\\]+)"{then}\s*:\s*').match(self.text, self._json_begin)
            return None if found is None else CallText(found[1], {}, cut_json=self.text[found.end() :])
        name, arguments = self._cut
        if isinstance(arguments, int):
            return CallText(name, {}, cut_json=self.text[arguments:])
        return CallText(name, {}, cut_json=json.dumps(arguments, ensure_ascii=False)[:-1])

    def _json_calls(self, at: int) -> Steps:
        """Reads JSON objects, also a list of them."""
        closing = literal_pieces(self.format.call_end + self.format.end)
        at = yield from self._blanks(at)
        is_list = bool(self.format.opening) and self.text.startswith("[", at)
        at = (yield from self._blanks(at + 1)) if is_list else at
        self._json_begin = at
        num_calls, closed = 0, False
        while self.text.startswith("{", at) and not closed:
            self._json_begin = at
            _, end = yield from self.read_value(at, '"')
            call = self._json_call(self.text[at:end])
            at, closed = (end, False) if is_list else (yield from self._closing(closing, end))
            yield replace(call, is_closed=is_list or not closing or self._is_closed(closing, at))
            num_calls += 1
            self.end = at
            if not closed:
                self._json_begin = at = yield from self._blanks(at, ",;")
        if not num_calls:
            raise NotACall
        if is_list and self.text.startswith("]", at):
            self.end, _ = yield from self._closing(closing, at + 1)
        elif not closed:
            after, closed = yield from self._closing(closing, at)
            self.end = after if closed else self.end
        return self.end

    def _json_call(self, text: str) -> CallText:
        value = _strict_object(text)
        if not self.format.name_key and len(value) == 1:
            name, arguments = next(iter(value.items()))
        else:
            name = value.get(self.format.name_key, value.get("name"))
            keys = (self.format.arguments_key, "arguments", "parameters")
            arguments = next((value[key] for key in keys if key in value), {})
        if isinstance(arguments, str):
            arguments = _strict_object(arguments)
        if not isinstance(name, str) or not TOOL_NAME.fullmatch(name) or not isinstance(arguments, dict):
            raise NotACall
        if not self.format.opening and name not in self.tools:
            raise NotACall
        return CallText(name, arguments)

    def _named_calls(self, at: int) -> Steps:
        """Reads calls in which the name precedes the arguments."""
        format = self.format
        while True:
            self._cut = None
            name, name_text, at = yield from self._name(at)
            self._cut = name, at
            if format.style == "arguments":
                at = yield from self._blanks(at)
                self._cut = name, at
                if not self.text.startswith("{", at):
                    raise NotACall
                _, end = yield from self.read_value(at, '"')
                arguments: dict[str, Any] = _strict_object(self.text[at:end])
                at = end
            else:
                arguments, at = yield from self._parameters(at, name)
            closing = literal_pieces(format.call_end)
            at, _ = yield from self._closing(closing, at)
            is_closed = not closing or self._is_closed(closing, at)
            yield CallText(name, arguments, name_text, is_closed=is_closed)
            self.end, self._cut = at, None
            if format.begin:
                at = yield from self._blanks(at, format.separator.strip())
                again = yield from self._pieces(literal_pieces(format.call_begin), at)
                if again is not None and (format.call_begin or TOOL_NAME.match(self.text, at)):
                    at = again
                    continue
            if format.end:
                self.end, _ = yield from self._closing(literal_pieces(format.end), self.end)
            return self.end

    def _name(self, at: int) -> Generator[None, None, tuple[str, str, int]]:
        """Reads a name and what separates it from the arguments. Returns the name, the name with a counter that
        follows, and the position."""
        at = yield from self._blanks(at)
        end = yield from self._run(NAME_CHARS, at)
        run, pieces = self.text[at:end], literal_pieces(self.format.name_end)
        name = run
        if pieces and NAME_CHARS.fullmatch(pieces[0].replace(COUNT, "")):
            found = re.fullmatch(f"(.+?){piece_pattern(pieces[0]).pattern}", run)
            if found is None:
                raise NotACall
            name, pieces = found[1], pieces[1:]
        after = yield from self._pieces(pieces, end)
        if after is None or not TOOL_NAME.fullmatch(name):
            raise NotACall
        return name, run, after

    def _parameters(self, at: int, name: str) -> Generator[None, None, tuple[dict[str, Any], int]]:
        """Reads arguments that are written one by one."""
        parameters = self.format.parameters
        assert parameters is not None
        schema = self.tools.get(name)
        properties = schema.get("properties") if isinstance(schema, dict) else None
        arguments: dict[str, Any] = {}
        self._cut = name, arguments
        while True:
            at = yield from self._blanks(at, parameters.separator.strip() if arguments else "")
            begin = yield from self._pieces(literal_pieces(parameters.begin), at)
            if begin is None:
                break
            end = yield from self._run(KEY, begin)
            key = self.text[begin:end]
            if not key:
                break
            begin = yield from self._pieces(literal_pieces(self._value_begin), end)
            if begin is None:
                raise NotACall
            if parameters.quote:
                arguments[key], at = yield from self.read_value(begin, parameters.quote)
                continue
            is_string = None if TYPE not in self._value_begin else self.text[end:begin].strip() == self._string_begin
            text, at = yield from self._raw_value(begin)
            own = properties.get(key) if isinstance(properties, dict) else None
            arguments[key] = typed_value(text, own, is_string)
        closing = literal_pieces(self.format.call_end) or literal_pieces(self.format.end)
        if closing and (yield from self._piece(closing[0], at)) is None:
            raise NotACall
        return arguments, at

    def _raw_value(self, begin: int) -> Generator[None, None, tuple[str, int]]:
        """Reads a value without quotes, up to the first end marker that an argument or the end of the call follows."""
        parameters = self.format.parameters
        assert parameters is not None
        before = self._value_begin[len(self._value_begin.rstrip()) :]
        marker = parameters.value_end.strip()
        after = parameters.value_end[: len(parameters.value_end) - len(parameters.value_end.lstrip())]
        follows = [literal_pieces(parameters.begin)[:1], literal_pieces(self.format.call_end or self.format.end)[:1]]
        searched = begin
        while True:
            position = self.text.find(marker, searched)
            while position < 0:
                searched = max(begin, len(self.text) - len(marker) + 1)
                yield from self._more()
                position = self.text.find(marker, searched)
            next_at = yield from self._blanks(position + len(marker), parameters.separator.strip())
            for pieces in follows:
                if pieces and (yield from self._piece(pieces[0], next_at)) is not None:
                    text = self.text[begin:position]
                    text = text[len(before) :] if before and text.startswith(before) else text
                    text = text[: -len(after)] if after and text.endswith(after) else text
                    if text.startswith(CDATA[0]) and text.endswith(CDATA[1]):
                        text = text[len(CDATA[0]) : -len(CDATA[1])]
                    return text, position + len(marker)
            searched = position + 1

    def read_value(self, at: int, quote: str, depth: int = 0) -> Generator[None, None, tuple[Any, int]]:
        """Reads a value in JSON, in Python's syntax, or with other quotes. Returns it and its end."""
        at = yield from self._blanks(at)
        if depth > MAX_DEPTH or at >= len(self.text):
            raise NotACall
        first = self.text[at]
        for mark in (quote, '"', "'"):
            after = yield from self._piece(mark, at) if mark[0] == first else _nothing()
            if after is not None:
                return (yield from self._quoted(after, mark))
        if first in "{[":
            return (yield from self._container(at, quote, depth))
        end = yield from self._run(WORD, at)
        word = self.text[at:end]
        if word in WORDS:
            return WORDS[word], end
        try:
            return STRICT_JSON.decode(word), end
        except ValueError:
            raise NotACall from None

    def _container(self, at: int, quote: str, depth: int) -> Generator[None, None, tuple[Any, int]]:
        """Reads an object, whose keys may lack quotes, or a list."""
        is_object = self.text[at] == "{"
        close = "}" if is_object else "]"
        found: list[Any] = []
        keys: list[str] = []
        at += 1
        while True:
            at = yield from self._blanks(at)
            if self.text.startswith(close, at):
                return (dict(zip(keys, found)) if is_object else found), at + 1
            if found:
                after = yield from self._piece(",", at)
                if after is None:
                    raise NotACall
                at = yield from self._blanks(after)
                if self.text.startswith(close, at):
                    continue
            if is_object:
                key, at = yield from self._key(at, quote)
                keys.append(key)
            value, at = yield from self.read_value(at, quote, depth + 1)
            found.append(value)

    def _key(self, at: int, quote: str) -> Generator[None, None, tuple[str, int]]:
        if self.text[at : at + 1] in ('"', "'", quote[0]):
            key, at = yield from self.read_value(at, quote)
        else:
            end = yield from self._run(KEY, at)
            key, at = self.text[at:end], end
        after = yield from self._piece(":", at)
        if after is None or not isinstance(key, str) or not key:
            raise NotACall
        return key, after

    def _quoted(self, at: int, mark: str) -> Generator[None, None, tuple[str, int]]:
        """Reads a string from behind its opening quote on, with JSON's escapes if the quote is one character. A single
        quote ends it only where a value can end, because templates do not escape it."""
        begin, single = at, len(mark) == 1
        pattern = re.compile(rf"\\.|{re.escape(mark)}" if single else re.escape(mark), re.DOTALL)
        while True:
            found = pattern.search(self.text, at)
            if found is None:
                at = max(at, len(self.text) - (1 if self.text.endswith("\\") or not single else 0) - (len(mark) - 1))
                yield from self._more()
            elif found[0] != mark:
                at = found.end()
            else:
                if mark == "'":
                    after = yield from self._blanks(found.end())
                    if self.text[after : after + 1] not in ("", ",", ")", "}", "]", ":"):
                        at = found.end()
                        continue
                text = self.text[begin : found.start()]
                return (_unescaped(text) if single else text), found.end()

    def _closing(self, pieces: Sequence[str], at: int) -> Generator[None, None, tuple[int, bool]]:
        """Reads as many of the closing pieces as there are. Returns the position, and whether all were there."""
        start = at
        for number, piece in enumerate(pieces):
            after = yield from self._blanks(at)
            found = yield from self._piece(piece, after)
            if found is None:
                if self.last and piece.startswith(self.text[after:]):
                    return len(self.text), True  # the text ends within the closing marker
                return (at if number else start), False
            at = found
        return at, bool(pieces)

    def _is_closed(self, closing: Sequence[str], at: int) -> bool:
        return self.text.endswith(closing[-1], 0, at)

    def _pieces(self, pieces: Sequence[str], at: int) -> Position:
        """Matches pieces; those up to an id may be missing."""
        number = 0
        while number < len(pieces):
            after = yield from self._piece(pieces[number], at)
            if after is not None:
                number, at = number + 1, after
            elif ID in pieces[number : number + 2]:
                number = pieces.index(ID, number) + 1
            else:
                return None
        return at

    def _piece(self, piece: str, at: int) -> Position:
        """Matches white space and a piece of a literal."""
        at = yield from self._blanks(at)
        if not any(mark in piece for mark in PLACEHOLDERS):
            while not self.text.startswith(piece, at):
                if self.last or not piece.startswith(self.text[at:]):
                    return None
                yield None
            return at + len(piece)
        pattern, fixed = piece_pattern(piece), re.split(f"[{''.join(PLACEHOLDERS)}]", piece)[0]
        while True:
            found = pattern.match(self.text, at)
            ends = found is not None and (found.end() < len(self.text) or self.last)
            seen = self.text[at : at + len(fixed)]
            if found is not None and ends:
                return found.end()
            if self.last or not fixed.startswith(seen) or len(self.text) - at > MAX_PLACEHOLDER_CHARS:
                return None
            yield None

    def _blanks(self, at: int, also: str = "") -> Generator[None, None, int]:
        """Returns the position after white space and the characters `also`."""
        while True:
            while at < len(self.text) and (self.text[at].isspace() or self.text[at] in also):
                at += 1
            if at < len(self.text) or self.last:
                return at
            yield None

    def _run(self, pattern: re.Pattern[str], at: int) -> Generator[None, None, int]:
        """Returns the end of the characters that `pattern` matches."""
        while True:
            found = pattern.match(self.text, at)
            end = at if found is None else found.end()
            if end < len(self.text) or self.last:
                return end
            yield None

    def _more(self) -> Generator[None, None, None]:
        """Waits for text. Raises NotACall if none follows."""
        if self.last:
            raise NotACall
        yield None


def _nothing() -> Position:
    return None
    yield


def _value_begin(by_type: Mapping[str, str], quote: str) -> tuple[str, str]:
    """Returns the literal between a name and a value of any type, and the one before a string without white space."""
    literals = list(dict.fromkeys(by_type.values()))
    string = by_type["string"]
    if quote:
        return string.removesuffix(quote), string
    if len(literals) == 1:
        return string, string.strip()
    prefix, suffix = string, string
    for other in literals:
        prefix = _common(prefix, other)
        suffix = _common(suffix[::-1], other[::-1])[::-1]
    return f"{prefix}{TYPE}{suffix}", string.strip()


def _common(first: str, second: str) -> str:
    length = next(
        (at for at, (one, other) in enumerate(zip(first, second)) if one != other), min(len(first), len(second))
    )
    return first[:length]


def _strict_object(text: str) -> dict[str, Any]:
    """Returns a JSON object. Raises NotACall if `text` is anything else."""
    try:
        value = STRICT_JSON.decode(text)
        json.dumps(value, ensure_ascii=False).encode()  # raises on an unpaired surrogate
    except (ValueError, RecursionError):
        raise NotACall from None
    if not isinstance(value, dict):
        raise NotACall
    return value


def _unescaped(text: str) -> str:
    """Returns a quoted text without its escapes; unchanged if these are invalid."""
    if "\\" not in text:
        return text
    body = re.sub(r"\\'", "'", text)
    body = re.sub(r'(?<!\\)((?:\\\\)*)"', r'\1\\"', body).replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    try:
        return str(json.loads(f'"{body}"'))
    except ValueError:
        return text
