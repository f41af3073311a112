"""Log-probabilities of tokens under the model: after guidance, before grammar, bias, penalties and temperature."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swiftspec.messages import SampledLogprob
from swiftspec.sampling.sampler import Sampler
from swiftspec.sampling.vocab import count_above

BLOCK_ROWS = 16  # rows of logits that stay in a CPU's caches between the passes over them


def token_logprobs(
    sampler: Sampler, logits: Tensor, tokens: Sequence[int], k: int, others: Sequence[int] = ()
) -> tuple[SampledLogprob, ...]:
    """Returns the log-probability and the rank of each of the `tokens` [n], and the log-probabilities of the `k` most
    likely tokens (-1: of all tokens), or instead of the tokens `others` if there are any.

    `logits` [n, >= V]: raw; row i is the distribution of `tokens[i]`. In a tensor-parallel group they are this rank's
    columns, and every rank must call the function; all get the same result.
    """
    vocab, shard = sampler.vocab, sampler.shard
    if shard is None and logits.device.type == "cpu" and len(tokens) > BLOCK_ROWS:
        starts = range(0, len(tokens), BLOCK_ROWS)
        blocks = [(logits[at : at + BLOCK_ROWS], tokens[at : at + BLOCK_ROWS]) for at in starts]
        return tuple(one for block in blocks for one in token_logprobs(sampler, *block, k, others))
    logits = logits[:, : vocab if shard is None else len(shard.tokens)]
    # All values are a logit minus the same logsumexp: clients compare them for equality to see whether a token was the
    # most likely one.
    wanted = torch.tensor([(token, *others) for token in tokens], dtype=torch.int64, device=logits.device)
    if not others:
        wanted = torch.cat((wanted, _most_likely(sampler, logits, vocab if k < 0 else min(k, vocab))), -1)
    if shard is None:
        found, total = logits.gather(-1, wanted), logits.logsumexp(-1, keepdim=True)
        above = count_above(logits, found[:, :1])
    else:
        found, total = shard.values(logits, wanted)
        above = shard.count_above(logits, found[:, :1])
    logprobs = (found - total).clamp_max(0)
    tops = [tuple(zip(*row)) for row in zip(wanted[:, 1:].tolist(), logprobs[:, 1:].tolist())]
    return tuple(map(SampledLogprob, logprobs[:, 0].tolist(), tops, (above + 1).tolist()))


def _most_likely(sampler: Sampler, logits: Tensor, count: int) -> Tensor:
    """Returns the `count` most likely tokens of each row, as [n, count]; of all ranks if the logits are sharded."""
    if sampler.shard is None:
        return logits.argmax(-1, keepdim=True) if count == 1 else logits.topk(count).indices
    return sampler.shard.log_top_k(logits, count)[0]


class PromptLogprobs:
    """Log-probabilities of all prompt tokens except the first, collected from the logits of each prefill chunk."""

    def __init__(self, sampler: Sampler, prompt: Sequence[int], k: int) -> None:
        self._sampler, self._prompt, self._k = sampler, prompt, k
        self.values: list[SampledLogprob] = []

    def add_rows(self, logits: Tensor) -> None:
        """Adds the next rows of raw logits, see `token_logprobs`."""
        first = len(self.values) + 1
        tokens = self._prompt[first : first + logits.shape[0]]
        self.values += token_logprobs(self._sampler, logits, tokens, self._k)
