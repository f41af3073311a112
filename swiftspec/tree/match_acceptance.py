"""Acceptance of suffix lookup by match length: how often the token after an earlier occurrence is the next token."""

from __future__ import annotations

import math
from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

# Smallest match length of each bucket, and the acceptance that is assumed before any is measured. The values are lower
# than those of edits and higher than those of free text, so that the first rounds of either lose little.
BUCKETS_TOKENS = (0, 2, 4, 8, 16, 32)
PRIOR = (0.0, 0.15, 0.35, 0.65, 0.85, 0.93)
PRIOR_NODES = 8.0  # measured nodes that the assumed values count as
MEMORY_NODES = 256.0  # measured nodes of a bucket, after which its counts are halved, so that old ones fade


class MatchAcceptance:
    """Measured acceptance of proposed tokens by the length of their match. `table`: acceptance by match length."""

    def __init__(self, max_length: int) -> None:
        """`max_length`: longest match; longer ones count as this long."""
        self.table: NDArray[np.float32] = np.zeros(max_length + 1, np.float32)
        self._accepted = [prior * PRIOR_NODES for prior in PRIOR]
        self._expected = [PRIOR_NODES] * len(PRIOR)  # sum of the shares of the measured nodes
        for bucket in range(len(PRIOR)):
            self._update(bucket)

    def add(self, length: int, share: float, *, accepted: bool) -> None:
        """Adds a proposed node whose parent was accepted. `share`: see `SuffixIndex.query`; a node is accepted with the
        probability acceptance x share."""
        bucket = bisect_right(BUCKETS_TOKENS, length) - 1
        if self._expected[bucket] > MEMORY_NODES:
            self._accepted[bucket] /= 2
            self._expected[bucket] /= 2
        self._accepted[bucket] += accepted
        self._expected[bucket] += share
        self._update(bucket)

    def _update(self, bucket: int) -> None:
        upper = BUCKETS_TOKENS[bucket + 1] if bucket + 1 < len(BUCKETS_TOKENS) else math.inf
        end = int(min(upper, len(self.table)))
        self.table[BUCKETS_TOKENS[bucket] : end] = min(self._accepted[bucket] / self._expected[bucket], 1.0)
