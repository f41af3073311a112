"""Tree masks: which of the last cache slots a row attends to (paper section 3.1, non-square masks; section 4, padding).

A mask row covers only the last W slots in use, right-aligned: column W - 1 is the last slot. A row attends to all
earlier slots. Expansions (w rows over the whole tree), verifications (square) and prompt chunks (lower triangular) use
the same representation.
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
)  # widths of padded masks, in slots; few, because a CUDA graph is captured for each


def from_parents(parents: Sequence[int]) -> MaskRows:
    """Returns the tree attention mask [nodes, nodes] of a whole tree: row i is True at node i and its ancestors.

    `parents`: parent of each node, in topological order (`parents[i] < i`); negative for a root.
    """
    rows = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent >= 0:
            rows[node] |= rows[parent]
    return rows


def causal(n: int) -> MaskRows:
    """Returns the causal mask [n, n] of a chain of `n` tokens, such as a prompt chunk."""
    return np.tri(n, dtype=np.bool_)


def pad_left(rows: MaskRows) -> MaskRows:
    """Pads mask rows on the left to the next of `MASK_WIDTHS`, or to a multiple of the largest one.

    The added columns are True, since they stand for earlier slots, which every row attends to.
    """
    n, width = rows.shape
    fixed = padded_width(width)
    padded = np.ones((n, fixed), dtype=np.bool_)
    padded[:, fixed - width :] = rows
    return padded


def padded_width(width: int) -> int:
    """Returns the width of the padded mask: the next of `MASK_WIDTHS`, or a multiple of the largest one."""
    return next((w for w in MASK_WIDTHS if w >= width), -(-width // MASK_WIDTHS[-1]) * MASK_WIDTHS[-1])


def paths(tokens: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    """Returns for each node of a proposal the tokens from the root's child down to the node; empty for the root."""
    rows: list[list[int]] = []
    for token, parent in zip(tokens, parents, strict=True):
        rows.append([] if parent < 0 else [*rows[parent], token])
    return rows
