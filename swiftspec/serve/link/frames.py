"""Frames of the engine link between rank 0 and the front end: msgspec structs over a Unix socket, length-prefixed.

Rank 0 decodes up to `EngineInfo.max_num_seqs` requests concurrently. While that many are running, the front end sends
the next `StartFrame` only after the `DoneFrame` or `FailedFrame` of one of them. A cancelled request also ends with one
of these two frames. Nothing is pickled, and the size of a frame is limited.
"""

from __future__ import annotations

from typing import Any

import msgspec

from swiftspec.errors import UserError
from swiftspec.messages import VerifiedRound
from swiftspec.observe.rpc_latency import RpcRecord
from swiftspec.params import SamplingParams
from swiftspec.signals import DRAIN_TIMEOUT_S

MAX_FRAME_BYTES = 64 << 20  # enough for a prompt of millions of tokens
MAX_LOGPROBS_PER_FRAME = 1 << 18  # each takes at most 16 bytes; a prompt with more takes several frames
LENGTH_PREFIX_BYTES = 4  # big-endian
QUEUE_TIMEOUT_S = 60.0  # longest wait of a request in the queue, after which it is refused (429)


class FrontEndLost(UserError):
    """Raised if the front end has closed the engine link or sent an invalid frame."""


class Frame(msgspec.Struct, frozen=True, tag=True):
    """Base class of all frames. The class name is the tag of a serialized frame."""


# From the front end to rank 0.


class StartFrame(Frame, frozen=True):
    """Starts a request.

    `request`: number that identifies the request in later frames.
    `prompt`: token ids.
    `choices`: (number of texts to return, number to sample) in mode smc; None: a single text.
    """

    request: int
    prompt: list[int]
    sampling: SamplingParams
    choices: tuple[int, int] | None = None


class CancelFrame(Frame, frozen=True):
    """Cancels a request. Rank 0 ignores the frame if the request has already ended."""

    request: int


class ServingFrame(Frame, frozen=True):
    """Notifies rank 0 that the front end accepts requests from clients."""


class SubscribeFrame(Frame, frozen=True):
    """Turns the sending of trace events on or off, from the next request on."""

    on: bool


class ShutdownFrame(Frame, frozen=True):
    """Requests the shutdown of all ranks, after the front end has finished."""


# From the supervisor to the front end.


class FrontendConfig(Frame, frozen=True):
    """Configuration of the front end, sent before the engine link is connected. Timeouts in seconds; None: no limit."""

    model_names: list[str]  # names that clients use for the model, the default first
    api_keys: list[str]  # a request needs one of them; empty: no key is needed
    max_queue: int
    request_timeout: float | None
    queue_timeout: float = QUEUE_TIMEOUT_S
    drain_timeout: float = DRAIN_TIMEOUT_S
    host: str = "127.0.0.1"  # the address that the server listens on
    otlp_endpoint: str | None = None  # OpenTelemetry collector; None: no spans
    chat_template: str | None = None  # file of a chat template; None: that of the tokenizer
    allowed_origins: list[str] = []  # origins of web pages that may call the server; ["*"]: all
    public_metrics: bool = False  # whether /metrics needs no key
    kv_block_size: int = 16  # tokens per block in the metric cache_config_info


# From rank 0 to the front end.


class DrainFrame(Frame, frozen=True):
    """Requests a drain: the front end rejects new requests, lets running ones end, and then sends `ShutdownFrame`."""


class LoadingFrame(Frame, frozen=True):
    """Progress of loading, such as "target weights 3.1 of 5.7 GB, 1.2 GB/s"."""

    detail: str


class ModelPathFrame(Frame, frozen=True):
    """Path of the target, sent before the weights are loaded so that the front end can load the tokenizer meanwhile."""

    target: str  # a folder or a GGUF file


class EngineInfo(Frame, frozen=True):
    """Properties of the models and the engine, sent when rank 0 is ready to accept requests. `plan`: fields of the
    EngineConfig that the server runs with."""

    model: str
    draft_model: str | None
    max_model_len: int
    vocab_size: int  # limit of the token ids in a prompt
    eos_token_ids: list[int]
    defaults: dict[str, Any]  # default sampling parameters, from the command line and generation_config.json
    plan: dict[str, Any]
    load_ms: float
    trace_head: dict[str, Any] = {}  # header line of a trace
    max_num_seqs: int = 1  # maximum number of requests that are decoded concurrently
    cache_tokens: int = 0  # see `Roles.cache_tokens`


class TargetStateFrame(Frame, frozen=True):
    """State of a remote target, sent when it changes. `lost`: why its worker does not serve; None: it serves again."""

    lost: str | None


class RankState(msgspec.Struct, frozen=True):
    """State of one rank. `role`: "target" or "draft". `state`: "up", "loading" or "lost". `restarts`: number of
    restarts so far."""

    rank: int
    role: str
    pid: int
    state: str
    restarts: int


class RankStatesFrame(Frame, frozen=True):
    """States of all ranks of the job, sent whenever one of them changes."""

    ranks: list[RankState]


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of a token under the target, and other tokens at the same position; see
    `messages.SampledLogprob`. `top`: (id, log-probability) pairs."""

    logprob: float
    top: list[tuple[int, float]]
    rank: int


class TokensFrame(Frame, frozen=True):
    """Tokens of one round.

    `accepted`: number of leading tokens that are accepted draft tokens.
    `logprobs`: one per token; None if not requested.
    `finish_reason`: "stop" or "length" in the last `TokensFrame` of a request, otherwise None.
    `rpc_records`: RPCs to workers since the previous `TokensFrame`, if the front end exports spans.
    `cached_tokens`: prompt tokens that the prefix cache supplied.
    """

    request: int
    token_ids: list[int]
    accepted: int
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    rpc_records: list[RpcRecord] = []
    cached_tokens: int = 0


class PromptLogprobsFrame(Frame, frozen=True):
    """Log-probabilities of the prompt's tokens except the first, if requested; sent before the first `TokensFrame`.
    Those of a long prompt are sent in several frames."""

    request: int
    logprobs: list[TokenLogprob]


class TraceEvent(msgspec.Struct, frozen=True, array_like=True):
    """One line of a trace (docs/reference/trace.md). `kind`: "head", "begin", "round" or "end"."""

    kind: str
    line: bytes  # a JSON object, not empty
    tokens: list[int]  # token ids that the line contains


class TraceEventsFrame(Frame, frozen=True):
    """Trace events, sent while there are subscribers."""

    events: list[TraceEvent]


class Choice(msgspec.Struct, frozen=True, array_like=True):
    """One text of the population in mode smc, with its weight."""

    token_ids: list[int]
    finish_reason: str
    weight: float


class DoneFrame(Frame, frozen=True):
    """Reports that a request has finished or was cancelled, so that rank 0 can start another request.

    `timings`, `metrics`: see `serve.answer_stats`.
    `extra`: further fields of the response (`exact`, `particles`, ...).
    `choices`: the requested texts of the population (mode smc); empty for a single text.
    `rounds`: the verified rounds that the statistics are made of, for an answer that the front end cuts (see
    `answer_stats.cut_statistics`); empty in mode smc.
    """

    request: int
    timings: dict[str, Any]
    metrics: dict[str, Any]
    extra: dict[str, Any]
    choices: list[Choice] = []
    rounds: list[VerifiedRound] = []


class FailedFrame(Frame, frozen=True):
    """Reports that one request has failed; rank 0 continues to serve. `user`: whether the request is invalid (status
    400). `unavailable`: whether the worker of the target is lost (status 503). Otherwise the error is internal (status
    500)."""

    request: int
    message: str
    user: bool
    unavailable: bool = False


class EngineLostFrame(Frame, frozen=True):
    """Reports that rank 0 exits after an error. Its running requests are lost, without a `FailedFrame` for each."""

    message: str


ToEngine = StartFrame | CancelFrame | ServingFrame | SubscribeFrame | ShutdownFrame
FromEngine = (
    DrainFrame
    | LoadingFrame
    | ModelPathFrame
    | EngineInfo
    | TargetStateFrame
    | RankStatesFrame
    | PromptLogprobsFrame
    | TokensFrame
    | TraceEventsFrame
    | DoneFrame
    | FailedFrame
    | EngineLostFrame
)
