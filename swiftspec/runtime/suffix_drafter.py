"""Suffix lookup (prompt lookup decoding): a drafter without a model, which proposes continuations of earlier
occurrences of the latest tokens."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, takewhile
from math import exp

from swiftspec.backends.cpu.suffix_index import MAX_MATCH_TOKENS, NativeSuffixIndex
from swiftspec.messages import NodeSource, Proposal, RequestStart, VerifyResult
from swiftspec.runtime.row_budget import MIN_GAIN_FACTOR, RowBudget, default_row_seconds
from swiftspec.tree.match_acceptance import MatchAcceptance

MEMORY_TOKENS = 1 << 16  # prompts and outputs of recent requests, at least one context, in which matches are searched


class SharedLookup:
    """What the suffix lookups of concurrent requests share, so that each knows as much as one that had decoded all
    requests: the measured acceptance, the texts of ended requests and the row budget."""

    def __init__(self, budget: RowBudget) -> None:
        self.budget, self.acceptance = budget, MatchAcceptance(MAX_MATCH_TOKENS)
        self._texts = deque[tuple[SuffixDrafter, list[int]]]()  # of ended requests, and who has decoded them
        self._ended = self._tokens = 0  # number of ended requests; tokens of `_texts`

    def add(self, owner: SuffixDrafter, text: list[int]) -> None:
        """Adds the text of a request that has ended."""
        self._texts.append((owner, text))
        self._ended += 1
        self._tokens += len(text)
        while self._tokens > MEMORY_TOKENS and len(self._texts) > 1:
            self._tokens -= len(self._texts.popleft()[1])

    def texts_after(self, seen: int, owner: SuffixDrafter) -> tuple[int, list[list[int]]]:
        """Returns the number of ended requests, and the kept texts of others than `owner` after the first `seen`."""
        first = self._ended - len(self._texts)
        later = enumerate(self._texts, first)
        return self._ended, [text for number, (by, text) in later if number >= seen and by is not owner]


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

    def __init__(
        self,
        max_nodes: int,
        max_model_len: int,
        row_seconds: Sequence[float] | None = None,
        shared: SharedLookup | None = None,
    ) -> None:
        """`max_nodes`: largest bs. `max_model_len`: tokens of the longest text. `row_seconds`: seconds of verifications
        of 1 to `max_nodes` nodes; None: not measured. `shared`: with the drafters of concurrent requests; None: there
        are none."""
        self._index, self._max_model_len = NativeSuffixIndex(max(MEMORY_TOKENS, max_model_len)), max_model_len
        self.acceptance = MatchAcceptance(MAX_MATCH_TOKENS) if shared is None else shared.acceptance
        self._shared = shared
        self._seen = 0  # number of ended requests in `shared` whose texts the index has, as far as they were kept
        self._max_nodes = max_nodes
        self._text: list[int] = []  # the latest text
        self._set_aside: tuple[NativeSuffixIndex, list[int]] | None = None  # during a request without `suffix_memory`
        if row_seconds is None:
            self.set_row_seconds(default_row_seconds)
        else:
            self._row_seconds = list(row_seconds)

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
        if self._shared is not None:
            self._seen, texts = self._shared.texts_after(self._seen, self)
            for text in texts:
                self._begin_text(text)
        if not start.sampling.suffix_memory:
            self._set_aside = self._index, self._text
            self._index, self._text = NativeSuffixIndex(self._max_model_len), []
        self._nodes = min(start.sampling.verify_batch or self._max_nodes, self._max_nodes)
        self._root = start.request, 0, len(start.tokens) - 1, start.tokens[-1]
        self._proposal: Proposal | None = None
        self._matches: list[tuple[int, float]] = []  # match length and share of each node of the proposal
        self._begin_text(start.tokens)

    @property
    def joint(self) -> bool:
        """Whether the rows are chosen together with those of other requests."""
        return self._shared is not None and self._shared.budget.joint

    def propose(self) -> Proposal:
        self.find()
        return self.share()

    def find(self) -> Proposal:
        """Returns the nodes that would be verified if the row budget did not depend on other proposals."""
        self._found = (
            self._index.query(self._nodes - 1, self.acceptance.table) if self._nodes > 1 else ([], [], [], [], [])
        )
        _, _, lengths, shares, weights = self._found
        best = self.best_count(weights)
        count = len(weights) if self.joint else best
        self._matches = [*zip(lengths[:count], shares[:count], strict=True)]
        self.candidates = self._proposal = self._leading(count)
        return self.candidates if count == best else self._leading(best)

    def share(self) -> Proposal:
        """Returns the part of the last `candidates` that is verified."""
        if not self.joint:
            return self.candidates
        return self._leading(self.num_verified(self.candidates.weights[1:]))

    def num_verified(self, weights: Sequence[float], least: int = 0) -> int:
        """Returns the number of leading nodes of a proposal that are verified: by the row budget if other requests
        run, otherwise `best_count`. Parameters as there."""
        if self._shared is None or not self.joint:
            return self.best_count(weights, least)
        return self._shared.budget.share(weights[: self._nodes - 1], least)

    def _leading(self, count: int) -> Proposal:
        """Returns a proposal of the first `count` nodes that were found."""
        tokens, parents, _, _, weights = self._found
        request, round_, at, root = self._root
        return Proposal(
            request=request,
            round=round_,
            prefix_len=at,
            tokens=(root, *tokens[:count]),
            parents=(-1, *parents[:count]),
            weights=(0.0, *weights[:count]),
            sources=(NodeSource.ROOT, *(NodeSource.SUFFIX,) * count),
        )

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
        if self._shared is not None and self._set_aside is None:
            self._shared.add(self, self._text)

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
