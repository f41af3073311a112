"""The exceptions that cross the rooms of the house."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can mend. The message is one line: the cause, then the mend. Front ends print it and exit."""


class DrafterLost(Exception):
    """The drafter failed or answered too late. Decoding goes on with root-only proposals."""


class RankLost(Exception):
    """A rank of this rank's own group, or its leader, is gone. The job ends; the message is one line that says who."""


def shown(value: object, most: int = 80) -> str:
    """A value as a message shows it: on one line, and cut where it is long."""
    text = f"{value:#x}" if isinstance(value, int) and abs(value) >> 256 else repr(value)  # Python will not write them
    return text if len(text) <= most else f"{text[: most - 3]}..."
