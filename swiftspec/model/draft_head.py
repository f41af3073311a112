"""Draft heads, which read hidden states of the target: EAGLE-3 and multi-token prediction (MTP)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftspec.model.batch import Batch, ForwardOutput
from swiftspec.model.packed_model import LayerCaches
from swiftspec.model.spec import DraftHeadSpec, ModelSpec
from swiftspec.model.transformer import ModelOps, Transformer
from swiftspec.model.weights import ModelWeights, Weight


@dataclass(frozen=True, slots=True)
class DraftHeadWeights:
    """Weights of a draft head, or of one rank's shard of it. The norms are [hidden].

    `decoder`: of the layer, whose QKV of eagle3 projects the hidden state; the LM head has the rows of `token_ids`.
    """

    decoder: ModelWeights
    embedding_norm: Tensor
    # of the normalised embedding: to queries, keys and values (eagle3), or to the residual stream (mtp)
    embedding_projection: Weight
    # mtp: before `hidden_projection`; eagle3 with `norm_before_residual`: instead of the layer's norm before attention
    hidden_norm: Tensor | None
    hidden_projection: Weight | None  # mtp: [hidden, hidden]
    target_projection: Weight | None  # eagle3: [hidden, layers * hidden size of the target]
    target_norm: Tensor | None  # mtp: the final norm of the target
    token_ids: Tensor | None  # [rows of the LM head] int64, ids of their tokens; None: the whole vocabulary


class DraftHead(Transformer):
    """A draft head as a model of one layer, whose batches have hidden states as further inputs (`Batch.hidden`).

    The hidden states of its output, [rows, 1, hidden], are the inputs of rows that follow drafted tokens. Logits of
    tokens that its LM head does not have are -inf.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: DraftHeadWeights,
        ops: ModelOps,
        device: torch.device | str,
        dtype: torch.dtype,
        max_positions: int,
        **kwargs: Any,
    ) -> None:
        """As `Transformer`."""
        assert spec.draft_head is not None
        self.head_spec: DraftHeadSpec = spec.draft_head
        super().__init__(spec, weights.decoder, ops, device, dtype, max_positions, hidden_layers=(0,), **kwargs)
        self._embedding_norm = self._pack_norm(weights.embedding_norm)
        self._embedding_projection = ops.pack(weights.embedding_projection, dtype, device)
        self._hidden_norm = self._pack_norm(weights.hidden_norm)
        self._hidden_projection, self._target_projection = (
            None if weight is None else ops.pack(weight, dtype, device)
            for weight in (weights.hidden_projection, weights.target_projection)
        )
        self._target_norm, self._final_norm, self._residual_norm = (
            self._wide(norm) for norm in (weights.target_norm, weights.decoder.norm, weights.hidden_norm)
        )
        # columns of this rank's logits that the rows of the LM head are; None: all of them
        self._columns = None if weights.token_ids is None else weights.token_ids.to(self.device) - self.first_token

    def _fuse(self) -> None:
        return None  # native code runs whole models, which read tokens alone

    def _wide(self, norm: Tensor | None) -> Tensor | None:
        return None if norm is None else norm.to(self.device, torch.promote_types(self.dtype, torch.float32))

    def _rows_of(self, tokens: Sequence[int]) -> list[int]:
        if self._columns is None:
            return super()._rows_of(tokens)
        columns = {token - self.first_token for token in tokens}
        return [row for row, column in enumerate(self._columns.tolist()) if column in columns]

    @torch.no_grad()
    def project(self, states: Tensor) -> Tensor:
        """Returns the inputs [rows, hidden] of rows that follow verified tokens, from the target's hidden states
        [rows, layers, hidden size of the target] there."""
        states = states.to(self.device, self.dtype)
        if self._target_projection is None:
            return self._norm(states[:, 0], self._target_norm)
        return self._ops.norm_linear(states.flatten(1), None, self._target_projection)

    @torch.no_grad()
    def forward(self, batch: Batch, cache: LayerCaches, *, head: bool = True) -> ForwardOutput:
        output = super().forward(batch, cache, head=head)
        logits, hidden = output
        assert hidden is not None
        if self.head_spec.kind == "mtp":
            hidden = self._norm(hidden, self._final_norm)
        if logits is not None and self._columns is not None:
            every = logits.new_full((len(logits), self.head_rows), -torch.inf)
            logits = every.index_copy_(1, self._columns, logits[:, : len(self._columns)])
        return ForwardOutput(logits, hidden)

    @torch.inference_mode()
    def _run_layers(self, batch: Batch, cache: LayerCaches, *, head: bool = True) -> tuple[Tensor, list[Tensor]]:
        hidden, stack = batch.hidden, self.stack
        assert hidden is not None, "a draft head requires hidden states"
        embedded = self._ops.embed(batch.tokens, stack.embedding, stack.embedding_multiplier)
        projected = self._ops.norm_linear(embedded, self._embedding_norm, self._embedding_projection)
        if self._hidden_projection is not None:
            hidden = projected + self._ops.norm_linear(hidden, self._hidden_norm, self._hidden_projection)
            return self._run_layers_on(hidden, batch, cache)
        if self.head_spec.norm_before_residual:
            hidden = self._norm(hidden, self._residual_norm)
        return self._run_layers_on(hidden, batch, cache, projected)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        assert weight is not None
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, self.spec.norm_eps).to(self.dtype)
