"""Predicted rounds over a network link, with a tree replica on the near side.

Two forms: only the draft is behind the link, and the decoding loop runs next to the target; or both models are behind
links of this kind, and only the loop is on the near side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from swiftspec.lab import simulation
from swiftspec.lab.network_link import Link
from swiftspec.lab.simulation import Outcome, RecordedAcceptance, Rounds, SimulatedTimes

MESSAGE_BYTES = 200  # bytes of a result or a proposal, protocol overhead included
NODE_BYTES = 20  # bytes of a node in a tree delta


@dataclass(frozen=True, slots=True)
class LinkCost:
    """Cost of a link per round, in seconds."""

    message: float  # one way, of a result or a proposal
    expansion: float  # additional time for the nodes of one expansion
    both: bool  # whether the target is behind such a link too

    @staticmethod
    def over(link: Link, nodes: int, *, both: bool) -> LinkCost:
        """Returns the cost of `link`. `nodes`: nodes that an expansion adds to the tree."""
        return LinkCost(link.one_way(MESSAGE_BYTES), nodes * NODE_BYTES / link.bandwidth, both)

    @property
    def verifying(self) -> float:
        """Additional seconds of a verification."""
        return 2 * self.message if self.both else 0.0


def serial_over_link(rounds: Rounds, d: int, times: SimulatedTimes, far: LinkCost) -> Outcome:
    """Serial rounds: the result crosses the link, d expansions run, the proposal returns and is verified."""
    drafting = 2 * far.message + times.answer + d * (times.draft + times.expand)
    length = far.verifying + times.target + times.verify + times.settle + drafting
    return simulation.outcome(rounds, length * len(rounds), drafting * len(rounds))


def async_over_link(rounds: Rounds, d: int, times: SimulatedTimes, far: LinkCost) -> Outcome:
    """Asynchronous rounds: a verification starts from the tree replica, which contains the d expansions from before the
    result and, if the result requires further expansions immediately, these as well."""
    expansion, growth = times.draft + times.expand, far.message + d * far.expansion
    submitted = growing = waiting = 0.0  # growing: when the draft started its expansions
    for _, critical in rounds:
        grown = growing + d * expansion
        result = submitted + far.verifying + times.target + times.verify
        answered = max(result + far.message, grown) + times.answer + critical * expansion
        held = grown + growth if critical == 0 else answered + far.message + critical * far.expansion
        begins = max(result + times.settle + times.answer, held)
        waiting += begins - result
        submitted, growing = begins, answered
    return simulation.outcome(rounds, submitted, waiting)


def max_hidden_depth(times: SimulatedTimes, far: LinkCost) -> int:
    """Returns the largest d whose expansions the target never waits for.

    0: the link alone takes longer than a round.
    """
    left = times.target + times.verify + times.settle + far.verifying - 2 * far.message
    return max(math.floor(left / (times.draft + times.expand + far.expansion)), 0)


@dataclass(frozen=True, slots=True)
class PredictedPlan:
    """One way to run the pair, at its best d."""

    name: str
    d: int | None
    outcome: Outcome


def predict_plans(
    link: Link,
    acceptance: RecordedAcceptance,
    bs: int,
    w: int,
    plain: SimulatedTimes,
    near: SimulatedTimes,
    apart: SimulatedTimes,
) -> list[PredictedPlan]:
    """Predicts every way to run the pair, those on one side first.

    `plain`, `near` and `apart` are the step times of plain decoding, of both models on one side in serial mode, and of
    a split pair.
    """
    depths = {mode: acceptance.depths(mode, bs, w) for mode in ("serial", "async")}
    rounds = {(mode, d): acceptance.rounds(mode, bs, w, d) for mode in depths for d in depths[mode]}
    found = [
        PredictedPlan("ar on one side", None, simulation.plain(plain)),
        _best("serial on one side", {d: simulation.serial(rounds["serial", d], d, near) for d in depths["serial"]}),
    ]
    for both in (False, True):
        far, where = LinkCost.over(link, w * max(bs, w), both=both), "both apart" if both else "draft apart"
        in_turn = {d: serial_over_link(rounds["serial", d], d, apart, far) for d in depths["serial"]}
        at_once = {d: async_over_link(rounds["async", d], d, apart, far) for d in depths["async"]}
        found += [_best(f"serial, {where}", in_turn), _best(f"async, {where}", at_once)]
    return found


def _best(name: str, outcomes: dict[int, Outcome]) -> PredictedPlan:
    d = max(outcomes, key=lambda d: outcomes[d].speed)
    return PredictedPlan(name, d, outcomes[d])


def format_verdict(found: Sequence[PredictedPlan], link: Link, bs: int, w: int, apart: SimulatedTimes) -> str:
    """Reports whether a split over the link is faster, and which depth hides the link."""
    here = max((plan for plan in found if plan.name.endswith("one side")), key=lambda plan: plan.outcome.speed)
    lines = []
    for both, where in ((False, "draft apart"), (True, "both apart")):
        split = max((plan for plan in found if plan.name.endswith(where)), key=lambda plan: plan.outcome.speed)
        gain = split.outcome.speed / here.outcome.speed
        pays = "pays" if gain > 1 else "does not pay"
        most = max_hidden_depth(apart, LinkCost.over(link, w * max(bs, w), both=both))
        depth = f"growth of up to d {most} is hidden" if most > 0 else "no d is hidden: the target waits in every round"
        lines.append(f"{where}: {pays}, {split.name} at d {split.d} gives {gain:.2f} times {here.name}; {depth}")
    return "\n".join(lines)


def format_plans(found: Sequence[PredictedPlan]) -> str:
    """Formats the plans as aligned text."""
    cells = [("run", "d", "tok/s", "tok/round", "round ms", "of it waiting")]
    for plan in found:
        out, d = plan.outcome, "" if plan.d is None else str(plan.d)
        cells.append(
            (plan.name, d, f"{out.speed:.1f}", f"{out.tokens_per_round:.2f}", f"{1e3 * out.round:.2f}",
             f"{1e3 * out.waiting:.2f}")
        )  # fmt: skip
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells)
