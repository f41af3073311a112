"""Rounds as they are noted in the midst of decoding, where there is time for no more than that, and their lines, which
are made by whoever has time."""

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

MIN_LOGPROB = -9999.0  # in place of the logarithm of 0: a filter forbids this node

ForwardSpan = tuple[float, float, int]  # begin, end, rows
DraftSnapshot = tuple[
    bytes, int, list[ForwardSpan]
]  # `DraftTree.state`; tokens before it in the draft's cache; what has run


@dataclass(slots=True)
class RoundRecord:
    """A round as it is noted on rank 0.

    `times`, of the loop's events: how the request opened (opening, drafter opened, opened), or the end of the round
    before (verified, observed, settled, taken); then proposed, grown, verified and observed. `asked`: the drafter was.
    `draft`: of a draft in this process its tree, and as it was a round before; of another what reads its lane, and may
    raise ValueError. `hops`: exchanges with workers since the round before.
    """

    proposal: Proposal
    result: VerifyResult
    times: list[float]
    asked: bool
    forward: float  # seconds in the target
    p: Sequence[float] | None  # the target's, of all nodes but the root
    draft: tuple[DraftSnapshot, DraftSnapshot] | Callable[[], Record] | None
    hops: Sequence[RpcRecord] = ()

    def line(self) -> Record:
        """Its line. A lane that makes no sense is left out."""
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
        if self.hops:
            line["workers"] = [hop.line() for hop in self.hops]
        return line


TraceEntry = Record | RoundRecord


def to_record(entry: TraceEntry) -> Record:
    """The line of what was noted."""
    return entry.line() if isinstance(entry, RoundRecord) else entry


def draft_timeline(
    grown: DraftSnapshot, before: DraftSnapshot, first: bool, times: Sequence[float], growth: Sequence[float]
) -> Record:
    """What the draft's lane says of a round. `times`: begin and end of reading the prompt, in the `first` one, else of
    taking the result before; `growth`: when it was asked for a proposal, when that was there, when the tree had grown.
    """
    (state, prefix, forwards), (began, proposed, ended) = grown, growth
    (count, expanded), (_, known) = tree_sizes(state), tree_sizes(before[0])
    computed = sum(rows for _, _, rows in forwards)
    wasted = max(before[1] + known + computed - prefix - expanded, 0)  # KV is kept or computed, nothing else
    spans = {"open" if first else "observe": tuple(times), "propose": (began, proposed), "grow": (proposed, ended)}
    counts = {"nodes": count, "expanded": expanded, "reused": known - wasted, "wasted": wasted}
    return {**spans, "forwards": forwards, **counts, "tree": tree_record(state)}


def tree_sizes(state: bytes) -> tuple[int, int]:
    """Nodes of a tree, and how many of them are expanded."""
    nodes, expanded = np.frombuffer(state, np.int64, 2).tolist()
    return nodes, expanded


def tree_record(state: bytes) -> dict[str, NDArray[Any]]:
    """tokens, parents, logprobs and expanded, as a line has them."""
    nodes, expanded = tree_sizes(state)
    tokens, parents, slots, bits = np.frombuffer(state, np.int64)[2:].reshape(4, -1)[:, :nodes]
    logprobs = np.maximum(bits.view(np.float64), MIN_LOGPROB).astype(np.float32)
    above = parents.astype(np.int32)
    above[0] = -1
    return {"tokens": tokens.astype(np.int32), "parents": above, "logprobs": logprobs, "expanded": slots < expanded}
