"""Reference backend: the operators in plain torch on any device, with which tests compare the other backends.

In shapes, `rows` is the number of tokens of a forward, `hidden` the hidden size, `inputs` and `outputs` are those of a
projection, `heads` is the number of query heads, `window` the number of columns of the mask (`Batch.mask`).

A row's result does not depend on the other rows of its batch, on their number or on the slots of its keys, up to
rounding: torch may sum a product of more rows in another order.
"""

from __future__ import annotations

import torch

from swiftspec.backends.reference.attention import make_slot_mover, prepare, rope_tables, tree_attention
from swiftspec.backends.reference.delta import (
    fold_state,
    gated_delta,
    move_slots,
    multiply_sigmoid,
    prepare_delta,
)
from swiftspec.backends.reference.linear import embed, linear_residual, norm_head, norm_linear, norm_swiglu
from swiftspec.backends.reference.mixture import mlp, pack_mixture
from swiftspec.backends.reference.noise import gumbel_rows
from swiftspec.backends.reference.packing import mask_outputs, pack, pack_norm
from swiftspec.backends.reference.per_layer import add_per_layer, per_layer_embeddings
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
    "DRAFT_HEAD",
    "MAX_CAPTURED_SEQUENCES",
    "PEER_ALL_REDUCE",
    "PREFILL_CHUNK_ROWS",
    "Scores",
    "add_per_layer",
    "capture_bucket",
    "children",
    "device_tree",
    "draw",
    "draw_keyed",
    "embed",
    "fold_state",
    "fuse",
    "gated_delta",
    "gumbel_rows",
    "linear_residual",
    "log_probs",
    "log_top_k",
    "make_slot_mover",
    "mask_outputs",
    "mlp",
    "move_slots",
    "multiply_sigmoid",
    "norm_head",
    "norm_linear",
    "norm_swiglu",
    "pack",
    "pack_mixture",
    "pack_norm",
    "per_layer_embeddings",
    "prepare",
    "prepare_delta",
    "rope_tables",
    "tree_attention",
]  # fmt: skip

DRAFT_HEAD = None  # format to which a dense LM head of a draft is quantised at load; None: it stays dense
PEER_ALL_REDUCE = False  # whether projections all-reduce in their kernel, through the memory of the group's GPUs
PREFILL_CHUNK_ROWS = 256  # rows of a prefill chunk without logits: compute-bound, and soon interrupted
MAX_CAPTURED_SEQUENCES = 0  # a forward cannot be captured in a CUDA graph: `prepare` reads on the host


def capture_bucket(max_kv_len: int | None) -> None:
    """Returns None: no graph holds the number of slots that attention reads."""


def fuse(stack: PackedModel) -> FusedModel | None:
    """Returns None: this backend cannot run a model as one call (optional operator)."""
    return None


def device_tree(slots: int, children: int, leaves: int, vocab: int, device: torch.device) -> None:
    """Returns None: this backend has no draft tree in device memory (optional operator)."""
