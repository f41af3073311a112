"""Calibration of a model pair: the maximum-likelihood fit to recorded rounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

RECORDED_CALIBRATION = 1.0  # of the rounds that are fitted, so that weights are the draft's own scores
MIN_CHOICES = 50  # fewer recorded choices are not fitted
LEAST, MOST = 0.1, 5.0  # limits of a fitted calibration
BISECTIONS = 40


class RecordedChoice(NamedTuple):
    """The children of an expanded node, one of which has the target's next token."""

    scores: NDArray[np.float64]  # log-weights of the children at RECORDED_CALIBRATION
    chosen: int  # index of the child


def fit_calibration(rounds: Iterable[dict[str, Any]]) -> float | None:
    """Returns the calibration c with the largest likelihood of the target's choices in `rounds`, the round lines of a
    trace: a child is chosen with a probability proportional to exp(score / c). Returns None with too few choices.

    Only choices among the children are counted, so that the tokens outside of the tree do not matter. The likelihood is
    concave in 1 / c; the zero of its derivative is found by bisection.
    """
    choices = [choice for line in rounds for choice in read_choices(line)]
    if len(choices) < MIN_CHOICES:
        return None
    low, high = 1 / MOST, 1 / LEAST
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _slope(choices, middle) > 0 else (low, middle)
    return round(2 / (low + high), 2)


def read_choices(line: dict[str, Any]) -> Iterator[RecordedChoice]:
    """Yields the choices along the output tokens of a round, from the root down to the last node whose children have
    the next token. A round without a draft tree has none."""
    tree = line.get("draft", {}).get("tree")
    if tree is None:
        return
    node, parents = 0, np.array(tree["parents"])
    for token in line["tokens"]:
        children = np.flatnonzero(parents == node)
        found = [at for at, child in enumerate(children) if tree["tokens"][child] == token]
        if not found:
            return
        logprobs = np.array(tree["logprobs"], np.float64)
        yield RecordedChoice(logprobs[children] - logprobs[node], found[0])
        node = int(children[found[0]])


def _slope(choices: Iterable[RecordedChoice], inverse: float) -> float:
    """Returns the derivative of the log-likelihood by 1 / c at 1 / c = `inverse`: the sum of the chosen scores, less
    their expected values."""
    total = 0.0
    for scores, chosen in choices:
        shares = np.exp(inverse * (scores - scores.max()))
        total += scores[chosen] - float(shares @ scores / shares.sum())
    return total
