"""Decides what the next rounds look like: how many expansions the draft makes (d), how many nodes are verified (bs),
and whether the draft is asked at all.

`decide` is a pure function of what was measured, and what it decides never changes a token. It compares tokens a
second: those of one shape (d, bs) with those of another, and those of the best shape with those of plain rounds.
"""

from __future__ import annotations

from swiftspec.config import MOST_STEPS
from swiftspec.control.cost_model import Forecast
from swiftspec.control.round_stats import PLAIN, PROBE, WINDOW, Decision, Measured

EVERY = 8  # rounds between two decisions; one takes about a tenth of a millisecond
REFRESH = 512  # rounds after which the time of a plain round is measured again
MARGIN = 1.05  # speculation is given up only where plain rounds are faster by this factor
GAIN = 1.04  # another shape is taken only where it promises more by this factor
FIRST = 3  # rounds after which the cost of forwards is known
# A usual acceptance, fitted by eye to the embedded pair with bs = 4, 8, 16 and d up to 6: the text comes down to depth
# i with the chance USUAL^i, and less often where bs leaves few nodes for a depth.
USUAL, NODES_A_DEPTH = 0.88, 2.5
REACH = 2  # d rises by at most this much at a time: how far down the text would come is a guess


def decide(m: Measured) -> Decision:
    """The kind of the next rounds.

    Speculation goes on while it is faster than plain rounds, in the shape that promises most. A few plain rounds are
    made where their time is not known or was measured long ago. Where speculation is slower, rounds stay plain until
    it is time to try it again.

    The first rounds that were ever measured tell what forwards cost here, though not yet how much is accepted; with a
    usual acceptance that is enough to choose d for models of any size, and bs where the time of a plain round is known.
    """
    if not m.config.decides:
        return m.current
    if m.config.adapt_steps and len(m.trees) == FIRST and m.rounds == (FIRST if m.speculating else PROBE):
        return _by_cost(m)
    since = m.rounds - (WINDOW if m.speculating else PROBE)
    if since < 0 or since % EVERY != 0:
        return m.current
    forecast = Forecast(m)
    best = _best_shape(m, forecast)
    if m.config.self_switch:
        if m.plain_round is None or (m.speculating and m.plain_age > REFRESH):
            return PLAIN
        pays = forecast.speed(*best) * m.plain_round * MARGIN >= 1  # a plain round gives one token
        if not pays and (m.speculating or m.rounds < m.patience):
            return PLAIN
    return Decision(*best, True)


def _by_cost(m: Measured) -> Decision:
    """After the first rounds: the shape with the most tokens a second at a usual acceptance. Before bs is chosen, a few
    plain rounds tell what a single row costs."""
    if m.config.mode == "async":
        return Decision(Forecast(m).ratio(m.nodes), m.nodes, True)
    free = m.config.adapt_batch and m.config.self_switch
    if free and m.plain_round is None:
        return PLAIN
    forecast, promises = Forecast(m), dict[tuple[int, int], float]()
    for bs in _halves(m) if free else [m.nodes]:
        tokens = 1.0
        for d in range(1, max(MOST_STEPS, m.config.steps) + 1):
            tokens += USUAL**d * min(1.0, bs / (NODES_A_DEPTH * d)) ** 2
            seconds = forecast.seconds(d, bs)
            present = GAIN if (d, bs) == (m.steps, m.nodes) else 1
            promises[d, bs] = present * tokens / seconds if seconds > 0 else 0.0
    return Decision(*max(promises, key=lambda shape: promises[shape]), True)


def _halves(m: Measured) -> list[int]:
    """The values of bs that may be chosen: the configured one, its half, its quarter and so on."""
    return [m.config.verify_batch >> i for i in range(m.config.verify_batch.bit_length() - 1)]


def _best_shape(m: Measured, forecast: Forecast) -> tuple[int, int]:
    """The shape (d, bs) that promises most tokens a second. It is the present one unless another promises more by the
    factor `GAIN`.

    What a smaller shape gives is counted from the rounds seen, what a larger one gives is a guess; so no larger one is
    tried while `hold` lasts. A draft that grows ahead of the target makes as many expansions for free as fit into a
    verification. There d is never below that number, and changing d to that number needs no gain.
    """
    ahead, most = m.config.mode == "async", max(MOST_STEPS, m.config.steps)
    halves = _halves(m)
    promises = {}
    for bs in halves if m.config.adapt_batch and halves else [m.nodes]:
        least = forecast.ratio(bs) if ahead else 1
        highest = min((least if ahead else m.steps) + REACH, most)
        for d in range(least, highest + 1) if m.config.adapt_steps else [m.steps]:
            if m.hold <= 0 or (bs <= m.nodes and d <= max(m.steps, least)):
                present = bs == m.nodes and (d == m.steps or (ahead and d == least))
                promises[d, bs] = forecast.speed(d, bs) / (1 if present else GAIN)
    return max(promises, key=lambda shape: promises[shape])
