"""Damaged JSON: a valid value with fields replaced, removed or added, and possibly damaged bytes."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

# Placeholders for text that json.dumps cannot write, or not quickly.
RAW = {
    "@digits": "9" * 5000, "@exponent": "1e999", "@deep": "[" * 100_000 + "]" * 100_000, "@nested": "[" * 70 + "]" * 70,
    "@open": "[" * 5000, "@surrogate": '"\\ud800"', "@objects": '{"a":' * 2000 + "1" + "}" * 2000,
}  # fmt: skip
SCALARS: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 4, 16, 4.0, 0.5, -0.0, 1e-300, 1e308, 10**12, 10**30, 10**400, -(2**63), 2**31,
    2**63, float("nan"), float("inf"), "", "x", "4", "NaN", "a\nb", "\0", "\x1b[2J", "x" * 5000, "../../x", "auto",
]  # fmt: skip
HOSTILE: list[Any] = [*SCALARS, [], {}, [[]], [None], [5], ["a"], [1, 2], {"a": 1}, {"": {}}, *RAW]
Place = tuple[str | int, ...]


def places(value: object, at: Place = ()) -> Iterator[Place]:
    """The position of each part of a value, the whole first."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield from places(part, (*at, key))


@st.composite
def mutated(draw: st.DrawFn, *bases: Any) -> Any:
    """One of the base values with up to three parts replaced, removed or added."""
    value = copy.deepcopy(draw(st.sampled_from(bases)))
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.sampled_from(list(places(value))))
        new = draw(st.sampled_from(HOSTILE))
        if not place:
            if draw(st.integers(0, 9)) == 0:
                return new
            continue
        holder = value
        for step in place[:-1]:
            holder = holder[step]
        match draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"])):
            case "replace":
                holder[place[-1]] = copy.deepcopy(new)
            case "remove":
                del holder[place[-1]]
            case _ if isinstance(holder, dict):
                holder[draw(st.sampled_from(["extra", "x" * 300, "a\nb", "\ud800", ""]))] = copy.deepcopy(new)
            case _:
                holder.append(copy.deepcopy(new))
    return value


def written(value: object) -> bytes:
    """As text, with the placeholders of RAW replaced."""
    text = json.dumps(value)
    for word, raw in RAW.items():
        text = text.replace(f'"{word}"', raw)
    return text.encode()


@st.composite
def damaged(draw: st.DrawFn, sound: st.SearchStrategy[bytes]) -> bytes:
    """Bytes; one time in four truncated, changed or extended."""
    data = draw(sound)
    if not data or draw(st.integers(0, 3)):
        return data
    at = draw(st.integers(0, len(data) - 1))
    match draw(st.sampled_from(["cut", "change", "insert", "front"])):
        case "cut":
            return data[:at]
        case "change":
            return data[:at] + bytes([draw(st.integers(0, 255))]) + data[at + 1 :]
        case "insert":
            return data[:at] + draw(st.binary(min_size=1, max_size=8)) + data[at:]
        case _:
            return draw(st.sampled_from([b"\xef\xbb\xbf", b"\xff\xfe", b"\0", b"\n\n"])) + data


def texts(*bases: Any) -> st.SearchStrategy[bytes]:
    """A damaged JSON file."""
    return damaged(mutated(*bases).map(written))
