"""Controller around a drafter: measures its rounds, applies the decisions of the policy, and grafts suffix lookup."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import exp, inf
from statistics import fmean, median
from typing import NamedTuple

from swiftspec.control import policy
from swiftspec.control.draft_budget import GREEDY, kind_of
from swiftspec.control.round_stats import Decision, RoundSample, RoundStats
from swiftspec.control.step_times import SteppedDrafter
from swiftspec.messages import Proposal, RequestStart, VerifyResult, merge_results
from swiftspec.params import SamplingParams
from swiftspec.runtime.drafter import DrafterWrapper, NoDrafter
from swiftspec.runtime.suffix_drafter import SuffixDrafter
from swiftspec.tree.merged_proposal import merge_proposals

SKIPPED_ROUNDS = 2  # rounds after a change that are not measured: caches are cold, and the draft may have to catch up
DRAFT_ROUNDS = 8  # rounds with the draft whose times and tokens predict the next ones
# Multiple of the usual duration that the budget charges for a single slow round, because other load can prolong it
SLOW_ROUND_FACTOR = 2.0
MIN_GAIN_FACTOR = 1.1  # suffix lookup alone proposes only if the predicted tokens per second rise by this factor


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """Decisions made in one request, and the latest measurements. Times are in seconds; None: not measured. An
    autoregressive round that was not measured is predicted from row times, if they are known."""

    steps: int  # d of speculative rounds at the end of the request
    nodes: int  # bs of speculative rounds at the end of the request
    ar_rounds: int  # rounds of the request without the draft
    changes: tuple[tuple[int, Decision], ...]  # per change: the first round that it applies to, and the decision
    speculative_round_time: float | None
    ar_round_time: float | None
    break_even: float | None  # tokens per round at which speculation is as fast as autoregressive rounds
    speedup: float | None  # tokens per second of speculative rounds, relative to autoregressive rounds


@dataclass(slots=True)
class _Round:
    """The current round. Times are of the clock, in seconds."""

    began: float
    found: Proposal | None = None  # by suffix lookup
    own: Proposal | None = None  # by the draft, before it is cut to bs; None: the round is without the draft
    proposal: Proposal | None = None  # what is verified
    proposed: float = 0.0
    draft: float = 0.0  # seconds in the draft's forwards
    caught_up: bool = False  # whether the draft first received rounds that it had missed


class _DraftRound(NamedTuple):
    """What `Controller._skips_draft` needs of a recent round with the draft."""

    draft: float  # seconds of its proposal
    row: float  # seconds of its verification, in proportion to that of one row
    tokens: int


class Controller(DrafterWrapper[SteppedDrafter]):
    """Drafter that decides in each round whether an inner drafter proposes, with which d and bs, and grafts suffix
    lookup on it.

    Rounds without the inner drafter propose what suffix lookup finds, or only the root. Before its next round it
    receives them as one merged result; a request that begins without it is opened on it then, so that its prompt is
    not prefilled in vain. A proposal of both merges them by weight. A round in which suffix lookup alone is predicted
    to give more tokens per second skips the inner drafter. In a request that sets bs or d the inner drafter proposes
    alone, so that the rounds depend neither on the clock nor on earlier requests.

    The controller runs on rank 0, because only rank 0 reads a clock. A smaller bs reaches the other ranks as a smaller
    proposal, an autoregressive round as a root-only proposal, and d as the drafter's `draft_steps`.
    """

    def __init__(
        self,
        drafter: SteppedDrafter,
        stats_of: Callable[[str], RoundStats],
        *,
        suffix: SuffixDrafter | None = None,
        keep_budget: Callable[[str], None] = lambda kind: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`stats_of`: returns the measurements of a kind of request (`draft_budget.kind_of`), which may change from
        round to round (`SharedStats.of`). `suffix`: suffix lookup to add; it is the spare of the drafter that surrounds
        this one, which opens it and sends it the results. `keep_budget`: stores the budget of a kind, called at the end
        of a request. `clock`: returns the time in seconds."""
        super().__init__(drafter)
        self._none, self._suffix = NoDrafter(), suffix
        self._clock, self._stats_of, self._keep_budget = clock, stats_of, keep_budget
        self.round_stats = stats_of(GREEDY)
        self._draft_rounds = deque[_DraftRound](maxlen=DRAFT_ROUNDS)
        self._reset()

    def _reset(self) -> None:
        """Resets the per-request state."""
        self._kind: str | None = None  # of the request; None if its measurements are not kept
        self._ar_rounds = self._counted = 0  # rounds without the draft: all, and those in the measurements
        self._changes: list[tuple[int, Decision]] = []
        self._unopened: RequestStart | None = None  # the request, until the inner drafter has opened it
        self._missed: list[VerifyResult] = []  # results that the idle drafter has not received
        self._round = _Round(0.0)
        self._busy = 0.0  # seconds in the draft's forwards until its last proposal
        self._skip = SKIPPED_ROUNDS  # upcoming rounds that are not measured
        self._grafts = False  # whether suffix lookup adds to the proposals
        self._last_s = 0.0  # duration of the latest round with the draft, up to which the next one is charged
        self._idle = 0  # upcoming rounds without the draft after which nothing is measured or decided

    def open(self, start: RequestStart) -> None:
        self._reset()
        self._use(self._stats_for(start.sampling))
        self.round_stats.start_request(len(start.tokens))
        self._none.open(start)
        self._unopened = start
        self._grafts = self._suffix is not None and not start.sampling.sets_shape
        if self.round_stats.speculating:
            self._open_drafter(at_open=True)
        self._rest()

    def _open_drafter(self, *, at_open: bool) -> None:
        """Opens the request on the inner drafter, which prefills the prompt, unless that was done before. `at_open`:
        see `DraftBudget.charge_prefill`."""
        if self._unopened is None:
            return
        start, self._unopened = self._unopened, None
        self._set_steps()
        began, m = self._clock(), self.round_stats
        self.inner.open(start)
        if reference := m.reference_time:
            m.budget.charge_prefill(len(start.tokens), (self._clock() - began) / reference, at_open=at_open)
        self._busy = self.inner.busy

    def _stats_for(self, sampling: SamplingParams) -> RoundStats:
        """Returns the measurements that a request continues: those of all requests of its kind, or empty ones if the
        request sets its own bs or d."""
        ours = self._stats_of(GREEDY).config
        asked = ours.for_request(sampling)
        if asked is not ours:
            return RoundStats(asked)
        self._kind = kind_of(sampling)
        return self._stats_of(self._kind)

    def _follow_company(self) -> None:
        """Continues other measurements if the number of requests that share the rounds has changed."""
        if self._kind is None or (stats := self._stats_of(self._kind)) is self.round_stats:
            return
        self._count_ar_rounds(None)
        self._use(stats)
        self._skip, self._idle = SKIPPED_ROUNDS, 0
        self._draft_rounds.clear()
        if self._unopened is None:
            self._set_steps()

    def _use(self, stats: RoundStats) -> None:
        """Continues the given measurements. Suffix lookup gets the row times that belong to them."""
        self.round_stats = stats
        if self._suffix is not None and stats.row_times is not None:
            self._suffix.set_row_seconds(stats.row_times.target.at)

    def propose(self) -> Proposal:
        self._follow_company()
        if self._idle > 0:
            return self._suffix.propose() if self._grafts and self._suffix is not None else self._none.propose()
        now = self._round = _Round(self._clock())
        if self._grafts and self._suffix is not None:
            now.found = self._suffix.find()
        if self.round_stats.speculating and not self._skips_draft(now.found):
            now.proposal = self._propose_with_draft(now)
        elif now.found is not None and self._suffix is not None:
            now.proposal = self._suffix.share()
        else:
            now.proposal = self._none.propose()
        now.proposed = self._clock()
        return now.proposal

    def _propose_with_draft(self, now: _Round) -> Proposal:
        now.caught_up = self._catch_up()
        now.began = self._clock()  # the prefill is counted apart
        own = self.inner.propose()
        now.own, now.draft, self._busy = own, self.inner.busy - self._busy, self.inner.busy
        suffix, cut = self._suffix, _truncate(own, self.round_stats.nodes)
        if now.found is None or suffix is None or own.draft_probs is not None:
            return cut
        if not suffix.joint and len(now.found.tokens) == 1:
            return cut
        mine, least = own if suffix.joint else cut, len(cut.tokens) - 1  # other requests may leave rows to this one
        return merge_proposals(mine, suffix.candidates, lambda weights: suffix.num_verified(weights, least))

    def grow(self) -> None:
        if self._round.own is not None:
            self.inner.grow()

    def observe(self, result: VerifyResult) -> None:
        if self._idle > 0:
            self._missed.append(result)
            self._none.observe(result)
            self._ar_rounds += 1
            self._idle -= 1
            return
        came, now, m = self._clock(), self._round, self.round_stats
        self._none.observe(result)
        if now.own is None:
            self._missed.append(result)
            self._ar_rounds += 1
            plain = now.proposal is not None and len(now.proposal.tokens) == 1 and self._skip <= 0
            self._count_ar_rounds(came - now.began if plain else None)
        else:
            self.inner.observe(result)
            self._settle(now, came, result)
            # what another d or bs would have given follows only from rounds that the draft alone has determined
            alone = now.found is None or self._suffix is None or len(self._suffix.candidates.tokens) == 1
            if alone and self._skip <= 0 and not now.caught_up:
                m.add(self._sample(now, came, result))
        self._skip -= 1
        decision = policy.decide(m)
        if decision != m.current:
            m.apply(decision)
            self._changes.append((result.round + 1, decision))
            self._skip = SKIPPED_ROUNDS
            if self._unopened is None:
                self._set_steps()
        self._rest()

    def _rest(self) -> None:
        """Postpones the next measurement and decision while the draft waits for a trial: the bookkeeping of each round
        would cost a small model a percent of its speed."""
        if not self.round_stats.speculating and self.round_stats.budget.spent:
            self._idle, self._skip = policy.DECISION_INTERVAL_ROUNDS - 1, 0

    def _count_ar_rounds(self, seconds: float | None) -> None:
        """Adds the rounds without the draft since the last call to the measurements. `seconds`: see
        `RoundStats.add_ar_rounds`."""
        rounds, self._counted = self._ar_rounds - self._counted, self._ar_rounds
        if rounds > 0:
            self.round_stats.budget.backlog += sum(len(missed.tokens) for missed in self._missed[-rounds:])
            self.round_stats.add_ar_rounds(rounds, seconds)

    def _settle(self, now: _Round, came: float, result: VerifyResult) -> None:
        """Counts a round with the draft in the budget, compared to one of suffix lookup alone."""
        assert now.proposal is not None
        tokens = len(result.tokens)
        row = (came - now.proposed) / self._rows(len(now.proposal.tokens))
        seconds, typical = self._clock() - now.began, self.round_stats.usual_round_time
        most = inf if typical is None else max(SLOW_ROUND_FACTOR * typical, self._last_s)
        self._last_s, seconds = seconds, min(seconds, most)
        if now.found is None or len(now.found.tokens) == 1:
            self.round_stats.settle(seconds, tokens)
        else:
            hits = min(len(now.found.match_path(result.tokens)), tokens - 1)
            self.round_stats.settle(seconds - row * self._rows(len(now.found.tokens)), tokens - 1 - hits)
        self._draft_rounds.append(_DraftRound(now.proposed - now.began, row, tokens))

    def _skips_draft(self, found: Proposal | None) -> bool:
        """Returns whether a round with the proposal `found` of suffix lookup is predicted to be faster than one with
        the draft, too. In the latter the draft adds tokens if the first token of suffix lookup is wrong. A draft that
        expands during the verifications costs no time that could be saved."""
        ahead = self.round_stats.config.mode != "serial"
        if found is None or len(found.tokens) == 1 or ahead or not self._draft_rounds:
            return False
        recent = self._draft_rounds
        chances = [exp(weight) for weight in found.weights]
        tokens, row = sum(chances), median(seen.row for seen in recent)
        alone = tokens / (row * self._rows(len(chances)))
        with_draft = tokens + (1 - chances[1]) * (fmean(seen.tokens for seen in recent) - 1)
        rows = self._rows(max(len(chances), self.round_stats.nodes))
        return alone > MIN_GAIN_FACTOR * with_draft / (row * rows + median(seen.draft for seen in recent))

    def _rows(self, nodes: int) -> float:
        """Returns the duration of a verification of `nodes` nodes in proportion to that of one."""
        return 1.0 if self._suffix is None else self._suffix.row_seconds(nodes) / self._suffix.row_seconds(1)

    def catch_up(self, result: VerifyResult) -> None:
        """Applies `result`, which merges rounds that were decoded without this drafter. These rounds are not
        measured."""
        if self.round_stats.speculating:
            self._catch_up()
            self.inner.observe(result)
        else:
            self._missed.append(result)
        self._none.observe(result)
        self._skip = SKIPPED_ROUNDS

    def close(self) -> None:
        if self._unopened is None:
            self.inner.close()
        self._count_ar_rounds(None)
        if self._kind is not None and self.round_stats.config.self_switch:
            self._keep_budget(self._kind)

    def report(self) -> PolicyReport | None:
        """Returns the report of the request so far, or None if the config enables no adaptation."""
        m = self.round_stats
        if not m.config.is_adaptive:
            return None
        tree, plain = m.speculative_round_time, m.reference_time
        break_even = tree / plain if tree is not None and plain else None
        speedup = (
            sum(seen.tokens for seen in m.speculative_rounds) / len(m.speculative_rounds) / break_even
            if break_even
            else None
        )
        return PolicyReport(
            steps=m.steps,
            nodes=m.nodes,
            ar_rounds=self._ar_rounds,
            changes=tuple(self._changes),
            speculative_round_time=tree,
            ar_round_time=plain,
            break_even=break_even,
            speedup=speedup,
        )

    def _set_steps(self) -> None:
        if self.inner.draft_steps != self.round_stats.steps:
            self.inner.draft_steps = self.round_stats.steps

    def _sample(self, now: _Round, came: float, result: VerifyResult) -> RoundSample:
        """Returns the measurement of a round with the draft that ends now. `came`: clock time at which its result
        arrived."""
        own = now.own
        assert own is not None
        hits = result.path[1:] if now.proposal is own else own.match_path(result.tokens)
        rank = {node: at for at, node in enumerate(_nodes_by_weight(own))}
        ranks = tuple(rank[node] for node in hits)
        return RoundSample(self._clock() - now.began, came - now.proposed, now.draft, len(result.tokens), ranks)

    def _catch_up(self) -> bool:
        """Opens the request on the inner drafter, if that is still due, and sends it the missed rounds as one merged
        result. Returns whether there was something to do."""
        behind = self._unopened is not None or bool(self._missed)
        self._last_s = inf if behind else self._last_s
        self._open_drafter(at_open=False)
        if self._missed:
            self.inner.observe(merge_results(self._missed))
            self._missed.clear()
        self.round_stats.budget.backlog = 0
        return behind


def _truncate(proposal: Proposal, nodes: int) -> Proposal:
    """Cuts a proposal to the `nodes` nodes with the largest weights, in the order of the proposal. A proposal with
    draft distributions is returned unchanged: the choice of nodes to cut would depend on the tokens that were drawn,
    and that would bias rejection sampling."""
    if len(proposal.tokens) <= nodes or proposal.draft_probs is not None:
        return proposal
    kept = sorted(_nodes_by_weight(proposal)[:nodes])
    place = {node: at for at, node in enumerate(kept)}
    return replace(
        proposal,
        tokens=tuple(proposal.tokens[node] for node in kept),
        parents=tuple(place.get(proposal.parents[node], -1) for node in kept),
        weights=tuple(proposal.weights[node] for node in kept),
        sources=tuple(proposal.sources[node] for node in kept),
    )


def _nodes_by_weight(proposal: Proposal) -> list[int]:
    """Returns the nodes with the largest weight first, of equal ones the earlier one. A parent therefore precedes its
    children, and the first n nodes are the best connected sub-tree of n nodes."""
    return sorted(range(len(proposal.tokens)), key=lambda node: -proposal.weights[node])
