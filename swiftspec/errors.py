"""Exceptions that several packages share."""

from __future__ import annotations


class UserError(Exception):
    """An error that the user can fix. The message is one line, cause and then fix. Front ends print it and exit."""


class RequestFailed(UserError):
    """An error that ends one request and leaves the engine usable. All ranks of a group raise it in the same step."""


class NonFiniteLogits(RequestFailed):
    """The target's logits contain NaN or infinity."""

    def __init__(self, whose: str = "the target's") -> None:
        super().__init__(f"{whose} logits are not finite: its weights are damaged, or too large for this dtype")


class DrafterLost(Exception):
    """The drafter failed or answered too late. Decoding continues with root-only proposals."""


class RankLost(Exception):
    """A rank of this rank's group, or its leader, has exited. The job ends; the message is one line that names the
    rank."""


def truncated_repr(value: object, max_chars: int = 80) -> str:
    """repr of a value for a message: one line, and for a long value only its beginning and its end."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python refuses to format integers of thousands of digits
        text = "a number of too many digits"
    return text if len(text) <= max_chars else f"{text[: max_chars - 20]}...{text[-10:]}"
