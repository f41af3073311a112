"""Position-keyed noise (a counter-based RNG) in plain torch: the integers of csrc/common/noise.h on any device, and
Gumbel noise from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B9
_WORD = 0xFFFFFFFF


def _mix_int(x: int) -> int:
    """Returns a bijective hash of a 32-bit integer (two multiply-xorshift rounds), as in csrc/common/noise.h."""
    x ^= x >> 16
    x = x * 0x7FEB352D & _WORD
    x ^= x >> 15
    x = x * 0x846CA68B & _WORD
    return x ^ x >> 16


def _mix_(x: Tensor) -> Tensor:
    """Applies `_mix_int` in place to an int32 tensor. Products wrap, and the masks make the arithmetic shifts
    logical."""
    high = x >> 16  # one buffer for all three shifts, since allocation dominates
    x ^= high.bitwise_and_(0xFFFF)
    x *= 0x7FEB352D
    x ^= torch.bitwise_right_shift(x, 15, out=high).bitwise_and_(0x1FFFF)
    x *= 0x846CA68B - 2**32
    x ^= torch.bitwise_right_shift(x, 16, out=high).bitwise_and_(0xFFFF)
    return x


def stream_key(seed: int, stream: int) -> int:
    """Returns the 32-bit key of a noise stream, from which `row_keys` derives the keys of positions."""
    key = _mix_int((seed + _GOLDEN) & _WORD)  # the constant keeps seed 0 off the hash's fixed point 0
    key = _mix_int(key ^ (seed >> 32 & _WORD))
    return _mix_int((key + stream * _GOLDEN) & _WORD)


def row_key(seed: int, stream: int, position: int) -> int:
    """Returns the 32-bit key of the noise row of a position, which has one number per token of the vocabulary."""
    return _mix_int(stream_key(seed, stream) ^ (position & _WORD))


def row_keys(streams: Tensor, positions: Tensor) -> Tensor:
    """Computes `row_key` on a device: int32 keys from `stream_key` and integer positions, broadcast together ->
    int32."""
    return _mix_(streams ^ positions.to(torch.int32))


def noise_bits(
    seed: int, stream: int, positions: Sequence[int], tokens: range, device: torch.device | str = "cpu"
) -> Tensor:
    """Returns the noise bits [positions, tokens] uint32, identical on every backend and rank."""
    keys = torch.tensor([row_key(seed, stream, p) for p in positions], dtype=torch.uint32).view(torch.int32).to(device)
    return row_bits(keys, counters(tokens, device))


def counters(tokens: range, device: torch.device | str = "cpu") -> Tensor:
    """Returns the hash counters of `tokens` for `row_bits`: [tokens] int32."""
    return torch.arange(tokens.start, tokens.stop, dtype=torch.int32, device=device) * (_GOLDEN - 2**32)


def row_bits(keys: Tensor, counters: Tensor) -> Tensor:
    """Returns the noise bits [..., tokens] uint32 of rows with int32 keys [...]. `counters`: those of the tokens."""
    keys = keys.unsqueeze(-1)
    bits = _mix_(keys + counters)
    bits ^= keys
    return _mix_(bits).view(torch.uint32)


def gumbel(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts uint32 noise bits to standard Gumbel noise -log(-log(1 - v)), where v = (bits + 0.5) / 2^32. Accurate
    for large values."""
    floor = 2.0**-24 - 1  # float32 would round -v to -1 and the noise to -inf
    minus_v = bits.to(dtype).add_(0.5).mul_(-(2.0**-32)).clamp_min_(floor)
    return minus_v.log1p_().neg_().log_().neg_()


def gumbel_rows(seed: int, stream: int, positions: Tensor, tokens: range) -> Tensor:
    """Returns the standard Gumbel noise [rows, tokens] float32 of absolute positions [rows] (int64)."""
    return gumbel(noise_bits(seed, stream, positions.tolist(), tokens, positions.device), torch.float32)
