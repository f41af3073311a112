"""Cost model: predicts the tokens per second of other shapes (d, bs) from measurements of recent rounds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from statistics import median

import numpy as np

from swiftspec.control.round_stats import RoundStats
from swiftspec.control.step_times import DraftTimes, steps_for

# Probability that the accepted path continues from depth i to i + 1, divided by the probability that it continues from
# i - 1 to i; assumed for depths that no measured proposal has reached. Fitted by eye to the demo models.
DEPTH_DECAY = 0.75
# Time of a verification of one node relative to that of the smallest measured bs, assumed until it is measured. The
# value is so low that a smaller bs is tried where it would lose few tokens; its time is measured from then on.
ONE_ROW_FACTOR = 0.75
HYSTERESIS = 1.05  # tolerance of the verification time, as a factor, within which d stays unchanged


class CostModel:
    """Predictions for rounds of any shape (d, bs), based on at least one measured round of the current shape, or on row
    times. Only the latter predict the times of more nodes than were measured.

    In all methods, `steps` is d and `nodes` is bs.
    """

    def __init__(self, stats: RoundStats) -> None:
        trees, table = stats.speculative_rounds, stats.row_times
        assert trees or table is not None
        self._stats, self._lookahead = stats, stats.config.mode == "async"
        times, self._expansion, self._overhead = dict(stats.verify_times), 0.0, 0.0
        if trees:
            # The lower quartile excludes rounds in which a lookahead drafter ran out of nodes and made more than d
            # expansions.
            self._expansion = _lower_quartile([tree.draft for tree in trees]) / stats.steps
            times[stats.nodes] = median(tree.target for tree in trees)
        elif table is not None:
            self._expansion = table.draft.at(stats.config.leaves_per_expansion)
        if stats.ar_round_time is not None:
            times[1] = stats.ar_round_time
        elif table is None and (fewest := min(times)) > 1:
            times[1] = ONE_ROW_FACTOR * times[fewest]
        self._prior: Callable[[float], float] = (lambda rows: 1.0) if table is None else table.target.at
        self._rows = sorted(times) or [1]
        self._factors = [times[rows] / self._prior(rows) for rows in sorted(times)] or [1.0]
        if trees:
            forwards = self._forward_time(stats.steps, stats.nodes)
            self._overhead = max(median(tree.seconds for tree in trees) - forwards, 0.0)

    def tokens_per_second(self, steps: int, nodes: int) -> float:
        """Returns the predicted tokens per second; 0 if the predicted time of a round is 0."""
        seconds = self.round_time(steps, nodes)
        return self.tokens_per_round(steps, nodes) / seconds if seconds > 0 else 0.0

    def round_time(self, steps: int, nodes: int) -> float:
        """Returns the predicted duration of a round, in seconds."""
        return self._forward_time(steps, nodes) + self._overhead

    def tokens_per_round(self, steps: int, nodes: int) -> float:
        """Returns the predicted tokens per round. For a smaller bs or d, each measured round determines the depth that
        its accepted path would have reached; the gain of a larger d is estimated."""
        trees, now = self._stats.speculative_rounds, self._stats.steps
        depths = [bisect_left(tree.accepted_ranks, nodes) for tree in trees]
        if steps < now:
            depths = [min(depth, self._proposal_depth(steps)) for depth in depths]
        further = self._tokens_of_deeper(depths, nodes, steps - now) if steps > now else 0.0
        return 1 + sum(depths) / len(depths) + further

    def steps_per_verification(self, nodes: int) -> int:
        """Returns d for a lookahead drafter (paper section 3.1): the number of expansions that fit into a verification
        of `nodes` nodes after the drafter's fixed overhead per round. The current d is returned if it is the right
        number for a verification time that differs by at most the factor `HYSTERESIS`."""
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
        """Returns the seconds of a round's forwards: the sum over both models, or the maximum with a lookahead drafter,
        whose forwards run during the verification."""
        target, draft = self._verify_time(nodes), steps * self._expansion
        return max(target, draft) if self._lookahead else target + draft

    def _verify_time(self, nodes: int) -> float:
        """Returns the seconds of a verification of `nodes` nodes: those in the row times, multiplied by the factor that
        verifications have taken in comparison. The factor is interpolated linearly between the measured values of bs
        and constant beyond them. Without row times the same holds for the seconds themselves."""
        return self._prior(nodes) * float(np.interp(nodes, self._rows, self._factors))

    def _proposal_depth(self, steps: int) -> int:
        """Returns the number of levels below the root of a proposal after `steps` expansions. A lookahead drafter's
        proposal has one level less, because it expands before the result is known, and the bonus token takes up one
        level as the new root."""
        return max(steps - 1, 1) if self._lookahead else steps

    def _tokens_of_deeper(self, depths: list[int], nodes: int, more: int) -> float:
        """Returns the estimated additional tokens per round if the tree has `more` further levels.

        `depths`: depth of the accepted path of each measured round, with bs = `nodes`.
        Two effects reduce the gain. The probability that the path continues falls by `DEPTH_DECAY` per level. And a
        deeper node ranks lower in the proposal, so that a small bs omits it; the rank is assumed to be proportional to
        the depth.
        """
        trees, grown = self._stats.speculative_rounds, self._proposal_depth(self._stats.steps)
        places = [tree.accepted_ranks[grown - 1] for tree in trees if len(tree.accepted_ranks) >= grown]
        above = sum(depth >= grown - 1 for depth in depths)
        chance = sum(depth >= grown for depth in depths) / above if above else 0.0
        tokens, share = 0.0, 1 / len(depths)
        for extra in range(1, more + 1):
            chance *= DEPTH_DECAY
            share *= chance
            tokens += share * sum(place * (grown + extra) < nodes * grown for place in places)
        return tokens


def _lower_quartile(values: list[float]) -> float:
    """Returns the lower quartile of `values`."""
    return sorted(values)[len(values) // 4]
