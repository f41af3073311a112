"""Noise, draws and candidates on a GPU (csrc/cuda/sampling/sampling.h): from logits to tokens in one read."""

from __future__ import annotations

import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.backends import reference
from swiftspec.backends.cuda.checks import current_stream
from swiftspec.backends.reference import DEFAULT_SCORES, Scores
from swiftspec.backends.reference.resampling import ResamplingState

MAX_CANDIDATES = 64


def gumbel_rows(seed: int, stream: int, positions: Tensor, tokens: range) -> Tensor:
    """Standard Gumbel noise of absolute positions [n] (int64): [n, tokens] float32, the bits of backends/cpu."""
    out = torch.empty(positions.shape[0], len(tokens), dtype=torch.float32, device=positions.device)
    if out.numel() > 0:
        _C.gumbel_rows_cuda(seed, stream, positions, tokens.start, out, current_stream())
    return out


def draw(logits: Tensor, vocab: int, scores: Scores = DEFAULT_SCORES) -> Tensor:
    """The token [n] of each row's highest score, of equal ones the first; logits [n, >= vocab]. tau plays no part.

    -1 where a score is NaN, or the highest is infinite.
    """
    if not _supported(logits, 1):
        return reference.draw(logits, vocab, scores)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if logits.shape[0] > 0:
        _C.draw_cuda(logits, vocab, scores.bias, *_noise_arguments(scores), scores.temperature, tokens,
        current_stream())
    return tokens


def children(logits: Tensor, vocab: int, k: int, scores: Scores = DEFAULT_SCORES) -> tuple[Tensor, Tensor]:
    """`log_top_k` of the scores of logits [n, >= vocab]: tokens [n, k] and log-probabilities [n, k]."""
    if not _supported(logits, k):
        return reference.children(logits, vocab, k, scores)
    tokens = torch.empty(logits.shape[0], k, dtype=torch.int64, device=logits.device)
    values = torch.empty(logits.shape[0], k, dtype=torch.float32, device=logits.device)
    if logits.shape[0] > 0:
        noise = _noise_arguments(scores)
        tau = 1.0 if noise[0] is None else scores.tau
        _C.children_cuda(logits, vocab, scores.bias, *noise, scores.temperature, tau, tokens, values, current_stream())
    return tokens, values


def draw_keyed(logits: Tensor, vocab: int, keys: Tensor, scores: Scores = DEFAULT_SCORES) -> tuple[Tensor, Tensor]:
    """The token [n] that `draw` gives under the noise of `keys` [n] (int32, `noise.row_keys`), and `log_probs` [n]
    there, NaN where it is -1: one launch, without the noise in memory."""
    if not _supported(logits, 1):
        return reference.draw_keyed(logits, vocab, keys, scores)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    return tokens, _keyed(logits, vocab, keys.contiguous(), tokens, scores)


def log_probs(logits: Tensor, vocab: int, tokens: Tensor, scores: Scores = DEFAULT_SCORES) -> Tensor:
    """log_softmax of the scores of logits [n, >= vocab] at tokens [n]: [n]. Noise and tau play no part."""
    if not _supported(logits, 1):
        return reference.log_probs(logits, vocab, tokens, scores)
    return _keyed(logits, vocab, None, tokens.contiguous(), scores)


def _keyed(logits: Tensor, vocab: int, keys: Tensor | None, tokens: Tensor, scores: Scores) -> Tensor:
    """Draws into `tokens` where there are keys."""
    values = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    if logits.shape[0] > 0:
        _C.draw_keyed_cuda(logits, vocab, scores.bias, scores.temperature, keys, tokens, values, current_stream())
    return values


def log_top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of log_softmax(scores [n, V]): tokens [n, k] and log-probabilities [n, k], likeliest first, of equal
    ones the earlier token, never above 0 and never NaN."""
    return children(scores, scores.shape[1], k)


def resample(groups: ResamplingState, uniform: Tensor, threshold: float, width: int) -> None:
    """`reference.resampling.resample` in one launch of a fixed grid (csrc/cuda/particles), at most 1024 particles."""
    _C.resample_cuda(**groups.fields(), uniform=uniform, threshold=threshold, width=width, stream=current_stream())


def _supported(logits: Tensor, k: int) -> bool:
    return logits.dtype == torch.float32 and logits.stride(1) == 1 and k <= MAX_CANDIDATES


def _noise_arguments(scores: Scores) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """The noise and which of its rows is whose, where there are both."""
    return (None, None) if scores.noise is None or scores.rows is None else (scores.noise, scores.rows)
