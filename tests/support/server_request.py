"""One request to a server that can lose its ranks, and its outcome."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

MAX_REQUEST_S = 90.0  # in which every request must end
End = Literal["text", "broken", "refused", "disconnected", "cut", "hung", "odd"]


@dataclass(frozen=True)
class ClientRequest:
    """A request with a deterministic answer."""

    prompt: str
    tokens: int = 48
    seed: int | None = None  # None: greedy
    stream: bool = True
    chat: bool = False
    regex: str | None = None  # constraint of the answer

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self) -> dict[str, Any]:
        """The JSON of the request."""
        drawn = {"temperature": 0.0} if self.seed is None else {"temperature": 0.8, "seed": self.seed}
        end = {"structured_outputs": {"regex": self.regex}} if self.regex else {"ignore_eos": True}
        what = {"messages": [{"role": "user", "content": self.prompt}]} if self.chat else {"prompt": self.prompt}
        return {**what, "max_tokens": self.tokens, "stream": self.stream, **drawn, **end}

    def text_of(self, body: dict[str, Any]) -> str:
        """The text of one chunk, or of a complete response."""
        if not body["choices"]:
            return ""
        choice = body["choices"][0]
        fields = choice.get("delta") or choice.get("message") or {} if self.chat else choice
        return fields.get("content" if self.chat else "text") or ""


@dataclass
class RequestOutcome:
    """The outcome of a request.

    `end`: "text" (complete), "broken" (an error with the number of tokens), "refused" (429 or 503), "disconnected" (the
        front end died), "cut" (by the client), "hung" (beyond MAX_REQUEST_S) or "odd" (must not occur).
    `piece_times`: arrival of each piece of text, on the monotonic clock.
    `last`: the chunk with the metrics.
    """

    end: End = "odd"
    text: str = ""
    error: str = ""
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    piece_times: list[float] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)

    @property
    def longest_pause(self) -> float:
        """The longest time between two pieces of text, in seconds."""
        return max((later - earlier for earlier, later in zip(self.piece_times, self.piece_times[1:])), default=0.0)


class ClientDisconnected(Exception):
    """Raised by `on_piece` to disconnect the client."""


def disconnect_after(after: int) -> Callable[[int], None]:
    """An `on_piece` that disconnects after that many pieces of text; 0: never."""

    def on_piece(pieces: int) -> None:
        if pieces == after:
            raise ClientDisconnected

    return on_piece


def send_request(
    client: httpx.Client,
    request: ClientRequest,
    on_piece: Callable[[int], None] = lambda pieces: None,
    timeout_s: float = MAX_REQUEST_S,
) -> RequestOutcome:
    """Sends a request; never raises. `on_piece`: called with the number of pieces of text after each one."""
    outcome = RequestOutcome()
    try:
        with client.stream("POST", request.path, json=request.body(), timeout=timeout_s) as response:
            if response.status_code == 200 and request.stream:
                _read_stream(response, request, outcome, on_piece, timeout_s)
            else:
                response.read()
                _read_response(response, request, outcome)
    except ClientDisconnected:
        outcome.end = "cut"
    except httpx.TimeoutException:
        outcome.end = "hung"
    except httpx.TransportError as error:
        outcome.end, outcome.error = "disconnected", repr(error)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        outcome.end, outcome.error = "odd", f"invalid response: {error!r}"
    outcome.ended = time.monotonic()
    if outcome.ended - outcome.began > timeout_s:
        outcome.end = "hung"
    return outcome


def _read_stream(
    response: httpx.Response,
    request: ClientRequest,
    outcome: RequestOutcome,
    on_piece: Callable[[int], None],
    timeout_s: float,
) -> None:
    for line in response.iter_lines():
        if time.monotonic() - outcome.began > timeout_s:
            return
        if line == "data: [DONE]":
            outcome.end = "text"
        elif line.startswith("data: "):
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                _set_error(chunk["error"], outcome)
                continue
            outcome.last = chunk
            if piece := request.text_of(chunk):
                outcome.text += piece
                outcome.piece_times.append(time.monotonic())
                on_piece(len(outcome.piece_times))
    if outcome.end == "odd":
        outcome.error = outcome.error or "the stream ended without [DONE]"


def _read_response(response: httpx.Response, request: ClientRequest, outcome: RequestOutcome) -> None:
    body = response.json()
    if response.status_code == 200:
        outcome.end, outcome.text, outcome.last = "text", request.text_of(body), body
    else:
        _set_error(body["error"], outcome)


def _set_error(error: dict[str, Any], outcome: RequestOutcome) -> None:
    """Classifies by the error type: a stream that sent a comment before has status 200."""
    kind, outcome.error = error["type"], error["message"]
    if kind in ("rate_limit_error", "unavailable_error"):
        outcome.end = "refused"
    elif kind == "engine_error" and re.search(r"after \d+ tokens?: ", outcome.error):
        outcome.end = "broken"
    else:
        outcome.end, outcome.error = "odd", f"{kind}: {outcome.error}"


def find_fault(request: ClientRequest, outcome: RequestOutcome, expected_text: str, front_end_died: bool) -> str | None:
    """One line about an outcome that must not occur; None if the outcome is allowed."""
    match outcome.end:
        case "hung":
            return f"{request} had no end after {outcome.ended - outcome.began:.1f} s"
        case "odd":
            return f"{request} ended oddly: {outcome.error}"
        case "text" if outcome.text != expected_text:
            return f"{request} was answered wrongly: {outcome.text!r} instead of {expected_text!r}"
        case "disconnected" if not front_end_died:
            return f"{request} was disconnected though the front end lived: {outcome.error}"
        case _ if not expected_text.startswith(outcome.text):
            return f"{request} began wrongly: {outcome.text!r}, not as {expected_text!r}"
        case _:
            return None
