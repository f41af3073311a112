"""Sampling and resampling of the CPU backend. Shapes as in reference/__init__.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.reference import sampling as reference
from swiftspec.backends.reference.resampling import ResamplingState
from swiftspec.backends.reference.sampling import DEFAULT_SCORES, Scores


def gumbel_rows(seed: int, stream: int, positions: Tensor, tokens: range) -> Tensor:
    """Returns the standard Gumbel noise [rows, tokens] float32 of absolute positions [rows] (int64), within 1e-6 of
    reference/."""
    out = torch.empty(positions.shape[0], len(tokens))
    _C.gumbel_rows(seed, stream, positions.to(torch.int32), tokens.start, out)
    return out


def draw(logits: Tensor, vocab: int, scores: Scores = DEFAULT_SCORES) -> Tensor:
    """Draws tokens; see reference/sampling.py."""
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        return reference.draw(logits, vocab, scores)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64)
    scores = _with_numbers(scores)
    noise, noise_rows = _noise(scores)
    _C.draw(
        logits,
        vocab,
        scores.bias,
        noise,
        noise_rows,
        scores.temperature,
        tokens=tokens,
    )
    return tokens


def children(logits: Tensor, vocab: int, k: int, scores: Scores = DEFAULT_SCORES) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the k best tokens of each row; see reference/sampling.py."""
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        return reference.children(logits, vocab, k, scores)
    count = logits.shape[0]
    tokens, values = torch.empty(count, k, dtype=torch.int64), torch.empty(count, k)
    scores = _with_numbers(scores)
    noise, noise_rows = _noise(scores)
    _C.children(
        logits,
        vocab,
        scores.bias,
        noise,
        noise_rows,
        scores.temperature,
        tau=scores.tau,
        tokens=tokens,
        values=values,
    )
    return tokens, values


def log_probs(logits: Tensor, vocab: int, tokens: Tensor, scores: Scores = DEFAULT_SCORES) -> Tensor:
    """Log-probabilities of given tokens; see reference/sampling.py."""
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        return reference.log_probs(logits, vocab, tokens, scores)
    out = torch.empty(logits.shape[0])
    for rows, each in _sets(scores, len(logits)):
        _C.log_probs(logits[rows], vocab, each.bias, each.temperature, tokens[rows].contiguous(), out[rows])
    return out


def draw_keyed(logits: Tensor, vocab: int, keys: Tensor, scores: Scores = DEFAULT_SCORES) -> tuple[Tensor, Tensor]:
    """Draws tokens with the noise of keys; see reference/sampling.py. Skips the noise of tokens that cannot win."""
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        return reference.draw_keyed(logits, vocab, keys, scores)
    tokens, out = torch.empty(logits.shape[0], dtype=torch.int64), torch.empty(logits.shape[0])
    for rows, each in _sets(scores, len(logits)):
        _C.draw_keyed(
            logits[rows],
            vocab,
            each.bias,
            each.temperature,
            keys[rows].contiguous(),
            tokens[rows],
            values=out[rows],
        )
    return tokens, out


def resample(groups: ResamplingState, uniform: Tensor, threshold: float, width: int) -> None:
    """As `reference.resampling.resample`, in native code."""
    _C.resample(**groups.fields(), uniform=uniform, threshold=threshold, width=width)


def _sets(scores: Scores, rows: int) -> Iterator[tuple[slice, Scores]]:
    """Yields each set of bias and temperature, as Python numbers, with the rows that it applies to."""
    if scores.scalars is None or scores.scalars.dim() == 1:
        yield slice(0, rows), _with_numbers(scores)
        return
    temperatures = scores.scalars[:, 0].tolist()
    count = rows // len(temperatures)
    for i, temperature in enumerate(temperatures):
        yield slice(i * count, (i + 1) * count), Scores(temperature, None if scores.bias is None else scores.bias[i])


def _with_numbers(scores: Scores) -> Scores:
    """Returns the same scores with `Scores.scalars` as Python numbers."""
    if scores.scalars is None:
        return scores
    temperature, tau, factor = scores.scalars.tolist()
    noise, rows = (scores.noise, scores.rows) if factor else (None, None)
    return Scores(temperature, scores.bias, noise, rows, tau)


def _noise(scores: Scores) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Returns the noise and the noise row of each row of logits, or (None, None) if the scores have no noise."""
    return (None, None) if scores.noise is None or scores.rows is None else (scores.noise, scores.rows)
