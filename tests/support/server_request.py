"""One request to a server that may lose its ranks, and how it ended."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

MAX_REQUEST_S = 90.0  # seconds in which every request must end, however it does
End = Literal["text", "broken", "refused", "disconnected", "cut", "hung", "odd"]


@dataclass(frozen=True)
class ClientRequest:
    """A request whose answer is always the same."""

    prompt: str
    tokens: int = 48
    seed: int | None = None  # None: greedy
    stream: bool = True
    chat: bool = False
    regex: str | None = None  # that the answer keeps to

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self) -> dict[str, Any]:
        """As it is sent."""
        drawn = {"temperature": 0.0} if self.seed is None else {"temperature": 0.8, "seed": self.seed}
        end = {"structured_outputs": {"regex": self.regex}} if self.regex else {"ignore_eos": True}
        what = {"messages": [{"role": "user", "content": self.prompt}]} if self.chat else {"prompt": self.prompt}
        return {**what, "max_tokens": self.tokens, "stream": self.stream, **drawn, **end}

    def text_of(self, error_: dict[str, Any]) -> str:
        """Of one chunk, or of the whole answer."""
        if not error_["choices"]:
            return ""
        choice = error_["choices"][0]
        outcome = choice.get("delta") or choice.get("message") or {} if self.chat else choice
        return outcome.get("content" if self.chat else "text") or ""


@dataclass
class RequestOutcome:
    """How a request ended: with its whole "text"; "broken" off with an error that says after how many tokens; "refused"
    with 429 or 503; "disconnected" with the front end's death; "cut" by us; "hung" beyond BOUND; or "odd", which nobody
    may see. `came`: when each piece of text came, on the monotonic clock; `last`: the chunk with the metrics."""

    end: End = "odd"
    text: str = ""
    error_: str = ""  # the error
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    came: list[float] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)

    @property
    def longest_pause(self) -> float:
        """Seconds between two pieces of text."""
        return max((later - earlier for earlier, later in zip(self.piece_times, self.piece_times[1:])), default=0.0)


class ClientDisconnected(Exception):
    """Raised by `heard`: the client leaves."""


def disconnect_after(after: int) -> Callable[[int], None]:
    """A client that leaves after so many pieces; 0: it stays."""

    def on_piece(pieces: int) -> None:
        if pieces == after:
            raise ClientDisconnected

    return on_piece


def send_request(
    client: httpx.Client, request: ClientRequest, on_piece: Callable[[int], None] = lambda pieces: None, timeout_s: float = MAX_REQUEST_S
) -> RequestOutcome:
    """Asks, and never raises. `heard` is told of each piece of text, how many there are by now."""
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
        outcome.end, outcome.error = "odd", f"no answer of ours: {error!r}"
    outcome.ended = time.monotonic()
    if outcome.ended - outcome.began > timeout_s:
        outcome.end = "hung"
    return outcome


def _read_stream(
    response: httpx.Response, request: ClientRequest, outcome: RequestOutcome, on_piece: Callable[[int], None], timeout_s: float
) -> None:  # fmt: skip
    for line in response.iter_lines():
        if time.monotonic() - outcome.began > timeout_s:
            return
        if line == "data: [DONE]":
            outcome.end = "text"
        elif line.startswith("data: "):
            error_ = json.loads(line.removeprefix("data: "))
            if "error" in error_:
                _set_error(error_["error"], outcome)
                continue
            outcome.last = error_
            if piece := request.text_of(error_):
                outcome.text += piece
                outcome.piece_times.append(time.monotonic())
                on_piece(len(outcome.piece_times))
    if outcome.end == "odd":
        outcome.error = outcome.error or "the stream ended without a word"


def _read_response(response: httpx.Response, request: ClientRequest, outcome: RequestOutcome) -> None:
    error_ = response.json()
    if response.status_code == 200:
        outcome.end, outcome.text, outcome.last = "text", request.text_of(error_), error_
    else:
        _set_error(error_["error"], outcome)


def _set_error(error: dict[str, Any], outcome: RequestOutcome) -> None:
    """By its kind: a stream that has had a comment while it waited has the status 200."""
    kind, outcome.error = error["type"], error["message"]
    if kind in ("rate_limit_error", "unavailable_error"):
        outcome.end = "refused"
    elif kind == "engine_error" and re.search(r"after \d+ tokens?: ", outcome.error):
        outcome.end = "broken"
    else:
        outcome.end, outcome.error = "odd", f"{kind}: {outcome.error}"


def find_fault(request: ClientRequest, outcome: RequestOutcome, expected_text: str, front_end_died: bool) -> str | None:
    """What is wrong with an end, in a line; None where it is as it should be."""
    match outcome.end:
        case "hung":
            return f"{request} had no end after {outcome.ended - outcome.began:.1f} s"
        case "odd":
            return f"{request} ended oddly: {outcome.error}"
        case "text" if outcome.text != expected_text:
            return f"{request} was answered wrongly: {outcome.text!r} in place of {expected_text!r}"
        case "disconnected" if not front_end_died:
            return f"{request} was disconnected though the front end lived: {outcome.error}"
        case _ if not expected_text.startswith(outcome.text):
            return f"{request} began wrongly: {outcome.text!r}, not as {expected_text!r}"
        case _:
            return None
