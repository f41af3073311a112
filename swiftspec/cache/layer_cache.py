"""Interface of a cache of one kind of layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class LayerCache(Protocol):
    """Cache of all layers of one kind, for example of the attention layers (kv.py).

    A forward writes the state of each row to a slot of a sequence; the operator of the layer does that. `ModelCache`
    allocates the slots and calls the methods below, which move or copy states between slots and never recompute them.
    """

    def allocate(self, sequences: int) -> None:
        """Allocates zeroed buffers for `sequences` sequences. The old buffers are freed first."""
        ...

    def move(self, sequence: int, slots: Sequence[int], first: int) -> None:
        """Moves the states of `slots`, which ascend, to the consecutive slots `first`, `first + 1`, ..., none of which
        is above its source."""
        ...

    def settle(self, sequence: int, verified: int, used: int) -> None:
        """Called when the states of the first `verified` slots of a sequence are written and these slots are final, for
        example after a commit. `used`: slots in use."""
        ...

    def reusable_len(self, sequence: int, count: int) -> int:
        """Returns the largest number of slots, at most `count`, that can be the prefix of another text. The sequence
        has at least `count` verified slots."""
        ...

    def saved_len(self, saved: Any, count: int) -> int:
        """As `reusable_len`, for what `save_prefix` has returned."""
        ...

    def snapshot(self, sequence: int, count: int) -> None:
        """Keeps the state after the first `count` slots of a sequence, all of which are verified, so that
        `reusable_len` includes this number until the sequence is cleared or truncated."""
        ...

    def num_snapshots(self, sequence: int, count: int) -> int:
        """Returns the number of states that `save_prefix` would return in addition to those of the slots."""
        ...

    def truncate(self, sequence: int, count: int) -> None:
        """Makes the first `count` slots of a sequence all of its slots. `count`: a result of `reusable_len`."""
        ...

    def clear(self, sequence: int) -> None:
        """Makes a sequence empty."""
        ...

    def copy_prefix(self, source: int, destination: int, count: int) -> None:
        """Copies the first `count` slots of the sequence `source` to the sequence `destination`. `count`: a result of
        `reusable_len`."""
        ...

    def save_prefix(self, sequence: int, count: int) -> Any:
        """Returns a copy of the first `count` slots of a sequence, for `load_prefix` of this kind of layer. `count`: a
        result of `reusable_len`."""
        ...

    def load_prefix(self, sequence: int, saved: Any, count: int) -> None:
        """Copies the first `count` slots of a copy that `save_prefix` has returned to the start of a sequence.
        `count`: a result of `saved_len`."""
        ...

    def wipe(self, sequence: int, count: int) -> None:
        """Zeroes the first `count` slots of a sequence, because a state that is not finite would propagate into later
        requests even where it is masked."""
        ...
