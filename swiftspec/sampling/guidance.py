"""Classifier-free guidance: extrapolates logits away from those of a negative prompt (Sanchez et al., 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from swiftspec.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Guidance:
    """The unconditional sequence of a request, and the guidance scale.

    `tokens` is the negative prompt followed by the output so far. Its last token corresponds to the root; the tokens
    after the root are the same in both sequences.
    """

    tokens: tuple[int, ...]
    scale: float  # s

    @staticmethod
    def of(sampling: SamplingParams, tokens: Sequence[int], prompt_len: int) -> Guidance | None:
        """Returns the guidance of a request that starts from `tokens` (prompt, and output from `prompt_len` on), or
        None if its guidance scale is 1.

        Without a negative prompt the unconditional sequence begins with the last prompt token, as in transformers.
        """
        if not sampling.guided:
            return None
        negative = sampling.negative_prompt_ids or tokens[prompt_len - 1 : prompt_len]
        return Guidance((*negative, *tokens[prompt_len:]), sampling.guidance_scale)


def guided_logits(logits: Tensor, scale: float | Tensor) -> Tensor:
    """Returns the guided logits `l_u + s (l_c - l_u)`, half as many rows as `logits`, whose first half are the
    conditional rows l_c and whose second half are the unconditional rows l_u. `scale`: s, or [] on the device, for a
    CUDA graph.

    transformers combines log-probabilities instead, which adds a constant to each row: the distribution is the same.
    The formula is elementwise, so a vocabulary shard needs no communication.
    """
    conditional, unconditional = logits.chunk(2)
    # three separate roundings: a fused operator would round the end of a row differently from its middle
    return (conditional - unconditional).mul_(scale).add_(unconditional)
