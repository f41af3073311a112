"""YAML in which every value stays text.

A YAML loader converts values by rules that few people know: 010 becomes 8, 1:30 becomes 90, yes becomes True.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import yaml

from swiftspec.errors import truncated_repr
from swiftspec.file_io import one_line

NULL_SPELLINGS = ("", "~", "null", "Null", "NULL")


class UnsupportedYaml(Exception):
    """The text is not YAML of the supported subset. The message is a predicate that follows the name of the file:
    `contains an anchor, an alias or a tag`."""


class PlainLoader(yaml.BaseLoader):
    """YAML loader that converts no scalar. Raises UnsupportedYaml on anchors, aliases, tags and repeated keys."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Returns the next node, without its conversion."""
        event = self.peek_event()
        if event.anchor is not None or getattr(event, "tag", None) is not None:
            raise UnsupportedYaml(
                "contains an anchor, an alias or a tag (& * !): remove it, or quote a value that begins with one"
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Returns the dict of a node."""
        found = super().construct_mapping(node, deep)
        if len(found) < len(node.value):
            (key, _), *_ = Counter(key.value for key, _ in node.value).most_common(1)
            raise UnsupportedYaml(f"contains {truncated_repr(key)} twice: remove one of them")
        return found


def parse_mapping(text: str) -> dict[str, Any]:
    """Parses a text that contains one mapping. A value is text, None for null, or a list or mapping of values. Raises
    UnsupportedYaml on any other content."""
    try:
        loader = PlainLoader(text)
        root = loader.get_single_node()
        if root is None or _is_null(root):
            return {}
        if not isinstance(root, yaml.MappingNode):
            kind = "list" if isinstance(root, yaml.SequenceNode) else "single value"
            raise UnsupportedYaml(f"must contain `flag: value` lines, not a {kind}")
        found = loader.construct_mapping(root, deep=True)
        return found | {key.value: None for key, value in root.value if _is_null(value)}
    except yaml.YAMLError as error:
        raise UnsupportedYaml(f"is not YAML: {one_line(error)}") from None
    except RecursionError:
        raise UnsupportedYaml("is nested too deeply") from None


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value in NULL_SPELLINGS
