"""A drafter that is steered: it measures its rounds, and has them as `policy.decide` wants."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from swiftspec.control import policy
from swiftspec.control.forecast import Seen
from swiftspec.control.measure import SteppedDrafter
from swiftspec.control.policy import Decision, Pace
from swiftspec.messages import Opening, Proposal, VerifyResult
from swiftspec.runtime.drafter import NoDrafter


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """What was decided in one request, and its latest measurements. Times in seconds."""

    steps: int  # d and bs of a speculative round, at the end
    nodes: int
    plain_rounds: int
    changes: tuple[tuple[int, Decision], ...]  # from which round on what was decided
    tree_round: float | None
    plain_round: float | None
    break_even: float | None
    speedup: float | None


class Controller:
    """Stands for a drafter, and in plain rounds for none; the drafter then sleeps, and catches up in one step.

    It runs on rank 0, which alone has a clock. What it decides between two rounds travels as the proposal, root-only or
    of fewer nodes, and as the drafter's `steps`.
    """

    def __init__(
        self, drafter: SteppedDrafter, make: Callable[[], Pace], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`make`: what is measured, made for guided requests and for others, whose rounds take another time."""
        self._drafter, self._none = drafter, NoDrafter()
        self._clock, self._make = clock, make
        self.pace = make()
        self._paces = {False: self.pace}
        self._reset()

    def _reset(self) -> None:
        """Nothing has happened yet in this request."""
        self._plain_rounds = 0
        self._changes: list[tuple[int, Decision]] = []
        self._missed: list[VerifyResult] = []
        self._began = self._proposed = self._busy = self._spent = 0.0
        self._whole: Proposal | None = None  # the round's proposal before it was cut
        self._cut: tuple[Proposal, tuple[int, ...], Seen] | None = None  # the round before, if its text goes on

    @property
    def busy(self) -> float:
        return self._drafter.busy

    def open(self, opening: Opening) -> None:
        self._reset()
        guided = opening.sampling.guided
        if guided not in self._paces:
            self._paces[guided] = self._make()
        self.pace = self._paces[guided]
        self.pace.begin()
        self._none.open(opening)
        self._set_steps()
        self._drafter.open(opening)
        self._busy = self._drafter.busy

    def propose(self) -> Proposal:
        self._began = self._clock()
        if self.pace.speculating:
            self._catch_up()
            self._whole = self._drafter.propose()
            self._spent, self._busy = self._drafter.busy - self._busy, self._drafter.busy
            proposal = _leading(self._whole, self.pace.nodes)
        else:
            self._whole, proposal = None, self._none.propose()
        self._proposed = self._clock()
        return proposal

    def grow(self) -> None:
        if self.pace.speculating:
            self._drafter.grow()

    def observe(self, result: VerifyResult) -> None:
        came = self._clock()
        if self.pace.speculating:
            self._drafter.observe(result)
        else:
            self._missed.append(result)
            self._plain_rounds += 1
        self._none.observe(result)
        self._note(result, came)
        pace, decision = self.pace, policy.decide(self.pace)
        if decision.speculate != pace.speculating or (decision.speculate and decision[:2] != (pace.steps, pace.nodes)):
            pace.turn(decision)
            self._changes.append((result.round + 1, decision))
            self._set_steps()

    def close(self) -> None:
        self._drafter.close()

    def report(self) -> PolicyReport:
        """So far."""
        p = self.pace
        times = p.tree_round, p.plain_round, p.break_even, p.speedup
        return PolicyReport(p.steps, p.nodes, self._plain_rounds, tuple(self._changes), *times)

    def _set_steps(self) -> None:
        if self._drafter.draft_steps != self.pace.steps:
            self._drafter.draft_steps = self.pace.steps

    def _note(self, result: VerifyResult, came: float) -> None:
        """Hands the round to the pace. The text that was verified later tells how a whole proposal would have fared."""
        trees = self.pace.trees
        if self._cut is not None and trees and trees[-1] is self._cut[2]:
            whole, tokens, seen = self._cut
            trees[-1] = seen._replace(hits=_walk(whole, (*tokens, *result.tokens)))
        self._cut = None
        seconds, target = self._clock() - self._began, came - self._proposed
        if self._whole is None:
            self.pace.see(Seen(seconds, 1, target))
            return
        hits = result.path[1:] if len(self._whole.tokens) <= self.pace.nodes else _walk(self._whole, result.tokens)
        seen = Seen(seconds, len(result.tokens), target, self._spent, self._proposed - self._began, hits)
        self.pace.see(seen)
        if len(hits) == len(result.tokens):  # the bonus token is a node that was cut off
            self._cut = self._whole, result.tokens, seen

    def _catch_up(self) -> None:
        """Tells the drafter what it missed, as the result of one long round."""
        if self._missed:
            tokens = tuple(token for result in self._missed for token in result.tokens)
            first, last = self._missed[0], self._missed[-1]
            path = tuple(range(len(tokens)))
            self._drafter.observe(VerifyResult(last.request, last.round, first.prefix_len, path, tokens))
            self._missed.clear()


def _leading(proposal: Proposal, nodes: int) -> Proposal:
    """Its likeliest nodes; all of them where they carry what they were drawn from."""
    if len(proposal.tokens) <= nodes or proposal.drawn is not None:
        return proposal
    return replace(proposal, tokens=proposal.tokens[:nodes], parents=proposal.parents[:nodes])


def _walk(proposal: Proposal, tokens: Sequence[int]) -> tuple[int, ...]:
    """The nodes that spell as many leading `tokens` as the proposal holds."""
    path, node = [], 0
    for token in tokens:
        children = zip(proposal.tokens[node + 1 :], proposal.parents[node + 1 :])
        found = next((i for i, child in enumerate(children, node + 1) if child == (token, node)), None)
        if found is None:
            break
        path.append(node := found)
    return tuple(path)
