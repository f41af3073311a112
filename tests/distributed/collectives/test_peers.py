"""Groups of GPUs that sum in their kernels, without a GPU: which rank opens which memory, and the errors. Ranks are
threads, and GPU memory is numbers. tests/gpu/test_peers.py uses real GPUs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from threading import Barrier, Lock, local
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from swiftspec.backends.cuda import cuda
from swiftspec.backends.cuda import linear as cuda_linear
from swiftspec.backends.cuda import peers as cuda_peers
from swiftspec.backends.cuda.peers import PeerAccessError
from swiftspec.backends.unfused import unfused
from swiftspec.builder.plan import Checkpoints, GpuUse, Plan, TokenIds
from swiftspec.config import EngineConfig
from swiftspec.distributed.collectives import leave, peers
from swiftspec.distributed.launch import supervisor
from swiftspec.errors import RankLost, UserError
from swiftspec.model.batch import ForwardOutput
from swiftspec.model.loader import load_model
from swiftspec.params import SamplingParams
from tests.support.proposals import draft_proposal
from tests.support.roles import make_runner, make_verifier, request_start
from tests.support.thread_group import ThreadGroup
from tests.support.tiny_checkpoints import make_checkpoint

T = TypeVar("T")
CPU = torch.device("cpu")


@dataclass
class Machine:
    """A machine with GPUs, of which those in `blind` (a, b) cannot reach each other. Replaces `_C`; the current device
    is per thread. `broken`: (step, GPU) at which the driver fails. `deaf`: (writer, reader) whose writes are lost."""

    blind: set[tuple[str, str]] = field(default_factory=set)
    opened: dict[str, set[str]] = field(default_factory=dict)  # owner -> ranks that have its memory open
    freed: dict[str, set[str]] = field(default_factory=dict)  # owner -> ranks that had it open then
    channels: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    still: set[str] = field(default_factory=set)  # ranks whose kernels have ended
    broken: tuple[str, str] | None = None
    deaf: tuple[str, str] | None = None
    memory: dict[str, bytearray] = field(default_factory=dict)  # the beginning of each inbox
    here: local = field(default_factory=local)
    lock: Lock = field(default_factory=Lock)

    def fail_at(self, step: str) -> None:
        if self.broken == (step, self.here.bus):
            raise RuntimeError(f"{step}: invalid\nargument")

    def cuda_bus_id(self) -> str:
        return self.here.bus

    def cuda_reaches(self, bus: str) -> bool:
        return not {(self.here.bus, bus), (bus, self.here.bus)} & self.blind

    def cuda_inbox_bytes(self, ranks: int, lines: int) -> int:
        return ranks * lines

    def CudaInbox(self, size: int) -> Any:
        self.fail_at("inbox")
        return Inbox(self, self.here.bus, size)

    def CudaPeerInbox(self, handle: bytes) -> Any:
        self.fail_at("open")
        return PeerInbox(self, handle.decode(), self.here.bus)

    def CudaWord(self, name: str, rank: int, size: int, seconds: float) -> Any:
        self.fail_at("pin")
        word = bytearray(16)
        return SimpleNamespace(name=name, view=lambda: memoryview(word))

    def CudaChannel(self, rank: int, *rest: Any) -> str:
        self.channels[rank] = rest
        return f"channel {rank}"

    def cuda_decode_fault(self, word: int) -> tuple[int, int, int, int] | None:
        return (0, 2, 1, 5) if word else None


class Inbox:
    def __init__(self, machine: Machine, bus: str, size: int) -> None:
        self.machine, self.bus = machine, bus
        self.address = 1000 * int(bus) + int(bus)
        machine.opened[bus], machine.memory[bus] = set(), bytearray(256)

    def handle(self) -> bytes:
        self.machine.fail_at("handle")
        return self.bus.encode()

    def read(self, offset: int, size: int) -> bytes:
        return bytes(self.machine.memory[self.bus][offset : offset + size])

    def clear(self) -> None:
        self.machine.memory[self.bus][:] = bytes(256)

    def __del__(self) -> None:
        with self.machine.lock:
            self.machine.freed[self.bus] = set(self.machine.opened[self.bus])


class PeerInbox:
    def __init__(self, machine: Machine, owner: str, viewer: str) -> None:
        self.machine, self.owner, self.viewer = machine, owner, viewer
        self.address = 1000 * int(viewer) + int(owner)
        machine.opened[owner].add(viewer)

    def write(self, offset: int, data: bytes) -> None:
        if self.machine.deaf != (self.viewer, self.owner):
            self.machine.memory[self.owner][offset : offset + len(data)] = data

    def __del__(self) -> None:
        with self.machine.lock:
            if self.viewer in self.machine.still:  # otherwise a kernel could still write there
                self.machine.opened[self.owner].remove(self.viewer)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(cuda_peers, "_C", made)
    monkeypatch.setattr(cuda_linear, "_C", made)
    for module in (cuda_peers, cuda_linear):
        monkeypatch.setattr(module, "use_current_device", lambda: None)
    monkeypatch.setattr(peers, "max_lines", lambda width: width)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: made.still.add(made.here.bus))
    return made


class Gloo(ThreadGroup):
    """A stand-in for the torch.distributed group of a TorchDistGroup."""

    name = "target"
    closed = False

    def close(self) -> None:
        self.closed = True


def on_gpus(machine: Machine, size: int, work: Callable[[Gloo, Any], T]) -> list[T | Exception]:
    """The result or exception of `work` on each rank; each rank uses the GPU with its own number."""
    barrier, places = Barrier(size, timeout=30), [torch.empty(0)] * size
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))

    def run(rank: int) -> T | Exception:
        machine.here.bus = str(rank)
        try:
            return work(Gloo(rank, size, barrier, places), store)
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def join(group: Gloo, store: Any) -> peers.PeerMemoryGroup:
    stands_in: Any = group
    return peers.PeerMemoryGroup.join(store, stands_in, width=64, device=CPU)


@pytest.mark.parametrize("size", [2, 5, 8])
def test_every_rank_sees_every_inbox_in_rank_order(machine: Machine, size: int) -> None:
    def work(group: Gloo, store: Any) -> bool:
        joined = join(group, store)
        gathered = joined.all_gather(torch.tensor([group.rank]))
        assert machine.channels[group.rank][-1].tolist() == [0, 1000 * peers.STARTUP_TIMEOUT_S]
        joined.end_startup()
        joined.close()
        return group.closed and gathered.flatten().tolist() == list(range(size))

    assert on_gpus(machine, size, work) == [True] * size
    for rank in range(size):
        inboxes, lines, *_, error_word = machine.channels[rank]
        assert inboxes == [1000 * rank + owner for owner in range(size)]
        assert lines == 64 and error_word.tolist() == [0, 1000 * peers.PEER_TIMEOUT_S]
    assert machine.freed == {str(rank): set() for rank in range(size)}, "each when all others had closed it"
    assert not any(map(any, machine.memory.values())), "the messages that tried the links are cleared"


def test_gpus_without_peer_access_are_refused_where_kernels_are_required(machine: Machine) -> None:
    """All ranks raise the same error of one line."""
    machine.blind = {("1", "3")}
    errors = on_gpus(machine, 4, join)
    assert {type(error) for error in errors} == {PeerAccessError}
    assert {str(error) for error in errors} == {"GPU 1 of rank 1 cannot access GPU 3 of rank 3 in its group"}


def test_gpus_without_peer_access_use_the_library(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on all ranks of the group."""
    machine.blind = {("1", "3")}
    monkeypatch.setattr(peers.TorchDistGroup, "join", lambda store, name, *_, **__: store.group)

    def work(group: Gloo, store: Any) -> tuple[bool, bool]:
        stands_in: Any = SimpleNamespace(set=store.set, get=store.get, group=group)
        joined = peers.join(stands_in, "", 0, 0, device=CPU, timeout=timedelta(1), width=64)
        return joined is group, group.closed

    assert on_gpus(machine, 4, work) == [(True, False)] * 4


REASONS = {
    "inbox": "GPU rank 1: inbox: invalid argument", "handle": "GPU rank 1: handle: invalid argument",
    "open": "GPU rank 1: open: invalid argument", "pin": "GPU rank 1: pin: invalid argument",
    "link": "GPU rank 1: what rank 2 writes to its GPU memory does not arrive",
}  # fmt: skip


@pytest.mark.parametrize("step", REASONS)
def test_whatever_fails_while_joining_all_ranks_use_the_library(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """IPC handles that one rank cannot make or open, memory that it cannot pin, or a link that loses what one rank
    writes: no rank waits for another, rank 0 prints the reason, and all memory is freed after it was closed."""
    monkeypatch.setattr(peers.TorchDistGroup, "join", lambda store, name, *_, **__: store.group)
    monkeypatch.setattr(cuda_peers, "PROBE_TIMEOUT_S", 0.1)
    machine.still = {"0", "1", "2"}  # no kernel has run
    if step == "link":
        machine.deaf = ("2", "1")
    else:
        machine.broken = (step, "1")
    lines: list[str] = []

    def work(group: Gloo, store: Any) -> bool:
        stands_in: Any = SimpleNamespace(set=store.set, get=store.get, group=group)
        ranks = {"device": CPU, "timeout": timedelta(1), "width": 64, "log": lines.append}
        return peers.join(stands_in, "target", group.rank, 3, **ranks) is group

    assert on_gpus(machine, 3, work) == [True] * 3
    assert lines == [f"group target sums by NCCL, without peer memory: {REASONS[step]}"]
    assert all(not openers for openers in machine.freed.values())
    assert all(not any(memory) for memory in machine.memory.values()), "zeroed again"


def test_more_ranks_than_the_kernels_sum_over(machine: Machine) -> None:
    assert all("at most 8 GPUs, not 9" in str(error) for error in on_gpus(machine, 9, join))


def test_closing_waits_for_other_ranks_only_for_a_limited_time(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "CLOSE_TIMEOUT_S", 0.1)
    joined: list[peers.PeerMemoryGroup] = []

    def work(group: Gloo, store: Any) -> None:
        joined.append(join(group, store))
        if group.rank == 1:
            joined[-1].close()

    first, second = on_gpus(machine, 2, work)
    assert first is None and str(second) == "other ranks have not left after 0.1 s"
    assert machine.freed == {}, "rank 0 has not unmapped the memory"


def test_each_wait_of_a_leaving_rank_ends_before_the_wait_for_it() -> None:
    assert peers.CLOSE_TIMEOUT_S < leave.LEAVE_TIMEOUT_S < supervisor.SHUTDOWN_GRACE_S


def test_few_rows_are_summed_in_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def product(x: Tensor, packed: Any, out: Tensor, *, residual: Tensor | None = None, channel: Any = None) -> Tensor:
        seen.append(channel)
        return out.fill_(3)

    monkeypatch.setattr(cuda_linear, "_linear", product)
    few: Any = object.__new__(cuda_linear.PeerCommunicator)
    packed: Any = None
    sums = cuda_linear.RowwiseReduce(few, lambda x: 2 * x)
    for rows in (1, 32, 33, 256):
        residual = torch.ones(rows, 4)
        out = cuda_linear.linear_residual(torch.ones(rows, 8), packed, residual, sums)
        assert seen[-1] is (few if rows <= 32 else None)
        assert torch.equal(out, torch.full((rows, 4), 3.0 if rows <= 32 else 7.0))
    assert torch.equal(sums(torch.ones(2)), torch.full((2,), 2.0))


def test_short_messages_are_gathered_by_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that fit into the lines of the longest product, in a limited number of pieces of whole words, go through
    a kernel; others through the library."""
    end: Any = object.__new__(cuda_linear.PeerCommunicator)
    end._lines = 4
    most = 8 * cuda_linear.MAX_GATHER_LAUNCHES
    sizes = {(8, torch.float32): True, (most, torch.float32): True, (most + 1, torch.float32): False}
    sizes |= {(4, torch.float64): True, (3, torch.bfloat16): False}
    for (count, dtype), taken in sizes.items():
        x: Any = SimpleNamespace(device=torch.device("cuda"), nbytes=count * dtype.itemsize)
        assert end.supports(x) == taken
    assert not end.supports(torch.zeros(2))  # not on a GPU
    calls: list[str] = []
    stub = SimpleNamespace(supports=lambda x: x.numel() < 3, gather=lambda x: calls.append("kernel"))
    library = SimpleNamespace(
        name="draft", rank=0, size=2, all_reduce=None, all_gather=lambda x: calls.append("library")
    )
    ends: tuple[Any, Any, Any] = (None, library, SimpleNamespace(communicator=stub))
    group = peers.PeerMemoryGroup(*ends)
    for count in (2, 3):
        group.all_gather(torch.zeros(count))
    assert calls == ["kernel", "library"]


@pytest.mark.parametrize("word", [0, 1])
def test_a_peer_that_never_arrives_is_named(machine: Machine, tmp_path: Path, word: int) -> None:
    make_checkpoint(tmp_path)
    model = load_model(tmp_path, dtype=torch.float32, ops=unfused, max_positions=64)
    sums = cuda_linear.PeerCommunicator(0, [1, 2, 3], 64, torch.tensor([word, 0]), CPU)
    group, ends, store = (
        SimpleNamespace(name="target", rank=0, size=3, all_reduce=None, communicator=sums) for _ in range(3)
    )
    stands_in: tuple[Any, Any, Any] = (store, group, ends)
    model.group = peers.PeerMemoryGroup(*stands_in)
    runner = make_runner(model, unfused, context=32, tree_slots=8)

    def fail(*args: Any, **more: Any) -> Any:
        raise RuntimeError("CUDA error: unspecified launch failure\nand advice")

    model.forward = fail
    kind, text = (
        (RankLost, r"^group target: GPU rank 0 waited too long for rank 2 \(slot 1, epoch 5\); .* SWIFTSPEC_PEERS=0 ")
        if word
        else (RuntimeError, "CUDA error")
    )
    with pytest.raises(kind, match=text):
        runner.prefill([1, 2])
    verifier = make_verifier(runner)
    model.forward = lambda *args, **more: ForwardOutput(torch.zeros(1, 64), None)
    group.all_gather = fail  # the descriptions of the logits by the ranks
    stands_in[2].communicator.supports = lambda x: False
    verifier.open(request_start([1], SamplingParams(temperature=0), request=0))
    with pytest.raises(kind, match=text):
        verifier.verify(draft_proposal(0, 0, 0, (1,), (-1,)))


def test_which_groups_sum_in_their_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups whose models all run on the CUDA operators, with a separate GPU per rank; the lines are as wide as the
    widest model needs."""
    for name, hidden in (("target", 64), ("draft", 32)):
        (tmp_path / name).mkdir()
        make_checkpoint(tmp_path / name, hidden_size=hidden)
    fits = {64: True, 32: True}

    def check_supported(config: Any, dtype: Any, device: Any) -> None:
        if not fits[config.hidden_size]:
            raise UserError("these operators do not fit")

    monkeypatch.setattr(cuda, "check_supported", check_supported)

    def models(**more: Any) -> Plan:
        plain: Any = {"dtype": torch.bfloat16, "device": torch.device("cuda", 0), "ops": "auto", "threads": 1}
        plain |= {"checkpoints": Checkpoints(tmp_path / "target", tmp_path / "draft"), "max_model_len": 64}
        plain |= {"engine": EngineConfig(), "vocabulary": TokenIds(64, (), ()), "grammars": None}
        return Plan(**{**plain, **more})

    def width(target: bool, draft: bool, **more: Any) -> int:
        return models(**more).peer_all_reduce_width(target=target, draft=draft)

    assert (width(True, False), width(True, True), width(False, True)) == (64, 64, 32)
    assert width(True, False, gpu=GpuUse(share_device=True)) == width(True, False, ops="unfused") == 0
    fits[32] = False
    assert (width(True, False), width(True, True)) == (64, 0)
