"""Group-wise int8 quantisation of activations and products with integer codes: the arithmetic of `--activations int8`.

The sum of code * activation over a group is an integer below 2^24, which float32 represents exactly, so it does not
depend on the order of summation. The sums of the groups are added in a fixed order, so all backends are bitwise
identical.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TOO_SMALL = 1e-30  # groups with smaller magnitudes become zeros, because 127 / magnitude could be infinite


def quantize_rows(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantises x [rows, inputs] in groups of `group` inputs. Returns integers -127..127 [rows, inputs / group,
    group] and scales [rows, inputs / group], both float32.

    The largest magnitude of a group becomes 127. A group with NaN or infinity gets the scale NaN.
    """
    groups = x.float().unflatten(1, (-1, group))
    top = groups.abs().amax(2)
    none = top < TOO_SMALL
    # torch would compute 127 / top as 127 * (1 / top), which rounds differently
    inverse = torch.where(none, 0.0, torch.full_like(top, 127) / top)
    scales = torch.where(top.isfinite(), torch.where(none, 0.0, top / 127), math.nan)
    return (groups * inverse.unsqueeze(2)).round_(), scales


def quantized_matmul(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor | None, minima: Tensor | None = None
) -> Tensor:
    """Quantises x [rows, inputs] and multiplies it by the matrix (codes - zeros) * scales + minima. Returns [rows,
    outputs] in the dtype of x.

    `codes` [groups, group size, outputs], `scales`, `zeros` and `minima` [groups, outputs] and `bias` [outputs] are
    float32.
    """
    rows, by_row = quantize_rows(x, codes.shape[1])
    sums = rows.sum(2)
    out = torch.zeros(x.shape[0], codes.shape[2], device=x.device)
    for group in range(codes.shape[0]):  # in order, because these sums are rounded
        exact = rows[:, group] @ codes[group] - sums[:, group, None] * zeros[group]
        out += exact * (scales[group] * by_row[:, group, None])
        if minima is not None:
            out += sums[:, group, None] * (minima[group] * by_row[:, group, None])
    return (out if bias is None else out + bias).to(x.dtype)
