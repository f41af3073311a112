"""Conversion between exceptions and gRPC statuses with one line of detail."""

from __future__ import annotations

from typing import Any

import grpc

from swiftspec.errors import DrafterLost, UserError
from swiftspec.file_io import one_line
from swiftspec.runtime.cancellation import Cancelled
from swiftspec.sampling.grammar import GrammarTooComplex

Code = grpc.StatusCode


class SessionGone(Exception):
    """The worker does not know the session: it was evicted or ended, or the worker was restarted."""


class StaleRound(Exception):
    """A request for an earlier round, or for the current round with other content."""


class WorkerFull(Exception):
    """All sessions of the worker are in use."""


class WorkerLost(ConnectionError):
    """The worker cannot be reached, or the connection was lost. The request may have been executed or not."""


class WorkerRefused(UserError):
    """The worker has refused the request; the message contains the reason."""


ERROR_STATUS: tuple[tuple[type[BaseException], Code], ...] = (  # the first match applies
    (SessionGone, Code.NOT_FOUND),
    (StaleRound, Code.FAILED_PRECONDITION),
    (WorkerFull, Code.RESOURCE_EXHAUSTED),
    (Cancelled, Code.CANCELLED),
    (UserError, Code.FAILED_PRECONDITION),
    (ValueError, Code.INVALID_ARGUMENT),
    (GrammarTooComplex, Code.ABORTED),
    (DrafterLost, Code.ABORTED),
    (RuntimeError, Code.ABORTED),  # torch's exception for a device error or a lack of memory
    (MemoryError, Code.ABORTED),
)
CERTIFICATE_ERRORS = {  # part of gRPC's message on a rejected certificate, and the message of this module
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not trusted: pass it, or its CA certificate, with --tls-ca",
    "Hostname Verification Check failed": "its certificate is for another host: use a name or address that it lists",
}
CONNECTION_LOST_CODES = (
    Code.UNAVAILABLE,
    Code.CANCELLED,
    Code.INTERNAL,
    Code.UNKNOWN,
)  # the statuses of a lost connection


def status_of(error: BaseException) -> tuple[Code, str] | None:
    """Returns the status and detail for an error that a client has to handle; None for an internal error."""
    code = next((code for kind, code in ERROR_STATUS if isinstance(error, kind)), None)
    return None if code is None else (code, one_line(error))


def error_from_rpc(error: Any, peer: str) -> Exception:
    """Returns the exception to raise for `error`, the `grpc.RpcError` of a failed call. `peer`: name of the worker in
    the exception's message."""
    code, details = error.code(), one_line(Exception(error.details() or error.code().name))
    if code == Code.NOT_FOUND:
        return SessionGone(f"{peer}: {details}")
    if code == Code.DEADLINE_EXCEEDED:
        return TimeoutError(f"{peer} did not answer in time")
    if (why := next((said for sign, said in CERTIFICATE_ERRORS.items() if sign in details), None)) is not None:
        return WorkerRefused(f"{peer}: {why}")
    if code in CONNECTION_LOST_CODES:
        return WorkerLost(f"{peer} is unavailable: {details}")
    if code == Code.UNIMPLEMENTED:
        return WorkerRefused(
            f"{peer} does not provide this service: it is the other kind of worker, or another program"
        )
    return WorkerRefused(f"{peer}: {details}")
