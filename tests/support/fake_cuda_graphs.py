"""Stand-ins for CUDA graphs on a CPU: one that runs the work again, one as strict as real graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

T = TypeVar("T")
HOST_READS = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal", "aten::masked_select"}


class Rerun:
    """A stand-in for a capture: the result stays in the same tensors, which each replay overwrites."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(
        self, forward: Callable[[], T], restore: Callable[[], None] = lambda: None, /
    ) -> tuple[T, Callable[[], None]]:
        self.captures += 1
        out = tree_map_only(Tensor, torch.empty_like, forward())
        restore()

        def replay() -> None:
            self.replays += 1
            for old, new in zip(_tensors(out), _tensors(forward()), strict=True):
                old.copy_(new)

        return out, replay


class Recording(TorchDispatchMode):
    """Records operators with the tensors that they read and write. A replay uses the same tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func._schema.name not in HOST_READS, f"{func} waits for the device"
        out = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, out))
        return out

    @torch.inference_mode()
    def run(self) -> None:
        for func, args, kwargs, out in self._calls:
            for old, new in zip(_tensors(out), _tensors(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():  # neither a view nor in place
                    old.copy_(new)


def _tensors(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, tuple | list):
        for part in out:
            yield from _tensors(part)


class Recorder(Rerun):
    """Captures operators on tensors, for work without native code and without a group. A replay runs no Python of
    ours."""

    def __call__(
        self, forward: Callable[[], T], restore: Callable[[], None] = lambda: None, /
    ) -> tuple[T, Callable[[], None]]:
        self.captures += 1
        forward()
        restore()
        with Recording() as recording:
            out = forward()
        restore()

        def replay() -> None:
            self.replays += 1
            recording.run()

        return out, replay


class RerunWithoutReads(Rerun):
    """A rerun that must not read values."""

    def __call__(
        self, forward: Callable[[], T], restore: Callable[[], None] = lambda: None, /
    ) -> tuple[T, Callable[[], None]]:
        def blind() -> T:
            with Recording():
                return forward()

        return super().__call__(blind, restore)
