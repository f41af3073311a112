"""Predicted speed of decoding over a network link.

Either only the draft is remote and the decoding loop runs on the target's machine, or both models are remote, each over
a link of its own with the same properties. In asynchronous mode the decoding loop proposes from a tree replica, which
tree deltas from the draft update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.prediction import simulation
from bench.prediction.network_link import Link
from bench.prediction.simulation import Outcome, RecordedAcceptance, Rounds, SimulatedTimes

MESSAGE_BYTES = 200  # bytes of a result or a proposal, protocol overhead included
NODE_BYTES = 20  # bytes of a node in a tree delta


@dataclass(frozen=True, slots=True)
class LinkCost:
    """Delays by a link, in seconds."""

    message: float  # from sending a result or a proposal to its arrival
    expansion: float  # additional transfer time for the nodes of one expansion
    both: bool  # whether the target is remote too, over a link of its own

    @staticmethod
    def over(link: Link, nodes: int, *, both: bool) -> LinkCost:
        """Returns the delays by `link`.

        `nodes`: nodes that one expansion adds to the tree.
        `both`: whether both models are remote, instead of the draft only.
        """
        return LinkCost(link.one_way(MESSAGE_BYTES), nodes * NODE_BYTES / link.bandwidth, both)

    @property
    def verifying(self) -> float:
        """Seconds that the link adds to a verification: a round trip, or 0 for a local target."""
        return 2 * self.message if self.both else 0.0


def serial_over_link(rounds: Rounds, d: int, times: SimulatedTimes, far: LinkCost) -> Outcome:
    """Simulates serial mode: in each round the result is sent to the draft, which expands d times and sends a proposal,
    which the target verifies."""
    drafting = 2 * far.message + times.answer + d * (times.draft + times.expand)
    length = far.verifying + times.target + times.verify + times.settle + drafting
    return simulation.outcome(rounds, length * len(rounds), drafting * len(rounds))


def async_over_link(rounds: Rounds, d: int, times: SimulatedTimes, far: LinkCost) -> Outcome:
    """Simulates asynchronous mode with a tree replica.

    A verification starts when the replica has received the d expansions that the draft ran ahead of the previous result
    and, if that result required expansions on the critical path, those as well.
    """
    expansion, growth = times.draft + times.expand, far.message + d * far.expansion
    submitted = growing = waiting = 0.0  # growing: when the draft starts its d expansions
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
    """Returns the largest d whose expansions and their transfer fit into a round of the target, so that they do not
    delay it. Expansions on the critical path are not counted.

    Returns 0 if not even one expansion fits.
    """
    left = times.target + times.verify + times.settle + far.verifying - 2 * far.message
    return max(math.floor(left / (times.draft + times.expand + far.expansion)), 0)


@dataclass(frozen=True, slots=True)
class PredictedPlan:
    """Predicted outcome of one mode and placement of the models, at its best d. `d` is None in mode ar."""

    name: str
    d: int | None
    outcome: Outcome


def predict_plans(
    link: Link,
    acceptance: RecordedAcceptance,
    bs: int,
    w: int,
    *,
    plain: SimulatedTimes,
    near: SimulatedTimes,
    apart: SimulatedTimes,
) -> list[PredictedPlan]:
    """Predicts `ar` and `serial` with both models local, then `serial` and `async` with a remote draft, then with two
    remote models.

    `plain`: step times of autoregressive decoding.
    `near`: step times with both models local.
    `apart`: step times with a remote draft.
    """
    depths = {mode: acceptance.depths(mode, bs, w) for mode in ("serial", "async")}
    rounds = {(mode, d): acceptance.rounds(mode, bs, w, d) for mode in depths for d in depths[mode]}
    found = [
        PredictedPlan("ar, both local", None, simulation.plain(plain)),
        _best("serial, both local", {d: simulation.serial(rounds["serial", d], d, near) for d in depths["serial"]}),
    ]
    for both in (False, True):
        far, where = LinkCost.over(link, w * max(bs, w), both=both), "both remote" if both else "draft remote"
        in_turn = {d: serial_over_link(rounds["serial", d], d, apart, far) for d in depths["serial"]}
        at_once = {d: async_over_link(rounds["async", d], d, apart, far) for d in depths["async"]}
        found += [_best(f"serial, {where}", in_turn), _best(f"async, {where}", at_once)]
    return found


def _best(name: str, outcomes: dict[int, Outcome]) -> PredictedPlan:
    d = max(outcomes, key=lambda d: outcomes[d].speed)
    return PredictedPlan(name, d, outcomes[d])


def format_verdict(found: Sequence[PredictedPlan], link: Link, bs: int, w: int, apart: SimulatedTimes) -> str:
    """Formats, for a remote draft and for two remote models, the speed relative to local decoding and the largest d
    whose expansions do not delay the target. `apart`: step times as in `predict_plans`."""
    here = max((plan for plan in found if plan.name.endswith("both local")), key=lambda plan: plan.outcome.speed)
    lines = []
    for both, where in ((False, "draft remote"), (True, "both remote")):
        split = max((plan for plan in found if plan.name.endswith(where)), key=lambda plan: plan.outcome.speed)
        gain = split.outcome.speed / here.outcome.speed
        pays = "pays" if gain > 1 else "does not pay"
        most = max_hidden_depth(apart, LinkCost.over(link, w * max(bs, w), both=both))
        depth = f"no delay of the target up to d {most}" if most > 0 else "every d delays the target"
        lines.append(f"{where}: {pays}, {split.name} at d {split.d} is {gain:.2f}x as fast as {here.name}; {depth}")
    return "\n".join(lines)


def format_plans(found: Sequence[PredictedPlan]) -> str:
    """Formats the plans as an aligned table."""
    cells = [("run", "d", "tok/s", "tok/round", "round ms", "waiting ms")]
    for plan in found:
        out, d = plan.outcome, "" if plan.d is None else str(plan.d)
        cells.append(
            (
                plan.name,
                d,
                f"{out.speed:.1f}",
                f"{out.tokens_per_round:.2f}",
                f"{1e3 * out.round:.2f}",
                f"{1e3 * out.waiting:.2f}",
            )
        )
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells)
