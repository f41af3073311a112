"""Exceptions that several packages share."""

from __future__ import annotations


class UserError(Exception):
    """An error that the user can fix. The message is one line: the cause, then the fix. Commands print it and exit; the
    HTTP server returns it with a 4xx status."""


class RequestFailed(UserError):
    """An error that ends one request and leaves the engine usable. All ranks of a group raise it in the same call, so
    their states stay equal."""


class NonFiniteLogits(RequestFailed):
    """The logits of a model contain NaN or infinity. `whose`: the model, in the possessive form, for the message."""

    def __init__(self, whose: str = "the target's") -> None:
        super().__init__(f"{whose} logits are not finite: the weights are corrupt, or too large for this dtype")


class WorkerUnavailable(UserError):
    """The worker of the target does not serve a request now, but may serve it later (HTTP status 503)."""


class DrafterLost(Exception):
    """The drafter failed or answered too late. Decoding continues with root-only proposals."""


class RankLost(Exception):
    """A rank that this rank depends on has exited, does not respond or has failed. The message is one line."""


OUT_OF_MEMORY_TEXTS = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "cublas_status_alloc_failed",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error reports that memory ran out, or was raised while such an error was handled: an error
    during a CUDA graph's capture makes the end of the capture raise another one."""
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause).lower()
        if isinstance(cause, MemoryError) or any(known in text for known in OUT_OF_MEMORY_TEXTS):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def truncated_repr(value: object, max_chars: int = 80) -> str:
    """Returns the repr of a value for a message: on one line, and with the middle left out if it is longer than
    `max_chars`."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python refuses to format integers of thousands of digits
        text = "a number with too many digits"
    return text if len(text) <= max_chars else f"{text[: max_chars - 20]}...{text[-10:]}"
