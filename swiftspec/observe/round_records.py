"""Records of rounds as they are taken during decoding, where time is short, and their conversion to trace lines, which
is done later, outside the critical path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftspec.messages import Proposal, VerifyResult
from swiftspec.observe.rpc_latency import RpcRecord
from swiftspec.observe.trace_format import LOGPROB_DIGITS, Record

MIN_LOGPROB = -9999.0  # instead of log 0, for a node that a filter forbids

ForwardSpan = tuple[float, float, int]  # begin, end, rows
DraftSnapshot = tuple[bytes, int, list[ForwardSpan]]  # `DraftTree.state`, prefix length of the draft's cache, forwards


@dataclass(slots=True)
class RoundRecord:
    """A round as recorded on rank 0.

    `times`: times of the loop's events: how the request opened (opening, drafter opened, opened), or the end of the
    previous round (verified, observed, settled, taken); then proposed, grown, verified and observed.
    `asked`: whether the drafter took part.
    `draft`: for a draft in this process its tree, now and one round before; for another one a function that reads its
    timeline and may raise ValueError.
    `rpcs`: RPCs with workers since the previous round.
    """

    proposal: Proposal
    result: VerifyResult
    times: list[float]
    asked: bool
    forward: float  # seconds in the target
    p: Sequence[float] | None  # target probabilities of all nodes but the root
    draft: tuple[DraftSnapshot, DraftSnapshot] | Callable[[], Record] | None
    rpcs: Sequence[RpcRecord] = ()

    def line(self) -> Record:
        """Its trace line. An invalid draft timeline is omitted."""
        proposal, times, first = self.proposal, self.times, self.proposal.round == 0
        began, proposed, grown, verified, _ = times[-5:]
        nodes: Record = {"tokens": proposal.tokens, "parents": proposal.parents}
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
    """The trace line of an entry."""
    return entry.line() if isinstance(entry, RoundRecord) else entry


def draft_timeline(
    grown: DraftSnapshot, before: DraftSnapshot, first: bool, times: Sequence[float], growth: Sequence[float]
) -> Record:
    """The draft's timeline of a round.

    `times`: begin and end of the prefill, in the `first` round, otherwise of processing the previous result.
    `growth`: when a proposal was requested, when it was ready, when the tree had been expanded.
    """
    (state, prefix, forwards), (began, proposed, ended) = grown, growth
    (count, expanded), (_, known) = tree_sizes(state), tree_sizes(before[0])
    computed = sum(rows for _, _, rows in forwards)
    wasted = max(before[1] + known + computed - prefix - expanded, 0)  # KV is either reused or computed
    spans = {"open" if first else "observe": tuple(times), "propose": (began, proposed), "grow": (proposed, ended)}
    counts = {"nodes": count, "expanded": expanded, "reused": known - wasted, "wasted": wasted}
    return {**spans, "forwards": forwards, **counts, "tree": tree_record(state)}


def tree_sizes(state: bytes) -> tuple[int, int]:
    """The number of nodes of a tree, and of its expanded nodes."""
    nodes, expanded = np.frombuffer(state, np.int64, 2).tolist()
    return nodes, expanded


def tree_record(state: bytes) -> dict[str, NDArray[Any]]:
    """tokens, parents, logprobs and expanded flags, as in a trace line."""
    nodes, expanded = tree_sizes(state)
    tokens, parents, slots, bits = np.frombuffer(state, np.int64)[2:].reshape(4, -1)[:, :nodes]
    logprobs = np.maximum(bits.view(np.float64), MIN_LOGPROB).astype(np.float32)
    above = parents.astype(np.int32)
    above[0] = -1
    return {"tokens": tokens.astype(np.int32), "parents": above, "logprobs": logprobs, "expanded": slots < expanded}
