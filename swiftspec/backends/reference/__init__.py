"""The fused operators in plain torch, on any device: what the other backends are compared with.

Letters: n rows of a forward, D the hidden size, N and K outputs and inputs of a projection, H query heads, G
key-value heads, g = H / G, hd the head's width, L slots in use, W the width of the mask window, S sequences.
"""

from __future__ import annotations

import torch

from swiftspec.backends.reference.attention import mover, prepare, rope_tables, tree_attention
from swiftspec.backends.reference.linear import embed, linear_residual, norm_head, norm_linear, norm_swiglu
from swiftspec.backends.reference.noise import gumbel_rows
from swiftspec.backends.reference.packing import pack, pack_norm
from swiftspec.backends.reference.sampling import PLAIN, Scores, children, draw, draw_keyed, log_probs, log_top_k
from swiftspec.model.packed_model import Fused, Stack

__all__ = [
    "CAPTURES", "PLAIN", "Scores", "children", "device_tree", "draw", "draw_keyed", "embed", "fuse", "gumbel_rows",
    "linear_residual", "log_probs", "log_top_k", "mover", "norm_head", "norm_linear", "norm_swiglu", "pack",
    "pack_norm", "prepare", "rope_tables", "tree_attention",
]  # fmt: skip

CAPTURES = 0  # sequences of a forward that can be a CUDA graph: none, `prepare` reads what it needs on the host


def fuse(stack: Stack) -> Fused | None:
    """The stack as one call, where operators have that; these do not."""
    return None


def device_tree(slots: int, children: int, leaves: int, vocab: int, device: torch.device) -> None:
    """A draft tree that grows without the host, where operators have that; these do not."""
