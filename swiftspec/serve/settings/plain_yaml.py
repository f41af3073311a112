"""A subset of YAML: `key: value` lines whose values stay text.

A YAML loader would convert values by rules that few people know: 010 becomes 8, 1:30 becomes 90, yes becomes True.
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

from swiftspec.errors import truncated_repr
from swiftspec.file_io import one_line

YamlValue = str | None | list[str] | dict[str, str]
NULL_SPELLINGS = ("", "~", "null", "Null", "NULL")


class UnsupportedYaml(Exception):
    """The text is not YAML of the supported subset. The message is a predicate that follows the name of the file:
    `contains more than one document`."""


def parse_mapping(text: str) -> list[tuple[str, YamlValue]]:
    """Parses a text that contains one mapping. Returns its pairs in order; a value is text, a list of texts, a mapping
    from text to text, or None for null. Raises UnsupportedYaml on any other content."""
    try:
        return list(_pairs(yaml.parse(text, Loader=yaml.SafeLoader)))
    except yaml.YAMLError as error:
        raise UnsupportedYaml(f"is not YAML: {one_line(error)}") from None
    except RecursionError:
        raise UnsupportedYaml("is nested too deeply") from None


def _pairs(events: Iterator[Event]) -> Iterator[tuple[str, YamlValue]]:
    start = next(event for event in events if not isinstance(event, StreamStartEvent | DocumentStartEvent))
    if isinstance(start, ScalarEvent) and start.style is None and start.value in NULL_SPELLINGS:
        pass
    elif isinstance(start, MappingStartEvent):
        _check_untagged(start)
        while not isinstance(event := next(events), MappingEndEvent):
            key = _text(event, "a key must be the name of a flag")
            yield key, _value(next(events), events, key)
    elif not isinstance(start, StreamEndEvent):
        kind = "list" if isinstance(start, SequenceStartEvent) else "single value"
        raise UnsupportedYaml(f"must contain `flag: value` lines, not a {kind}")
    if any(isinstance(event, DocumentStartEvent) for event in events):
        raise UnsupportedYaml("contains more than one document")


def _value(event: Event, events: Iterator[Event], key: str) -> YamlValue:
    rule = f"nests {truncated_repr(key)} too deeply"
    if isinstance(event, SequenceStartEvent):
        _check_untagged(event)
        items: list[str] = []
        while not isinstance(event := next(events), SequenceEndEvent):
            items.append(_text(event, rule))
        return items
    if isinstance(event, MappingStartEvent):
        _check_untagged(event)
        found: dict[str, str] = {}
        while not isinstance(event := next(events), MappingEndEvent):
            inner = _text(event, rule)
            if inner in found:
                raise UnsupportedYaml(f"contains {truncated_repr(inner)} twice in {truncated_repr(key)}")
            found[inner] = _text(next(events), rule)
        return found
    text = _text(event, rule)
    return None if isinstance(event, ScalarEvent) and event.style is None and text in NULL_SPELLINGS else text


def _text(event: Event, rule: str) -> str:
    _check_untagged(event)
    if not isinstance(event, ScalarEvent):
        raise UnsupportedYaml(rule if rule.startswith("nests") else f"is not valid: {rule}")
    return event.value


def _check_untagged(event: Event) -> None:
    """Raises UnsupportedYaml on anchors, aliases and tags."""
    tagged = isinstance(event, ScalarEvent | SequenceStartEvent | MappingStartEvent) and event.tag is not None
    if isinstance(event, AliasEvent) or tagged or (isinstance(event, NodeEvent) and event.anchor is not None):
        raise UnsupportedYaml(
            "contains an anchor, an alias or a tag (& * !): remove it, or quote a value that begins with one"
        )
