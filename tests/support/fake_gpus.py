"""A stand-in for torch.cuda with several GPUs, and ranks as threads that use one each.

Tensors are in CPU memory and tagged with a device, streams and graphs belong to one. Every capture, event and native
call checks the current device of its thread: it must have been set, and be the rank's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier, local
from types import SimpleNamespace
from typing import Any, TypeVar
from weakref import WeakSet

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map_only

from swiftspec.backends.cuda import cuda, torch_interop
from swiftspec.backends.reference import attention
from swiftspec.backends.unfused import unfused
from swiftspec.distributed.launch.world import World, available_cores
from tests.support.fake_cuda_graphs import Recording
from tests.support.thread_group import ThreadGroup

T = TypeVar("T")
CPU = torch.device("cpu")
MEMORY = 2**40  # bytes of a GPU


class FakeGpus:
    """`count` GPUs. `captures`, `events`, `native_calls`: devices on which they happened. `graphs`: those that are
    alive and hold a capture."""

    def __init__(self, patch: pytest.MonkeyPatch, count: int) -> None:
        self.here = local()  # of a thread: `current`, `native` and `own` device
        self.captures: list[int] = []
        self.events: list[int] = []
        self.native_calls: list[int] = []
        self.graphs = WeakSet[FakeGraph]()
        cuda_names: dict[str, Any] = {
            "is_available": lambda: True, "device_count": lambda: count, "current_device": self.current,
            "set_device": lambda device: self.select(torch.device(device).index), "device": self.device,
            "Stream": self.stream, "current_stream": lambda device=None: self.stream(device),
            "stream": lambda stream: self.device(stream.device), "synchronize": lambda device=None: None,
            "Event": lambda: SimpleNamespace(record=self.record, synchronize=lambda: None),
            "CUDAGraph": lambda: FakeGraph(self), "graph": self.capture, "graph_pool_handle": object,
            "mem_get_info": lambda device: (MEMORY, MEMORY), "memory_reserved": lambda device: 0,
            "memory_allocated": lambda device: 0, "get_device_name": lambda device=None: "a GPU",
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_properties": lambda device: SimpleNamespace(uuid=f"GPU-{torch.device(device).index}"),
        }  # fmt: skip
        for name, value in cuda_names.items():
            patch.setattr(torch.cuda, name, value)
        # the CUDA operators' mover of KV, whose native part is `FakeNative`
        patch.setattr(torch_interop, "_C", FakeNative(self))
        patch.setattr(unfused, "make_slot_mover", cuda.make_slot_mover)
        patch.setattr(attention, "_has_efficient_attention", lambda q: False)  # no such kernel for CPU memory

    def current(self) -> int:
        return getattr(self.here, "current", 0)

    def select(self, device: int | None) -> None:
        assert device is not None, "a device without index"
        self.here.current = device

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = vars(self.here).get("current")
        self.here.current = torch.device(device).index
        try:
            yield
        finally:
            del self.here.current
            if before is not None:
                self.here.current = before

    def check(self, what: str, device: int) -> int:
        """The device, after a check that it is the current one of a thread that has set it, and the rank's."""
        assert hasattr(self.here, "current"), f"{what} in a thread that has not set its device"
        own = getattr(self.here, "own", self.here.current)
        assert device == self.here.current == own, f"{what} on GPU {device}; current {self.here.current}, own {own}"
        return device

    def stream(self, device: Any = None, priority: int = 0) -> Any:
        index = self.current() if device is None else torch.device(device).index
        self.check("a stream", index)
        waits: dict[str, Any] = {"wait_stream": lambda other: None, "synchronize": lambda: None}
        return SimpleNamespace(device=torch.device("cuda", index), cuda_stream=index, priority=priority, **waits)

    def record(self, stream: Any = None) -> None:
        self.events.append(self.check("an event", self.current() if stream is None else stream.device.index))

    @contextmanager
    def capture(self, graph: FakeGraph, *, stream: Any, **options: Any) -> Iterator[None]:
        graph.device = self.check("a capture", stream.device.index)
        self.captures.append(graph.device)
        with graph.recording:
            yield
        self.graphs.add(graph)

    @contextmanager
    def rank(self, own: int) -> Iterator[None]:
        """Makes the calling thread that of the rank that owns a GPU."""
        self.here.own = own
        with GpuTensors():
            yield


class FakeGraph:
    """A graph that replays the operators of its capture."""

    def __init__(self, gpus: FakeGpus) -> None:
        self.gpus, self.recording, self.device = gpus, Recording(), -1

    def replay(self) -> None:
        assert self in self.gpus.graphs, "a replay of a graph that was freed"
        self.recording.run()

    def reset(self) -> None:
        self.gpus.graphs.discard(self)


class FakeNative:
    """The part of the native extension that moves KV."""

    def __init__(self, gpus: FakeGpus) -> None:
        self.gpus = gpus

    def use_cuda_device(self, device: int) -> None:
        self.gpus.here.native = device

    def CudaCache(self, k: Tensor, v: Tensor) -> Any:
        def check() -> None:
            assert k.device.index == v.device.index == self.gpus.here.native, "a cache on another device"
            self.gpus.native_calls.append(self.gpus.check("a native call", self.gpus.here.native))

        def move(sequence: int, source: list[int], start: int, stream: int) -> None:
            check()
            assert stream == k.device.index
            for part in (k, v):
                part[:, sequence, :, start : start + len(source)] = part[
                    :, sequence, :, torch.tensor(source, device=k.device)
                ].clone()

        check()
        return SimpleNamespace(move=move)


class GpuTensors(TorchFunctionMode):
    """Puts tensors of a GPU into CPU memory and tags them. Operators of tensors on two GPUs fail."""

    MOVES = (Tensor.to, Tensor.cpu)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {**(kwargs or {})}
        if func == Tensor.device.__get__:  # pyright: ignore[reportAttributeAccessIssue]
            return _tag(args[0]) or CPU
        if func is torch.device:
            return func(*args, **kwargs)
        kwargs.pop("pin_memory", None)
        if func in self.MOVES and isinstance(args[-1], str):
            args = (*args[:-1], torch.device(args[-1]))
        if isinstance(kwargs.get("device"), str):
            kwargs["device"] = torch.device(kwargs["device"])
        named = [CPU] if func is Tensor.cpu else []
        named += [each for each in (*args, *kwargs.values()) if isinstance(each, torch.device)]
        tags = {tag for each in tree_iter((args, kwargs)) if isinstance(each, Tensor) and (tag := _tag(each))}
        assert len(tags) <= 1, f"{func} of tensors on {tags}"
        assert not tags or func is not Tensor.numpy, "the memory of a GPU as an array"
        device = next(iter(named or tags), CPU)
        placed: Any = tree_map_only(torch.device, lambda device: CPU, (args, kwargs))
        out = func(*placed[0], **placed[1])
        if func in self.MOVES and out is args[0] and device != (_tag(out) or CPU):
            out = out.clone()
        for each in tree_iter(out):
            if isinstance(each, Tensor) and not any(each is old for old in args):
                each._gpu = device if device.type == "cuda" else None  # type: ignore[attr-defined]
        return out


def _tag(tensor: Tensor) -> torch.device | None:
    return getattr(tensor, "_gpu", None)


class JoinedThreads(ThreadGroup):
    """A group of thread ranks as `join_group` returns it."""

    def __init__(self, name: str, *rest: Any) -> None:
        super().__init__(*rest)
        self.name = name

    def all_gather(self, x: Tensor) -> Tensor:
        return super().all_gather(x.cpu()).to(x.device)

    def close(self) -> None: ...
    def abort(self) -> None: ...


class ThreadJoin:
    """Replaces `join_group`: the ranks of a group are threads of this process. `make`: the class of the groups."""

    def __init__(self, make: Callable[..., Any] = JoinedThreads) -> None:
        self.make = make
        self.meetings: dict[str, tuple[Barrier, list[Tensor]]] = {}

    def __call__(self, world: World, name: str, rank: int, size: int, **options: Any) -> Any:
        meeting = self.meetings.setdefault(name, (Barrier(size, timeout=20), [torch.empty(0)] * size))
        return self.make(name, rank, size, *meeting)


def on_gpu_ranks(
    gpus: FakeGpus, size: int, work: Callable[[World], T], *, own: Callable[[int], int] = int
) -> list[T | BaseException]:
    """The result or exception of `work` on each rank, a thread that owns a GPU: that of its number, or `own(rank)`."""
    store, cores = HashStore(), frozenset([min(available_cores())])

    def run(rank: int) -> T | BaseException:
        with gpus.rank(own(rank)):
            try:
                return work(World(rank, size, rank, size, "127.0.0.1", store, cores))
            except BaseException as error:
                return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
