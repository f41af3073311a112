"""Cost model: predicts tokens per second of rounds with another shape (d, bs) from recent rounds. Pure arithmetic."""

from __future__ import annotations

from bisect import bisect_left
from statistics import median

import numpy as np

from swiftspec.control.round_stats import RoundStats
from swiftspec.control.step_times import DraftTimes, steps_for

# Estimate for depths that were never grown: the probability that the path continues to the next depth, divided by the
# same probability one depth higher. Fitted by eye to the demo models.
DEPTH_DECAY = 0.75
# Estimated time of a one-row verification, relative to that of the fewest rows measured. Low enough that a smaller bs
# is tried if that would lose few tokens; from then on its time is measured.
ONE_ROW_FACTOR = 0.75
HYSTERESIS = 1.05  # d is kept if it is right for a verification time within this factor


class CostModel:
    """Predictions for rounds of any shape from measured rounds of the current shape (at least one)."""

    def __init__(self, stats: RoundStats) -> None:
        trees = stats.speculative_rounds
        self._stats, self._lookahead = stats, stats.config.mode == "async"
        # A lookahead drafter that runs out of nodes makes more than d expansions in a round. The lower quartile
        # excludes such rounds.
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
        """Predicted tokens per second."""
        seconds = self.round_time(steps, nodes)
        return self.tokens_per_round(steps, nodes) / seconds if seconds > 0 else 0.0

    def round_time(self, steps: int, nodes: int) -> float:
        """Predicted seconds of a round."""
        return self._forward_time(steps, nodes) + self._overhead

    def tokens_per_round(self, steps: int, nodes: int) -> float:
        """Predicted tokens per round. For fewer nodes or a smaller d, each measured round shows the depth that its
        accepted path would have reached; the gain of a larger d is estimated."""
        trees, now = self._stats.speculative_rounds, self._stats.steps
        depths = [bisect_left(tree.hits, nodes) for tree in trees]
        if steps < now:
            depths = [min(depth, self._proposal_depth(steps)) for depth in depths]
        further = self._tokens_of_deeper(depths, nodes, steps - now) if steps > now else 0.0
        return 1 + sum(depths) / len(depths) + further

    def steps_per_verification(self, nodes: int) -> int:
        """d of a lookahead drafter (paper, section 3.1): as many expansions as fit into a verification of `nodes`
        nodes, minus the time of the draft's answer. The current d is kept if it is right within `HYSTERESIS`."""
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
        """Seconds of a round's forwards: the sum of both models, or with a lookahead drafter the slower one."""
        target, draft = self._verify_time(nodes), steps * self._expansion
        return max(target, draft) if self._lookahead else target + draft

    def _verify_time(self, nodes: int) -> float:
        """Seconds of a verification: interpolated linearly between measured numbers of rows, constant above them."""
        return float(np.interp(nodes, self._rows, self._times))

    def _proposal_depth(self, steps: int) -> int:
        """Depths below the root after d expansions. With a lookahead drafter it is one less, because the bonus token
        becomes the new root."""
        return max(steps - 1, 1) if self._lookahead else steps

    def _tokens_of_deeper(self, depths: list[int], nodes: int, more: int) -> float:
        """Estimated additional tokens per round with `more` further depths. Two effects reduce them: the probability
        that the path continues falls with depth, and a deeper node ranks lower in the proposal, so a small bs omits it.
        The rank is assumed to grow in proportion to the depth."""
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
    """The lower quartile."""
    return sorted(values)[len(values) // 4]
