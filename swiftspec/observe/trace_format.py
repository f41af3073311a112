"""Format of the lines of a trace, in a file or as server-sent events. docs/reference/trace.md documents the fields.

A `RoundRecord` is taken on the critical path of decoding, so its conversion to a line is left for later. A line may
contain NumPy arrays, which `to_json` converts to lists when it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from swiftspec.messages import Proposal, VerifyResult
from swiftspec.observe.rpc_latency import RpcRecord
from swiftspec.params import SamplingParams

Record = dict[str, Any]
TRACE_VERSION = 1
LOGPROB_DIGITS = 5  # decimals of probabilities and log-probabilities
MIN_LOGPROB = -9999.0  # replaces -inf, the log-probability of a node that a filter forbids

ForwardSpan = tuple[float, float, int]  # begin, end, rows
DraftSnapshot = tuple[bytes, int, list[ForwardSpan]]  # `DraftTree.state`, prefix length of the draft's cache, forwards


def trace_header(facts: Record) -> Record:
    """Returns the first line of a trace. `facts`: its fields except the version."""
    return {"swiftspec_trace": TRACE_VERSION, **facts}


def non_default_fields(sampling: SamplingParams) -> Record:
    """Returns the sampling parameters that differ from their defaults."""
    usual = SamplingParams()
    values = {field.name: getattr(sampling, field.name) for field in fields(sampling)}
    return {name: value for name, value in values.items() if value != getattr(usual, name)}


@dataclass(slots=True)
class RoundRecord:
    """A round as recorded on rank 0.

    `times`: `perf_counter` times of events of the decoding loop. In round 0 they are opening, drafter opened, opened;
    in later rounds verified, observed, settled, taken of the previous round. Then follow proposed, grown, verified,
    observed of this round.
    `asked`: whether the drafter was asked for the proposal. False in rounds without the draft, except in mode ar, where
    it is always true.
    `draft`: the draft's timeline, or None if there is none. For a draft in this process: its snapshots after this round
    and the previous one. For a draft in another process: a function that decodes the timeline, and raises ValueError if
    it is invalid.
    `rpcs`: RPCs with workers since the previous round.
    """

    proposal: Proposal
    result: VerifyResult
    times: list[float]
    asked: bool
    forward: float  # seconds that the target spent in forwards
    p: Sequence[float] | None  # the target's probability of each node except the root
    draft: tuple[DraftSnapshot, DraftSnapshot] | Callable[[], Record] | None
    rpcs: Sequence[RpcRecord] = ()

    def line(self) -> Record:
        """Returns the trace line of the round. Omits an invalid draft timeline."""
        proposal, times, first = self.proposal, self.times, self.proposal.round == 0
        began, proposed, grown, verified, _ = times[-5:]
        sources = [source.label for source in proposal.sources]
        nodes: Record = {"tokens": proposal.tokens, "parents": proposal.parents, "sources": sources}
        if self.p is not None:
            nodes["p"] = [None, *(round(value, LOGPROB_DIGITS) for value in self.p)]
        line: Record = {"request": proposal.request, "round": proposal.round}
        line |= {"wait": (began, proposed)} if self.asked else {}
        line |= {"proposal": nodes, "path": self.result.path, "tokens": self.result.tokens}
        read = {"open": (times[1], times[2])} if first else {}
        line["target"] = {**read, "verify": (grown, verified), "forward": self.forward}
        if callable(self.draft):
            with suppress(ValueError):
                line["draft"] = self.draft()
        elif self.draft is not None:
            line["draft"] = draft_timeline(*self.draft, first, times[:2], times[-5:-2])
        if self.rpcs:
            line["workers"] = [rpc.line() for rpc in self.rpcs]
        return line


TraceEntry = Record | RoundRecord


def to_record(entry: TraceEntry) -> Record:
    """Returns the trace line of an entry."""
    return entry.line() if isinstance(entry, RoundRecord) else entry


def draft_timeline(
    grown: DraftSnapshot, before: DraftSnapshot, first: bool, times: Sequence[float], growth: Sequence[float]
) -> Record:
    """Returns the draft's timeline of a round, as in a trace line.

    `grown`, `before`: snapshots after the expansions of this round and of the previous one.
    `first`: whether this is round 0.
    `times`: begin and end of the prefill in round 0, and of processing the previous result in later rounds.
    `growth`: times when a proposal was requested, when it was ready, and when the expansions had ended.
    """
    (state, prefix, forwards), (began, proposed, ended) = grown, growth
    (count, expanded), (_, known) = tree_sizes(state), tree_sizes(before[0])
    computed = sum(rows for _, _, rows in forwards)
    # KV is either reused or computed; rows that are not nodes, such as those of a block head, do not count
    wasted = min(max(before[1] + known + computed - prefix - expanded, 0), known)
    spans = {"open" if first else "observe": tuple(times), "propose": (began, proposed), "grow": (proposed, ended)}
    counts = {"nodes": count, "expanded": expanded, "reused": known - wasted, "wasted": wasted}
    return {**spans, "forwards": forwards, **counts, "tree": tree_record(state)}


def tree_sizes(state: bytes) -> tuple[int, int]:
    """Returns (number of nodes, number of expanded nodes) of a tree. `state`: the bytes of `DraftTree.state`."""
    nodes, expanded = np.frombuffer(state, np.int64, 2).tolist()
    return nodes, expanded


def tree_record(state: bytes) -> dict[str, NDArray[Any]]:
    """Returns field `tree` of a trace line: tokens, parents, log-probabilities and expanded flags of all nodes.

    `state`: the bytes of `DraftTree.state`.
    """
    nodes, expanded = tree_sizes(state)
    tokens, parents, slots, bits = np.frombuffer(state, np.int64)[2:].reshape(4, -1)[:, :nodes]
    logprobs = np.maximum(bits.view(np.float64), MIN_LOGPROB).astype(np.float32)
    above = parents.astype(np.int32)
    above[0] = -1
    return {"tokens": tokens.astype(np.int32), "parents": above, "logprobs": logprobs, "expanded": slots < expanded}


def to_json(value: Any) -> Any:
    """Converts an array to a list, as the `default` function of a JSON encoder. Raises TypeError on another object."""
    if not isinstance(value, np.ndarray):
        raise TypeError(f"object of type {type(value).__name__} is not JSON serialisable")
    if value.dtype.kind == "f":
        return np.round(value.astype(np.float64), LOGPROB_DIGITS).tolist()
    return value.astype(np.int64).tolist()


def tokens_in(line: Record) -> set[int]:
    """Returns all token ids in a line."""
    found = set(line.get("tokens", ()))
    found.update(line.get("begin", {}).get("prompt", ()), line.get("proposal", {}).get("tokens", ()))
    tree = line.get("draft", {}).get("tree")
    if tree is not None:
        found.update(tree["tokens"].tolist())
    return found


class TokenText(NamedTuple):
    """What a trace contains about a token: its text; its bytes if they are not whole characters, else None; whether it
    is special, so that the text of an answer leaves it out."""

    text: str
    data: bytes | None = None
    special: bool = False


def text_fields(tokens: Mapping[int, TokenText]) -> Record:
    """Returns the fields `texts`, `bytes` and `special` of a line, of which empty ones are left out."""
    named = {
        "texts": {str(token): found.text for token, found in tokens.items()},
        "bytes": {str(token): found.data.hex() for token, found in tokens.items() if found.data is not None},
        "special": [token for token, found in tokens.items() if found.special],
    }
    return {name: value for name, value in named.items() if value}


class TokenTexts:
    """Makes the fields of `text_fields` for trace lines, so that each token is written once."""

    def __init__(self) -> None:
        self._given: set[int] = set()

    def new(self, line: Record, token_text: Callable[[int], TokenText]) -> Record:
        """Returns the fields for the tokens that no earlier line contains; no field if there are none."""
        missing = sorted(tokens_in(line) - self._given)
        self._given.update(missing)
        return text_fields({token: token_text(token) for token in missing})
