"""Families of operators, and namespaces that take some families from another backend: what replaces single kernels that
a GPU computes wrongly (backends/cuda/trial.py).

A family changes as one, because its functions share packed structures or a state that only they read. Between families
pass tensors of the same layout in every backend: hidden states, QKV, logits, RoPE tables, and the KV cache. The one
packed structure that two families read is the norm of query and key heads, which `compose` packs for the family that
reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

Family = Literal["projections", "attention", "embedding", "sampling", "tree", "cache", "resampling"]
FAMILIES: dict[Family, tuple[str, ...]] = {
    # packed matrices and norms; with them, how a group sums the products
    "projections": (
        "pack", "pack_norm", "mask_outputs", "norm_linear", "norm_swiglu", "linear_residual", "mlp", "norm_head",
        "prefill_chunk", "fuse", "tilings_of", "with_tiling", "PEER_ALL_REDUCE", "DRAFT_HEAD",
    ),
    "attention": (  # the plan of a forward
        "rope_tables", "prepare", "tree_attention", "MAX_CAPTURED_SEQUENCES", "capture_bucket",
    ),
    "embedding": ("embed",),
    "sampling": (
        "children", "draw", "draw_keyed", "log_probs", "log_top_k", "gumbel_rows", "match_chains", "reject_chains",
        "Scores", "DEFAULT_SCORES",
    ),
    "tree": ("device_tree", "DeviceTree"),
    "cache": ("make_slot_mover",),
    "resampling": ("resample",),
}  # fmt: skip
# names of a backend that belong to no family: of both sources, the smaller number of rows, and checks before the choice
OTHER_NAMES = ("CLUSTER_MAJORS", "PREFILL_CHUNK_ROWS", "check_supported")


def compose(native: Any, library: Any, on_library: Collection[Family]) -> Any:
    """Returns the operators of the module `native`, with those of the families `on_library` from the module `library`.

    A function that the chosen module lacks is missing in the result, too: optional operators have a default where they
    are used.
    """
    if not on_library:
        return native
    if {*FAMILIES} <= {*on_library}:
        return library
    sources = {family: library if family in on_library else native for family in FAMILIES}
    names = {
        name: getattr(sources[family], name)
        for family, members in FAMILIES.items()
        for name in members
        if hasattr(sources[family], name)
    }
    projections, attention = sources["projections"], sources["attention"]
    if projections is not attention:
        names["pack_norm"] = partial(_pack_norm, projections.pack_norm, attention.pack_norm)
    names["PREFILL_CHUNK_ROWS"] = min(projections.PREFILL_CHUNK_ROWS, attention.PREFILL_CHUNK_ROWS)
    return SimpleNamespace(**names)


def with_tilings(ops: Any, tilings: Mapping[str, Any]) -> Any:
    """Returns the CUDA operators `ops`, which pack matrices with these tilings instead of the default ones (by shape,
    see `pack` in backends/cuda/linear.py)."""
    if not tilings:
        return ops
    members = [name for names in FAMILIES.values() for name in names]
    names = {name: getattr(ops, name) for name in (*members, *OTHER_NAMES) if hasattr(ops, name)}
    return SimpleNamespace(**{**names, "pack": partial(ops.pack, tilings=tilings)})


def _pack_norm(
    of_rows: Any, of_heads: Any, weight: Tensor, eps: float, dtype: torch.dtype, device: torch.device | str
) -> Any:
    """Packs a norm for the family that reads it: weight [hidden] for the projections, [heads, head_dim] for
    attention."""
    return (of_rows if weight.dim() == 1 else of_heads)(weight, eps, dtype, device)
