"""Adaptive speculation policy: chooses d, bs and whether the draft is used, from measurements of recent rounds.

`decide` compares shapes (d, bs) by predicted tokens per second; whether the draft is used follows from its budget
(draft_budget.py). It is a pure function of the measurements. Its decisions do not change the output; with verify reject
they change the sampled text, but not its distribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from swiftspec.config import MAX_MEASURED_DRAFT_STEPS, EngineConfig
from swiftspec.control.cost_model import CostModel
from swiftspec.control.draft_budget import STOPPED, DraftBudget
from swiftspec.control.round_stats import NO_SPECULATION, PROBE_ROUNDS, WINDOW_ROUNDS, Decision, RoundStats
from swiftspec.control.row_times import PairTimes

DECISION_INTERVAL_ROUNDS = 8  # rounds from one decision to the next; a decision takes about 0.1 ms
REFRESH_ROUNDS = 512  # rounds after which the time of an autoregressive round is measured again
# The same while the rounds with the draft gain so little that an error of the measurement could be the reason
NARROW_REFRESH_ROUNDS = 64
MIN_GAIN_FACTOR = 1.04  # another shape is chosen only if its prediction is better by this factor
FIRST_DECISION_ROUNDS = 3  # speculative rounds before the first decision, which needs only the cost of forwards
# Typical acceptance, a least-squares fit to the demo models with bs from 2 to 32 and d up to 8, greedy: the accepted
# path reaches depth i with probability TYPICAL_ACCEPTANCE^i * min(1, bs / (NODES_PER_DEPTH * i)).
TYPICAL_ACCEPTANCE, NODES_PER_DEPTH = 0.83, 3.75
LARGE_BATCHES = (12, 16, 24, 32)  # candidates for bs above the configured one
# Predicted speed of the largest one at a typical acceptance rate, relative to the best shape
MIN_CANDIDATE_SHARE = 0.85
MAX_RAISE_STEPS = 2  # largest increase of d per decision, because the acceptance at new depths is an estimate


def initial_stats(config: EngineConfig, row_times: PairTimes | None, budget: DraftBudget | None = None) -> RoundStats:
    """Returns the measurements before the first round. `budget`: that of an earlier start; None: there was none.

    With row times, d and bs are those with the most tokens per second at a typical acceptance rate, as far as they are
    adaptive, and a draft that is slower than autoregressive rounds even then is not used before it has earned a trial.
    Values of bs above the configured one become candidates up to the largest whose rows are so cheap that a pair with
    more accepted tokens could gain from them.
    """
    m = RoundStats(config, row_times)
    if row_times is not None:
        if config.adapt_batch:
            larger = [bs for bs in LARGE_BATCHES if config.verify_batch < bs <= config.max_nodes]
            promises = _typical_promises(m, [*m.batch_sizes, *larger])
            least = MIN_CANDIDATE_SHARE * max(promises.values())
            most = max(bs for (_, bs), promise in promises.items() if promise >= least)
            m.batch_sizes += [bs for bs in larger if bs <= most]
        promises = _typical_promises(m, m.batch_sizes)
        if config.adapt_steps:
            m.steps, m.nodes = _most_promising(promises)
        if promises.get((m.steps, m.nodes), 0.0) * row_times.target.at(1) < 1:  # an autoregressive round has one token
            m.budget = DraftBudget(0.0, STOPPED)
    if budget is not None:
        m.budget = budget
    m.speculating = not (config.self_switch and m.budget.spent)
    return m


def decide(m: RoundStats) -> Decision:
    """Returns the kind of the next rounds: speculative with some d and bs, or autoregressive.

    Speculation continues until its budget is spent, in the shape with the most predicted tokens per second. Then rounds
    are autoregressive until they have earned another trial. A few autoregressive rounds are run if their duration is
    not measured, because row times can be wrong by more than a draft gains, or was measured long ago.

    The first decision on the shape is made after `FIRST_DECISION_ROUNDS` rounds, which suffice for the cost of forwards
    but not for the acceptance rate. With a typical acceptance rate it already chooses d for models of any size, and
    also bs if the time of an autoregressive round is known.
    """
    if not m.config.is_adaptive:
        return m.current
    if m.config.self_switch and not _speculates(m):
        return NO_SPECULATION
    if (
        m.config.adapt_steps
        and len(m.speculative_rounds) == FIRST_DECISION_ROUNDS
        and m.rounds == (FIRST_DECISION_ROUNDS if m.speculating else PROBE_ROUNDS)
    ):
        return _first_decision(m)
    since = m.rounds - WINDOW_ROUNDS
    due = not m.speculating or (since >= 0 and since % DECISION_INTERVAL_ROUNDS == 0)
    if not (due and m.speculative_rounds):
        return Decision(m.steps, m.nodes, True)
    return Decision(*_best_shape(m, CostModel(m)), True)


def _speculates(m: RoundStats) -> bool:
    """Returns whether the next rounds use the draft."""
    if m.speculating:
        if not m.budget.pays:
            return False
        few = len(m.speculative_rounds) < FIRST_DECISION_ROUNDS
        trusted = NARROW_REFRESH_ROUNDS if m.budget.gains_little else REFRESH_ROUNDS
        return m.budget.spent or few or (len(m.ar_seconds) > 0 and m.ar_age <= trusted)
    if not m.budget.spent:
        return m.rounds >= PROBE_ROUNDS
    missed = m.missed_round
    return missed is not None and m.budget.may_start(missed, m.rounds)


def _first_decision(m: RoundStats) -> Decision:
    """Returns the decision after the first rounds: the shape with the most tokens per second at a typical acceptance
    rate. bs is included if the time of an autoregressive round is known."""
    if m.config.mode == "async":
        return Decision(CostModel(m).steps_per_verification(m.nodes), m.nodes, True)
    free = m.config.adapt_batch and m.reference_time is not None
    promises = _typical_promises(m, m.batch_sizes if free else [m.nodes])
    promises[m.steps, m.nodes] *= MIN_GAIN_FACTOR
    return Decision(*_most_promising(promises), True)


def _typical_promises(m: RoundStats, batch_sizes: Sequence[int]) -> dict[tuple[int, int], float]:
    """Returns the tokens per second of each shape (d, bs) at a typical acceptance rate, with bs from `batch_sizes`."""
    forecast, promises = CostModel(m), dict[tuple[int, int], float]()
    for bs in batch_sizes:
        tokens = 1.0
        for d in range(1, max(MAX_MEASURED_DRAFT_STEPS, m.config.initial_draft_steps) + 1):
            tokens += TYPICAL_ACCEPTANCE**d * min(1.0, bs / (NODES_PER_DEPTH * d))
            seconds = forecast.round_time(d, bs)
            promises[d, bs] = tokens / seconds if seconds > 0 else 0.0
    return promises


def _most_promising(promises: Mapping[tuple[int, int], float]) -> tuple[int, int]:
    """Returns the shape (d, bs) with the most tokens per second."""
    return max(promises, key=lambda shape: promises[shape])


def _best_shape(m: RoundStats, forecast: CostModel) -> tuple[int, int]:
    """Returns the shape (d, bs) with the most predicted tokens per second. The current shape is kept unless another
    shape is better by `MIN_GAIN_FACTOR`.

    Predictions for a smaller d or bs follow from measured rounds, but those for a larger d or bs are estimates, so
    neither is increased while `m.raise_cooldown` is positive. Expansions of a lookahead drafter cost no time as long as
    they fit into a verification: its d is never below the number that fits, and changing d to that number requires no
    gain.
    """
    ahead, most = m.config.mode == "async", max(MAX_MEASURED_DRAFT_STEPS, m.config.initial_draft_steps)
    promises = {}
    for bs in m.batch_sizes if m.config.adapt_batch else [m.nodes]:
        least = forecast.steps_per_verification(bs) if ahead else 1
        highest = min((least if ahead else m.steps) + MAX_RAISE_STEPS, most)
        for d in range(least, highest + 1) if m.config.adapt_steps else [m.steps]:
            if m.raise_cooldown <= 0 or (bs <= m.nodes and d <= max(m.steps, least)):
                present = bs == m.nodes and (d == m.steps or (ahead and d == least))
                promises[d, bs] = forecast.tokens_per_second(d, bs) / (1 if present else MIN_GAIN_FACTOR)
    return _most_promising(promises)
