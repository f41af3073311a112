"""What a client is told when something goes wrong: OpenAI's nested error, Anthropic's on its own path."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from swiftspec.errors import UserError
from swiftspec.serve.http.engine_link.engine import Broken, Refused, Unusable
from swiftspec.serve.text.template import TooLong

KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 409: "invalid_request_error", 413: "request_too_large", 429: "rate_limit_error",
    500: "api_error", 503: "unavailable_error", 504: "timeout",
}  # fmt: skip
BROKEN = {"engine_error": 500, "timeout": 504, "replaced": 409}
DEEP = "the body is nested too deeply"
LONGEST = 600  # characters of a message
ANTHROPIC = "/v1/messages"
ANTHROPICS = {  # its words for ours
    "unavailable_error": "overloaded_error", "timeout": "timeout_error", "engine_error": "api_error",
    "replaced": "invalid_request_error",
}  # fmt: skip
NO_RETRY = {"x-should-retry": "false"}


class ApiError(Exception):
    """An answer with an error status. `param`: the field of the request; `code`: a word for programs."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, kind: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        line = " ".join(message.encode("utf-8", "replace").decode().split())
        self.status, self.param, self.code = status, param, code
        self.message = line if len(line) <= LONGEST else line[: LONGEST - 3] + "..."
        self.kind = kind or KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
        self.headers = dict(headers or {})


def unsupported(param: str, message: str) -> ApiError:
    """For a field whose meaning is known and that is not served."""
    return ApiError(400, f"{param}: {message}", param, "unsupported_parameter")


def unready(message: str, retry_after: float | None, status: int = 503) -> ApiError:
    """For a request that cannot be taken now. `retry_after`: seconds; None where another try is no use."""
    if retry_after is None:
        return ApiError(status, message, headers=NO_RETRY)
    wait = {"Retry-After": str(max(1, math.ceil(retry_after))), "retry-after-ms": str(math.ceil(retry_after * 1000))}
    return ApiError(status, message, headers=wait)


def told(error: Exception) -> ApiError:
    """Any exception as what the client is told."""
    match error:
        case ApiError():
            return error
        case Refused():
            return unready(str(error), error.retry_after, error.status)
        case Broken():
            status = BROKEN.get(error.kind, 500)
            return ApiError(status, str(error), kind=error.kind, headers=NO_RETRY if status != 500 else None)
        case TooLong():
            return ApiError(400, str(error), code="context_length_exceeded")
        case Unusable() | UserError():
            return ApiError(400, str(error))
        case RequestValidationError():
            return _invalid(error.errors())
        case HTTPException():
            message = f"{error.status_code}: {error.detail}" if error.status_code != 400 else str(error.detail)
            return ApiError(error.status_code, message, headers=error.headers)
        case RecursionError():
            return ApiError(400, DEEP)
        case UnicodeEncodeError():
            return ApiError(400, "the body holds half of a surrogate pair, which is no text")
        case _:
            return ApiError(500, "something broke in the server; its log says what", code="internal_error")


def _invalid(complaints: Sequence[Any]) -> ApiError:
    """The first complaint of pydantic, and the field it is about."""
    first = complaints[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {first['ctx']['error']} at character {first['loc'][-1]}")
    if first["loc"] == ("body",):
        hint = "" if first["type"] == "missing" else ", sent as Content-Type: application/json"
        return ApiError(400, f"the body must be a JSON object{hint}")
    words = [str(word) for word in first["loc"][1:]]
    param = ".".join(word for word in words if word.isidentifier() or word.isdigit())[:200]
    said = str(first["msg"])
    return ApiError(400, f"{param}: {said[:1].lower()}{said[1:]}", param)


def body(error: ApiError, path: str) -> dict[str, Any]:
    """The JSON of an error, in the shape that the path's clients know."""
    if path.startswith(ANTHROPIC):
        kind = ANTHROPICS.get(error.kind, error.kind)
        return {"type": "error", "error": {"type": kind, "message": error.message}}
    said = {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}
    return {"error": said}


def response(error: ApiError, path: str) -> Response:
    data = msgspec.json.encode(body(error, path))
    return Response(data, error.status, error.headers, media_type="application/json")


def install(app: FastAPI) -> None:
    """Has every exception that is the client's, or that is expected, answered in these shapes."""

    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect):
            return Response(status_code=499)  # nobody reads it
        return response(told(error), request.url.path)

    kinds = (
        ApiError, UserError, RequestValidationError, HTTPException, RecursionError, UnicodeEncodeError,
        ClientDisconnect,
    )  # fmt: skip
    for kind in kinds:
        app.add_exception_handler(kind, handle)
