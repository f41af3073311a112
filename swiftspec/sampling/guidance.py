"""Classifier-free guidance: the target's logits moved away from those after another prompt (Sanchez et al., 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from swiftspec.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Guidance:
    """The unconditional text of a request, and how far to move away from what follows it.

    `tokens` is the negative prompt, then the output so far. Its last token stands at the root's place; what comes after
    the root is the same in both texts.
    """

    tokens: tuple[int, ...]
    scale: float  # s

    @staticmethod
    def of(sampling: SamplingParams, tokens: Sequence[int], prompt_len: int) -> Guidance | None:
        """For a request that starts from `tokens`, those from `prompt_len` on output; None where it is not guided.

        Without a negative prompt the unconditional text begins with the prompt's last token, as in transformers.
        """
        if not sampling.guided:
            return None
        negative = sampling.negative_prompt_ids or tokens[prompt_len - 1 : prompt_len]
        return Guidance((*negative, *tokens[prompt_len:]), sampling.guidance_scale)

    def combine(self, logits: Tensor) -> Tensor:
        """Conditional rows [n, m], then the unconditional ones, to guided rows l_u + s (l_c - l_u) [n, m].

        transformers combines log-probabilities instead, which adds a constant to each row: the law is the same. It is
        linear in every token, so a shard of the vocabulary needs no word from the others.
        """
        conditional, unconditional = logits.chunk(2)
        # three roundings, each of its own: a fused operator would round a row's end otherwise than its middle
        return (conditional - unconditional).mul_(self.scale).add_(unconditional)
