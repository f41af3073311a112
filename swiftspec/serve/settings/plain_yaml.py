"""YAML without its surprises: `key: value` lines whose values stay the text that stands there.

A loader would make numbers and booleans of them by rules that few people know: 010 is 8 to it, 1:30 is 90, yes is True.
"""

from __future__ import annotations

from collections.abc import Iterator

import yaml
from yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
    StreamStartEvent,
)  # fmt: skip

from swiftspec.errors import shown
from swiftspec.file_io import in_a_line

Value = str | None | list[str] | dict[str, str]
NULLS = ("", "~", "null", "Null", "NULL")


class NotPlain(Exception):
    """What the text is or holds, and should not: the end of a sentence that begins with the file's name."""


def mapping(text: str) -> list[tuple[str, Value]]:
    """The pairs of the one mapping that a text holds, in order: a value is text, a list of texts, or a mapping from
    text to text; None where it is null. Raises NotPlain on anything else."""
    try:
        return list(_pairs(yaml.parse(text, Loader=yaml.SafeLoader)))
    except yaml.YAMLError as error:
        raise NotPlain(f"is not YAML: {in_a_line(error)}") from None
    except RecursionError:
        raise NotPlain("is nested too deeply") from None


def _pairs(events: Iterator[Event]) -> Iterator[tuple[str, Value]]:
    start = next(event for event in events if not isinstance(event, StreamStartEvent | DocumentStartEvent))
    if isinstance(start, ScalarEvent) and start.style is None and start.value in NULLS:
        pass
    elif isinstance(start, MappingStartEvent):
        _plain(start)
        while not isinstance(event := next(events), MappingEndEvent):
            key = _text(event, "a key must be the name of a flag")
            yield key, _value(next(events), events, key)
    elif not isinstance(start, StreamEndEvent):
        kind = "list" if isinstance(start, SequenceStartEvent) else "single value"
        raise NotPlain(f"must hold `flag: value` lines, not a {kind}")
    if any(isinstance(event, DocumentStartEvent) for event in events):
        raise NotPlain("holds more than one document")


def _value(event: Event, events: Iterator[Event], key: str) -> Value:
    rule = f"nests {shown(key)} deeper than a setting can be"
    if isinstance(event, SequenceStartEvent):
        _plain(event)
        items: list[str] = []
        while not isinstance(event := next(events), SequenceEndEvent):
            items.append(_text(event, rule))
        return items
    if isinstance(event, MappingStartEvent):
        _plain(event)
        found: dict[str, str] = {}
        while not isinstance(event := next(events), MappingEndEvent):
            inner = _text(event, rule)
            if inner in found:
                raise NotPlain(f"names {shown(inner)} twice in {shown(key)}")
            found[inner] = _text(next(events), rule)
        return found
    text = _text(event, rule)
    return None if isinstance(event, ScalarEvent) and event.style is None and text in NULLS else text


def _text(event: Event, rule: str) -> str:
    _plain(event)
    if not isinstance(event, ScalarEvent):
        raise NotPlain(rule if rule.startswith("nests") else f"is not usable: {rule}")
    return event.value


def _plain(event: Event) -> None:
    """Raises NotPlain on what only programs write."""
    tagged = isinstance(event, ScalarEvent | SequenceStartEvent | MappingStartEvent) and event.tag is not None
    if isinstance(event, AliasEvent) or tagged or (isinstance(event, NodeEvent) and event.anchor is not None):
        raise NotPlain("has an anchor, an alias or a tag (& * !): write the value itself, in quotes if it begins so")
