"""Group-wise int8 quantisation of activations and products with integer codes: the arithmetic of `--activations int8`.

The sum of code times activation over a group is an integer below 2^24, which float32 represents exactly. The result
does therefore not depend on the order of summation, and all backends are bitwise identical.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TOO_SMALL = 1e-30  # a group below this is zero, because the inverse could be infinite


def quantize_rows(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantises x [n, K] to integers -127..127 [n, K / g, g] with scales [n, K / g], both float32.

    The largest magnitude of a group becomes 127. A group with NaN or infinity gets the scale NaN.
    """
    groups = x.float().unflatten(1, (-1, group))
    top = groups.abs().amax(2)
    none = top < TOO_SMALL
    inverse = torch.where(none, 0.0, torch.full_like(top, 127) / top)  # a scalar 127 would multiply by 1 / top
    scales = torch.where(top.isfinite(), torch.where(none, 0.0, top / 127), math.nan)
    return (groups * inverse.unsqueeze(2)).round_(), scales


def quantized_matmul(x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor | None) -> Tensor:
    """Product of the quantised x [n, K] with (codes - zeros) scales: [n, N] in the dtype of x.

    codes [K / g, g, N], scales [K / g, N] and zeros [K / g, N], all float32; bias [N] float32.
    """
    rows, by_row = quantize_rows(x, codes.shape[1])
    sums = rows.sum(2)
    out = torch.zeros(x.shape[0], codes.shape[2], device=x.device)
    for group in range(codes.shape[0]):  # in order, because these sums are rounded
        exact = rows[:, group] @ codes[group] - sums[:, group, None] * zeros[group]
        out += exact * (scales[group] * by_row[:, group, None])
    return (out if bias is None else out + bias).to(x.dtype)
