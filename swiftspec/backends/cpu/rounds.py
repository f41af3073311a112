"""The inner part of a round as one native call: an expansion of the draft tree, the verification of a proposal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from swiftspec import _C


class HostRounds:
    """Rounds of one decoder over the only sequence of one cache, `k` and `v` [layers, 1, G, capacity, hd].

    The native side finds rows, masks and positions itself and keeps the logits to itself; a group's ranks exchange the
    best of theirs. Raises OSError when one of them is gone.
    """

    def __init__(self, decoder: _C.Decoder, k: Tensor, v: Tensor) -> None:
        _, sequences, kv_heads, capacity, head_dim = k.shape
        assert sequences == 1 and k.is_contiguous() and v.is_contiguous()
        layer = kv_heads * capacity * head_dim * k.element_size()
        self._region = (k.data_ptr(), v.data_ptr(), capacity, layer)
        self._kept = k, v
        self._native = _C.Rounds(decoder)

    def scoring(
        self, vocab: int, temperature: float, bias: Tensor | None, noisy: bool, seed: int, stream: int
    ) -> HostScoring:
        """What makes tokens of a request's logits: `bias` [vocab] float32, and if `noisy` the noise of that stream."""
        assert bias is None or (bias.is_contiguous() and bias.shape == (vocab,))
        address = 0 if bias is None else bias.data_ptr()
        return HostScoring(_C.Scoring(self._native, vocab, temperature, address, noisy, seed, stream), bias)

    def expand(
        self, tree: _C.Tree, prefix: int, pending: list[int], w: int, k: int, scoring: HostScoring, coupled: bool,
        tau: float,
    ) -> tuple[int, float]:  # fmt: skip
        """Expands the w likeliest leaves into k children each, `coupled` and `tau` as in `Sampler.children`. `prefix`:
        verified tokens with KV; `pending`: those without, before a root that is all there is. Returns how many leaves,
        and the seconds of the forward."""
        return self._native.expand(tree, *self._region, prefix, pending, w, k, scoring.native, coupled, tau)

    def verify(
        self, tokens: Sequence[int], parents: Sequence[int], prefix: int, scoring: HostScoring
    ) -> tuple[list[int], list[int], float]:
        """The accepted path, whose slots now follow the prefix, and the tokens drawn along it, as spec.verify.walk has
        them; and the forward's seconds."""
        return self._native.verify(tokens, parents, *self._region, prefix, scoring.native)


@dataclass(frozen=True, slots=True)
class HostScoring:
    """Holds what the native side points to."""

    native: _C.Scoring
    bias: Tensor | None
