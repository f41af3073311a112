"""Controller around a drafter: measures its rounds and applies the decisions of `policy.decide`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from swiftspec.control import policy
from swiftspec.control.cost_model import CostModel
from swiftspec.control.round_stats import Decision, RoundSample, RoundStats
from swiftspec.control.step_times import SteppedDrafter
from swiftspec.messages import Proposal, RequestStart, VerifyResult, merge_results
from swiftspec.params import SamplingParams
from swiftspec.runtime.drafter import NoDrafter

SKIPPED_ROUNDS = 2  # rounds after a change that are not measured: caches are cold, and the draft may have to catch up


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """Decisions made in one request, and the latest measurements. Times are in seconds; None: not measured. An
    autoregressive round that was not measured is predicted from row times, if they are known."""

    steps: int  # d of speculative rounds at the end of the request
    nodes: int  # bs of speculative rounds at the end of the request
    ar_rounds: int  # autoregressive rounds of the request
    changes: tuple[tuple[int, Decision], ...]  # per change: the first round that it applies to, and the decision
    speculative_round_time: float | None
    ar_round_time: float | None
    break_even: float | None  # tokens per round at which speculation is as fast as autoregressive rounds
    speedup: float | None  # tokens per second of speculative rounds, relative to autoregressive rounds


class Controller:
    """Drafter that calls an inner drafter in speculative rounds and proposes only the root in autoregressive rounds.

    During autoregressive rounds the inner drafter is idle. Before the next speculative round it receives the missed
    rounds as one merged result; if a request begins with autoregressive rounds, the drafter opens it then. The
    controller runs on rank 0, because only rank 0 reads a clock. A smaller bs reaches the other ranks as a smaller
    proposal, an autoregressive round as a root-only proposal, and d as the drafter's `draft_steps`.
    """

    def __init__(
        self,
        drafter: SteppedDrafter,
        make_stats: Callable[[], RoundStats],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`make_stats`: returns empty measurements. It is called once for ordinary requests and once for requests with
        guidance, whose rounds take longer. `clock`: returns the time in seconds."""
        self._drafter, self._none = drafter, NoDrafter()
        self._clock, self._make_stats = clock, make_stats
        self.round_stats = make_stats()
        self._all_stats = {False: self.round_stats}
        self._reset()

    def _reset(self) -> None:
        """Resets the per-request state."""
        self._ar_rounds = 0
        self._changes: list[tuple[int, Decision]] = []
        self._unopened: RequestStart | None = None  # the request, until the inner drafter has opened it
        self._missed: list[VerifyResult] = []  # results that the idle drafter has not received
        self._proposal: Proposal | None = None  # the drafter's whole proposal; None in an autoregressive round
        self._began = self._proposed = 0.0  # clock times of the start of the round and of its proposal
        self._busy = self._draft = 0.0  # seconds in the draft's forwards: in total, and in this round
        self._skip = SKIPPED_ROUNDS  # upcoming rounds that are not measured
        self._foreign = False  # whether the next result is of another proposal

    @property
    def busy(self) -> float:
        return self._drafter.busy

    def open(self, start: RequestStart) -> None:
        self._reset()
        self.round_stats = self._stats_for(start.sampling)
        self.round_stats.start_request()
        self._none.open(start)
        self._unopened = start
        if self.round_stats.speculating:
            self._open_drafter()

    def _open_drafter(self) -> None:
        """Opens the request on the inner drafter, which prefills the prompt, unless that was done before."""
        if self._unopened is not None:
            start, self._unopened = self._unopened, None
            self._set_steps()
            self._drafter.open(start)
            self._busy = self._drafter.busy

    def _stats_for(self, sampling: SamplingParams) -> RoundStats:
        """Returns the measurements that a request continues: those of all ordinary requests or of all requests with
        guidance, or empty ones if the request sets its own bs or d."""
        guided, ours = sampling.guided, self._all_stats[False].config
        asked = ours.for_request(sampling)
        if asked is not ours:
            return RoundStats(asked)
        if guided not in self._all_stats:
            self._all_stats[guided] = self._make_stats()
        return self._all_stats[guided]

    def propose(self) -> Proposal:
        self._began = self._clock()
        if self.round_stats.speculating:
            self._catch_up()
            self._proposal = self._drafter.propose()
            self._draft, self._busy = self._drafter.busy - self._busy, self._drafter.busy
            proposal = _truncate(self._proposal, self.round_stats.nodes)
        else:
            self._proposal, proposal = None, self._none.propose()
        self._proposed = self._clock()
        return proposal

    def grow(self) -> None:
        if self.round_stats.speculating:
            self._drafter.grow()

    def ignore_round(self) -> None:
        """Declares that the next result is not that of the latest proposal: it is not measured."""
        self._foreign = True

    def observe(self, result: VerifyResult) -> None:
        if self._foreign:
            self._foreign = False
            self._follow(result)
            return
        came = self._clock()
        if self.round_stats.speculating:
            self._drafter.observe(result)
            self.round_stats.count_trial(len(result.tokens))
        else:
            self._missed.append(result)
            self._ar_rounds += 1
        self._none.observe(result)
        if self._skip > 0:
            self._skip -= 1
        else:
            self.round_stats.add(self._sample(result, came))
        decision = policy.decide(self.round_stats)
        if decision != self.round_stats.current:
            self.round_stats.apply(decision)
            self._changes.append((result.round + 1, decision))
            self._skip = SKIPPED_ROUNDS
            if self._unopened is None:
                self._set_steps()

    def catch_up(self, result: VerifyResult) -> None:
        """Applies `result`, which merges rounds that were decoded without this drafter. These rounds are not
        measured."""
        if self.round_stats.speculating:
            self._catch_up()
        self._follow(result)
        self._skip = SKIPPED_ROUNDS

    def _follow(self, result: VerifyResult) -> None:
        """Applies a result that is not measured."""
        if self.round_stats.speculating:
            self._drafter.observe(result)
        else:
            self._missed.append(result)
        self._none.observe(result)

    def close(self) -> None:
        if self._unopened is None:
            self._drafter.close()

    def report(self) -> PolicyReport | None:
        """Returns the report of the request so far, or None if the config enables no adaptation."""
        m = self.round_stats
        if not m.config.is_adaptive:
            return None
        tree, plain = m.speculative_round_time, m.ar_round_time
        if plain is None and m.row_times is not None:
            plain = CostModel(m).ar_round_time
        break_even = tree / plain if tree is not None and plain else None
        speedup = (
            sum(seen.tokens for seen in m.speculative_rounds) / len(m.speculative_rounds) / break_even
            if break_even
            else None
        )
        return PolicyReport(m.steps, m.nodes, self._ar_rounds, tuple(self._changes), tree, plain, break_even, speedup)

    def _set_steps(self) -> None:
        if self._drafter.draft_steps != self.round_stats.steps:
            self._drafter.draft_steps = self.round_stats.steps

    def _sample(self, result: VerifyResult, came: float) -> RoundSample:
        """Returns the measurement of the round that ends now. `came`: clock time at which its result arrived."""
        seconds, target = self._clock() - self._began, came - self._proposed
        if self._proposal is None:
            return RoundSample(seconds, target, 0.0, len(result.tokens), ())
        whole = len(self._proposal.tokens) <= self.round_stats.nodes
        hits = result.path[1:] if whole else self._proposal.match_path(result.tokens)
        rank = {node: at for at, node in enumerate(_nodes_by_weight(self._proposal))}
        return RoundSample(seconds, target, self._draft, len(result.tokens), tuple(rank[node] for node in hits))

    def _catch_up(self) -> None:
        """Opens the request on the inner drafter, if that is still due, and sends it the missed rounds as one merged
        result."""
        self._open_drafter()
        if self._missed:
            self._drafter.observe(merge_results(self._missed))
            self._missed.clear()


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
