"""Families of operators, and backends that take some families from another one: what replaces single kernels that a GPU
computes wrongly (backends/cuda/trial.py).

A family changes as one, because its functions share packed structures or a state that only they read. Between families
pass tensors of the same layout in every backend: hidden states, QKV, logits, RoPE tables, and the KV cache. The one
packed structure that two families read is the norm of query and key heads, which `compose` packs for the family that
reads it.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from swiftspec.backends.reference import Backend

Family = Literal["projections", "attention", "embedding", "sampling", "tree", "cache", "resampling"]
FAMILIES: dict[Family, tuple[str, ...]] = {
    # packed matrices and norms; with them, how a group sums the products
    "projections": (
        "pack", "pack_qkv", "pack_norm", "mask_outputs", "norm_linear", "norm_swiglu", "linear_residual", "mlp",
        "norm_head", "prefill_chunk", "fuse", "kept_int4_group", "int4_needs", "PERMUTED_INT4", "TILINGS",
        "PEER_ALL_REDUCE", "DRAFT_HEAD",
    ),
    "attention": (  # the plan of a forward
        "rope_tables", "prepare", "tree_attention", "MAX_CAPTURED_SEQUENCES", "capture_bucket", "FUSED_ATTENTION",
        "attention_shapes",
    ),
    "embedding": ("embed",),
    "sampling": (
        "children", "draw", "draw_keyed", "log_probs", "gumbel_rows",
    ),
    "tree": ("device_tree",),
    "cache": ("make_slot_mover",),
    "resampling": ("resample",),
}  # fmt: skip


def compose(native: Backend, library: Backend, on_library: Collection[Family]) -> Backend:
    """Returns the backend `native`, with the operators of the families `on_library` from the backend `library`."""
    if not on_library:
        return native
    if {*FAMILIES} <= {*on_library}:
        return library
    taken: dict[str, Any] = {name: getattr(library, name) for family in on_library for name in FAMILIES[family]}
    if ("projections" in on_library) != ("attention" in on_library):
        rows, heads = (library, native) if "projections" in on_library else (native, library)
        taken["pack_norm"] = partial(_pack_norm, rows.pack_norm, heads.pack_norm)
    if {"projections", "attention"} & {*on_library}:
        taken["PREFILL_CHUNK_ROWS"] = min(native.PREFILL_CHUNK_ROWS, library.PREFILL_CHUNK_ROWS)
    return native.with_operators(**taken)


def _pack_norm(
    of_rows: Any, of_heads: Any, weight: Tensor, eps: float, dtype: torch.dtype, device: torch.device | str
) -> Any:
    """Packs a norm for the family that reads it: weight [hidden] for the projections, [heads, head_dim] for
    attention."""
    return (of_rows if weight.dim() == 1 else of_heads)(weight, eps, dtype, device)
