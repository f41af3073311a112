"""Tree masks: who sees whom in the last slots of the cache (paper section 3.1, non-square masks; section 4, padding).

A mask row is a bit window over the last W slots, right-aligned; everything older is visible. The draft's rows (w leaves
against the whole tree), the verifier's (a square) and a prompt chunk's (a triangle) are the same thing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

WIDTHS = (8, 16, 32, 64, 128, 256)  # the few fixed shapes that masks are padded to, so that few graphs serve every tree


def from_parents(parents: Sequence[int]) -> Tensor:
    """Rows of a whole tree in topological order: [n, n] bool, row i = the ancestors of node i and itself.

    `parents[i] < i`; a negative parent marks a root.
    """
    rows: list[list[bool]] = []
    for node, parent in enumerate(parents):
        row = rows[parent].copy() if parent >= 0 else [False] * len(parents)
        row[node] = True
        rows.append(row)
    return torch.tensor(rows)


def causal(n: int) -> Tensor:
    """Rows of a chain, such as a prompt chunk: [n, n] bool, lower triangular."""
    return torch.ones(n, n, dtype=torch.bool).tril_()


def pad_left(rows: Tensor) -> Tensor:
    """Pads [n, W] with visible columns to the next fixed width (beyond the widest: to its next multiple).

    The added columns stand for older slots, which every row sees.
    """
    width = rows.shape[1]
    fixed = next((w for w in WIDTHS if w >= width), -(-width // WIDTHS[-1]) * WIDTHS[-1])
    return torch.nn.functional.pad(rows, (fixed - width, 0), value=True) if fixed > width else rows
