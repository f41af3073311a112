"""Predicts the tokens a second of rounds of another shape (d, bs), from the latest rounds. This is arithmetic only."""

from __future__ import annotations

from bisect import bisect_left
from statistics import median

import numpy as np

from swiftspec.control.round_stats import RoundStats
from swiftspec.control.step_times import DraftTimes, steps_for

# A guess for depths that were never grown. The text goes on from one depth to the next with some chance; this is that
# chance over the chance one depth higher up. Set by eye on the embedded pair.
DEPTH_DECAY = 0.75
# A guess for the time of a verification of one row, over that of the fewest rows measured. It is low enough for a
# smaller bs to be tried where that would lose few tokens; after that its measured time is known.
ONE_ROW_FACTOR = 0.75
HYSTERESIS = 1.05  # d stays where it would be right for a verification faster or slower by up to this factor


class CostModel:
    """For rounds of any shape, from those of the shape in use. At least one of these must have been measured."""

    def __init__(self, stats: RoundStats) -> None:
        trees = stats.speculative_rounds
        self._stats, self._lookahead = stats, stats.config.mode == "async"
        # A draft that grows ahead sometimes runs out of nodes and makes more than d expansions in a round. The lower
        # quartile is the time of a round where it did not.
        self._expansion = _lower_quartile([tree.draft for tree in trees]) / stats.steps
        times = stats.verify_times | {stats.nodes: median(tree.target for tree in trees)}
        fewest = min(times)
        if stats.ar_round_time is not None:
            times[1] = stats.ar_round_time
        elif fewest > 1:
            times[1] = ONE_ROW_FACTOR * times[fewest]
        self._rows = sorted(times)
        self._times = [times[rows] for rows in self._rows]
        forwards = self._forward_time(stats.steps, stats.nodes)
        self._overhead = max(median(tree.seconds for tree in trees) - forwards, 0.0)

    def tokens_per_second(self, steps: int, nodes: int) -> float:
        """Tokens a second."""
        seconds = self.round_time(steps, nodes)
        return self.tokens_per_round(steps, nodes) / seconds if seconds > 0 else 0.0

    def round_time(self, steps: int, nodes: int) -> float:
        """Of a round."""
        return self._forward_time(steps, nodes) + self._overhead

    def tokens_per_round(self, steps: int, nodes: int) -> float:
        """Tokens a round. Each round seen tells how deep its text would have come with fewer nodes, and with a smaller
        d. What a larger d would add is guessed."""
        trees, now = self._stats.speculative_rounds, self._stats.steps
        depths = [bisect_left(tree.hits, nodes) for tree in trees]
        if steps < now:
            depths = [min(depth, self._proposal_depth(steps)) for depth in depths]
        further = self._tokens_of_deeper(depths, nodes, steps - now) if steps > now else 0.0
        return 1 + sum(depths) / len(depths) + further

    def steps_per_verification(self, nodes: int) -> int:
        """d for a draft that grows ahead (paper, section 3.1): as many expansions as fit into a verification of that
        many nodes, beside the time of the draft's answer. The present d is kept if it is right within `BAND`."""
        trees, steps = self._stats.speculative_rounds, self._stats.steps
        if self._expansion <= 0:
            return steps
        target = min(tree.target for tree in trees)
        late = max(steps * self._expansion - target, 0.0)
        turn = _lower_quartile([tree.seconds - tree.target for tree in trees]) - late
        draft = DraftTimes(max(turn, 0.0), self._expansion)
        target *= self._verify_time(nodes) / self._verify_time(self._stats.nodes)
        return min(max(steps, steps_for(target / HYSTERESIS, draft)), steps_for(target * HYSTERESIS, draft))

    def _forward_time(self, steps: int, nodes: int) -> float:
        """Seconds of a round's forwards: of both models where they run in turn, else of the slower one."""
        target, draft = self._verify_time(nodes), steps * self._expansion
        return max(target, draft) if self._lookahead else target + draft

    def _verify_time(self, nodes: int) -> float:
        """Seconds of a verification. Linear between the numbers of rows that were measured, constant above them."""
        return float(np.interp(nodes, self._rows, self._times))

    def _proposal_depth(self, steps: int) -> int:
        """Depths below the root that d expansions leave. A draft that grows ahead loses one of them: the token that the
        target adds to a verified path becomes the new root."""
        return max(steps - 1, 1) if self._lookahead else steps

    def _tokens_of_deeper(self, depths: list[int], nodes: int, more: int) -> float:
        """Tokens that so many more depths would add to a round, by a guess. Two things reduce them: the chance that the
        text goes on falls from depth to depth, and a deeper node stands further back in the proposal, so that a small
        bs leaves it out. Its place is taken to grow in proportion to its depth."""
        trees, grown = self._stats.speculative_rounds, self._proposal_depth(self._stats.steps)
        places = [tree.hits[grown - 1] for tree in trees if len(tree.hits) >= grown]
        above = sum(depth >= grown - 1 for depth in depths)
        chance = sum(depth >= grown for depth in depths) / above if above else 0.0
        tokens, share = 0.0, 1 / len(depths)
        for extra in range(1, more + 1):
            chance *= DEPTH_DECAY
            share *= chance
            tokens += share * sum(place * (grown + extra) < nodes * grown for place in places)
        return tokens


def _lower_quartile(values: list[float]) -> float:
    """The lower one."""
    return sorted(values)[len(values) // 4]
