"""Group-wise quantisation of activations and products with integer codes: `--activations int8` and `int16`.

The sum of code * activation over a group is an integer below 2^24, which float32 represents exactly, so it does not
depend on the order of summation. The sums of the groups are added in a fixed order, so all backends are bitwise
identical.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

REST_PARTS = 254  # what the second int8 number of an activation counts: parts of the first one's unit
TOO_SMALL = 1e-30  # groups with smaller magnitudes become zeros, because 127 / magnitude could be infinite


def quantize_rows(x: Tensor, group: int, parts: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Quantises x [rows, inputs] in groups of `group` inputs. Returns `parts` pairs of integers -127..127 [rows, inputs
    / group, group] and scales [rows, inputs / group], both float32; x is the sum of their products.

    The largest magnitude of a group becomes 127. The second pair is the rounding error of the first, which gives 16
    bits together. A group with NaN or infinity gets the scale NaN.
    """
    groups = x.float().unflatten(1, (-1, group))
    top = groups.abs().amax(2)
    none = top < TOO_SMALL
    # torch would compute 127 / top as 127 * (1 / top), which rounds differently
    inverse = torch.where(none, 0.0, torch.full_like(top, 127) / top)
    scales = torch.where(top.isfinite(), torch.where(none, 0.0, top / 127), math.nan)
    exact = groups * inverse.unsqueeze(2)
    codes = exact.round()
    found = [(codes, scales)]
    if parts == 2:
        found.append((((exact - codes) * REST_PARTS).round_(), scales / torch.full_like(scales, REST_PARTS)))
    return found


def quantized_matmul(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bias: Tensor | None,
    minima: Tensor | None = None,
    parts: int = 1,
) -> Tensor:
    """Quantises x [rows, inputs] to `parts` int8 numbers per input and multiplies it by the matrix (codes - zeros) *
    scales + minima. Returns [rows, outputs] in the dtype of x.

    `codes` [groups, group size, outputs], `scales`, `zeros` and `minima` [groups, outputs] and `bias` [outputs] are
    float32.
    """
    pairs = quantize_rows(x, codes.shape[1], parts)
    products = [_product(rows, by_row, codes, scales, zeros, minima) for rows, by_row in pairs]
    out = products[0] if parts == 1 else products[0] + products[1]
    return (out if bias is None else out + bias).to(x.dtype)


def _product(
    rows: Tensor, by_row: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, minima: Tensor | None
) -> Tensor:
    sums = rows.sum(2)
    out = torch.zeros(rows.shape[0], codes.shape[2], device=rows.device)
    for group in range(codes.shape[0]):  # in order, because these sums are rounded
        exact = rows[:, group] @ codes[group] - sums[:, group, None] * zeros[group]
        out += exact * (scales[group] * by_row[:, group, None])
        if minima is not None:
            out += sums[:, group, None] * (minima[group] * by_row[:, group, None])
    return out
