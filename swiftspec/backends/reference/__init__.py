"""Reference backend: the operators in plain torch on any device, with which tests compare the other backends, and which
those inherit.

In shapes, `rows` is the number of tokens of a forward, `hidden` the hidden size, `inputs` and `outputs` are those of a
projection, `heads` is the number of query heads, `window` the number of columns of the mask (`Batch.mask`).

A row's result does not depend on the other rows of its batch, on their number or on the slots of its keys, up to
rounding: torch may sum a product of more rows in another order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal, Self

import torch
from torch import Tensor

from swiftspec.backends.reference import attention, delta, linear, mixture, noise, packing, per_layer, sampling
from swiftspec.model.packed_model import FusedModel, PackedModel
from swiftspec.model.spec import ModelSpec
from swiftspec.model.weights import Weight


class Backend:
    """The operators of a model for one kind of hardware: here those in plain torch. A subclass overrides the operators
    that it has, and states its properties as class attributes.

    Operators are functions (static methods), so that a call costs no more than that of a function. What `pack`,
    `pack_norm` and `prepare` return is read by operators of the same backend only.
    """

    name = "reference"
    DRAFT_HEAD: Literal["int8", "int4"] | None = (
        None  # to which a dense LM head of a draft is quantised at load; None: not at all
    )
    FLOAT32_STREAM: bool = False  # bfloat16 models have a residual stream in float32
    FUSED_ATTENTION: bool = False  # attention keeps no mask and no scores over the whole cache in memory
    INT8_ACTIVATIONS: bool = False  # products can quantise activations to int8 numbers
    MAX_CAPTURED_SEQUENCES: int = 0  # of a forward in a CUDA graph; 0: no graph, as `prepare` reads on the host
    OWN_THREADS: bool = False  # products use threads of their own and not those of torch
    PACKED_CACHE: bool = False  # packed weights can be kept on disk (backends/cpu/packed_weight_cache.py)
    PEER_ALL_REDUCE: bool = False  # projections all-reduce in their kernel, through the memory of the group's GPUs
    PERMUTED_INT4: bool = True  # int4 codes of matrices whose inputs are permuted are kept where others are
    PREFILL_CHUNK_ROWS: int = 256  # of a prefill chunk without logits: compute-bound, and soon interrupted
    TILINGS: bool = False  # `tilings_of` returns tilings of a packed projection, among which a GPU is tuned

    resample: Callable[..., None] | None = None  # None: particles use reference/resampling.py

    pack = staticmethod(packing.pack)
    pack_norm = staticmethod(packing.pack_norm)
    pack_mixture = staticmethod(mixture.pack_mixture)
    mask_outputs = staticmethod(packing.mask_outputs)
    rope_tables = staticmethod(attention.rope_tables)

    embed = staticmethod(linear.embed)
    norm_linear = staticmethod(linear.norm_linear)
    norm_swiglu = staticmethod(linear.norm_swiglu)
    linear_residual = staticmethod(linear.linear_residual)
    mlp = staticmethod(mixture.mlp)
    norm_head = staticmethod(linear.norm_head)
    prepare = staticmethod(attention.prepare)
    tree_attention = staticmethod(attention.tree_attention)
    multiply_sigmoid = staticmethod(delta.multiply_sigmoid)
    prepare_delta = staticmethod(delta.prepare_delta)
    gated_delta = staticmethod(delta.gated_delta)
    per_layer_embeddings = staticmethod(per_layer.per_layer_embeddings)
    add_per_layer = staticmethod(per_layer.add_per_layer)
    prefill_chunk = staticmethod(nullcontext)  # context of the layers of a prefill chunk

    make_slot_mover = staticmethod(attention.make_slot_mover)
    fold_state = staticmethod(delta.fold_state)
    move_slots = staticmethod(delta.move_slots)

    gumbel_rows = staticmethod(noise.gumbel_rows)
    draw = staticmethod(sampling.draw)
    draw_keyed = staticmethod(sampling.draw_keyed)
    children = staticmethod(sampling.children)
    log_probs = staticmethod(sampling.log_probs)

    @staticmethod
    def attention_shapes(capacity: int) -> list[str]:
        """Returns the shapes of the attention kernel for a cache of `capacity` slots, among which a GPU is tuned, the
        default one first; nothing if the backend has no choice."""
        return []

    def check_supported(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device | str) -> None:
        """Raises UserError if these operators cannot run the model on this machine."""

    def pack_qkv(self, weight: Weight, head_dim: int, dtype: torch.dtype, device: torch.device | str) -> Any:
        """Packs the projection to queries, keys and values of an attention layer. `head_dim`: of each head."""
        return self.pack(weight, dtype, device)

    def qkv_attention(
        self,
        x: Tensor,
        norm: Any,
        packed: Any,
        plan: Any,
        layer: int,
        qk_norm: Any = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Applies RMSNorm, the QKV projection and `tree_attention`: x [rows, hidden] -> [rows, heads * head_dim]."""
        return self.tree_attention(self.norm_linear(x, norm, packed), plan, layer, qk_norm, sinks)

    def kept_int4_group(self, inputs: int, group: int, dtype: torch.dtype) -> int:
        """Returns the inputs per group of an int4 matrix with `inputs` inputs and `group` inputs per group, as `pack`
        keeps it; 0 if `pack` dequantises it."""
        return 0

    def int4_needs(self, dtype: torch.dtype, device: torch.device | str) -> str | None:
        """Returns in a few words what `pack` lacks to keep int4 matrices of any shape; None if nothing would help."""
        return None

    def capture_bucket(self, max_kv_len: int | None) -> int | None:
        """Returns the number of slots that attention reads in a forward whose `Batch.max_kv_len` this is. A CUDA graph
        of the forward holds it by value. None: the whole cache, or what `Batch.kv_len` on the device requires."""
        return None

    def fuse(self, stack: PackedModel) -> FusedModel | None:
        """Returns the model as one native call, or None if its forward runs operator by operator."""
        return None

    def device_tree(self, slots: int, children: int, leaves: int, vocab: int, device: torch.device) -> Any:
        """Returns a draft tree that is expanded on the device (a `DeviceTreeLike`), or None if the backend does not
        support that, or not with these sizes. `slots`: tree slots. `children`, `leaves`: k and w."""
        return None

    def with_operators(self, **operators: Any) -> Self:
        """Returns a copy of the backend with other operators or properties of these names."""
        changed = copy.copy(self)
        vars(changed).update(operators)
        return changed


reference = Backend()
