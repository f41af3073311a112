"""Errors on their way through gRPC: a status and one line there, an exception here."""

from __future__ import annotations

from typing import Any

import grpc

from swiftspec.errors import DrafterLost, UserError
from swiftspec.file_io import one_line
from swiftspec.runtime.cancellation import Cancelled
from swiftspec.sampling.grammar import GrammarTooComplex

Code = grpc.StatusCode


class SessionGone(Exception):
    """The worker does not know the session: it was evicted, ended, or another worker answers now."""


class StaleRound(Exception):
    """A round that was answered already, and is asked for again with other words; or one before it."""


class WorkerFull(Exception):
    """All sessions are at work, and there is room for no other."""


class WorkerLost(ConnectionError):
    """The worker cannot be reached, or its answer broke off. What was asked may have been done or not."""


class WorkerRefused(UserError):
    """The worker has understood and will not: the message says why."""


ERROR_STATUS: tuple[tuple[type[BaseException], Code], ...] = (  # the first that fits
    (SessionGone, Code.NOT_FOUND),
    (StaleRound, Code.FAILED_PRECONDITION),
    (WorkerFull, Code.RESOURCE_EXHAUSTED),
    (Cancelled, Code.CANCELLED),
    (UserError, Code.FAILED_PRECONDITION),
    (ValueError, Code.INVALID_ARGUMENT),
    (GrammarTooComplex, Code.ABORTED),
    (DrafterLost, Code.ABORTED),
    (RuntimeError, Code.ABORTED),  # torch reports a failed device or a full memory so
    (MemoryError, Code.ABORTED),
)
CERTIFICATE_ERRORS = {  # what gRPC says of a certificate that it does not take, and what is said of it here
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not trusted: name it, or who has signed it, with --tls-ca",
    "Hostname Verification Check failed": "its certificate is for another host: use a name or address that it names",
}
CONNECTION_LOST_CODES = (
    Code.UNAVAILABLE,
    Code.CANCELLED,
    Code.INTERNAL,
    Code.UNKNOWN,
)  # what a broken connection looks like


def status_of(error: BaseException) -> tuple[Code, str] | None:
    """What a client is told of an error; None: it is a fault of ours."""
    code = next((code for kind, code in ERROR_STATUS if isinstance(error, kind)), None)
    return None if code is None else (code, one_line(error))


def error_from_rpc(error: Any, peer: str) -> Exception:
    """The exception for a call that failed, a `grpc.RpcError` that is a call too. `peer`: who was asked, for people."""
    code, details = error.code(), one_line(Exception(error.details() or error.code().name))
    if code == Code.NOT_FOUND:
        return SessionGone(f"{peer}: {details}")
    if code == Code.DEADLINE_EXCEEDED:
        return TimeoutError(f"{peer} did not answer in time")
    if (why := next((said for sign, said in CERTIFICATE_ERRORS.items() if sign in details), None)) is not None:
        return WorkerRefused(f"{peer}: {why}")
    if code in CONNECTION_LOST_CODES:
        return WorkerLost(f"{peer} is gone: {details}")
    if code == Code.UNIMPLEMENTED:
        return WorkerRefused(f"{peer} has no such service: is it a worker of the other kind, or another program?")
    return WorkerRefused(f"{peer}: {details}")
