"""What a request must keep to, whatever decodes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swiftspec.errors import UserError
from swiftspec.params import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The sizes of a pair of models. `check_sampling` raises UserError on parameters that the mode cannot serve."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    check_sampling: Callable[[SamplingParams], None]

    def check(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        """Raises UserError on a request that cannot be served; before anything is computed for it."""
        length, vocab = self.max_model_len, self.vocab_size
        if not prompt:
            raise UserError("the prompt is empty: give at least one token")
        negative = ("the negative prompt", sampling.negative_prompt_ids)
        for name, ids in (("the prompt", prompt), negative):
            if len(ids) >= length:
                raise UserError(
                    f"{name} of {len(ids)} tokens does not fit the context of {length} with room for an answer: shorten"
                    " it or raise max_model_len"
                )
        others = ("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)
        for name, ids in (("the prompt", prompt), negative, *others):
            if not all(0 <= token < vocab for token in ids):
                raise UserError(f"{name} names a token outside 0..{vocab - 1}")
        if sampling.top_k > vocab:
            raise UserError(f"top_k {sampling.top_k} is above the vocabulary of {vocab}: 0 turns it off")
        self.check_sampling(sampling)
