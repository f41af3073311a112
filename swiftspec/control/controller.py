"""A drafter whose rounds are measured, and then shaped as `policy.decide` says."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from swiftspec.control import policy
from swiftspec.control.round_stats import Decision, Measured, MeasuredRound
from swiftspec.control.step_times import SteppedDrafter
from swiftspec.messages import Opening, Proposal, VerifyResult
from swiftspec.params import SamplingParams
from swiftspec.runtime.drafter import NoDrafter

SKIP = 2  # rounds after a change that are not measured: caches are cold, and a draft may have to catch up


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """What was decided in one request, and the latest measurements. Times are in seconds."""

    steps: int  # d and bs of a speculative round, at the end
    nodes: int
    plain_rounds: int
    changes: tuple[tuple[int, Decision], ...]  # each decision with the first round that it holds for
    tree_round: float | None
    plain_round: float | None
    break_even: float | None  # the tokens a speculative round must give to be as fast as plain rounds
    speedup: float | None  # of speculative rounds over plain ones


class Controller:
    """A drafter that asks another one in speculative rounds and none in plain rounds.

    The other drafter sleeps during plain rounds. Before the next speculative round it is told in one step what it
    missed. All this happens on rank 0, since only rank 0 has a clock. A decision about bs reaches the other ranks as a
    smaller proposal, one about plain rounds as a proposal of the root alone, and d as the drafter's `draft_steps`.
    """

    def __init__(
        self, drafter: SteppedDrafter, make: Callable[[], Measured], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`make` is called for ordinary requests, and again for guided ones, whose rounds take longer."""
        self._drafter, self._none = drafter, NoDrafter()
        self._clock, self._make = clock, make
        self.measured = make()
        self._all_measured = {False: self.measured}
        self._reset()

    def _reset(self) -> None:
        """Nothing has happened yet in this request."""
        self._plain_rounds = 0
        self._changes: list[tuple[int, Decision]] = []
        self._missed: list[VerifyResult] = []  # results that the sleeping drafter has not been told
        self._proposal: Proposal | None = None  # the drafter's, before it was cut; None in a plain round
        self._began = self._proposed = 0.0  # when the round began, and when its proposal was there
        self._busy = self._draft = 0.0  # seconds in the draft's forwards, in all and for this round
        self._skip = SKIP  # rounds to come that are not measured

    @property
    def busy(self) -> float:
        return self._drafter.busy

    def open(self, opening: Opening) -> None:
        self._reset()
        self.measured = self._measured_so_far(opening.sampling)
        self.measured.begin()
        self._none.open(opening)
        self._set_steps()
        self._drafter.open(opening)
        self._busy = self._drafter.busy

    def _measured_so_far(self, sampling: SamplingParams) -> Measured:
        """What was measured of requests like this one. One that says the shape of its rounds is like no other."""
        guided, ours = sampling.guided, self._all_measured[False].config
        asked = ours.for_request(sampling)
        if asked is not ours:
            return Measured(asked)
        if guided not in self._all_measured:
            self._all_measured[guided] = self._make()
        return self._all_measured[guided]

    def propose(self) -> Proposal:
        self._began = self._clock()
        if self.measured.speculating:
            self._catch_up()
            self._proposal = self._drafter.propose()
            self._draft, self._busy = self._drafter.busy - self._busy, self._drafter.busy
            proposal = _leading(self._proposal, self.measured.nodes)
        else:
            self._proposal, proposal = None, self._none.propose()
        self._proposed = self._clock()
        return proposal

    def grow(self) -> None:
        if self.measured.speculating:
            self._drafter.grow()

    def observe(self, result: VerifyResult) -> None:
        came = self._clock()
        if self.measured.speculating:
            self._drafter.observe(result)
        else:
            self._missed.append(result)
            self._plain_rounds += 1
        self._none.observe(result)
        if self._skip > 0:
            self._skip -= 1
        else:
            self.measured.add(self._round(result, came))
        decision = policy.decide(self.measured)
        if decision != self.measured.current:
            self.measured.change(decision)
            self._changes.append((result.round + 1, decision))
            self._skip = SKIP
            self._set_steps()

    def catch_up(self, result: VerifyResult) -> None:
        """Rounds that were decoded without this drafter, as the result of one long round. They are not measured."""
        if self.measured.speculating:
            self._catch_up()
            self._drafter.observe(result)
        else:
            self._missed.append(result)
        self._none.observe(result)
        self._skip = SKIP

    def close(self) -> None:
        self._drafter.close()

    def report(self) -> PolicyReport | None:
        """The report of the request so far; None where it has left nothing to decide."""
        m = self.measured
        if not m.config.decides:
            return None
        tree, plain = m.tree_round, m.plain_round
        break_even = tree / plain if tree is not None and plain else None
        speedup = sum(seen.tokens for seen in m.trees) / len(m.trees) / break_even if break_even else None
        return PolicyReport(
            m.steps, m.nodes, self._plain_rounds, tuple(self._changes), tree, plain, break_even, speedup
        )

    def _set_steps(self) -> None:
        if self._drafter.draft_steps != self.measured.steps:
            self._drafter.draft_steps = self.measured.steps

    def _round(self, result: VerifyResult, came: float) -> MeasuredRound:
        """The round that ends now and whose result came then."""
        seconds, target = self._clock() - self._began, came - self._proposed
        if self._proposal is None:
            return MeasuredRound(seconds, target, 0.0, len(result.tokens), ())
        whole = len(self._proposal.tokens) <= self.measured.nodes
        hits = result.path[1:] if whole else _walk(self._proposal, result.tokens)
        return MeasuredRound(seconds, target, self._draft, len(result.tokens), hits)

    def _catch_up(self) -> None:
        """Tells the drafter what it missed, as the result of one long round."""
        if self._missed:
            self._drafter.observe(merged(self._missed))
            self._missed.clear()


def merged(results: Sequence[VerifyResult]) -> VerifyResult:
    """Consecutive results as that of one long round, for a drafter that missed them."""
    tokens = tuple(token for result in results for token in result.tokens)
    first, last = results[0], results[-1]
    return VerifyResult(last.request, last.round, first.prefix_len, tuple(range(len(tokens))), tokens)


def _leading(proposal: Proposal, nodes: int) -> Proposal:
    """The proposal cut down to its likeliest nodes. One that carries the distributions its tokens were drawn from is
    never cut: leaving out a node because of its own draw would bias the text."""
    if len(proposal.tokens) <= nodes or proposal.drawn is not None:
        return proposal
    return replace(proposal, tokens=proposal.tokens[:nodes], parents=proposal.parents[:nodes])


def _walk(proposal: Proposal, tokens: Sequence[int]) -> tuple[int, ...]:
    """The nodes that spell as many of the first `tokens` as the proposal holds, including nodes that were cut off."""
    path, node = [], 0
    for token in tokens:
        children = zip(proposal.tokens[node + 1 :], proposal.parents[node + 1 :])
        found = next((i for i, child in enumerate(children, node + 1) if child == (token, node)), None)
        if found is None:
            break
        path.append(node := found)
    return tuple(path)
