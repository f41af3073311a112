"""Ranks with one GPU each, on a stand-in for torch.cuda: which device each of them uses, and how they leave a group
whose communicator must not be closed while captured graphs live."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import BrokenBarrierError, Event, Lock
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from swiftspec.builder import plan as plan_module
from swiftspec.builder import ranks
from swiftspec.builder.models import Models
from swiftspec.builder.plan import Plan
from swiftspec.config import EngineConfig
from swiftspec.distributed.collectives import leave
from swiftspec.distributed.launch.world import World
from swiftspec.distributed.remote.worker import Worker, WorkerServer
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.errors import RankLost, UserError
from swiftspec.llm_engine import LLMEngine
from swiftspec.params import SamplingParams
from swiftspec.runtime.executors.graph import CudaCapture
from swiftspec.runtime.overlapped import ThreadedVerifier
from tests.support.cases import fast_first
from tests.support.fake_gpus import FakeGpus, GpuTensors, JoinedThreads, ThreadJoin, on_gpu_ranks
from tests.support.toy_pair import make_pair

PROMPT, ANSWER = [5, 60, 70, 8], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
GPU_1 = torch.device("cuda", 1)
SERIAL = EngineConfig("serial", target_tp=2, draft_tp=-1, verify_batch=4, draft_leaves=2, draft_steps=2)
SHAPE: Any = {"verify_batch": 4, "draft_leaves": 2, "draft_steps": 2}
OPTIONS: Any = {"dtype": "float32", "device": "cuda", "set_torch_threads": False}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """With eight heads, which six ranks can share."""
    folders = make_pair(tmp_path_factory.mktemp("pair"))
    for folder in folders:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": 8, "num_key_value_heads": 4}))
    return folders


@pytest.fixture(scope="module")
def text(pair: tuple[Path, Path]) -> list[int]:
    llm = LLMEngine(pair[0], dtype="float32", device="cpu", ops="reference", set_torch_threads=False)
    return llm.generate(PROMPT, ANSWER).token_ids


def run_rank(world: World, pair: tuple[Path, Path], config: EngineConfig, act: Callable[[LLMEngine], Any]) -> Any:
    """Rank 0 acts on its LLMEngine, the others run until it ends."""
    if world.rank == 0:
        return act(LLMEngine(*pair, config, world=world, **OPTIONS))
    plan = Plan.create(*pair, config, world, OPTIONS)
    return ranks.run_until_shutdown(ranks.start_engine_rank(world, plan.engine, Models.of(plan), None), traced=False)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "draft"), fast_first([(3, 1), (1, 1), (6, 2)], 1, unpack=True))
def test_every_rank_uses_its_own_gpu(
    pair: tuple[Path, Path], text: list[int], monkeypatch: pytest.MonkeyPatch, target: int, draft: int
) -> None:
    """A group of one rank captures graphs; the stand-in for a larger one, whose ranks are threads, cannot."""
    size = target + draft
    gpus = FakeGpus(monkeypatch, size)
    monkeypatch.setattr(ranks, "join_group", ThreadJoin())
    monkeypatch.setattr(ranks, "pin_to_cores", lambda cores: None)
    config = EngineConfig("async", target_tp=target, draft_tp=draft, **SHAPE)

    def act(llm: LLMEngine) -> list[int]:
        with closing(llm):
            return llm.generate(PROMPT, ANSWER).token_ids

    assert on_gpu_ranks(gpus, size, lambda world: run_rank(world, pair, config, act)) == [text, *[None] * (size - 1)]
    alone = {rank for rank, group in ((0, target), (target, draft)) if group == 1}
    assert {*gpus.captures} == alone and {*gpus.native_calls} == {*range(size)}
    assert {*gpus.events} == alone & {0}, "the tokens of a captured verification"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("failed", range(4))
def test_a_failed_capture_ends_the_start_in_one_line(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, failed: int
) -> None:
    """On rank 0; the others are shut down. The ranks of a group capture once all of them have loaded, one graph after
    the other, and no further one after a failure."""
    gpus = FakeGpus(monkeypatch, 4)
    monkeypatch.setattr(ranks, "join_group", ThreadJoin())
    monkeypatch.setattr(ranks, "pin_to_cores", lambda cores: None)
    loaded, load = set[int](), Models.load_roles

    def load_and_note(*args: Any, **holds: bool) -> Any:
        held = load(*args, **holds)
        loaded.add(gpus.here.own)
        return held

    captured: dict[int, int] = dict.fromkeys(range(4), 0)

    def capture(verifier: Any, drafter: Any, config: Any, progress: Any, barrier: Callable[[], None]) -> None:
        ours = {0, 1} if verifier is not None else {2, 3}
        assert ours <= loaded
        for _ in range(3):
            barrier()
            if gpus.here.own == failed and captured[failed] == 1:
                raise RuntimeError("no room for a graph")
            assert all(captured[rank] >= captured[gpus.here.own] for rank in ours), "a rank is a graph ahead"
            captured[gpus.here.own] += 1

    monkeypatch.setattr(Models, "load_roles", load_and_note)
    monkeypatch.setattr(ranks, "capture_graphs", capture)
    config = EngineConfig("async", target_tp=2, draft_tp=2, **SHAPE)
    first, *others = on_gpu_ranks(gpus, 4, lambda world: run_rank(world, pair, config, lambda llm: "started"))
    assert isinstance(first, UserError) and str(first) == f"rank {failed} cannot start: no room for a graph"
    assert others == [None] * 3
    assert captured == {rank: 3 if rank // 2 != failed // 2 else 1 if rank == failed else 2 for rank in range(4)}


def test_ranks_that_exchange_differently_in_their_captures_do_not_start(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their next forward would wait in vain."""
    gpus = FakeGpus(monkeypatch, 2)
    monkeypatch.setattr(ranks, "join_group", ThreadJoin())
    monkeypatch.setattr(ranks, "pin_to_cores", lambda cores: None)
    monkeypatch.setattr(ranks, "count_exchanges", lambda group: gpus.here.own)
    first, second = on_gpu_ranks(gpus, 2, lambda world: run_rank(world, pair, SERIAL, lambda llm: "started"))
    assert str(first) == "rank 0 cannot start: the ranks of its group have captured different kernels"
    assert second is None


def test_a_thread_that_has_not_set_its_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the stand-in."""
    gpus = FakeGpus(monkeypatch, 2)
    found = on_gpu_ranks(gpus, 2, lambda world: CudaCapture(Lock(), torch.device("cuda", world.rank)))
    assert all("a stream in a thread that has not set its device" in str(error) for error in found)


def test_a_capture_requires_its_device_to_be_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would capture on the current device, and leave the work of the other one out of the graph."""
    gpus = FakeGpus(monkeypatch, 2)
    gpus.select(1)
    capture = CudaCapture(Lock(), GPU_1)
    gpus.select(0)
    with pytest.raises(RuntimeError, match="a capture on cuda:1, but GPU 0 is current"):
        capture(lambda: torch.zeros(1))


def test_a_graph_whose_capture_failed_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first graph keeps the memory pool alive, so it must be a complete one."""
    gpus = FakeGpus(monkeypatch, 1)
    gpus.select(0)
    capture, runs = CudaCapture(Lock(), torch.device("cuda", 0)), iter(range(9))

    def work() -> Tensor:
        if next(runs) == 2:  # after the warm-up runs
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.zeros(1)

    with pytest.raises(RuntimeError, match="not permitted"):
        capture(work)
    assert capture._first is None
    kept = capture(work)
    assert capture._first is not None and [*gpus.graphs] == [capture._first] and kept


@pytest.mark.slow
def test_other_threads_set_the_device(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path], text: list[int]
) -> None:
    """The thread of verifications, those of a worker's streams, and whatever thread calls an `LLMEngine`."""
    gpus = FakeGpus(monkeypatch, 2)
    nothing: Any = None

    def serve() -> int:
        worker = Worker("draft", nothing, nothing, (), GPU_1)
        receiver: Any = SimpleNamespace(peer="client")
        list(WorkerServer(worker, receiver, lambda: False)._execute((Opcode.READ_TOKENIZER, [])))
        return gpus.current()

    def verify() -> int:
        gpus.select(1)
        verifier: Any = SimpleNamespace(runner=SimpleNamespace(model=SimpleNamespace(device=GPU_1)))
        return ThreadedVerifier(verifier)._thread.submit(gpus.current).result()

    def load() -> LLMEngine:
        options: Any = {**OPTIONS, "device": "cuda:1"}
        with gpus.rank(1):
            return LLMEngine(*pair, EngineConfig("serial", **SHAPE), **options)

    def decode(llm: LLMEngine) -> list[int]:
        with GpuTensors():
            return llm.generate(PROMPT, ANSWER).token_ids

    for work in (serve, verify):
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(work).result() == 1
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        assert second.submit(decode, first.submit(load).result()).result() == text
    assert {*gpus.captures} == {*gpus.events} == {*gpus.native_calls} == {1}


def test_a_worker_passes_on_errors_that_it_answers() -> None:
    """So that an error of its GPU is recorded although the worker goes on."""
    errors, error, nothing = list[Exception](), RuntimeError("CUDA error: unspecified launch failure"), None
    unused: Any = nothing
    receiver: Any = SimpleNamespace(peer="client")
    server = WorkerServer(Worker("draft", unused, unused, on_error=errors.append), receiver, lambda: False)
    [answer] = server._on_error(error, None)
    assert answer.kind == Opcode.ERROR and errors == [error]


def test_a_gpu_has_an_index(monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path]) -> None:
    """Without one, threads could not make it their current device."""
    gpus = FakeGpus(monkeypatch, 2)
    gpus.select(1)
    with gpus.rank(1):
        assert Plan.create(*pair, EngineConfig("serial"), None, OPTIONS).device == GPU_1


@pytest.mark.parametrize("shared", [False, True])
def test_one_visible_gpu_per_rank(monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path], shared: bool) -> None:
    """As SLURM's --gpus-per-task=1 makes it: accepted if these are different GPUs."""
    gpus = FakeGpus(monkeypatch, 1)
    monkeypatch.setattr(ranks, "join_group", ThreadJoin())
    monkeypatch.setattr(ranks, "pin_to_cores", lambda cores: None)
    monkeypatch.setattr(plan_module, "gpu_uuid", lambda device: f"GPU-{0 if shared else gpus.here.number}")

    def act(world: World) -> Any:
        gpus.here.number = world.rank
        return run_rank(world, pair, SERIAL, lambda llm: llm.close())

    found = on_gpu_ranks(gpus, 2, act, own=lambda rank: 0)
    if shared:
        assert {type(error) for error in found} == {UserError} and len({str(error) for error in found}) == 1
        assert str(found[0]).startswith("ranks 0 and 1 use the same GPU: start at most one rank per GPU")
    else:
        assert found == [None, None]


@dataclass
class Communicators:
    """The communicators of a job's ranks, which are destroyed only if no captured graph of the rank lives, as NCCL's.

    `lost`: rank 1 is lost in its next collective. `hangs`: closing never ends. `states`: of each rank's communicator.
    """

    gpus: FakeGpus
    lost: bool = False
    hangs: bool = False
    states: dict[int, str] = field(default_factory=dict)
    over: Event = field(default_factory=Event)
    kept: list[Any] = field(default_factory=list)

    def make(self, *ends: Any) -> Communicator:
        return Communicator(self, *ends)

    def hold_graph(self, rank: ranks.Rank | None) -> None:
        """Captures a graph on a rank, which lives as long as the rank's roles."""
        assert rank is not None
        capture = rank.models._new_capture(0)
        self.kept.append((capture, capture(lambda: torch.zeros(1))))


class Communicator(JoinedThreads):
    def __init__(self, job: Communicators, *ends: Any) -> None:
        super().__init__(*ends)
        self.job = job
        job.states[self.rank] = "open"

    def all_gather(self, x: Tensor) -> Tensor:
        if self.job.lost and self.rank == 1:
            self._barrier.abort()
        try:
            return super().all_gather(x)
        except BrokenBarrierError:
            raise RankLost("a rank exited") from None

    def close(self) -> None:
        if self.job.hangs or any(graph.device == self.rank for graph in self.job.gpus.graphs):
            self.job.states[self.rank] = "waits for graphs"
            self.job.over.wait()
            return
        self.job.states[self.rank] = "destroyed"

    def abort(self) -> None:
        self.job.states[self.rank] = "aborted"
        raise RuntimeError("CUDA error: unspecified launch failure")  # the context is lost


def end_job(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path], job: Communicators, act: Callable[[LLMEngine], Any],
    log: Callable[[str], None] = lambda line: None,
) -> list[Any]:  # fmt: skip
    """Runs two ranks, each with a captured graph. Returns how they ended."""
    monkeypatch.setattr(ranks, "join_group", ThreadJoin(job.make))
    monkeypatch.setattr(ranks, "pin_to_cores", lambda cores: None)

    def work(world: World) -> Any:
        world = replace(world, log=log)
        if world.rank == 0:
            llm = LLMEngine(*pair, SERIAL, world=world, **OPTIONS)
            job.hold_graph(llm.roles.rank)
            with closing(llm):  # as the chat, a single answer and the server do
                return act(llm)
        plan = Plan.create(*pair, SERIAL, world, OPTIONS)
        rank = ranks.start_engine_rank(world, plan.engine, Models.of(plan), None)
        job.hold_graph(rank)
        return ranks.run_until_shutdown(rank, traced=False)

    try:
        return on_gpu_ranks(job.gpus, 2, work)
    finally:
        job.over.set()


@pytest.mark.parametrize("ending", ["/quit", "SIGTERM"])
def test_graphs_are_freed_before_the_communicator(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path], text: list[int], ending: str
) -> None:
    job = Communicators(FakeGpus(monkeypatch, 2))

    def act(llm: LLMEngine) -> list[int]:
        found = llm.generate(PROMPT, ANSWER).token_ids
        if ending == "SIGTERM":
            raise SystemExit(143)
        return found

    first, second = end_job(monkeypatch, pair, job, act)
    assert second is None and (first == text if ending == "/quit" else isinstance(first, SystemExit))
    assert job.states == {0: "destroyed", 1: "destroyed"} and not job.gpus.graphs


def test_after_a_lost_rank_the_communicator_is_aborted(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path]
) -> None:
    """Closing it would wait for that rank. No error of the abort replaces RankLost, which decides on the exit code."""
    job = Communicators(FakeGpus(monkeypatch, 2))

    def act(llm: LLMEngine) -> list[int]:
        job.lost = True
        return llm.generate(PROMPT, ANSWER).token_ids

    assert {type(each) for each in end_job(monkeypatch, pair, job, act)} == {RankLost}
    assert job.states == {0: "aborted", 1: "aborted"}
    assert len(job.gpus.graphs) == 2, "kernels that wait for the lost rank may still use their memory"


def test_leaving_takes_a_limited_time(monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path]) -> None:
    monkeypatch.setattr(leave, "LEAVE_TIMEOUT_S", 0.05)
    job, lines = Communicators(FakeGpus(monkeypatch, 2), hangs=True), list[str]()
    assert end_job(monkeypatch, pair, job, lambda llm: None, lines.append) == [None, None]
    assert sorted(lines) == [f"rank {rank} could not leave its group: not within 0.05 s" for rank in range(2)]
