"""Block heads (DFlash): draft heads that draft all positions of a block in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftspec.model.batch import Batch, ForwardOutput
from swiftspec.model.packed_model import LayerCaches, PackedAttention
from swiftspec.model.spec import BlockSpec, ModelSpec
from swiftspec.model.transformer import ModelOps, Transformer
from swiftspec.model.weights import ModelWeights, Weight


@dataclass(frozen=True, slots=True)
class BlockHeadWeights:
    """Weights of a block head, or of one rank's shard of it. Embedding and LM head of `decoder` are the target's."""

    decoder: ModelWeights
    target_projection: Weight  # [hidden, layers * hidden size of the target]
    target_norm: Tensor  # [hidden], of the projected hidden states
    context: Weight  # keys and values of all layers, layer by layer: [layers * 2 * kv_heads * head_dim, hidden]
    key_norms: Sequence[Tensor]  # of each layer, [head_dim]


class BlockHead(Transformer):
    """A block head as a model with two kinds of batches.

    The rows of a batch with `Batch.hidden`, projected hidden states of the target, are verified positions of one
    sequence. The forward writes their keys and values, which do not depend on their tokens, and returns no logits.

    Any other batch is the block of one sequence: the root and mask tokens at the positions after it, whose slots follow
    those of the verified positions. Row i of the logits belongs to the i-th position after the root: it predicts the
    token there, not the next one.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: BlockHeadWeights,
        ops: ModelOps,
        device: torch.device | str,
        dtype: torch.dtype,
        max_positions: int,
        **kwargs: Any,
    ) -> None:
        """As `Transformer`."""
        assert spec.draft_head is not None and spec.draft_head.block is not None
        self.block: BlockSpec = spec.draft_head.block
        super().__init__(spec, weights.decoder, ops, device, dtype, max_positions, **kwargs)
        self._target_projection = ops.pack(weights.target_projection, dtype, device)
        self._context = ops.pack(weights.context, dtype, device)
        wide = torch.promote_types(dtype, torch.float32)
        self._target_norm, *self._key_norms = (
            norm.to(self.device, wide) for norm in (weights.target_norm, *weights.key_norms)
        )

    def _fuse(self) -> None:
        return None  # native code runs whole models, which read tokens alone

    @torch.no_grad()
    def project(self, states: Tensor) -> Tensor:
        """Returns the inputs [rows, hidden] of verified positions, from the target's hidden states [rows, layers,
        hidden size of the target] there."""
        states = states.to(self.device, self.dtype).flatten(1)
        return self._norm(self._ops.norm_linear(states, None, self._target_projection), self._target_norm)

    @torch.no_grad()
    def forward(self, batch: Batch, cache: LayerCaches, *, head: bool = True) -> ForwardOutput:
        if batch.hidden is not None:
            self._write_context(batch, batch.hidden, cache)
            return ForwardOutput(None, None)
        stack, hidden = self.stack, self._run_layers(batch, cache)[0]
        logits = None
        if head:
            rows = hidden if batch.num_logits is None else hidden[1 : 1 + batch.num_logits]
            logits = self._ops.norm_head(rows, stack.norm, stack.head, stack.logit_multiplier, stack.logit_softcap)
        return ForwardOutput(logits, None)

    @torch.inference_mode()
    def _write_context(self, batch: Batch, states: Tensor, cache: LayerCaches) -> None:
        """Writes keys and values of verified positions in all layers, from `states` [rows, hidden] alone."""
        every = self._ops.norm_linear(states, None, self._context)
        for layer, norm, part in zip(
            self.stack.layers, self._key_norms, every.chunk(len(self.stack.layers), 1), strict=True
        ):
            kind = self.stack.attention[layer.attention]
            cos, sin = (table.index_select(0, batch.positions).unsqueeze(1) for table in (kind.cos, kind.sin))
            keys, values = part.unflatten(1, (2, kind.kv_heads, -1)).unbind(1)
            keys = self._norm(keys, norm)
            keys = torch.addcmul(keys * cos, keys.roll(keys.shape[2] // 2, -1), sin)
            store = cache.kinds[kind.cache]
            for buffer, rows in ((store.k, keys), (store.v, values)):
                by_slot = buffer[layer.cache_layer].transpose(1, 2)  # [sequences, capacity, KV heads, head dim]
                by_slot.index_put_((batch.sequence, batch.slots), rows.to(buffer.dtype))

    def _prepare(self, kind: PackedAttention, batch: Batch, cache: LayerCaches) -> Any:
        if self.block.causal or kind.options.window is not None:
            # a row of a block attends to the earlier rows of its block, which has the last slots of its sequence
            end = batch.kv_len.index_select(0, batch.sequence)[:, None]
            slots = torch.arange(-batch.mask.shape[1], 0, device=end.device) + end
            batch = replace(batch, mask=batch.mask & (slots <= batch.slots[:, None]))
        return super()._prepare(kind, batch, cache)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, self.spec.norm_eps).to(self.dtype)
