"""Counter-based noise in plain torch: the integers of csrc/common/noise.h on any device, and Gumbel noise from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B9
_WORD = 0xFFFFFFFF


def _mix_int(x: int) -> int:
    """A bijective hash of 32-bit integers (two multiply-xorshift rounds), as in csrc/common/noise.h."""
    x ^= x >> 16
    x = x * 0x7FEB352D & _WORD
    x ^= x >> 15
    x = x * 0x846CA68B & _WORD
    return x ^ x >> 16


def _mix_(x: Tensor) -> Tensor:
    """`_mix_int` in place on int32 tensors, whose products wrap; the masks make the shifts logical."""
    high = x >> 16  # one buffer for all three shifts, since allocation dominates
    x ^= high.bitwise_and_(0xFFFF)
    x *= 0x7FEB352D
    x ^= torch.bitwise_right_shift(x, 15, out=high).bitwise_and_(0x1FFFF)
    x *= 0x846CA68B - 2**32
    x ^= torch.bitwise_right_shift(x, 16, out=high).bitwise_and_(0xFFFF)
    return x


def stream_key(seed: int, stream: int) -> int:
    """The 32-bit key of a noise stream; combined with positions it gives row keys."""
    key = _mix_int((seed + _GOLDEN) & _WORD)  # the constant keeps seed 0 off the hash's fixed point 0
    key = _mix_int(key ^ (seed >> 32 & _WORD))
    return _mix_int((key + stream * _GOLDEN) & _WORD)


def row_key(seed: int, stream: int, position: int) -> int:
    """The 32-bit key of one row of noise."""
    return _mix_int(stream_key(seed, stream) ^ (position & _WORD))


def row_keys(streams: Tensor, positions: Tensor) -> Tensor:
    """`row_key` on a device: int32 stream keys and integer positions, which broadcast -> int32."""
    return _mix_(streams ^ positions.to(torch.int32))


def noise_bits(
    seed: int, stream: int, positions: Sequence[int], tokens: range, device: torch.device | str = "cpu"
) -> Tensor:
    """Noise bits [n, tokens] uint32, identical on every backend and rank."""
    keys = torch.tensor([row_key(seed, stream, p) for p in positions], dtype=torch.uint32).view(torch.int32).to(device)
    return row_bits(keys, counters(tokens, device))


def counters(tokens: range, device: torch.device | str = "cpu") -> Tensor:
    """The hash counters of tokens: [tokens] int32."""
    return torch.arange(tokens.start, tokens.stop, dtype=torch.int32, device=device) * (_GOLDEN - 2**32)


def row_bits(keys: Tensor, counters: Tensor) -> Tensor:
    """Noise bits [..., tokens] uint32 of rows with int32 keys [...]."""
    keys = keys.unsqueeze(-1)
    bits = _mix_(keys + counters)
    bits ^= keys
    return _mix_(bits).view(torch.uint32)


def gumbel(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel noise -log(-log(1 - v)) with v in (0, 1) from uint32; accurate for large values."""
    floor = 2.0**-24 - 1  # float32 would round -v to -1 and the noise to -inf
    minus_v = bits.to(dtype).add_(0.5).mul_(-(2.0**-32)).clamp_min_(floor)
    return minus_v.log1p_().neg_().log_().neg_()


def gumbel_rows(seed: int, stream: int, positions: Tensor, tokens: range) -> Tensor:
    """Standard Gumbel noise of absolute positions [n] (int64): [n, tokens] float32."""
    return gumbel(noise_bits(seed, stream, positions.tolist(), tokens, positions.device), torch.float32)
