"""Reference backend: the operators in plain torch on any device, the baseline of the other backends' tests.

Letters: n rows of a forward, D the hidden size, N and K outputs and inputs of a projection, H query heads, G
key-value heads, g = H / G, hd the head's width, L slots in use, W the width of the mask window, S sequences.
"""

from __future__ import annotations

import torch

from swiftspec.backends.reference.attention import make_slot_mover, prepare, rope_tables, tree_attention
from swiftspec.backends.reference.linear import embed, linear_residual, norm_head, norm_linear, norm_swiglu
from swiftspec.backends.reference.noise import gumbel_rows
from swiftspec.backends.reference.packing import pack, pack_norm
from swiftspec.backends.reference.sampling import (
    DEFAULT_SCORES,
    Scores,
    children,
    draw,
    draw_keyed,
    log_probs,
    log_top_k,
)
from swiftspec.model.packed_model import FusedModel, PackedModel

__all__ = [
    "DEFAULT_SCORES",
    "MAX_CAPTURED_SEQUENCES",
    "Scores",
    "children",
    "device_tree",
    "draw",
    "draw_keyed",
    "embed",
    "fuse",
    "gumbel_rows",
    "linear_residual",
    "log_probs",
    "log_top_k",
    "make_slot_mover",
    "norm_head",
    "norm_linear",
    "norm_swiglu",
    "pack",
    "pack_norm",
    "prepare",
    "rope_tables",
    "tree_attention",
]  # fmt: skip

MAX_CAPTURED_SEQUENCES = 0  # no CUDA graphs: `prepare` reads its inputs on the host


def fuse(stack: PackedModel) -> FusedModel | None:
    """Optional operator: the model as one call. Not implemented here."""
    return None


def device_tree(slots: int, children: int, leaves: int, vocab: int, device: torch.device) -> None:
    """Optional operator: a draft tree on the device. Not implemented here."""
