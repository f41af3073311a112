"""Noise, sampling and top-k on a GPU (csrc/cuda/sampling/sampling.h); the logits are read once."""

from __future__ import annotations

import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cuda.torch_interop import current_stream
from swiftspec.backends.reference import sampling as reference
from swiftspec.backends.reference.resampling import ResamplingState
from swiftspec.backends.reference.sampling import DEFAULT_SCORES, Scores

MAX_CANDIDATES = 64  # largest k of the top-k kernel


def gumbel_rows(seed: int, stream: int, positions: Tensor, tokens: range) -> Tensor:
    """Returns the standard Gumbel noise [rows, tokens] float32 of absolute positions [rows] (int64), bitwise identical
    to backends/cpu."""
    out = torch.empty(positions.shape[0], len(tokens), dtype=torch.float32, device=positions.device)
    if out.numel() > 0:
        _C.gumbel_rows_cuda(seed, stream, positions, tokens.start, out, current_stream())
    return out


def draw(logits: Tensor, vocab: int, scores: Scores = DEFAULT_SCORES) -> Tensor:
    """Draws tokens; see reference/sampling.py."""
    if not _supported(logits, 1):
        return reference.draw(logits, vocab, scores)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if logits.shape[0] > 0:
        noise, noise_rows = _noise_arguments(scores)
        _C.draw_cuda(
            logits,
            vocab,
            scores.bias,
            noise,
            noise_rows,
            scores.temperature,
            scalars=scores.scalars,
            tokens=tokens,
            stream=current_stream(),
        )
    return tokens


def children(logits: Tensor, vocab: int, k: int, scores: Scores = DEFAULT_SCORES) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the k best tokens of each row; see reference/sampling.py."""
    if not _supported(logits, k):
        return reference.children(logits, vocab, k, scores)
    tokens = torch.empty(logits.shape[0], k, dtype=torch.int64, device=logits.device)
    values = torch.empty(logits.shape[0], k, dtype=torch.float32, device=logits.device)
    if logits.shape[0] > 0:
        noise, noise_rows = _noise_arguments(scores)
        _C.children_cuda(
            logits,
            vocab,
            scores.bias,
            noise,
            noise_rows,
            scores.temperature,
            tau=1.0 if noise is None else scores.tau,
            scalars=scores.scalars,
            tokens=tokens,
            values=values,
            stream=current_stream(),
        )
    return tokens, values


def draw_keyed(logits: Tensor, vocab: int, keys: Tensor, scores: Scores = DEFAULT_SCORES) -> tuple[Tensor, Tensor]:
    """Draws tokens with the noise of keys, which is not written to memory; see reference/sampling.py."""
    if not _supported(logits, 1):
        return reference.draw_keyed(logits, vocab, keys, scores)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    return tokens, _keyed(logits, vocab, keys.contiguous(), tokens, scores)


def log_probs(logits: Tensor, vocab: int, tokens: Tensor, scores: Scores = DEFAULT_SCORES) -> Tensor:
    """Log-probabilities of given tokens; see reference/sampling.py."""
    if not _supported(logits, 1):
        return reference.log_probs(logits, vocab, tokens, scores)
    return _keyed(logits, vocab, None, tokens.contiguous(), scores)


def _keyed(logits: Tensor, vocab: int, keys: Tensor | None, tokens: Tensor, scores: Scores) -> Tensor:
    """Returns the log-probabilities [rows] of `tokens`. With `keys`, first draws tokens and writes them to `tokens`."""
    values = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    if logits.shape[0] > 0:
        _C.draw_keyed_cuda(
            logits,
            vocab,
            scores.bias,
            scores.temperature,
            scalars=scores.scalars,
            keys=keys,
            tokens=tokens,
            values=values,
            stream=current_stream(),
        )
    return values


def resample(groups: ResamplingState, uniform: Tensor, threshold: float, width: int) -> None:
    """`reference.resampling.resample` in one launch of a fixed grid (csrc/cuda/particles), for up to 1024 particles
    per group."""
    _C.resample_cuda(**groups.fields(), uniform=uniform, threshold=threshold, width=width, stream=current_stream())


def _supported(logits: Tensor, k: int) -> bool:
    return logits.dtype == torch.float32 and logits.stride(1) == 1 and k <= MAX_CANDIDATES


def _noise_arguments(scores: Scores) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Returns the noise and the noise row of each row of logits, or (None, None) if the scores have no noise."""
    return (None, None) if scores.noise is None or scores.rows is None else (scores.noise, scores.rows)
