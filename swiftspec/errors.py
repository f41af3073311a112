"""The exceptions that cross the rooms of the house."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can mend. The message is one line: the cause, then the mend. Front ends print it and exit."""


class RequestFailed(UserError):
    """What ends a request, and nothing else: all ranks of a group come upon it at the same step."""


class NonFiniteLogits(RequestFailed):
    """The target's logits are no numbers."""

    def __init__(self, whose: str = "the target's") -> None:
        super().__init__(f"{whose} logits are not finite: its weights are damaged, or too large for this dtype")


class DrafterLost(Exception):
    """The drafter failed or answered too late. Decoding goes on with root-only proposals."""


class RankLost(Exception):
    """A rank of this rank's own group, or its leader, is gone. The job ends; the message is one line that says who."""


def truncated_repr(value: object, max_chars: int = 80) -> str:
    """A value as a message shows it: in one line, and of a long one the beginning and the end."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python writes no integer of thousands of digits
        text = "a number of too many digits"
    return text if len(text) <= max_chars else f"{text[: max_chars - 20]}...{text[-10:]}"
