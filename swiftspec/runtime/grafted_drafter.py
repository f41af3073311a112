"""Grafting: suffix lookup adds its continuations to the proposals of a drafter with a model."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from math import exp
from statistics import fmean, median

from swiftspec.messages import Proposal, RequestStart, VerifyResult, merge_results
from swiftspec.runtime.drafter import Drafter
from swiftspec.runtime.suffix_drafter import SuffixDrafter
from swiftspec.tree.merged_proposal import merge_proposals

WINDOW_ROUNDS = 8  # rounds with the model whose times and tokens predict the next ones
MIN_GAIN_FACTOR = 1.1  # the model is skipped only if the predicted tokens per second rise by this factor


class GraftedDrafter:
    """Drafter that merges the proposals of another drafter with those of suffix lookup, by weight.

    A round in which suffix lookup alone is predicted to give more tokens per second skips the other drafter, which
    receives the results of such rounds as one merged result before its next proposal. This makes the time of its
    forwards zero while the text repeats an earlier one. In a request that sets bs or d the other drafter proposes
    alone, so that the rounds depend neither on the clock nor on earlier requests.
    """

    def __init__(
        self,
        drafter: Drafter,
        suffix: SuffixDrafter,
        *,
        may_skip: bool,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`may_skip`: whether rounds can skip `drafter`; a draft that expands during the verifications should not be.
        `on_change`: called before `drafter` observes a result that its own proposal did not determine. `clock`: returns
        the time in seconds."""
        self._drafter, self._suffix = drafter, suffix
        self._may_skip, self._on_change, self._clock = may_skip, on_change, clock
        # of the latest rounds with the model: seconds of its proposal, seconds of the verification divided by the time
        # of its rows, and tokens
        self._draft_s, self._verify_s = deque[float](maxlen=WINDOW_ROUNDS), deque[float](maxlen=WINDOW_ROUNDS)
        self._tokens = deque[int](maxlen=WINDOW_ROUNDS)
        self._model_nodes = 1  # of the latest proposal of the model

    @property
    def busy(self) -> float:
        return self._drafter.busy

    def open(self, start: RequestStart) -> None:
        self._missed: list[VerifyResult] = []  # results that the skipped drafter has not received
        self._grafts = not start.sampling.sets_shape
        self._suffix.open(start)
        self._drafter.open(start)

    def propose(self) -> Proposal:
        if not self._grafts:
            return self._drafter.propose()
        found = self._suffix.propose()
        self._own: Proposal | None = None  # the proposal of the drafter; None: it was skipped
        self._proposal = found
        if not self._skips_model(found):
            began = self._clock()
            self._catch_up()
            self._own = self._drafter.propose()
            self._draft_s.append(self._clock() - began)
            self._proposal = self._merge(self._own, found)
        self._proposed = self._clock()
        return self._proposal

    def grow(self) -> None:
        if not self._grafts or self._own is not None:
            self._drafter.grow()

    def observe(self, result: VerifyResult) -> None:
        if not self._grafts:
            self._suffix.observe(result)
            self._drafter.observe(result)
            return
        seconds = self._clock() - self._proposed
        self._suffix.observe(result)
        if self._own is None:
            self._missed.append(result)
            return
        self._verify_s.append(seconds / self._suffix.row_seconds(len(self._proposal.tokens)))
        self._tokens.append(len(result.tokens))
        if self._proposal is not self._own:
            self._on_change()
        self._drafter.observe(result)

    def close(self) -> None:
        self._suffix.close()
        self._drafter.close()

    def _catch_up(self) -> None:
        if self._missed:
            self._on_change()
            self._drafter.observe(merge_results(self._missed))
            self._missed.clear()

    def _skips_model(self, found: Proposal) -> bool:
        """Returns whether a round with the proposal `found` of suffix lookup is predicted to be faster than one with
        the model, too. In the latter the model adds tokens if the first token of suffix lookup is wrong."""
        if not (self._may_skip and self._tokens and len(found.tokens) > 1):
            return False
        chances = [exp(weight) for weight in found.weights]
        tokens, verify = sum(chances), median(self._verify_s)
        alone = tokens / (verify * self._suffix.row_seconds(len(chances)))
        with_model = tokens + (1 - chances[1]) * (fmean(self._tokens) - 1)
        rows = self._suffix.row_seconds(max(len(chances), self._model_nodes))
        return alone > MIN_GAIN_FACTOR * with_model / (verify * rows + median(self._draft_s))

    def _merge(self, own: Proposal, found: Proposal) -> Proposal:
        """Returns a proposal of the nodes of both with the largest weights: at least as many as `own` has, and more if
        that raises the predicted tokens per second."""
        self._model_nodes = len(own.tokens)
        if len(found.tokens) == 1 or own.draft_probs is not None:
            return own
        return merge_proposals(own, found, lambda weights: self._suffix.best_count(weights, len(own.tokens) - 1))
