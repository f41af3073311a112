"""What rank 0 and the front end say to each other: msgspec frames over a Unix socket, each with its length before it.

Rank 0 serves as many requests at a time as it says in `Ready`, mostly one. The front end sends the next `Start` only
after the `Done` or the `Failed` of an earlier one, which also follow a `Cancel`. Nothing in here is pickled, and a
frame has a largest length.
"""

from __future__ import annotations

from typing import Any

import msgspec

from swiftspec.observe.rpc_latency import Hop

MOST = 64 << 20  # bytes of a frame: a prompt of millions of tokens, or their log-probabilities
LENGTH = 4  # bytes before a frame, big-endian


class Frame(msgspec.Struct, frozen=True, tag=True):
    """Any of them."""


# From the front end to rank 0.


class Start(Frame, frozen=True):
    """A request: the prompt's tokens, and the fields of SamplingParams that are not at their defaults. `choices`: of a
    population so many texts are asked for, of so many that are drawn."""

    request: int
    prompt: list[int]
    sampling: dict[str, Any]
    choices: tuple[int, int] | None = None


class Cancel(Frame, frozen=True):
    """Nobody waits for this request any more. One that has ended is none of rank 0's business: nothing happens."""

    request: int


class Serving(Frame, frozen=True):
    """The front end has all that it needs to take requests."""


class Watch(Frame, frozen=True):
    """Whether somebody listens to what happens in the rounds: from the next request on rank 0 says so, or not."""

    on: bool


class Leave(Frame, frozen=True):
    """The front end has nothing to do any more: rank 0 is to end, and the other ranks with it."""


# From rank 0 to the front end.


class Configure(Frame, frozen=True):
    """What the front end is to be like: its keeper says so before there is a wire. Times in seconds."""

    model_name: str  # as clients are to call it
    api_keys: list[str]  # one of them must come with a request; none: nothing is asked
    max_queue: int
    queue_timeout: float
    request_timeout: float | None
    drain_timeout: float
    host: str = "127.0.0.1"  # where it listens
    otlp_endpoint: str | None = None  # a collector of OpenTelemetry's; None: no spans


class Drain(Frame, frozen=True):
    """Take no new requests, let those that run end, and then say `Leave`."""


class Loading(Frame, frozen=True):
    """What it is doing before it can serve: "target weights 3.1 of 5.7 GB, 1.2 GB/s"."""

    step: str


class Found(Frame, frozen=True):
    """Where the models lie, as soon as that is known: the front end reads the tokenizer while the weights load."""

    target: str  # a folder


class Ready(Frame, frozen=True):
    """It takes requests. `plan`: the fields of EngineConfig as they are in force."""

    model: str
    draft_model: str | None
    max_model_len: int
    vocab_size: int  # token ids in a prompt lie below
    eos_token_ids: list[int]
    defaults: dict[
        str, Any
    ]  # sampling values for requests that name none: of the command, else of generation_config.json
    plan: dict[str, Any]
    load_ms: float
    head: dict[str, Any] = {}  # the first line of a trace
    at_once: int = 1  # requests that it decodes side by side


class RankState(msgspec.Struct, frozen=True):
    """A rank: its `role` ("target" or "draft"), process, `state` ("up", "loading" or "lost"), and how often it was
    started again."""

    rank: int
    role: str
    pid: int
    state: str
    restarts: int


class Ranks(Frame, frozen=True):
    """All ranks of the job, whenever one of them changes."""

    ranks: list[RankState]


class Likelihood(msgspec.Struct, frozen=True, array_like=True):
    """The log-probability of a token in the target's distribution, and the likeliest tokens with theirs there."""

    logprob: float
    top: list[tuple[int, float]]


class Chunk(Frame, frozen=True):
    """The tokens of one round. `accepted`: the first so many were the draft's guess. `likelihoods` [tokens], where
    they were asked for. `finish_reason` "stop" or "length" on the last one. `hops`: exchanges with workers since the
    one before, where spans are made of them."""

    request: int
    token_ids: list[int]
    accepted: int
    likelihoods: list[Likelihood] | None = None
    finish_reason: str | None = None
    hops: list[Hop] = []


class Prompt(Frame, frozen=True):
    """The likelihood of each of a prompt's tokens but the first, before the first chunk, where they were asked for."""

    request: int
    likelihoods: list[Likelihood]


class Event(msgspec.Struct, frozen=True, array_like=True):
    """A line of a trace, as docs/reference/trace.md has it, of this `kind`: "head", "begin", "round" or "end"."""

    kind: str
    line: bytes  # an object of JSON, not empty
    tokens: list[int]  # that it names


class Events(Frame, frozen=True):
    """What has happened, where somebody listens."""

    events: list[Event]


class Choice(msgspec.Struct, frozen=True, array_like=True):
    """One text of a population, and its weight there."""

    token_ids: list[int]
    finish_reason: str
    weight: float


class Done(Frame, frozen=True):
    """A request has ended, by itself or cancelled; there is room for the next. `timings` and `metrics` as
    `serve.answer` makes them, `more` what else it says of the answer (`exact`, `particles`, ...), and `choices` the
    texts that were asked for."""

    request: int
    timings: dict[str, Any]
    metrics: dict[str, Any]
    more: dict[str, Any]
    choices: list[Choice] = []


class Failed(Frame, frozen=True):
    """A request has ended with an error, and rank 0 goes on. `user`: it is the request's own fault, a 400; else
    something broke."""

    request: int
    message: str
    user: bool


class Lost(Frame, frozen=True):
    """Rank 0 leaves, and so the requests that run there are lost: no `Failed` comes before this."""

    message: str


ToEngine = Start | Cancel | Serving | Watch | Leave
FromEngine = Drain | Loading | Found | Ready | Ranks | Prompt | Chunk | Events | Done | Failed | Lost
