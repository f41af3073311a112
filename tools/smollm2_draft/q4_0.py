"""Rounding of matrices to GGUF's Q4_0: blocks of 32 values with a float16 scale and codes from -8 to 7."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

BLOCK = 32


def codes_q4_0(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the codes of all blocks [blocks, BLOCK] from -8 to 7, and their scales [blocks, 1]. The value of the
    largest magnitude gets code -8."""
    blocks = weights.reshape(-1, BLOCK)
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    scale = largest / -8
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    return (blocks * inverse + 8.5).clamp(0, 15).floor() - 8, scale


def round_q4_0(weights: Tensor) -> Tensor:
    """Returns `weights` with every block of a row rounded."""
    codes, scale = codes_q4_0(weights)
    return (codes * scale.half().float()).reshape(weights.shape)


@contextlib.contextmanager
def round_matrices(model: nn.Module, *, active: bool) -> Iterator[None]:
    """Replaces all matrices by their rounded values inside the context, if `active`.

    Gradients of the rounded weights thus update the exact ones, so that the rounding of the file costs little.
    """
    kept = [(parameter, parameter.data) for parameter in model.parameters() if active and parameter.ndim == 2]
    for parameter, exact in kept:
        parameter.data = round_q4_0(exact)
    yield
    for parameter, exact in kept:
        parameter.data = exact
