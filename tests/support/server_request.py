"""One request to a server that may lose its ranks, and how it ended."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

BOUND = 90.0  # seconds in which every request must end, however it does
End = Literal["text", "broken", "refused", "disconnected", "cut", "hung", "odd"]


@dataclass(frozen=True)
class Asked:
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

    def text_of(self, said: dict[str, Any]) -> str:
        """Of one chunk, or of the whole answer."""
        if not said["choices"]:
            return ""
        choice = said["choices"][0]
        told = choice.get("delta") or choice.get("message") or {} if self.chat else choice
        return told.get("content" if self.chat else "text") or ""


@dataclass
class Told:
    """How a request ended: with its whole "text"; "broken" off with an error that says after how many tokens; "refused"
    with 429 or 503; "disconnected" with the front end's death; "cut" by us; "hung" beyond BOUND; or "odd", which nobody
    may see. `came`: when each piece of text came, on the monotonic clock; `last`: the chunk with the metrics."""

    end: End = "odd"
    text: str = ""
    said: str = ""  # the error
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    came: list[float] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)

    @property
    def longest_pause(self) -> float:
        """Seconds between two pieces of text."""
        return max((later - earlier for earlier, later in zip(self.came, self.came[1:])), default=0.0)


class Cut(Exception):
    """Raised by `heard`: the client leaves."""


def cutting(after: int) -> Callable[[int], None]:
    """A client that leaves after so many pieces; 0: it stays."""

    def heard(pieces: int) -> None:
        if pieces == after:
            raise Cut

    return heard


def ask(
    client: httpx.Client, asked: Asked, heard: Callable[[int], None] = lambda pieces: None, bound: float = BOUND
) -> Told:
    """Asks, and never raises. `heard` is told of each piece of text, how many there are by now."""
    told = Told()
    try:
        with client.stream("POST", asked.path, json=asked.body(), timeout=bound) as answer:
            if answer.status_code == 200 and asked.stream:
                _read(answer, asked, told, heard, bound)
            else:
                answer.read()
                _take(answer, asked, told)
    except Cut:
        told.end = "cut"
    except httpx.TimeoutException:
        told.end = "hung"
    except httpx.TransportError as error:
        told.end, told.said = "disconnected", repr(error)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        told.end, told.said = "odd", f"no answer of ours: {error!r}"
    told.ended = time.monotonic()
    if told.ended - told.began > bound:
        told.end = "hung"
    return told


def _read(
    answer: httpx.Response, asked: Asked, told: Told, heard: Callable[[int], None], bound: float
) -> None:  # fmt: skip
    for line in answer.iter_lines():
        if time.monotonic() - told.began > bound:
            return
        if line == "data: [DONE]":
            told.end = "text"
        elif line.startswith("data: "):
            said = json.loads(line.removeprefix("data: "))
            if "error" in said:
                _fail(said["error"], told)
                continue
            told.last = said
            if piece := asked.text_of(said):
                told.text += piece
                told.came.append(time.monotonic())
                heard(len(told.came))
    if told.end == "odd":
        told.said = told.said or "the stream ended without a word"


def _take(answer: httpx.Response, asked: Asked, told: Told) -> None:
    said = answer.json()
    if answer.status_code == 200:
        told.end, told.text, told.last = "text", asked.text_of(said), said
    else:
        _fail(said["error"], told)


def _fail(error: dict[str, Any], told: Told) -> None:
    """By its kind: a stream that has had a comment while it waited has the status 200."""
    kind, told.said = error["type"], error["message"]
    if kind in ("rate_limit_error", "unavailable_error"):
        told.end = "refused"
    elif kind == "engine_error" and re.search(r"after \d+ tokens?: ", told.said):
        told.end = "broken"
    else:
        told.end, told.said = "odd", f"{kind}: {told.said}"


def fault(asked: Asked, told: Told, right: str, front_end_died: bool) -> str | None:
    """What is wrong with an end, in a line; None where it is as it should be."""
    match told.end:
        case "hung":
            return f"{asked} had no end after {told.ended - told.began:.1f} s"
        case "odd":
            return f"{asked} ended oddly: {told.said}"
        case "text" if told.text != right:
            return f"{asked} was answered wrongly: {told.text!r} in place of {right!r}"
        case "disconnected" if not front_end_died:
            return f"{asked} was disconnected though the front end lived: {told.said}"
        case _ if not right.startswith(told.text):
            return f"{asked} began wrongly: {told.text!r}, not as {right!r}"
        case _:
            return None
