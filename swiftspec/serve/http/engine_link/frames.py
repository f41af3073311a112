"""Frames of the engine link between rank 0 and the front end: msgspec structs over a Unix socket, length-prefixed.

Rank 0 decodes up to `EngineInfo.max_num_seqs` requests concurrently. Beyond that the front end sends a `StartFrame`
only
after the `DoneFrame` or `FailedFrame` of an earlier request, which also follow a `CancelFrame`. Nothing is pickled, and
the size of a frame is limited.
"""

from __future__ import annotations

from typing import Any

import msgspec

from swiftspec.observe.rpc_latency import RpcRecord

MAX_FRAME_BYTES = 64 << 20  # enough for a prompt of millions of tokens, or for its log-probabilities
LENGTH_PREFIX_BYTES = 4  # big-endian


class Frame(msgspec.Struct, frozen=True, tag=True):
    """Base of all frames. The class name is the tag on the wire."""


# From the front end to rank 0.


class StartFrame(Frame, frozen=True):
    """A request.

    `prompt`: token ids.
    `sampling`: fields of SamplingParams that differ from their defaults.
    `choices`: (returned, sampled) texts of a population; None: a single text.
    """

    request: int
    prompt: list[int]
    sampling: dict[str, Any]
    choices: tuple[int, int] | None = None


class CancelFrame(Frame, frozen=True):
    """Cancels a request. Rank 0 ignores the frame if the request has already ended."""

    request: int


class ServingFrame(Frame, frozen=True):
    """The front end is ready to accept requests from clients."""


class SubscribeFrame(Frame, frozen=True):
    """Turns trace events on or off, from the next request on."""

    on: bool


class ShutdownFrame(Frame, frozen=True):
    """The front end has finished: rank 0 and the other ranks shut down."""


# From rank 0 to the front end.


class FrontendConfig(Frame, frozen=True):
    """Configuration of the front end, which its supervisor sends before there is a link to rank 0. Times in seconds."""

    model_name: str  # for clients
    api_keys: list[str]  # a request needs one of them; empty: no key is needed
    max_queue: int
    queue_timeout: float
    request_timeout: float | None
    drain_timeout: float
    host: str = "127.0.0.1"  # the address that the server listens on
    otlp_endpoint: str | None = None  # OpenTelemetry collector; None: no spans


class DrainFrame(Frame, frozen=True):
    """Drain request: the front end refuses new requests, lets running ones end, and then sends `ShutdownFrame`."""


class LoadingFrame(Frame, frozen=True):
    """Progress of loading, such as "target weights 3.1 of 5.7 GB, 1.2 GB/s"."""

    detail: str


class ModelPathFrame(Frame, frozen=True):
    """Path of the target, sent before its weights are loaded so that the front end can load the tokenizer meanwhile."""

    target: str  # a folder


class EngineInfo(Frame, frozen=True):
    """Rank 0 accepts requests; facts about the models and the engine. `plan`: the fields of the EngineConfig in
    force."""

    model: str
    draft_model: str | None
    max_model_len: int
    vocab_size: int  # limit of the token ids in a prompt
    eos_token_ids: list[int]
    defaults: dict[str, Any]  # default sampling parameters, from the command line and generation_config.json
    plan: dict[str, Any]
    load_ms: float
    trace_head: dict[str, Any] = {}  # the header line of a trace
    max_num_seqs: int = 1  # requests that are decoded concurrently


class RankState(msgspec.Struct, frozen=True):
    """A rank: its `role` ("target" or "draft"), process id, `state` ("up", "loading" or "lost") and number of
    restarts."""

    rank: int
    role: str
    pid: int
    state: str
    restarts: int


class RankStatesFrame(Frame, frozen=True):
    """All ranks of the job, sent whenever one of them changes."""

    ranks: list[RankState]


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The log-probability of a token in the target's distribution, and the most likely tokens with theirs."""

    logprob: float
    top: list[tuple[int, float]]


class TokensFrame(Frame, frozen=True):
    """The tokens of one round.

    `accepted`: the number of leading tokens that the draft proposed.
    `logprobs`: one per token, if requested.
    `finish_reason`: "stop" or "length" in the last frame of a request.
    `rpc_records`: RPCs to workers since the previous frame, if the front end exports spans.
    """

    request: int
    token_ids: list[int]
    accepted: int
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    rpc_records: list[RpcRecord] = []


class PromptLogprobsFrame(Frame, frozen=True):
    """Log-probabilities of the prompt's tokens except the first, if requested; sent before the first `TokensFrame`."""

    request: int
    logprobs: list[TokenLogprob]


class TraceEvent(msgspec.Struct, frozen=True, array_like=True):
    """A line of a trace (docs/reference/trace.md). `kind`: "head", "begin", "round" or "end"."""

    kind: str
    line: bytes  # a JSON object, not empty
    tokens: list[int]  # token ids in the line


class TraceEventsFrame(Frame, frozen=True):
    """Trace events, sent while there are subscribers."""

    events: list[TraceEvent]


class Choice(msgspec.Struct, frozen=True, array_like=True):
    """One text of a population with its weight."""

    token_ids: list[int]
    finish_reason: str
    weight: float


class DoneFrame(Frame, frozen=True):
    """A request has ended, by itself or cancelled, and its place is free.

    `timings`, `metrics`: see `serve.answer_stats`.
    `extra`: further fields of the response (`exact`, `particles`, ...).
    `choices`: the requested texts of a population.
    """

    request: int
    timings: dict[str, Any]
    metrics: dict[str, Any]
    extra: dict[str, Any]
    choices: list[Choice] = []


class FailedFrame(Frame, frozen=True):
    """A request has failed; rank 0 continues. `user`: the request is invalid (status 400), else an internal error."""

    request: int
    message: str
    user: bool


class EngineLostFrame(Frame, frozen=True):
    """Rank 0 exits, and its running requests are lost; no `FailedFrame` is sent for them."""

    message: str


ToEngine = StartFrame | CancelFrame | ServingFrame | SubscribeFrame | ShutdownFrame
FromEngine = (
    DrainFrame
    | LoadingFrame
    | ModelPathFrame
    | EngineInfo
    | RankStatesFrame
    | PromptLogprobsFrame
    | TokensFrame
    | TraceEventsFrame
    | DoneFrame
    | FailedFrame
    | EngineLostFrame
)
