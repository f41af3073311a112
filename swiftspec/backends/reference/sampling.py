"""What is made of logits, in plain torch: noise, draws, log-probabilities, the best of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from swiftspec.backends.reference.noise import counters, gumbel, row_bits


@dataclass(frozen=True, slots=True)
class Scores:
    """What is made of a vocabulary's logits: ((logits + bias) / temperature + noise) / tau, the last two together."""

    temperature: float = 1.0
    bias: Tensor | None = None  # [vocab] float32
    noise: Tensor | None = None  # [p, vocab], rows of `gumbel_rows`
    rows: Tensor | None = None  # [n] int64, which row of the noise each row of logits takes
    tau: float = 1.0


PLAIN = Scores()


def log_top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of log_softmax(scores [n, V]): tokens [n, k] and log-probabilities [n, k], likeliest first.

    Never above 0, which rounding would allow and a tree of likely paths could not bear; and -inf, not NaN, where the
    scores have overflowed.
    """
    best = scores.log_softmax(-1).topk(k)
    return best.indices, best.values.nan_to_num_(-math.inf, neginf=-math.inf).clamp_max_(0)


def draw(logits: Tensor, vocab: int, scores: Scores = PLAIN) -> Tensor:
    """The token [n] of each row's highest score, of equal ones the first; logits [n, >= vocab]. tau plays no part. -1
    where a score is NaN, or the highest is infinite."""
    return best(_shift(logits[:, :vocab], scores))


def best(scores: Tensor) -> Tensor:
    """The column [n] of each row's highest score, as `draw` has it."""
    column = scores.argmax(-1, keepdim=True)  # of a NaN, where there is one
    return column.masked_fill_(~scores.gather(-1, column).isfinite(), -1).squeeze(-1)


def children(logits: Tensor, vocab: int, k: int, scores: Scores = PLAIN) -> tuple[Tensor, Tensor]:
    """`log_top_k` of the scores of logits [n, >= vocab]: tokens [n, k] and log-probabilities [n, k]."""
    shifted = _shift(logits[:, :vocab], scores)
    return log_top_k(shifted / scores.tau if scores.noise is not None else shifted, k)


def log_probs(logits: Tensor, vocab: int, tokens: Tensor, scores: Scores = PLAIN) -> Tensor:
    """log_softmax of the scores of logits [n, >= vocab] at tokens [n]: [n]. Noise and tau play no part."""
    shifted = _shift(logits[:, :vocab], Scores(scores.temperature, scores.bias))
    return shifted.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)


def draw_keyed(logits: Tensor, vocab: int, keys: Tensor, scores: Scores = PLAIN) -> tuple[Tensor, Tensor]:
    """The token [n] of `draw` under the noise of `keys` [n] (`row_keys`), and log_softmax there; NaN where -1."""
    shifted = _shift(logits[:, :vocab], Scores(scores.temperature, scores.bias))
    tokens = best(shifted + gumbel(row_bits(keys, counters(range(vocab), keys.device)), logits.dtype))
    values = shifted.log_softmax(-1).gather(1, tokens.clamp_min(0)[:, None]).squeeze(1)
    return tokens, values.masked_fill(tokens < 0, math.nan)


def _shift(logits: Tensor, scores: Scores) -> Tensor:
    if scores.bias is not None:
        logits = logits + scores.bias.to(logits.dtype)
    logits = logits / scores.temperature
    if scores.noise is None:
        return logits
    assert scores.rows is not None
    return logits.add_(scores.noise.index_select(0, scores.rows).to(logits.dtype))
