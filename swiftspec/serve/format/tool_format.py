"""Syntax of a model's tool calls, as data, and the matching of its literal texts in generated text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

# Placeholders in literals, of Unicode's private use area: an id, a number that counts, the type of a value.
ID, COUNT, TYPE = PLACEHOLDERS = "\ue000", "\ue001", "\ue002"
PATTERNS = {ID: r"[\w.:/-]*", COUNT: r"\d+", TYPE: r"[^<>]{0,32}?"}
ATOM = re.compile(r"<[^<>\s]{1,64}>|\[/?[A-Z_]{2,32}\]|.", re.DOTALL)  # a marker, or one character
NAME_CHARS = re.compile(r"[\w.:/-]{0,160}", re.ASCII)

CallStyle = Literal["json", "arguments", "parameters"]


def common_prefix(first: str, second: str) -> str:
    """Returns the longest common prefix that ends between markers."""
    length = 0
    for one, other in zip(ATOM.findall(first), ATOM.findall(second)):
        if one != other:
            break
        length += len(one)
    return first[:length]


def common_suffix(first: str, second: str) -> str:
    """Returns the longest common suffix that begins between markers."""
    length = 0
    for one, other in zip(reversed(ATOM.findall(first)), reversed(ATOM.findall(second))):
        if one != other:
            break
        length += len(one)
    return first[len(first) - length :]


def literal_pieces(literal: str) -> list[str]:
    """Splits a literal into markers and words, between which generated text may have any white space."""
    pieces: list[str] = []
    joins = False
    for atom in ATOM.findall(literal):
        single = len(atom) == 1 and not atom.isspace() and atom != ID
        if single and joins:
            pieces[-1] += atom
        elif not atom.isspace():
            pieces.append(atom)
        joins = single
    return pieces


def piece_pattern(piece: str) -> re.Pattern[str]:
    """Returns the pattern of a piece, whose placeholders match what they stand for."""
    return re.compile(
        "".join(PATTERNS.get(part, re.escape(part)) for part in re.split(f"([{''.join(PLACEHOLDERS)}])", piece))
    )


@dataclass(frozen=True, slots=True)
class ParameterFormat:
    """Syntax of arguments that are written one by one.

    `begin`: before a name.
    `value_begins`: what follows the name, by JSON type of the value.
    `value_end`: after a value.
    `separator`: between two arguments.
    `quote`: what strings are quoted with, also in nested values; empty: a string is written as it is.
    `has_words`: whether true, false and null are written as in Python.
    """

    begin: str
    value_begins: dict[str, str]
    value_end: str
    separator: str
    quote: str = ""
    has_words: bool = False


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """Syntax of tool calls in generated text.

    `style`: a call is a JSON object with name and arguments ("json"), a name and a JSON object ("arguments"), or a name
        and single arguments ("parameters").
    `begin`, `end`: around all calls. If a call has no text before its JSON, calls occur only at the beginning.
    `call_begin`, `call_end`, `separator`: around and between calls.
    `name_end`: between name and arguments, unless the style is "json".
    `name_key`, `arguments_key`: keys of the JSON object; an empty `name_key`: the name is the key of the arguments.
    `is_list`: whether calls are written as a JSON list.
    `id_style`: the ids that the template accepts: any, nine letters and digits, or the text that begins with the name.
    """

    style: CallStyle
    begin: str = ""
    end: str = ""
    call_begin: str = ""
    call_end: str = ""
    separator: str = ""
    name_end: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"
    is_list: bool = False
    parameters: ParameterFormat | None = None
    id_style: Literal["any", "short", "name"] = "any"

    @property
    def opening(self) -> list[str]:
        """The pieces before the first name, or before the JSON."""
        return literal_pieces(self.begin + self.call_begin)

    @property
    def id_prefix(self) -> str:
        """What precedes the name in an id that begins with it."""
        return re.findall(r"[\w.:/-]*$", self.call_begin, re.ASCII)[0]

    @property
    def triggers(self) -> list[tuple[str, int]]:
        """The pieces that begin a call in a text, each with its index in `opening`: the first one, and what precedes
        the name, since models leave out what precedes that."""
        pieces = self.opening
        found = [(pieces[0], 0)] if pieces else []
        if self.style != "json" and len(pieces) > 1 and re.match(r"<\w{3}", pieces[-1]):
            found.append((pieces[-1], len(pieces) - 1))
        return found

    @property
    def literals(self) -> list[str]:
        """The texts that occur in calls, which may contain special tokens."""
        literals = [self.begin, self.end, self.call_begin, self.call_end, self.separator, self.name_end]
        if self.parameters is not None:
            parameters = self.parameters
            literals += [parameters.begin, parameters.value_end, parameters.separator, parameters.quote]
            literals += parameters.value_begins.values()
        return literals
