"""Sampling in plain torch: scores, draws, log-probabilities and top-k."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from swiftspec.backends.reference.noise import counters, gumbel, row_bits


@dataclass(frozen=True, slots=True)
class Scores:
    """Parameters of the scores ((logits + bias) / temperature + noise) / tau; tau applies only with noise.

    `scalars` [3] float64, on the device: temperature, tau and the factor of the noise, 0 or 1. They are used instead of
    the fields. If the factor is 0 or there is no noise, tau must be 1, since the CUDA operators do not apply it then.

    `log_probs` and `draw_keyed` also take the scalars [sets, 3] and the bias [sets, vocab] of several requests: set i
    applies to the rows from i * rows / sets on.
    """

    temperature: float = 1.0
    bias: Tensor | None = None  # [vocab] float32
    noise: Tensor | None = None  # [noise rows, vocab], from `gumbel_rows`
    rows: Tensor | None = None  # [rows] int64, index in `noise` for each row of logits
    tau: float = 1.0
    scalars: Tensor | None = None


DEFAULT_SCORES = Scores()


def log_top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns the k largest of log_softmax(scores): tokens [rows, k] and log-probabilities [rows, k], most likely
    first; scores [rows, vocab].

    Log-probabilities are clamped to at most 0, since rounding could exceed it and the tree requires that a child is not
    likelier than its parent. They are -inf instead of NaN if the scores have overflowed.
    """
    best = scores.log_softmax(-1).topk(k)
    return best.indices, best.values.nan_to_num_(-math.inf, neginf=-math.inf).clamp_max_(0)


def draw(logits: Tensor, vocab: int, scores: Scores = DEFAULT_SCORES) -> Tensor:
    """Returns the token [rows] with the highest score per row, the first one of ties; logits [rows, >= vocab]. tau is
    ignored. The token is -1 if a score of the row is NaN or the highest is infinite."""
    return argmax_token(compute_scores(logits[:, :vocab], scores))


def argmax_token(scores: Tensor) -> Tensor:
    """Returns the column [rows] of the highest score per row; -1 if a score is NaN or the highest is infinite."""
    column = scores.argmax(-1, keepdim=True)  # argmax returns the column of a NaN if there is one
    return column.masked_fill_(~scores.gather(-1, column).isfinite(), -1).squeeze(-1)


def children(logits: Tensor, vocab: int, k: int, scores: Scores = DEFAULT_SCORES) -> tuple[Tensor, Tensor]:
    """Returns `log_top_k` of the scores of logits [rows, >= vocab]: tokens and log-probabilities, each [rows, k]."""
    return log_top_k(calibrated_scores(logits[:, :vocab], scores), k)


def log_probs(logits: Tensor, vocab: int, tokens: Tensor, scores: Scores = DEFAULT_SCORES) -> Tensor:
    """Returns the log-probabilities [rows] of `tokens` [rows] under softmax((logits + bias) / temperature).

    `scores`: bias and temperature; its noise and calibration are ignored. Logits: [rows, >= vocab].
    """
    shifted = _noiseless_scores(logits[:, :vocab], scores)
    return shifted.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)


def draw_keyed(logits: Tensor, vocab: int, keys: Tensor, scores: Scores = DEFAULT_SCORES) -> tuple[Tensor, Tensor]:
    """Draws a token per row of logits [rows, >= vocab] with the Gumbel noise of `keys` [rows] (int32, see
    `noise.row_keys`). Returns the tokens [rows], -1 as in `draw`, and their log-probabilities [rows] without the noise,
    NaN if the token is -1."""
    shifted = _noiseless_scores(logits[:, :vocab], scores)
    tokens = argmax_token(shifted + gumbel(row_bits(keys, counters(range(vocab), keys.device)), logits.dtype))
    values = shifted.log_softmax(-1).gather(1, tokens.clamp_min(0)[:, None]).squeeze(1)
    return tokens, values.masked_fill(tokens < 0, math.nan)


def _noiseless_scores(logits: Tensor, scores: Scores) -> Tensor:
    """Returns (logits + bias) / temperature [rows, vocab], with the sets of `scores`."""
    if scores.scalars is None or scores.scalars.dim() == 1:
        return compute_scores(logits, Scores(scores.temperature, scores.bias, scalars=scores.scalars))
    per_set = logits.view(len(scores.scalars), -1, logits.shape[-1])
    if scores.bias is not None:
        per_set = per_set + scores.bias[:, None].to(logits.dtype)
    return (per_set / scores.scalars[:, :1, None].to(logits.dtype)).view_as(logits)


def compute_scores(logits: Tensor, scores: Scores) -> Tensor:
    """Returns the scores [rows, vocab] of logits [rows, vocab], before the division by tau."""
    if scores.bias is not None:
        logits = logits + scores.bias.to(logits.dtype)
    logits = logits / (scores.temperature if scores.scalars is None else scores.scalars[0])
    if scores.noise is None:
        return logits
    assert scores.rows is not None
    noise = scores.noise.index_select(0, scores.rows).to(logits.dtype)
    return logits.add_(noise) if scores.scalars is None else logits.addcmul_(noise, scores.scalars[2].to(logits.dtype))


def calibrated_scores(logits: Tensor, scores: Scores) -> Tensor:
    """Returns the scores [rows, vocab] of logits [rows, vocab]."""
    shifted = compute_scores(logits, scores)
    if scores.scalars is not None:
        return shifted / scores.scalars[1]
    return shifted if scores.noise is None else shifted / scores.tau
