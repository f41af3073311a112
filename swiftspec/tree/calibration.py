"""The constant that makes the draft's weights the chances that the target agrees, fitted to what the target did.

Children have weights log_softmax(s / c) of the draft's log-probabilities s (with the target's noise or without). By
-log c, the log-likelihood of the target's token after a node has the derivative s / c of that token less its mean under
the weights, whose variance under them is the Fisher information: so Newton's steps lead to the c of the largest
likelihood. Tokens that are no children count like the last child. That keeps an odd one from mattering, and leaves the
mean of the derivative at 0 where the weights are true.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

PRIOR = 8.0  # information in the first guess: that of some ten nodes
MEMORY = 256.0  # the most that is remembered, as texts change
STEP = 0.5  # the most that a node moves log c
LEAST, MOST = 0.1, 10.0  # of c


class Fit:
    """The constant of one request: a function of what it is shown, so the same on all ranks of a group."""

    def __init__(self, constant: float) -> None:
        self.constant = constant
        self._information = PRIOR

    def see(self, weights: NDArray[np.floating], taken: int | None) -> None:
        """Takes in a node after which the target's token is known: the `weights` [k] of its children, log-probabilities
        of which some may be -inf, and which of them that token is; None where it is none of them."""
        finite = np.isfinite(weights)
        if not finite.any():
            return
        above = np.where(finite, weights - weights[finite].min(), 0.0)
        chances = np.exp(weights)
        mean = float(chances @ above)
        self._information = min(self._information + float(chances @ above**2) - mean**2, MEMORY)
        step = ((0.0 if taken is None else float(above[taken])) - mean) / self._information
        constant = self.constant * math.exp(-max(-STEP, min(step, STEP)))
        self.constant = max(LEAST, min(constant, MOST))
