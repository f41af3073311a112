"""Conversion between messages and protobuf.

Converting an invalid protobuf message raises ValueError with one line. What depends on the vocabulary or on the
position of the request is validated by `RequestState`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from swiftspec.config import EngineConfig
from swiftspec.distributed.rpc import swiftspec_pb2 as pb
from swiftspec.distributed.transport.codec import check_nodes
from swiftspec.errors import UserError
from swiftspec.messages import DraftProbs, Logprob, Proposal, RequestStart, VerifyResult
from swiftspec.params import SamplingParams
from swiftspec.tree.replica import TreeDelta

PROTOCOL_VERSION = 3  # a peer with another version is refused
SHAPE_FIELDS = (
    "verify_batch",
    "draft_leaves",
    "draft_steps",
    "verify",
    "proposal",
    "calibration",
    "catch_up",
    "adapt_steps",
)
M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Hashes of a worker's model and tokenizer, as Ping returns them."""

    model: bytes
    tokenizer: bytes


def streams_tree_deltas(shape: EngineConfig) -> bool:
    """Returns whether a draft worker sends tree deltas instead of proposals in a session with the config `shape`."""
    return shape.mode == "async" and shape.proposal != "sample"


def parse_message(kind: type[M], data: bytes) -> M:
    """Parses a protobuf message. Raises ValueError on invalid bytes."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise ValueError(f"{len(data)} bytes are not a valid {kind.DESCRIPTOR.name}") from None


def request_start_to_proto(start: RequestStart, shape: EngineConfig, peer: ModelIdentity) -> pb.Opening:
    """Converts a request start. `shape`: config of its rounds. `peer`: identity that the worker must have, otherwise it
    refuses the request."""
    return pb.Opening(
        protocol=PROTOCOL_VERSION, tokenizer=peer.tokenizer, model=peer.model, request=start.request,
        prompt_len=start.prompt_len, tokens=start.tokens, sampling=pb.Sampling(**_set_fields(start.sampling)),
        shape=pb.Shape(ahead=shape.mode == "async", **_set_values(shape, SHAPE_FIELDS)),
        afresh=start.num_cached_tokens is not None,
    )  # fmt: skip


def request_start_from_proto(message: pb.Opening, own: ModelIdentity) -> tuple[RequestStart, EngineConfig]:
    """Returns the request start and the config of its rounds.

    `own`: identity of this worker.
    Raises UserError if the client expects another protocol version, model or tokenizer, and ValueError if the message
    is invalid.
    """
    if message.protocol != PROTOCOL_VERSION:
        raise UserError(
            f"the worker uses protocol version {PROTOCOL_VERSION}, the client version {message.protocol}:"
            " install the same SwiftSpec version on both"
        )
    if message.tokenizer != own.tokenizer:
        raise UserError("the tokenizers differ: use a worker whose model has the same tokenizer")
    if message.model != own.model:
        raise UserError("the worker's model has changed since the client connected: restart the client")
    count = len(message.tokens)
    if not 1 <= message.prompt_len <= count:
        raise ValueError(f"prompt_len of a request start must lie in 1..{count}, not {message.prompt_len}")
    try:
        values = _values(message.shape, SHAPE_FIELDS)
        shape = EngineConfig(mode="async" if message.shape.ahead else "serial", **values)
        sampling = SamplingParams(**_values(message.sampling, [field.name for field in fields(SamplingParams)]))
        shape.check_request(sampling)
    except UserError as error:
        raise ValueError(str(error)) from None
    kept = (0, 0) if message.afresh else None
    return RequestStart(
        message.request, tuple(message.tokens), sampling, message.prompt_len, num_cached_tokens=kept
    ), shape


def proposal_to_proto(proposal: Proposal) -> pb.Proposal:
    drawn = proposal.draft_probs
    return pb.Proposal(
        request=proposal.request, round=proposal.round, prefix_len=proposal.prefix_len, tokens=proposal.tokens,
        parents=proposal.parents, weights=proposal.weights, sources=proposal.sources,
        drawn=None if drawn is None else pb.Drawn(tokens=drawn.tokens.ravel(), probs=drawn.probs.ravel()),
    )  # fmt: skip


def proposal_from_proto(message: pb.Proposal) -> Proposal:
    tokens, parents, weights = tuple(message.tokens), tuple(message.parents), tuple(message.weights)
    others = len(parents), len(weights), len(message.sources)
    if not tokens or {*others} != {len(tokens)}:
        raise ValueError(f"a proposal has {len(tokens)} tokens, and {others} parents, weights and sources")
    sources = check_nodes(parents, weights, message.sources)
    drawn = _read_drawn(message.drawn, len({*parents[1:]})) if message.HasField("drawn") else None
    return Proposal(message.request, message.round, message.prefix_len, tokens, parents, weights, sources, drawn)


def _read_drawn(message: pb.Drawn, rows: int) -> DraftProbs:
    count = len(message.tokens)
    if rows == 0 or count == 0 or count % rows or len(message.probs) != count:
        raise ValueError(f"{count} tokens and {len(message.probs)} probabilities do not match {rows} distributions")
    tokens = np.array(message.tokens, np.int32).reshape(rows, -1)
    probs = np.array(message.probs, np.float32).reshape(rows, -1)
    if not (np.isfinite(probs).all() and (probs >= 0).all() and (probs > 0).any(-1).all()):
        raise ValueError("a proposal contains an invalid distribution")
    return DraftProbs(tokens, probs)


def delta_to_proto(delta: TreeDelta) -> pb.TreeDelta:
    return pb.TreeDelta(
        request=delta.request, round=delta.round, expansions=delta.expansions, first=delta.first,
        parents=delta.parents.tolist(), tokens=delta.tokens.tolist(), weights=delta.weights.tolist(),
    )  # fmt: skip


def delta_from_proto(message: pb.TreeDelta) -> TreeDelta:
    """Converts a tree delta without validation, since the replica checks whether the delta fits its tree."""
    parents, tokens = np.array(message.parents, np.int64), np.array(message.tokens, np.int64)
    weights = np.array(message.weights, np.float64)
    return TreeDelta(message.request, message.round, message.expansions, message.first, parents, tokens, weights)


def result_to_proto(result: VerifyResult, *, for_client: bool = True) -> pb.VerifyResult:
    """Converts a result. `for_client`: whether to include the fields that only the client of a target worker needs."""
    message = pb.VerifyResult(
        request=result.request, round=result.round, prefix_len=result.prefix_len, path=result.path, tokens=result.tokens
    )
    if for_client:
        message.overlaps.extend(result.overlaps)
        if result.logprobs is not None:
            message.likelihoods.CopyFrom(_logprobs_to_proto(result.logprobs))
        if result.prompt_logprobs is not None:
            message.prompt.CopyFrom(_logprobs_to_proto(result.prompt_logprobs))
    return message


def result_from_proto(message: pb.VerifyResult) -> VerifyResult:
    path, tokens = tuple(message.path), tuple(message.tokens)
    if not path or len(path) != len(tokens):
        raise ValueError(f"a result has {len(path)} nodes and {len(tokens)} tokens")
    likelihoods = _logprobs_from_proto(message.likelihoods) if message.HasField("likelihoods") else None
    prompt = _logprobs_from_proto(message.prompt) if message.HasField("prompt") else None
    if likelihoods is not None and len(likelihoods) != len(tokens):
        raise ValueError(f"a result has {len(likelihoods)} log-probabilities for {len(tokens)} tokens")
    about = message.request, message.round, message.prefix_len
    return VerifyResult(*about, path, tokens, tuple(message.overlaps), likelihoods, prompt)


def check_result(result: VerifyResult, proposal: Proposal) -> None:
    """Raises ValueError unless the result is of the proposal's round, its path is a path of the proposal, and its
    tokens are the tokens of that path."""
    if (result.request, result.round, result.prefix_len) != (proposal.request, proposal.round, proposal.prefix_len):
        raise ValueError(
            f"a result of request {result.request}, round {result.round} at {result.prefix_len} does not match the"
            f" proposal of request {proposal.request}, round {proposal.round} at {proposal.prefix_len}"
        )
    path, parents = result.path, proposal.parents
    inside = path[0] == 0 and 0 <= min(path) <= max(path) < len(parents)
    if not inside or any(parents[b] != a for a, b in pairwise(path)):
        raise ValueError("a result's path is not a path of the proposal")
    if tuple(proposal.tokens[node] for node in path[1:]) != result.tokens[:-1]:
        raise ValueError("a result's tokens do not match its path")


def _logprobs_to_proto(known: Sequence[Logprob]) -> pb.Likelihoods:
    top = [each for one in known for each in one.top]
    return pb.Likelihoods(
        logprobs=[one.logprob for one in known], width=len(known[0].top) if known else 0,
        top_tokens=[token for token, _ in top], top_logprobs=[logprob for _, logprob in top],
    )  # fmt: skip


def _logprobs_from_proto(message: pb.Likelihoods) -> tuple[Logprob, ...]:
    count, width = len(message.logprobs), message.width
    if width < 0 or {len(message.top_tokens), len(message.top_logprobs)} != {count * width}:
        raise ValueError(f"{len(message.top_tokens)} top tokens do not match {count} positions of {width}")
    top = list(zip(message.top_tokens, message.top_logprobs))
    return tuple(Logprob(each, tuple(top[i * width : (i + 1) * width])) for i, each in enumerate(message.logprobs))


def _set_fields(values: object) -> dict[str, Any]:
    return _set_values(values, [field.name for field in fields(values)])  # type: ignore[arg-type]


def _set_values(values: object, names: Sequence[str]) -> dict[str, Any]:
    """Returns the attributes of `values` with these names, without attributes that are None."""
    return {name: value for name in names if (value := getattr(values, name)) is not None}


def _values(message: Message, names: Sequence[str]) -> dict[str, Any]:
    """Returns the fields of a message with these names, as values for a dataclass. An optional field that is not set is
    None."""
    found: dict[str, Any] = {}
    for name in names:
        field, value = message.DESCRIPTOR.fields_by_name[name], getattr(message, name)
        if field.is_repeated:
            value = dict(value) if field.message_type is not None else tuple(value)
        elif field.has_presence and not message.HasField(name):
            value = None
        found[name] = value
    return found
