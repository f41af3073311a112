"""Predicts the tokens a second of rounds of another shape (d, bs), from the latest rounds. This is arithmetic only."""

from __future__ import annotations

from bisect import bisect_left
from statistics import median

import numpy as np

from swiftspec.control.round_stats import Measured
from swiftspec.control.step_times import DraftTimes, steps_for

# A guess for depths that were never grown. The text goes on from one depth to the next with some chance; this is that
# chance over the chance one depth higher up. Set by eye on the embedded pair.
DEEPER = 0.75
# A guess for the time of a verification of one row, over that of the fewest rows measured. It is low enough for a
# smaller bs to be tried where that would lose few tokens; after that its measured time is known.
ONE_ROW = 0.75
BAND = 1.05  # d stays where it would be right for a verification faster or slower by up to this factor


class Forecast:
    """For rounds of any shape, from those of the shape in use. At least one of these must have been measured."""

    def __init__(self, measured: Measured) -> None:
        trees = measured.trees
        self._measured, self._ahead = measured, measured.config.mode == "async"
        # A draft that grows ahead sometimes runs out of nodes and makes more than d expansions in a round. The lower
        # quartile is the time of a round where it did not.
        self._expansion = _quartile([tree.draft for tree in trees]) / measured.steps
        times = measured.targets | {measured.nodes: median(tree.target for tree in trees)}
        fewest = min(times)
        if measured.plain_round is not None:
            times[1] = measured.plain_round
        elif fewest > 1:
            times[1] = ONE_ROW * times[fewest]
        self._rows = sorted(times)
        self._times = [times[rows] for rows in self._rows]
        forwards = self._forwards(measured.steps, measured.nodes)
        self._rest = max(median(tree.seconds for tree in trees) - forwards, 0.0)

    def speed(self, steps: int, nodes: int) -> float:
        """Tokens a second."""
        seconds = self.seconds(steps, nodes)
        return self.tokens(steps, nodes) / seconds if seconds > 0 else 0.0

    def seconds(self, steps: int, nodes: int) -> float:
        """Of a round."""
        return self._forwards(steps, nodes) + self._rest

    def tokens(self, steps: int, nodes: int) -> float:
        """Tokens a round. Each round seen tells how deep its text would have come with fewer nodes, and with a smaller
        d. What a larger d would add is guessed."""
        trees, now = self._measured.trees, self._measured.steps
        depths = [bisect_left(tree.hits, nodes) for tree in trees]
        if steps < now:
            depths = [min(depth, self._grown(steps)) for depth in depths]
        further = self._further(depths, nodes, steps - now) if steps > now else 0.0
        return 1 + sum(depths) / len(depths) + further

    def ratio(self, nodes: int) -> int:
        """d for a draft that grows ahead (paper, section 3.1): as many expansions as fit into a verification of that
        many nodes, beside the time of the draft's answer. The present d is kept if it is right within `BAND`."""
        trees, steps = self._measured.trees, self._measured.steps
        if self._expansion <= 0:
            return steps
        target = min(tree.target for tree in trees)
        late = max(steps * self._expansion - target, 0.0)
        turn = _quartile([tree.seconds - tree.target for tree in trees]) - late
        draft = DraftTimes(max(turn, 0.0), self._expansion)
        target *= self._target(nodes) / self._target(self._measured.nodes)
        return min(max(steps, steps_for(target / BAND, draft)), steps_for(target * BAND, draft))

    def _forwards(self, steps: int, nodes: int) -> float:
        """Seconds of a round's forwards: of both models where they run in turn, else of the slower one."""
        target, draft = self._target(nodes), steps * self._expansion
        return max(target, draft) if self._ahead else target + draft

    def _target(self, nodes: int) -> float:
        """Seconds of a verification. Linear between the numbers of rows that were measured, constant above them."""
        return float(np.interp(nodes, self._rows, self._times))

    def _grown(self, steps: int) -> int:
        """Depths below the root that d expansions leave. A draft that grows ahead loses one of them: the token that the
        target adds to a verified path becomes the new root."""
        return max(steps - 1, 1) if self._ahead else steps

    def _further(self, depths: list[int], nodes: int, more: int) -> float:
        """Tokens that so many more depths would add to a round, by a guess. Two things reduce them: the chance that the
        text goes on falls from depth to depth, and a deeper node stands further back in the proposal, so that a small
        bs leaves it out. Its place is taken to grow in proportion to its depth."""
        trees, grown = self._measured.trees, self._grown(self._measured.steps)
        places = [tree.hits[grown - 1] for tree in trees if len(tree.hits) >= grown]
        above = sum(depth >= grown - 1 for depth in depths)
        chance = sum(depth >= grown for depth in depths) / above if above else 0.0
        tokens, share = 0.0, 1 / len(depths)
        for extra in range(1, more + 1):
            chance *= DEEPER
            share *= chance
            tokens += share * sum(place * (grown + extra) < nodes * grown for place in places)
        return tokens


def _quartile(values: list[float]) -> float:
    """The lower one."""
    return sorted(values)[len(values) // 4]
