"""Noise, draws and candidates on a GPU (csrc/cuda/sampling/sampling.h): from logits to tokens in one read."""

from __future__ import annotations

import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.backends import reference
from swiftspec.backends.cuda.checks import check, current_stream
from swiftspec.backends.reference import PLAIN, Scores

MOST_CANDIDATES = 64


def gumbel_rows(seed: int, stream: int, positions: Tensor, tokens: range) -> Tensor:
    """Standard Gumbel noise of absolute positions [n] (int64): [n, tokens] float32, the bits of backends/cpu."""
    out = torch.empty(positions.shape[0], len(tokens), dtype=torch.float32, device=positions.device)
    if out.numel() > 0:
        source = check("positions", positions, torch.int64, (positions.shape[0],), positions.device)
        rows, count = out.shape
        _C.gumbel_rows_cuda(seed, stream, source, rows, tokens.start, count, out.data_ptr(), current_stream())
    return out


def draw(logits: Tensor, vocab: int, scores: Scores = PLAIN) -> Tensor:
    """The token [n] of each row's highest score, of equal ones the first; logits [n, >= vocab]. tau plays no part."""
    if not _taken(logits, 1):
        return reference.draw(logits, vocab, scores)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    _launch(logits, vocab, 1, scores, 1.0, tokens, None)
    return tokens


def children(logits: Tensor, vocab: int, k: int, scores: Scores = PLAIN) -> tuple[Tensor, Tensor]:
    """`log_top_k` of the scores of logits [n, >= vocab]: tokens [n, k] and log-probabilities [n, k]."""
    if not _taken(logits, k):
        return reference.children(logits, vocab, k, scores)
    tokens = torch.empty(logits.shape[0], k, dtype=torch.int64, device=logits.device)
    values = torch.empty(logits.shape[0], k, dtype=torch.float32, device=logits.device)
    _launch(logits, vocab, k, scores, scores.tau, tokens, values)
    return tokens, values


def log_top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of log_softmax(scores [n, V]): tokens [n, k] and log-probabilities [n, k], likeliest first, of equal
    ones the earlier token, never above 0 and never NaN."""
    return children(scores, scores.shape[1], k)


def _taken(logits: Tensor, k: int) -> bool:
    return logits.dtype == torch.float32 and logits.stride(1) == 1 and k <= MOST_CANDIDATES


def _launch(
    logits: Tensor, vocab: int, k: int, scores: Scores, tau: float, tokens: Tensor, values: Tensor | None
) -> None:
    count, device = logits.shape[0], logits.device
    if count == 0:
        return
    check("logits", logits[0], torch.float32, (logits.shape[1],), device)
    bias = noise = rows = 0
    if scores.bias is not None:
        bias = check("bias", scores.bias, torch.float32, (vocab,), device)
    if scores.noise is not None and scores.rows is not None:
        noise = check("noise", scores.noise, torch.float32, (scores.noise.shape[0], vocab), device)
        rows = check("rows", scores.rows, torch.int64, (count,), device)
    _C.children_cuda(
        logits.data_ptr(), bias, noise, rows, scores.temperature, tau if noise else 1.0, count, vocab,
        logits.stride(0), k, tokens.data_ptr(), 0 if values is None else values.data_ptr(), current_stream(),
    )  # fmt: skip
