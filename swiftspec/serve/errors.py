"""Conversion of exceptions to HTTP error responses, in the schema of OpenAI's or of Anthropic's API."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Scope

from swiftspec.capabilities import NotSupported, check_features
from swiftspec.errors import UserError
from swiftspec.serve.link.engine_client import (
    GenerationFailedError,
    InvalidRequestError,
    RequestRejectedError,
)
from swiftspec.settings.flags import flag_name
from swiftspec.text.template import PromptTooLong

ERROR_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 409: "invalid_request_error", 413: "request_too_large", 429: "rate_limit_error",
    500: "api_error", 503: "unavailable_error", 504: "timeout",
}  # fmt: skip
FAILURE_STATUS = {"engine_error": 500, "unavailable_error": 503, "timeout": 504, "replaced": 409}
RETRIED_FAILURES = (500, 503)
CONTEXT_EXCEEDED = "context_length_exceeded"
UNREADABLE_BODY = "the body must be JSON in UTF-8, not compressed, with numbers of at most 4300 digits"
NESTED_TOO_DEEPLY = "the body is nested too deeply"
WRONG_TYPE = "_type"  # end of the names of pydantic's errors for a value of another type
MAX_MESSAGE_CHARS = 600
ANTHROPIC_PATH = "/v1/messages"
MODELS_PATH = "/v1/models"  # both APIs have it
ANTHROPIC_HEADER = b"anthropic-version"  # every client of Anthropic's API sends it
MAX_PATH_CHARS = 100  # of a path in a message
ANTHROPIC_ERROR_TYPES = {  # by OpenAI's error type; the other types are equal
    "unavailable_error": "overloaded_error",
    "timeout": "timeout_error",
    "engine_error": "api_error",
    "replaced": "invalid_request_error",
}
NO_RETRY_HEADERS = {"x-should-retry": "false"}


class ApiError(Exception):
    """Exception that is returned to the client as an HTTP error response.

    `param`: name of the invalid request field.
    `code`: machine-readable identifier such as "model_not_found".
    `kind`: error type such as "invalid_request_error"; None derives it from `status`.
    `anthropic_message`: the message in the schema of Anthropic's API, if its clients recognise other words.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        headers: Mapping[str, str] | None = None,
        anthropic_message: str | None = None,
    ) -> None:
        super().__init__(message)
        message_line = " ".join(message.encode("utf-8", "replace").decode().split())
        self.status, self.param, self.code = status, param, code
        self.message = (
            message_line if len(message_line) <= MAX_MESSAGE_CHARS else message_line[: MAX_MESSAGE_CHARS - 3] + "..."
        )
        self.kind = kind or ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        self.headers = dict(headers or {})
        self.anthropic_message = anthropic_message or self.message


def unsupported(param: str, message: str) -> ApiError:
    """Returns the error for a field that the API defines but this server does not support."""
    return ApiError(400, f"{param}: {message}", param, "unsupported_parameter")


def check_request_fields(param: str, *found: str) -> None:
    """Raises ApiError for the field `param` if two of these features are not supported together (capabilities.py)."""
    try:
        check_features(found)
    except NotSupported as error:
        raise unsupported(param, error.shown(flag_name)) from None


def unavailable_error(message: str, retry_after: float | None, status: int = 503) -> ApiError:
    """Returns the error for a request that cannot be accepted now. `retry_after`: seconds after which the client may
    retry; None if a retry is useless."""
    if retry_after is None:
        return ApiError(status, message, headers=NO_RETRY_HEADERS)
    headers = {"Retry-After": str(max(1, math.ceil(retry_after))), "retry-after-ms": str(math.ceil(retry_after * 1000))}
    return ApiError(status, message, headers=headers)


def to_api_error(error: Exception) -> ApiError:
    """Converts any exception to an ApiError."""
    match error:
        case ApiError():
            return error
        case RequestRejectedError():
            return unavailable_error(str(error), error.retry_after, error.status)
        case GenerationFailedError():
            status = FAILURE_STATUS.get(error.kind, 500)
            headers = None if status in RETRIED_FAILURES else NO_RETRY_HEADERS
            return ApiError(status, str(error), kind=error.kind, headers=headers)
        case PromptTooLong():
            return ApiError(400, str(error), code=CONTEXT_EXCEEDED)
        case InvalidRequestError() | UserError():
            return ApiError(400, str(error))
        case RequestValidationError():
            return _invalid(error.errors(), error.body)
        case HTTPException():
            message = f"{error.status_code}: {error.detail}" if error.status_code != 400 else UNREADABLE_BODY
            return ApiError(error.status_code, message, headers=error.headers)
        case RecursionError():
            return ApiError(400, NESTED_TOO_DEEPLY)
        case UnicodeEncodeError():
            return ApiError(400, "the body contains an unpaired surrogate, which is not valid text")
        case _:
            return ApiError(500, "internal server error; see the server's log", code="internal_error")


def _invalid(validation_errors: Sequence[Any], body: Any) -> ApiError:
    """Converts pydantic's validation errors to an ApiError that names the first invalid field."""
    first = validation_errors[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']} at character {first['loc'][-1]}")
    if first["loc"] == ("body",):
        hint = "" if first["type"] == "missing" else ", sent as Content-Type: application/json"
        return ApiError(400, f"the body must be a JSON object{hint}")
    best, path = _best_fit(validation_errors, body)
    param = ".".join(path)[:200]
    text = str(best["msg"])
    return ApiError(400, f"{param}: {text[:1].lower()}{text[1:]}", param)


def _best_fit(validation_errors: Sequence[Any], body: Any) -> tuple[Any, list[str]]:
    """Returns the error that describes the first invalid field, and the path of the field that this error names.

    A field with several shapes has an error for each shape. The best one is of the shape that fits the value furthest:
    it names the innermost field, or it is not about the type of the value.
    """
    paths = [_field_path(error, body) for error in validation_errors]
    first, shape = paths[0]
    root = first[:shape]
    fits = [
        (len(path), not error["type"].endswith(WRONG_TYPE), -index)
        for index, (error, (path, _)) in enumerate(zip(validation_errors, paths))
        if path[:shape] == root
    ]
    index = -max(fits)[2]
    return validation_errors[index], paths[index][0]


def _field_path(error: Any, body: Any) -> tuple[list[str], int]:
    """Returns the path of the field that an error names, and the length of its part before the first value with several
    shapes. pydantic's location also contains names of shapes, which are neither keys nor indices of the value."""
    where, *words = error["loc"]
    if where != "body":
        return [str(word) for word in words], len(words)
    path: list[str] = []
    shape, value = None, body
    for number, word in enumerate(words, 1):
        if isinstance(value, dict | list) and _has(value, word):
            value = value[word]
        elif error["type"] != "missing" or number < len(words):
            shape = len(path) if shape is None else shape
            continue
        path.append(str(word))
    return path, len(path) if shape is None else shape


def _has(value: dict[Any, Any] | list[Any], word: Any) -> bool:
    return word in value if isinstance(value, dict) else isinstance(word, int) and word < len(value)


def route_path(scope: Scope) -> str:
    """Returns the path of a request, relative to the path at which the application is mounted."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def uses_anthropic_schema(scope: Scope) -> bool:
    """Returns whether a request belongs to Anthropic's API: below /v1/messages, or below /v1/models with the header
    `anthropic-version`."""
    path = route_path(scope)
    if path.startswith(MODELS_PATH):
        return any(name == ANTHROPIC_HEADER for name, _ in scope["headers"])
    return path.startswith(ANTHROPIC_PATH)


def error_body(error: ApiError, anthropic: bool = False) -> dict[str, Any]:
    """Returns the JSON object of an error. `anthropic`: in the schema of Anthropic's API, else of OpenAI's."""
    if anthropic:
        kind = ANTHROPIC_ERROR_TYPES.get(error.kind, error.kind)
        return {"type": "error", "error": {"type": kind, "message": error.anthropic_message}}
    text = {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}
    return {"error": text}


def error_response(error: ApiError, scope: Scope) -> Response:
    """Returns the response for an error, in the schema of the API that the request belongs to."""
    data = msgspec.json.encode(error_body(error, uses_anthropic_schema(scope)))
    return Response(data, error.status, error.headers, media_type="application/json")


def install_error_handlers(app: FastAPI) -> None:
    """Registers exception handlers that return error responses."""

    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect):
            return Response(status_code=499)  # the client has disconnected and does not receive the response
        return error_response(to_api_error(error), request.scope)

    async def handle_unknown_route(request: Request, error: Exception) -> Response:
        """Names method and path, since Starlette's message does not."""
        api_error = to_api_error(error)
        if isinstance(error, HTTPException) and error.status_code in (404, 405):
            route = f"{request.method} {route_path(request.scope)[:MAX_PATH_CHARS]}"
            known = "" if api_error.headers.get("Allow") is None else f" (allowed: {api_error.headers['Allow']})"
            message = f"{route} is not an endpoint of this server{known}: see /openapi.json"
            api_error = ApiError(error.status_code, message, headers=error.headers)
        return error_response(api_error, request.scope)

    handled = (
        ApiError,
        UserError,
        RequestValidationError,
        RecursionError,
        UnicodeEncodeError,
        ClientDisconnect,
    )
    for kind in handled:
        app.add_exception_handler(kind, handle)
    app.add_exception_handler(HTTPException, handle_unknown_route)
