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
from swiftspec.observe.rpc_latency import Hop
from swiftspec.observe.trace_format import DIGITS, Record

FORBIDDEN = -9999.0  # in place of the logarithm of 0: a filter forbids this node

Forward = tuple[float, float, int]  # begin, end, rows
Grown = tuple[bytes, int, list[Forward]]  # `DraftTree.state`; tokens before it in the draft's cache; what has run


@dataclass(slots=True)
class Round:
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
    draft: tuple[Grown, Grown] | Callable[[], Record] | None
    hops: Sequence[Hop] = ()

    def line(self) -> Record:
        """Its line. A lane that makes no sense is left out."""
        proposal, times, first = self.proposal, self.times, self.proposal.round == 0
        began, proposed, grown, verified, _ = times[-5:]
        nodes: Record = {"tokens": proposal.tokens, "parents": proposal.parents}
        if self.p is not None:
            nodes["p"] = [None, *(round(value, DIGITS) for value in self.p)]
        line: Record = {"request": proposal.request, "round": proposal.round}
        line |= {"wait": (began, proposed)} if self.asked else {}
        line |= {"proposal": nodes, "path": self.result.path, "tokens": self.result.tokens}
        read = {"open": (times[1], times[2])} if first else {}
        line["target"] = {**read, "verify": (grown, verified), "forward": self.forward}
        if callable(self.draft):
            with suppress(ValueError):
                line["draft"] = self.draft()
        elif self.draft is not None:
            line["draft"] = lane_of(*self.draft, first, times[:2], times[-5:-2])
        if self.hops:
            line["workers"] = [hop.line() for hop in self.hops]
        return line


Noted = Record | Round


def opened(noted: Noted) -> Record:
    """The line of what was noted."""
    return noted.line() if isinstance(noted, Round) else noted


def lane_of(grown: Grown, before: Grown, first: bool, times: Sequence[float], growth: Sequence[float]) -> Record:
    """What the draft's lane says of a round. `times`: begin and end of reading the prompt, in the `first` one, else of
    taking the result before; `growth`: when it was asked for a proposal, when that was there, when the tree had grown.
    """
    (state, prefix, forwards), (began, proposed, ended) = grown, growth
    (count, expanded), (_, known) = sizes_of(state), sizes_of(before[0])
    computed = sum(rows for _, _, rows in forwards)
    wasted = max(before[1] + known + computed - prefix - expanded, 0)  # KV is kept or computed, nothing else
    spans = {"open" if first else "observe": tuple(times), "propose": (began, proposed), "grow": (proposed, ended)}
    counts = {"nodes": count, "expanded": expanded, "reused": known - wasted, "wasted": wasted}
    return {**spans, "forwards": forwards, **counts, "tree": tree_of(state)}


def sizes_of(state: bytes) -> tuple[int, int]:
    """Nodes of a tree, and how many of them are expanded."""
    nodes, expanded = np.frombuffer(state, np.int64, 2).tolist()
    return nodes, expanded


def tree_of(state: bytes) -> dict[str, NDArray[Any]]:
    """tokens, parents, logprobs and expanded, as a line has them."""
    nodes, expanded = sizes_of(state)
    tokens, parents, slots, bits = np.frombuffer(state, np.int64)[2:].reshape(4, -1)[:, :nodes]
    logprobs = np.maximum(bits.view(np.float64), FORBIDDEN).astype(np.float32)
    above = parents.astype(np.int32)
    above[0] = -1
    return {"tokens": tokens.astype(np.int32), "parents": above, "logprobs": logprobs, "expanded": slots < expanded}
