"""Rows rounded to int8, group by group, and their products with codes: the arithmetic of `--activations int8`.

A group's sum of code times byte is an integer below 2^24, which float32 holds, so nothing depends on the order in which
it is summed, and every backend computes the same bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TOO_SMALL = 1e-30  # a group without a larger number is zero: the inverse of less may be infinite


def round_rows(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """x [n, K] in bytes of -127..127 [n, K / g, g] and their scales [n, K / g], both float32.

    A group's largest number becomes 127. The scale of one with a NaN or an infinity is NaN.
    """
    groups = x.float().unflatten(1, (-1, group))
    top = groups.abs().amax(2)
    none = top < TOO_SMALL
    inverse = torch.where(none, 0.0, torch.full_like(top, 127) / top)  # 127 / top multiplies by 1 / top
    scales = torch.where(top.isfinite(), torch.where(none, 0.0, top / 127), math.nan)
    return (groups * inverse.unsqueeze(2)).round_(), scales


def rounded_product(x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor | None) -> Tensor:
    """x [n, K], rounded, against (codes - zeros) scales: [n, N] in the dtype of x.

    codes [K / g, g, N], scales [K / g, N] and zeros [K / g, N], all float32; bias [N] float32.
    """
    rows, by_row = round_rows(x, codes.shape[1])
    sums = rows.sum(2)
    out = torch.zeros(x.shape[0], codes.shape[2], device=x.device)
    for group in range(codes.shape[0]):  # in their order: these sums are rounded
        exact = rows[:, group] @ codes[group] - sums[:, group, None] * zeros[group]
        out += exact * (scales[group] * by_row[:, group, None])
    return (out if bias is None else out + bias).to(x.dtype)
