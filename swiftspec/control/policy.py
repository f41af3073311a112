"""Adaptive speculation policy: chooses d, bs and whether the draft is used, from measurements of recent rounds.

`decide` compares shapes (d, bs) by predicted tokens per second, and then the best shape with autoregressive decoding.
It is a pure function of the measurements. Its decisions do not change the output; with verify reject they change the
sampled text, but not its distribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from swiftspec.config import MAX_MEASURED_DRAFT_STEPS, EngineConfig
from swiftspec.control.cost_model import CostModel
from swiftspec.control.round_stats import NO_SPECULATION, PROBE_ROUNDS, WINDOW_ROUNDS, Decision, RoundStats
from swiftspec.control.row_times import PairTimes

DECISION_INTERVAL_ROUNDS = 8  # rounds from one decision to the next; a decision takes about 0.1 ms
REFRESH_ROUNDS = 512  # rounds after which the time of an autoregressive round is measured again
SWITCH_OFF_FACTOR = 1.05  # speculation stops only if autoregressive rounds are faster by this factor
MIN_GAIN_FACTOR = 1.04  # another shape is chosen only if its prediction is better by this factor
FIRST_DECISION_ROUNDS = 3  # speculative rounds before the first decision, which needs only the cost of forwards
# Typical acceptance, a least-squares fit to the demo models with bs from 2 to 32 and d up to 8, greedy: the accepted
# path reaches depth i with probability TYPICAL_ACCEPTANCE^i * min(1, bs / (NODES_PER_DEPTH * i)).
TYPICAL_ACCEPTANCE, NODES_PER_DEPTH = 0.83, 3.75
LARGE_BATCHES = (12, 16, 24, 32)  # candidates for bs above the configured one
# Predicted speed of the largest one at a typical acceptance rate, relative to the best shape
MIN_CANDIDATE_SHARE = 0.85
MAX_RAISE_STEPS = 2  # largest increase of d per decision, because the acceptance at new depths is an estimate


def initial_stats(config: EngineConfig, row_times: PairTimes | None) -> RoundStats:
    """Returns the measurements before the first round.

    With row times, d and bs are those with the most tokens per second at a typical acceptance rate, as far as they are
    adaptive. Values of bs above the configured one become candidates up to the largest whose rows are so cheap that a
    pair with more accepted tokens could gain from them.
    """
    m = RoundStats(config, row_times)
    if row_times is None or not config.adapts_shape:
        return m
    if config.adapt_batch:
        larger = [bs for bs in LARGE_BATCHES if config.verify_batch < bs <= config.max_nodes]
        promises = _typical_promises(m, [*m.batch_sizes, *larger])
        least = MIN_CANDIDATE_SHARE * max(promises.values())
        most = max(bs for (_, bs), promise in promises.items() if promise >= least)
        m.batch_sizes += [bs for bs in larger if bs <= most]
    if config.adapt_steps:
        m.steps, m.nodes = _most_promising(_typical_promises(m, m.batch_sizes))
    return m


def decide(m: RoundStats) -> Decision:
    """Returns the kind of the next rounds: speculative with some d and bs, or autoregressive.

    Speculation continues while it is faster than autoregressive rounds, in the shape with the most predicted tokens per
    second. A few autoregressive rounds are run if their time is neither measured nor known from row times, or was
    measured more than `REFRESH_ROUNDS` rounds ago. If speculation is slower, rounds become autoregressive, and after
    `m.retry_after` rounds at the latest speculation is tried again.

    A trial of a draft that is hardly ever right ends early; see `_trial_failed`.

    The first decision is made after `FIRST_DECISION_ROUNDS` rounds, which suffice for the cost of forwards but not for
    the acceptance rate. With a typical acceptance rate it already chooses d for models of any size, and also bs if the
    time of an autoregressive round is known.
    """
    if not m.config.is_adaptive:
        return m.current
    if m.config.self_switch and _trial_failed(m):
        return NO_SPECULATION
    if (
        m.config.adapt_steps
        and len(m.speculative_rounds) == FIRST_DECISION_ROUNDS
        and m.rounds == (FIRST_DECISION_ROUNDS if m.speculating else PROBE_ROUNDS)
    ):
        return _first_decision(m)
    since = m.rounds - (WINDOW_ROUNDS if m.speculating else PROBE_ROUNDS)
    if since < 0 or since % DECISION_INTERVAL_ROUNDS != 0:
        return m.current
    forecast = CostModel(m)
    best = _best_shape(m, forecast)
    if m.config.self_switch:
        if forecast.ar_round_time is None or (m.speculating and m.ar_age > REFRESH_ROUNDS):
            return NO_SPECULATION
        pays = (
            forecast.tokens_per_second(*best) * forecast.ar_round_time * SWITCH_OFF_FACTOR >= 1
        )  # an autoregressive round yields one token
        if not pays and (m.speculating or m.rounds < m.retry_after):
            return NO_SPECULATION
    return Decision(*best, True)


def _trial_failed(m: RoundStats) -> bool:
    """Returns whether speculation ends before the regular decision, because the trial accepted so few tokens that no
    shape pays, or to measure the time of an autoregressive round first. It is evaluated after each round of a trial
    with rare acceptance, and once an autoregressive round has been measured."""
    at_end_of_probe = not m.speculating and m.rounds == PROBE_ROUNDS
    if not (m.rarely_accepts and (m.speculating or at_end_of_probe)):
        return False
    if len(m.speculative_rounds) < FIRST_DECISION_ROUNDS or m.trial_rounds > WINDOW_ROUNDS:
        return False
    forecast = CostModel(m)
    if forecast.ar_round_time is None:
        return True
    chance = (m.trial_hits + 0.5) / (m.trial_rounds + 1)  # that the accepted path continues, at any depth
    bs, d = min(m.batch_sizes) if m.config.adapt_batch else m.nodes, 1 if m.config.adapt_steps else m.steps
    return forecast.round_time(d, bs) * (1 - chance) >= forecast.ar_round_time * SWITCH_OFF_FACTOR


def _first_decision(m: RoundStats) -> Decision:
    """Returns the decision after the first rounds: the shape with the most tokens per second at a typical acceptance
    rate. If bs and the use of the draft are adaptive, but the time of an autoregressive round is unknown, returns
    `NO_SPECULATION`, so that a few autoregressive rounds measure it."""
    if m.config.mode == "async":
        return Decision(CostModel(m).steps_per_verification(m.nodes), m.nodes, True)
    free = m.config.adapt_batch and (m.config.self_switch or m.row_times is not None)
    if free and CostModel(m).ar_round_time is None:
        return NO_SPECULATION
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
