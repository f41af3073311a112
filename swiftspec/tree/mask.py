"""Tree masks: which of the last cache slots a row attends to (paper section 3.1, non-square masks; section 4, padding).

A mask row is a right-aligned bit window over the last W slots; all older slots are visible. The same representation
serves the draft (w leaves against the whole tree), the verifier (a square) and a prompt chunk (a triangle).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MaskRows = NDArray[np.bool_]  # [n, W]

MASK_WIDTHS = (
    8,
    16,
    32,
    64,
    128,
    256,
)  # fixed widths that masks are padded to, which limits the number of CUDA graphs


def from_parents(parents: Sequence[int]) -> MaskRows:
    """Rows of a whole tree in topological order: [n, n], where row i contains the ancestors of node i and itself.

    `parents[i] < i`; a negative parent marks a root.
    """
    rows = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent >= 0:
            rows[node] |= rows[parent]
    return rows


def causal(n: int) -> MaskRows:
    """Rows of a chain, such as a prompt chunk: [n, n], lower triangular."""
    return np.tri(n, dtype=np.bool_)


def pad_left(rows: MaskRows) -> MaskRows:
    """Pads [n, W] with visible columns to the next fixed width, or beyond the largest one to its next multiple.

    The added columns stand for older slots, which every row attends to.
    """
    n, width = rows.shape
    fixed = next((w for w in MASK_WIDTHS if w >= width), -(-width // MASK_WIDTHS[-1]) * MASK_WIDTHS[-1])
    padded = np.ones((n, fixed), dtype=np.bool_)
    padded[:, fixed - width :] = rows
    return padded


def paths(tokens: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    """For each node of a proposal, the tokens from below the root down to the node."""
    rows: list[list[int]] = []
    for token, parent in zip(tokens, parents, strict=True):
        rows.append([] if parent < 0 else [*rows[parent], token])
    return rows
