"""Client of an OpenAI-compatible server: streams one answer and measures it.

The arrival of each piece of the response is recorded with its time, and decoded after the answer has ended, so that the
client uses little of a CPU that it shares with the server.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.workload import WARM_UP
from swiftspec.errors import UserError

TIMEOUT_S = 600.0  # for a response to begin and between two of its pieces
CONNECT_TIMEOUT_S = 10.0
MAX_CAUSE = 300  # characters of a server's error message that are repeated
Chunk = dict[str, Any]
# Fields of stream_options, the most informative first; a server that refuses one gets the next.
STREAM_OPTIONS: tuple[dict[str, bool] | None, ...] = (
    {"include_usage": True, "continuous_usage_stats": True}, {"include_usage": True}, None,
)  # fmt: skip
VLLM_COUNTERS = (
    "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens",
)  # fmt: skip
REFUSED = (httpx.codes.BAD_REQUEST, httpx.codes.UNPROCESSABLE_ENTITY)


class RefusedRequest(UserError):
    """The server does not accept a field of the request."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """Target forwards, drafted tokens and accepted tokens of some answers."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: Speculation) -> Speculation:
        return Speculation(self.rounds + other.rounds, self.drafted + other.drafted, self.accepted + other.accepted)

    def __sub__(self, other: Speculation) -> Speculation:
        return Speculation(self.rounds - other.rounds, self.drafted - other.drafted, self.accepted - other.accepted)

    @property
    def tokens_per_round(self) -> float | None:
        """Accepted tokens and the target's own one, averaged over the rounds; None without a round."""
        return 1 + self.accepted / self.rounds if self.rounds else None

    @property
    def accepted_share(self) -> float | None:
        """Accepted tokens divided by drafted ones; None if no token was drafted."""
        return self.accepted / self.drafted if self.drafted else None


@dataclass(frozen=True, slots=True)
class StreamedAnswer:
    """One answer. Times are seconds since the request was sent.

    `seconds`: until the end of the response. `arrivals`: times at which text arrived; empty for an answer without text.
    `tokens`: output tokens, as the server reports them, or without usage the number of chunks with text (`counted` is
    False). `first_tokens`: tokens of the first of these chunks, 1 if the server does not report it. `speculation`: None
    if the server does not report it.
    """

    text: str
    tokens: int
    counted: bool
    first_tokens: int
    seconds: float
    arrivals: Sequence[float] = field(repr=False)
    speculation: Speculation | None = None

    @property
    def gaps(self) -> list[float]:
        """Seconds between two chunks with text."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:])]

    @property
    def decode_tokens(self) -> int:
        """Tokens after the first chunk."""
        return self.tokens - self.first_tokens

    @property
    def decode_seconds(self) -> float:
        """Seconds from the first chunk with text to the last one."""
        return self.arrivals[-1] - self.arrivals[0] if self.arrivals else 0.0


def timed_events(pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, str]]:
    """Yields time and data of each server-sent event, from the pieces of a response with the times of their arrival.

    An event has the time of the piece that completes its last line. Comments and other fields are skipped.
    """
    rest = b""
    for at, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield at, line[5:].strip().decode("utf-8", "replace")


def read_answer(pieces: Iterable[tuple[float, bytes]], seconds: float) -> StreamedAnswer:
    """Decodes the pieces of a streamed response. Raises ValueError with the cause if it contains an error or no chunk.

    `seconds`: time of the end of the response.
    """
    chunks: list[tuple[float, Chunk]] = []
    for at, data in timed_events(pieces):
        if data == "[DONE]":
            break
        chunk = json.loads(data)
        if "error" in chunk:
            raise ValueError(_cause(chunk))
        chunks.append((at, chunk))
    if not chunks:
        raise ValueError("the response contains no server-sent event")
    with_text = [(at, chunk) for at, chunk in chunks if _all_text(chunk)]
    used = [chunk["usage"]["completion_tokens"] for _, chunk in chunks if chunk.get("usage")]
    tokens = used[-1] if used else len(with_text)
    first_usage = with_text[0][1].get("usage") if with_text else None
    first_tokens = first_usage["completion_tokens"] if first_usage else 1
    return StreamedAnswer(
        text="".join(_content(chunk) for _, chunk in chunks),
        tokens=tokens,
        counted=bool(used),
        first_tokens=first_tokens if len(with_text) > 1 else tokens,
        seconds=seconds,
        arrivals=[at for at, _ in with_text],
        speculation=reported_speculation([chunk for _, chunk in chunks]),
    )


def reported_speculation(chunks: Sequence[Chunk]) -> Speculation | None:
    """Returns what the chunks report about speculative decoding: SwiftSpec's `metrics` or llama-server's `timings`;
    None without either.

    llama-server reports no rounds. All of its tokens are accepted ones or the one that the target adds in each round,
    except the first token, which the prefill produces.
    """
    merged = {name: value for chunk in chunks for name, value in chunk.items() if name in ("metrics", "timings")}
    found = (merged.get("metrics") or {}).get("speculative_decoding")
    if found:
        return Speculation(found["num_spec_steps"], found["num_draft_tokens"], found["num_accepted_draft_tokens"])
    timings = merged.get("timings") or {}
    if "metrics" in merged or "predicted_n" not in timings:
        return None
    accepted = timings.get("draft_n_accepted", 0)
    return Speculation(max(timings["predicted_n"] - 1 - accepted, 0), timings.get("draft_n", 0), accepted)


def counted_speculation(metrics: str) -> Speculation | None:
    """Returns vLLM's counters of speculative decoding in a Prometheus text, summed over their labels; None without
    them."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics):
        if family.name in VLLM_COUNTERS:
            values = [sample.value for sample in family.samples if sample.name.endswith("_total")]
            sums[family.name] = sum(values)
    if len(sums) < len(VLLM_COUNTERS):
        return None
    return Speculation(*(int(sums[name]) for name in VLLM_COUNTERS))


class CompletionClient:
    """One server. `name`: its name in tables and errors. `chat`: use the chat endpoint instead of completions.

    Every method raises UserError, in one line with the server's name, if the server does not answer as expected.
    """

    def __init__(self, name: str, url: str, *, model: str | None, chat: bool, api_key: str | None) -> None:
        self.name, self.chat = name, chat
        self.url = re.sub(r"(/v1)?/*$", "", url)
        headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {api_key}"} if api_key else {})}
        timeout = httpx.Timeout(TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        limits = httpx.Limits(max_keepalive_connections=0)  # llama-server closes connections between requests
        self._http = httpx.Client(headers=headers, timeout=timeout, limits=limits, trust_env=False)
        self._stream_options = list(STREAM_OPTIONS)
        self._counts = True  # whether /metrics has vLLM's counters, as far as known
        self._counters: Speculation | None = None
        self._model = model

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._http.close()

    @property
    def model(self) -> str:
        """The model in the requests: the given one, or the first that the server lists."""
        if self._model is None:
            listed = self._get("/v1/models")
            try:
                self._model = str(json.loads(listed)["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise self._error("/v1/models lists no model; use --model") from None
        return self._model

    def warm_up(self, fields: Mapping[str, Any]) -> None:
        """Sends one request, and selects the fields of `stream_options` that the server accepts."""
        while True:
            try:
                self.answer([{"role": "user", "content": "Hello"}], {**fields, "max_tokens": WARM_UP})
                return
            except RefusedRequest:
                if len(self._stream_options) == 1:
                    raise
                del self._stream_options[0]

    def answer(self, messages: Sequence[Mapping[str, str]], fields: Mapping[str, Any]) -> StreamedAnswer:
        """Streams the answer to a conversation; without the chat endpoint, to the text of its last message.

        `fields`: further fields of the request, such as max_tokens.
        """
        body: dict[str, Any] = {"model": self.model, "stream": True, **fields}
        body |= {"messages": [*messages]} if self.chat else {"prompt": messages[-1]["content"]}
        if self._stream_options[0]:
            body["stream_options"] = self._stream_options[0]
        try:
            answer = read_answer(*self._stream("/v1/chat/completions" if self.chat else "/v1/completions", body))
        except (ValueError, LookupError) as error:
            raise self._error(f"{error}") from None
        return answer if answer.speculation is not None else replace(answer, speculation=self._counted())

    def _stream(self, path: str, body: Mapping[str, Any]) -> tuple[list[tuple[float, bytes]], float]:
        """Returns the pieces of a response with the times of their arrival, and the time of its end."""
        pieces: list[tuple[float, bytes]] = []
        content = json.dumps(body).encode()
        try:
            began = time.perf_counter()
            with self._http.stream(
                "POST", self.url + path, content=content, headers={"Content-Type": "application/json"}
            ) as response:
                for piece in response.iter_raw():
                    pieces.append((time.perf_counter() - began, piece))
                seconds = time.perf_counter() - began
        except httpx.HTTPError as error:
            raise self._error(f"{path}: {error or type(error).__name__}") from None
        self._check(path, response.status_code, b"".join(piece for _, piece in pieces))
        return pieces, seconds

    def _counted(self) -> Speculation | None:
        """Returns the increase of vLLM's counters since the previous answer; None if the server does not have them."""
        if not self._counts:
            return None
        try:
            counters = counted_speculation(self._get("/metrics"))
        except (UserError, ValueError):
            counters = None
        before, self._counters = self._counters, counters
        self._counts = counters is not None
        return None if counters is None or before is None else counters - before

    def _get(self, path: str) -> str:
        try:
            response = self._http.get(self.url + path)
        except httpx.HTTPError as error:
            raise self._error(f"{path}: {error or type(error).__name__}") from None
        self._check(path, response.status_code, response.content)
        return response.text

    def _check(self, path: str, status: int, body: bytes) -> None:
        if status != httpx.codes.OK:
            error = RefusedRequest if status in REFUSED else UserError
            raise self._error(f"{path}: {status} {_body_cause(body)}", error)

    def _error(self, cause: str, error: type[UserError] = UserError) -> UserError:
        return error(f"{self.name} ({self.url}): {' '.join(cause.split())[:MAX_CAUSE]}")


def _all_text(chunk: Chunk) -> str:
    """Returns all text of a chunk: content of a message, reasoning under one of its two names, text of a completion."""
    choice = _choice(chunk)
    delta = choice.get("delta") or {}
    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
    return _content(chunk) + reasoning


def _content(chunk: Chunk) -> str:
    choice = _choice(chunk)
    return (choice.get("delta") or {}).get("content") or choice.get("text") or ""


def _choice(chunk: Chunk) -> Chunk:
    choices = chunk.get("choices")
    return choices[0] if choices else {}


def _cause(body: Any) -> str:
    """Returns the message of an error object, in the shapes of OpenAI and of FastAPI, or the object as text."""
    error = body.get("error", body.get("message", body.get("detail"))) if isinstance(body, Mapping) else body
    message = error.get("message") if isinstance(error, Mapping) else error
    return message if isinstance(message, str) else json.dumps(body)


def _body_cause(body: bytes) -> str:
    text = body.decode("utf-8", "replace")
    try:
        return _cause(json.loads(text))
    except ValueError:
        return text
