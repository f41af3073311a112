"""Draft tree in native code on the arrays of a `DraftTree`, for short rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from swiftspec.tree.tree import DraftTree, SubTree


class NativeTreeHandle(Protocol):
    """The methods of a `DraftTree` in native code, on its arrays: `prospects` is `expected_mass`, `walk` is
    `match_prefix`. `fast_reply`: see `DraftTree.fast_reply`."""

    def best_subtree(self, bs: int, root: int, /) -> SubTree: ...
    def prospects(self, bs: int, w: int, root: int, /) -> tuple[float, float]: ...
    def walk(self, tokens: Sequence[int], /) -> list[int]: ...
    def reroot(self, node: int, /) -> tuple[list[int], list[int]]: ...
    def fast_reply(self, request: int, prefix_len: int, bs: int, w: int, steps: int, worth: float, /) -> Any: ...


class NativeTree(DraftTree):
    """A `DraftTree` whose methods run in native code on the same arrays. `NativeExecutor` expands only such trees.

    `make`: returns the native tree on the arrays token, parent, slot, logprob, visible, sizes.
    """

    def __init__(self, nodes: int, slots: int, make: Callable[[Sequence[NDArray]], NativeTreeHandle]) -> None:
        super().__init__(nodes, slots)
        self.native = make((self.token, self.parent, self.slot, self.logprob, self.visible, self.sizes))

    def best_subtree(self, bs: int, root: int = 0, first: int = 0) -> SubTree:
        if first > 0:
            return super().best_subtree(bs, root, first)
        return self.native.best_subtree(bs, root)

    def expected_mass(self, bs: int, w: int, root: int = 0) -> tuple[float, float]:
        return self.native.prospects(bs, w, root)

    def match_prefix(self, tokens: Sequence[int]) -> list[int]:
        return self.native.walk(tokens)

    def reroot(self, node: int) -> tuple[list[int], list[int]]:
        return self.native.reroot(node)

    def fast_reply(self, request: int, root_at: int, bs: int, w: int, steps: int, worth: float) -> Any:
        return self.native.fast_reply(request, root_at, bs, w, steps, worth)
