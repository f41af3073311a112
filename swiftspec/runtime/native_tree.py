"""The draft tree whose arithmetic native code does, on the same arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from swiftspec.tree.tree import DraftTree


class Handle(Protocol):
    """The native side of a tree."""

    def best_subtree(self, bs: int, root: int, /) -> tuple[list[int], list[int], list[int]]: ...
    def prospects(self, bs: int, w: int, root: int, /) -> tuple[float, float]: ...
    def walk(self, tokens: Sequence[int], /) -> list[int]: ...
    def reroot(self, node: int, /) -> tuple[list[int], list[int]]: ...
    def offer(self, request: int, prefix_len: int, bs: int, w: int, steps: int, worth: float, /) -> Any: ...


class NativeTree(DraftTree):
    """A `DraftTree` that can be expanded in one call with a forward; `native` is what that call takes.

    What is not overridden is for requests whose logits Python must see.
    """

    def __init__(self, nodes: int, slots: int, make: Callable[[Sequence[NDArray], int, int], Handle]) -> None:
        super().__init__(nodes, slots)
        arrays = (self.token, self.parent, self.slot, self.logprob, self.visible, self.sizes)
        self.native = make(arrays, nodes, slots)

    def best_subtree(self, bs: int, root: int = 0, first: int = 0) -> tuple[list[int], list[int], list[int]]:
        if first > 0:
            return super().best_subtree(bs, root, first)
        return self.native.best_subtree(bs, root)

    def prospects(self, bs: int, w: int, root: int = 0) -> tuple[float, float]:
        return self.native.prospects(bs, w, root)

    def walk(self, tokens: Sequence[int]) -> list[int]:
        return self.native.walk(tokens)

    def reroot(self, node: int) -> tuple[list[int], list[int]]:
        return self.native.reroot(node)
