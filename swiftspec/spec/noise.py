"""Noise that is a function of seed, stream, position and token, and of nothing else (design: idea 5)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

TARGET_STREAM = 0
_GOLDEN = 0x9E3779B9
_WORD = 0xFFFFFFFF


def _mix_int(x: int) -> int:
    """A bijective hash of 32-bit integers (two multiply-xorshift rounds); csrc/noise.h has the same."""
    x ^= x >> 16
    x = x * 0x7FEB352D & _WORD
    x ^= x >> 15
    x = x * 0x846CA68B & _WORD
    return x ^ x >> 16


def _mix_(x: Tensor) -> Tensor:
    """`_mix_int` in place on int32 tensors, whose products wrap; the masks make the shifts logical."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x7FEB352D
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= 0x846CA68B - 2**32
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def stream_key(seed: int, stream: int) -> int:
    """The 32-bit key of a stream, of which the positions make the keys of its rows."""
    key = _mix_int((seed + _GOLDEN) & _WORD)  # the constant keeps seed 0 off the hash's fixed point 0
    key = _mix_int(key ^ (seed >> 32 & _WORD))
    return _mix_int((key + stream * _GOLDEN) & _WORD)


def row_key(seed: int, stream: int, position: int) -> int:
    """The 32-bit key of one row of noise."""
    return _mix_int(stream_key(seed, stream) ^ (position & _WORD))


def row_keys(streams: Tensor, positions: Tensor) -> Tensor:
    """`row_key` on a device, of keys and positions that broadcast: int32 stream keys, whole positions -> int32."""
    return _mix_(streams ^ positions.to(torch.int32))


def noise_bits(
    seed: int, stream: int, positions: Sequence[int], tokens: range, device: torch.device | str = "cpu"
) -> Tensor:
    """Counter-based noise: [n, tokens] uint32, the same integers on every backend and rank."""
    keys = torch.tensor([row_key(seed, stream, p) for p in positions], dtype=torch.uint32).view(torch.int32).to(device)
    return row_bits(keys, counters(tokens, device))


def counters(tokens: range, device: torch.device | str = "cpu") -> Tensor:
    """What tells the tokens of a row apart: [tokens] int32."""
    return torch.arange(tokens.start, tokens.stop, dtype=torch.int32, device=device) * (_GOLDEN - 2**32)


def row_bits(keys: Tensor, counters: Tensor) -> Tensor:
    """The integers of rows [...] with these int32 keys: [..., tokens] uint32."""
    keys = keys.unsqueeze(-1)
    bits = _mix_(keys + counters)
    bits ^= keys
    return _mix_(bits).view(torch.uint32)


def gumbel(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel noise from uint32, -log(-log(1 - v)) with v in (0, 1): exact where it is large."""
    ceiling = 1 - 2.0**-24  # float32 would round v to 1 and the noise to -inf
    v = bits.to(dtype).add_(0.5).mul_(2.0**-32).clamp_max_(ceiling)
    return v.neg_().log1p_().neg_().log_().neg_()


class PositionNoise:
    """Gumbel rows by position, made in blocks: the nodes of a tree share a few positions, round after round."""

    BLOCK = 32

    def __init__(self, seed: int, device: torch.device | str, *, stream: int = TARGET_STREAM) -> None:
        self._seed, self._stream, self._device = seed, stream, device
        self._tokens = range(0)
        self._first = 0
        self._block = torch.empty(0)

    def rows(self, positions: Tensor, tokens: range, dtype: torch.dtype) -> Tensor:
        """[n, tokens] noise of `positions` [n]: the same for a token whatever range it is asked for in."""
        low, high = (int(bound) for bound in positions.aminmax())
        end = self._first + self._block.shape[0]
        if not (self._first <= low and high < end) or self._block.dtype != dtype or self._tokens != tokens:
            self._first, self._tokens = low, tokens
            span = range(low, max(high + 1, low + self.BLOCK))
            self._block = gumbel(noise_bits(self._seed, self._stream, span, tokens, self._device), dtype)
        return self._block[positions - self._first]
