"""Decides what the next rounds look like: how many expansions the draft makes (d), how many nodes are verified (bs),
and whether the draft is asked at all.

`decide` is a pure function of what was measured, and what it decides never changes a token. It compares tokens a
second: those of one shape (d, bs) with those of another, and those of the best shape with those of plain rounds.
"""

from __future__ import annotations

from swiftspec.config import MAX_MEASURED_DRAFT_STEPS
from swiftspec.control.cost_model import CostModel
from swiftspec.control.round_stats import NO_SPECULATION, PROBE_ROUNDS, WINDOW_ROUNDS, Decision, RoundStats

DECISION_INTERVAL_ROUNDS = 8  # rounds between two decisions; one takes about a tenth of a millisecond
REFRESH_ROUNDS = 512  # rounds after which the time of a plain round is measured again
SWITCH_OFF_FACTOR = 1.05  # speculation is given up only where plain rounds are faster by this factor
MIN_GAIN_FACTOR = 1.04  # another shape is taken only where it promises more by this factor
FIRST_DECISION_ROUNDS = 3  # rounds after which the cost of forwards is known
# A usual acceptance, fitted by eye to the embedded pair with bs = 4, 8, 16 and d up to 6: the text comes down to depth
# i with the chance USUAL^i, and less often where bs leaves few nodes for a depth.
TYPICAL_ACCEPTANCE, NODES_PER_DEPTH = 0.88, 2.5
MAX_RAISE_STEPS = 2  # d rises by at most this much at a time: how far down the text would come is a guess


def decide(m: RoundStats) -> Decision:
    """The kind of the next rounds.

    Speculation goes on while it is faster than plain rounds, in the shape that promises most. A few plain rounds are
    made where their time is not known or was measured long ago. Where speculation is slower, rounds stay plain until
    it is time to try it again.

    The first rounds that were ever measured tell what forwards cost here, though not yet how much is accepted; with a
    usual acceptance that is enough to choose d for models of any size, and bs where the time of a plain round is known.
    """
    if not m.config.is_adaptive:
        return m.current
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
        if m.ar_round_time is None or (m.speculating and m.ar_age > REFRESH_ROUNDS):
            return NO_SPECULATION
        pays = (
            forecast.tokens_per_second(*best) * m.ar_round_time * SWITCH_OFF_FACTOR >= 1
        )  # a plain round gives one token
        if not pays and (m.speculating or m.rounds < m.retry_after):
            return NO_SPECULATION
    return Decision(*best, True)


def _first_decision(m: RoundStats) -> Decision:
    """After the first rounds: the shape with the most tokens a second at a usual acceptance. Before bs is chosen, a few
    plain rounds tell what a single row costs."""
    if m.config.mode == "async":
        return Decision(CostModel(m).steps_per_verification(m.nodes), m.nodes, True)
    free = m.config.adapt_batch and m.config.self_switch
    if free and m.ar_round_time is None:
        return NO_SPECULATION
    forecast, promises = CostModel(m), dict[tuple[int, int], float]()
    for bs in _batch_sizes(m) if free else [m.nodes]:
        tokens = 1.0
        for d in range(1, max(MAX_MEASURED_DRAFT_STEPS, m.config.initial_draft_steps) + 1):
            tokens += TYPICAL_ACCEPTANCE**d * min(1.0, bs / (NODES_PER_DEPTH * d)) ** 2
            seconds = forecast.round_time(d, bs)
            present = MIN_GAIN_FACTOR if (d, bs) == (m.steps, m.nodes) else 1
            promises[d, bs] = present * tokens / seconds if seconds > 0 else 0.0
    return Decision(*max(promises, key=lambda shape: promises[shape]), True)


def _batch_sizes(m: RoundStats) -> list[int]:
    """The values of bs that may be chosen: the configured one, its half, its quarter and so on."""
    return [m.config.verify_batch >> i for i in range(m.config.verify_batch.bit_length() - 1)]


def _best_shape(m: RoundStats, forecast: CostModel) -> tuple[int, int]:
    """The shape (d, bs) that promises most tokens a second. It is the present one unless another promises more by the
    factor `GAIN`.

    What a smaller shape gives is counted from the rounds seen, what a larger one gives is a guess; so no larger one is
    tried while `hold` lasts. A draft that grows ahead of the target makes as many expansions for free as fit into a
    verification. There d is never below that number, and changing d to that number needs no gain.
    """
    ahead, most = m.config.mode == "async", max(MAX_MEASURED_DRAFT_STEPS, m.config.initial_draft_steps)
    halves = _batch_sizes(m)
    promises = {}
    for bs in halves if m.config.adapt_batch and halves else [m.nodes]:
        least = forecast.steps_per_verification(bs) if ahead else 1
        highest = min((least if ahead else m.steps) + MAX_RAISE_STEPS, most)
        for d in range(least, highest + 1) if m.config.adapt_steps else [m.steps]:
            if m.raise_cooldown <= 0 or (bs <= m.nodes and d <= max(m.steps, least)):
                present = bs == m.nodes and (d == m.steps or (ahead and d == least))
                promises[d, bs] = forecast.tokens_per_second(d, bs) / (1 if present else MIN_GAIN_FACTOR)
    return max(promises, key=lambda shape: promises[shape])
