"""Suffix lookup (prompt lookup decoding): a drafter without a model, which proposes continuations of earlier
occurrences of the latest tokens."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import accumulate, takewhile
from math import exp

from swiftspec.backends.cpu.suffix_index import MAX_MATCH_TOKENS, NativeSuffixIndex
from swiftspec.messages import NodeSource, Proposal, RequestStart, VerifyResult
from swiftspec.tree.match_acceptance import MatchAcceptance

MEMORY_TOKENS = 1 << 16  # prompts and outputs of recent requests, at least one context, in which matches are searched
# Time of each further row of a verification relative to that of one row, where it is not measured.
ROW_COST = 0.1
MIN_GAIN_FACTOR = 1.04  # nodes are verified only if the round's predicted tokens per second rise by this factor


def default_row_seconds(max_nodes: int) -> list[float]:
    """Returns the times of verifications of 1 to `max_nodes` nodes, in units of the first."""
    return [1 + ROW_COST * more for more in range(max_nodes)]


class SuffixDrafter:
    """Drafter that proposes continuations of earlier occurrences of the latest tokens, in the text of the request and
    in those of recent requests.

    The weight of a node is its predicted acceptance: that measured for matches of its length in this process, times the
    share of the occurrences that continue with its token. The proposal has the number of nodes with the most predicted
    tokens per second; it may be the root alone.
    """

    busy = 0.0  # there is no draft model
    lost_reason = None
    draft_steps = 0

    def __init__(self, max_nodes: int, max_model_len: int, row_seconds: Sequence[float] | None = None) -> None:
        """`max_nodes`: largest bs. `max_model_len`: tokens of the longest text. `row_seconds`: seconds of verifications
        of 1 to `max_nodes` nodes; None: not measured."""
        self._index, self._max_model_len = NativeSuffixIndex(max(MEMORY_TOKENS, max_model_len)), max_model_len
        self.acceptance = MatchAcceptance(MAX_MATCH_TOKENS)
        self._max_nodes = max_nodes
        self._text: list[int] = []  # the latest text
        self._set_aside: tuple[NativeSuffixIndex, list[int]] | None = None  # during a request without `suffix_memory`
        self._row_seconds = default_row_seconds(max_nodes) if row_seconds is None else list(row_seconds)

    def row_seconds(self, nodes: int) -> float:
        """Returns the time of a verification of `nodes` nodes, in seconds if they were measured, and otherwise in units
        of that of one node."""
        return self._row_seconds[nodes - 1]

    def set_row_seconds(self, at: Callable[[int], float]) -> None:
        """Sets the times of verifications. `at`: returns that of a number of nodes."""
        self._row_seconds = [at(nodes) for nodes in range(1, self._max_nodes + 1)]

    def open(self, start: RequestStart) -> None:
        if self._set_aside is not None:
            self._index, self._text = self._set_aside
            self._set_aside = None
        if not start.sampling.suffix_memory:
            self._set_aside = self._index, self._text
            self._index, self._text = NativeSuffixIndex(self._max_model_len), []
        self._nodes = min(start.sampling.verify_batch or self._max_nodes, self._max_nodes)
        self._root = start.request, 0, len(start.tokens) - 1, start.tokens[-1]
        self._proposal: Proposal | None = None
        self._matches: list[tuple[int, float]] = []  # match length and share of each node of the proposal
        self._begin_text(start.tokens)

    def propose(self) -> Proposal:
        tokens, parents, lengths, shares, weights = (
            self._index.query(self._nodes - 1, self.acceptance.table) if self._nodes > 1 else ([], [], [], [], [])
        )
        count = self.best_count(weights)
        self._matches = [*zip(lengths[:count], shares[:count], strict=True)]
        request, round_, at, root = self._root
        self._proposal = Proposal(
            request=request,
            round=round_,
            prefix_len=at,
            tokens=(root, *tokens[:count]),
            parents=(-1, *parents[:count]),
            weights=(0.0, *weights[:count]),
            sources=(NodeSource.ROOT, *(NodeSource.SUFFIX,) * count),
        )
        return self._proposal

    def grow(self) -> None:
        pass

    def observe(self, result: VerifyResult) -> None:
        if self._proposal is not None:
            self._measure(self._proposal, result)
            self._proposal = None
        self._index.append(result.tokens)
        self._text += result.tokens
        at = result.prefix_len + len(result.tokens)
        self._root = result.request, result.round + 1, at, result.tokens[-1]

    def close(self) -> None:
        pass

    def _begin_text(self, tokens: Sequence[int]) -> None:
        """Appends the text of a request, without the part that the latest text begins with, too, as in a conversation:
        that part is in the index. Its last tokens are repeated, because matches do not cross the border of a text."""
        shared = sum(1 for _ in takewhile(bool, map(operator.eq, tokens, self._text)))
        self._index.begin_text()
        self._index.append(tokens[max(shared - MAX_MATCH_TOKENS, 0) :])
        self._text = list(tokens)

    def best_count(self, weights: Sequence[float], least: int = 0) -> int:
        """Returns the number of leading nodes with the most predicted tokens per second, at most bs - 1; `least` unless
        more nodes bring a gain. `weights`: of all nodes but the root, descending."""
        tokens = accumulate(map(exp, weights), initial=1.0)
        speeds = [expected / time for expected, time in zip(tokens, self._row_seconds[: self._nodes], strict=False)]
        least = min(least, len(speeds) - 1)
        best = max(range(least, len(speeds)), key=speeds.__getitem__)
        return best if speeds[best] > MIN_GAIN_FACTOR * speeds[least] else least

    def _measure(self, proposal: Proposal, result: VerifyResult) -> None:
        """Counts which of the nodes were accepted whose parent was. The last token of the result has no successor yet,
        so that the children of its node are not counted."""
        path = (0, *proposal.match_path(result.tokens))
        followed = {*path[: len(result.tokens)]}
        for node, (length, share) in enumerate(self._matches, 1):
            if proposal.parents[node] in followed:
                self.acceptance.add(length, share, accepted=node in path)
