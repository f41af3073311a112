"""What a forward takes, and the two messages that draft and target exchange.

Letters: n rows of one forward, W the width of the mask window, S sequences in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """The input of every forward: prompt chunk, plain decoding, tree growth, verification, particles.

    A row sees every slot of its sequence older than the last W ones, and of those the ones its mask row names; its own
    slot is among them. All tensors lie on the model's device.
    """

    tokens: Tensor  # [n] int64
    positions: Tensor  # [n] int64, RoPE positions in the row's own sequence
    slots: Tensor  # [n] int64, where the row's KV goes, counted from the start of its sequence's region
    mask: Tensor  # [n, W] bool, right-aligned: column W - 1 is slot kv_len[sequence] - 1
    sequence: Tensor  # [n] int64, which region of the cache
    kv_len: Tensor  # [S] int64, slots in use once this batch's own are written

    def __len__(self) -> int:
        return self.tokens.shape[0]


@dataclass(frozen=True, slots=True)
class Proposal:
    """The sub-tree sent to be verified, in topological order. Node 0 is the root: the last verified token.

    `prefix_len` counts the verified tokens before the root, so the root stands at that absolute position.
    """

    request: int
    round: int
    prefix_len: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]  # parents[0] == -1, parents[i] < i

    def pack(self) -> Tensor:
        """Flat int32: request, round, prefix_len, count, tokens, parents."""
        head = (self.request, self.round, self.prefix_len, len(self.tokens))
        return torch.tensor(head + self.tokens + self.parents, dtype=torch.int32)

    @staticmethod
    def unpack(flat: Tensor) -> Proposal:
        """The inverse of `pack`. Raises ValueError on a message that is not one."""
        request, round_, prefix_len, *body = flat.tolist()
        count = body.pop(0) if body else -1
        if count < 1 or len(body) != 2 * count:
            raise ValueError(f"a proposal of {len(flat)} words does not hold the {count} nodes it names")
        parents = tuple(body[count:])
        if parents[0] != -1 or any(not 0 <= p < i for i, p in enumerate(parents[1:], 1)):
            raise ValueError("a proposal's nodes are not in topological order")
        return Proposal(request, round_, prefix_len, tuple(body[:count]), parents)

    @staticmethod
    def root_only(request: int, round_: int, prefix_len: int, token: int) -> Proposal:
        """What plain decoding sends: nothing but the root."""
        return Proposal(request, round_, prefix_len, (token,), (-1,))


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What the target made of a proposal: the accepted path and the tokens it sampled along it.

    `tokens` are the path's tokens without the root, then the bonus token; `prefix_len` is the proposal's, so the next
    root stands at prefix_len + len(tokens).
    """

    request: int
    round: int
    prefix_len: int
    path: tuple[int, ...]  # accepted proposal nodes, the root first
    tokens: tuple[int, ...]  # len(path) of them

    def pack(self) -> Tensor:
        """Flat int32: request, round, prefix_len, count, path, tokens."""
        head = (self.request, self.round, self.prefix_len, len(self.path))
        return torch.tensor(head + self.path + self.tokens, dtype=torch.int32)

    @staticmethod
    def unpack(flat: Tensor) -> VerifyResult:
        """The inverse of `pack`. Raises ValueError on a message that is not one."""
        request, round_, prefix_len, *body = flat.tolist()
        count = body.pop(0) if body else -1
        if count < 1 or len(body) != 2 * count:
            raise ValueError(f"a result of {len(flat)} words does not hold the {count} nodes it names")
        return VerifyResult(request, round_, prefix_len, tuple(body[:count]), tuple(body[count:]))
