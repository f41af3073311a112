"""Stand-ins for CUDA graphs on a CPU: one that runs the work again, one as strict as real graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

T = TypeVar("T")
# operators that wait for the device, have a result whose size depends on values, or copy from pageable memory
REFUSED = {
    "aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal", "aten::masked_select",
    "aten::lift_fresh", "aten::_unique2", "aten::unique_dim", "aten::repeat_interleave.Tensor",
}  # fmt: skip
INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
OPEN = threading.local()  # `here`: whether this thread records


class Rerun:
    """A stand-in for a capture: the result stays in the same tensors, which each replay overwrites."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(
        self, forward: Callable[[], T], restore: Callable[[], None] = lambda: None, /
    ) -> tuple[T, Callable[[], None]]:
        self.captures += 1
        out = _mapped(Tensor, torch.empty_like, forward())
        restore()

        def replay() -> None:
            self.replays += 1
            for old, new in zip(_tensors(out), _tensors(forward()), strict=True):
                old.copy_(new)

        return out, replay


class StorageView:
    """A tensor that a graph does not own: its address and shape, but not its memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._like = tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()

    def tensor(self) -> Tensor:
        dtype, offset, size, stride = self._like
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        assert storage is not None, f"a graph reads a tensor of size {[*size]} whose memory has been freed"
        return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)


class Recording(TorchDispatchMode):
    """Records operators with the tensors that they read and write, and refuses those that a capture on a GPU refuses. A
    replay uses the same tensors; those that the operators did not create must still exist."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self._own: set[int] = set()  # storages that the operators created

    def __enter__(self) -> Any:
        OPEN.here = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        OPEN.here = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name, kwargs or {}
        assert not {name, str(func).replace(".", "::", 1)} & REFUSED, f"{func} waits for the device"
        if name in INDEXED:
            masks = [part for part in args[1] if part is not None and part.dtype == torch.bool]
            assert not masks, f"{func} with a mask waits for the device"
        out = func(*args, **kwargs)
        given = {part.untyped_storage()._cdata for part in _tensors([*args, *kwargs.values()])}
        self._own |= {part.untyped_storage()._cdata for part in _tensors(out)} - (given - self._own)
        self._calls.append((func, self._held(args), self._held(kwargs), self._held(out)))
        return out

    def _held(self, parts: Any) -> Any:
        def held(tensor: Tensor) -> Tensor | StorageView:
            return tensor if tensor.untyped_storage()._cdata in self._own else StorageView(tensor)

        return _mapped(Tensor, held, parts)

    @torch.inference_mode()
    def run(self) -> None:
        for call in self._calls:
            func, args, kwargs, out = _mapped(StorageView, StorageView.tensor, call)
            for old, new in zip(_tensors(out), _tensors(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():  # neither a view nor in place
                    old.copy_(new)


def _refuse_in_recordings(owner: Any, name: str) -> None:
    """Makes a function raise AssertionError in threads that record."""
    function = getattr(owner, name)

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        assert not getattr(OPEN, "here", False), f"{name} in a capture"
        return function(*args, **kwargs)

    setattr(owner, name, checked)


for _method in ("tolist", "numpy", "pin_memory"):
    _refuse_in_recordings(Tensor, _method)
_refuse_in_recordings(torch, "from_numpy")


@contextmanager
def inside_kernel() -> Iterator[None]:
    """Returns a context manager for the Python of a kernel's stand-in, which may read values."""
    recording = getattr(OPEN, "here", False)
    OPEN.here = False
    try:
        with _disable_current_modes():
            yield
    finally:
        OPEN.here = recording


def _tensors(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, tuple | list):
        for part in out:
            yield from _tensors(part)


def _mapped(kind: type, change: Callable[[Any], Any], parts: Any) -> Any:
    """Replaces values of one type in nested sequences and dictionaries; much faster than tree_map_only."""
    if isinstance(parts, kind):
        return change(parts)
    if isinstance(parts, tuple | list):
        return type(parts)([_mapped(kind, change, part) for part in parts])
    if isinstance(parts, dict):
        return {name: _mapped(kind, change, part) for name, part in parts.items()}
    return parts


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
