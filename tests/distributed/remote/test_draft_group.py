"""The draft client in one process: a draft that is late, fails or is lost costs only speed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swiftspec import _C
from swiftspec.backends.cpu import cpu as host
from swiftspec.config import EngineConfig
from swiftspec.distributed.group.leader import FollowerGroup, LeaderDrafter
from swiftspec.distributed.launch.supervisor_link import Heartbeat
from swiftspec.distributed.remote.client import DraftLink, RemoteDrafter
from swiftspec.distributed.remote.served_roles import DraftTraceSender, ServedDrafter
from swiftspec.distributed.remote.server import DraftGroupServer
from swiftspec.distributed.remote.server_link import ServerLink
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.distributed.transport.request_state import ModelLimits, RequestState
from swiftspec.distributed.transport.transport import Transport
from swiftspec.errors import DrafterLost
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.model.loader import load_model
from swiftspec.observe.recorder import Recorder
from swiftspec.observe.trace_format import RoundRecord
from swiftspec.params import SamplingParams
from swiftspec.runtime.cancellation import CancelCheck
from swiftspec.tree.tree import DraftTree
from tests.support.proposals import draft_proposal
from tests.support.roles import make_drafter, make_runner, request_start
from tests.support.tiny_checkpoints import make_checkpoint
from tests.support.transports import connect

GREEDY = SamplingParams(temperature=0)
BOUNDS = ModelLimits(40, 200, 8)


class FakeDraft:
    """Proposes the root and one token, which is the number of the round; can be configured to be late or to fail."""

    grows = True

    def __init__(self) -> None:
        self.busy, self.draft_steps, self.fails = 0.0, 3, False
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.calls: list[str] = []
        self.errors: list[Exception] = []  # what its server has passed on
        self.runner = SimpleNamespace(
            hooks=[],
            cache=SimpleNamespace(prefix_len=[0]),
            first_token=0,
            cached_lengths=lambda texts, most: [0] * len(texts),
        )
        self.tree = DraftTree(9, 2)
        self.tree.reset(7)

    def select_executor(self, start: RequestStart) -> SimpleNamespace:
        return SimpleNamespace(name="eager")

    def open(self, start: RequestStart) -> None:
        self.calls.append(f"open {start.request}")
        self.request, self.round = start.request, 0
        self.at, self.root = len(start.tokens) - 1, start.tokens[-1]

    def propose(self) -> Proposal:
        assert self.may_answer.wait(30)
        if self.fails:
            raise RuntimeError("no memory left")
        self.busy += 0.25
        return draft_proposal(self.request, self.round, self.at, (self.root, self.round), (-1, 0))

    def grow(self) -> None:
        self.calls.append("grow")

    def observe(self, result: VerifyResult) -> None:
        self.round, self.at, self.root = result.round + 1, self.at + len(result.tokens), result.tokens[-1]

    def fast_reply(self) -> None:
        return None

    def close(self) -> None:
        self.calls.append("close")


def serve(far: Transport, draft: Any, on_error: Callable[[Exception], object] = lambda error: None) -> DraftGroupServer:
    """The draft's side, with a drafter that has no followers."""
    recording = DraftTraceSender(far, draft, traced=False)
    leading = LeaderDrafter(draft, FollowerGroup([]))
    return DraftGroupServer(
        far, leading, BOUNDS, recording, CancelCheck(), Heartbeat(), on_error=on_error
    )  # fmt: skip


def make_client(transport: Transport, **timeouts: Any) -> RemoteDrafter:
    """The target's side, with d = 3."""
    return RemoteDrafter(DraftLink(ServerLink(transport, RequestState(BOUNDS), "draft"), **timeouts), 3)


@pytest.fixture
def connection() -> Iterator[tuple[RemoteDrafter, FakeDraft, Transport]]:
    near, far = connect(None)
    draft = FakeDraft()
    service = threading.Thread(target=serve(far, draft, draft.errors.append).run, name="draft server")
    service.start()
    drafter = make_client(near, answer_timeout_s=0.3, open_timeout_s=0.6)
    yield drafter, draft, far
    with contextlib.suppress(ConnectionError):
        near.send(Opcode.SHUTDOWN)
    service.join(10)
    assert not service.is_alive()


def result(request: int, round_: int, at: int) -> VerifyResult:
    return VerifyResult(request, round_, at, (0,), (9,))


def test_a_shutdown_that_a_prefill_has_buffered_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's leader ends after SHUTDOWN, while the draft works: an answer to it then fails."""
    near, far = connect(None)
    server = serve(far, FakeDraft())
    near.send(Opcode.SHUTDOWN)
    near.close()
    assert server._commands.request_ended()
    answer = SimpleNamespace(frame=lambda: (Opcode.PROPOSAL, [0] * 1000))
    monkeypatch.setattr(server, "answers", lambda: repeat(answer))
    server.run()


def test_a_request_from_end_to_end(connection: tuple[RemoteDrafter, FakeDraft, Transport]) -> None:
    drafter, draft, _ = connection
    drafter.draft_steps = 5
    drafter.open(request_start([4, 5], GREEDY))
    assert drafter.propose() == draft_proposal(1, 0, 1, (5, 0), (-1, 0))
    for round_ in range(3):
        drafter.grow()
        drafter.observe(result(1, round_, 1 + round_))
        assert drafter.propose() == draft_proposal(1, round_ + 1, 2 + round_, (9, round_ + 1), (-1, 0))
    assert drafter.busy == 1.0 and draft.draft_steps == 5
    drafter.close()
    drafter.open(request_start([7], GREEDY, request=2))
    assert drafter.propose().request == 2
    assert draft.calls[:6] == ["open 1", "grow", "grow", "grow", "grow", "close"]


def test_a_late_answer_loses_the_request_and_is_dropped_in_the_next(
    connection: tuple[RemoteDrafter, FakeDraft, Transport],
) -> None:
    drafter, draft, _ = connection
    drafter.open(request_start([4, 5], GREEDY))
    drafter.propose()
    draft.may_answer.clear()
    drafter.observe(result(1, 0, 1))
    with pytest.raises(DrafterLost, match="did not answer in time"):
        drafter.propose()
    draft.may_answer.set()
    drafter.close()
    drafter.open(request_start([7], GREEDY, request=2))
    assert drafter.propose() == draft_proposal(2, 0, 0, (7, 0), (-1, 0)), "not the answer to the first request"


def test_a_failing_draft_reports_the_reason_and_serves_the_next_request(
    connection: tuple[RemoteDrafter, FakeDraft, Transport],
) -> None:
    drafter, draft, _ = connection
    drafter.open(request_start([4, 5], GREEDY))
    drafter.propose()
    draft.fails = True
    drafter.observe(result(1, 0, 1))
    with pytest.raises(DrafterLost, match="no memory left"):
        drafter.propose()
    assert [str(error) for error in draft.errors] == ["no memory left"], "an error of a GPU is recorded"
    drafter.observe(result(1, 1, 2))  # as a target that has not received it would
    draft.fails = False
    drafter.open(request_start([7], GREEDY, request=2))
    assert drafter.propose().request == 2


def test_a_lost_draft(connection: tuple[RemoteDrafter, FakeDraft, Transport]) -> None:
    drafter, _, far = connection
    drafter.open(request_start([4, 5], GREEDY))
    drafter.propose()
    drafter.link.send(Opcode.SHUTDOWN)
    next(thread for thread in threading.enumerate() if thread.name == "draft server").join(10)
    far.close()
    for _ in range(2):
        with pytest.raises(DrafterLost, match="disconnected"):
            drafter.open(request_start([7], GREEDY, request=2))


@pytest.mark.skipif(_C.level() == "none", reason="this CPU has no AVX2")
def test_results_within_the_tree_are_answered_by_native_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that always accepts the first child receives the proposals that a drafter in its own process would
    make."""
    make_checkpoint(tmp_path, vocab=40, layers=2, dtype=torch.float32, seed=3, hidden_size=64, intermediate_size=48)
    plan, prompt = EngineConfig(verify_batch=4, draft_leaves=3, draft_steps=3), [3, 1, 4, 1, 5]
    models = (load_model(tmp_path, dtype=torch.float32, ops=host, max_positions=260) for _ in range(2))
    runners = (make_runner(model, host, context=200, tree_slots=60) for model in models)
    ours, theirs = (make_drafter(runner, plan, ahead=True) for runner in runners)
    proposed: list[Proposal] = []  # by Python
    answer = ServedDrafter._answer
    monkeypatch.setattr(ServedDrafter, "_answer", lambda self, p: (proposed.append(p), answer(self, p))[1])
    near, far = connect(None)
    service = threading.Thread(target=serve(far, theirs).run)
    service.start()
    drafter, received = make_client(near), []
    try:
        for each in (drafter, ours):
            each.open(request_start(prompt, GREEDY))
        for _ in range(20):
            received.append(drafter.propose())
            assert received[-1] == ours.propose()
            ours.grow()
            last = received[-1]
            result = VerifyResult(1, last.round, last.prefix_len, (0,), (last.tokens[1],))
            for each in (drafter, ours):
                each.observe(result)
    finally:
        near.send(Opcode.SHUTDOWN)
        service.join(10)
    assert received[0] == proposed[0] and 0 < len(received) - len(proposed) < 20
    assert 0 < drafter.busy <= theirs.busy


def test_tracing_of_the_draft_starts_with_the_next_request(
    connection: tuple[RemoteDrafter, FakeDraft, Transport],
) -> None:
    drafter, _, _ = connection
    drafter.link.recorder = recorder = Recorder()
    recorder.listener = list[Any]().extend
    recorder.begin(request_start([4, 5], GREEDY))
    drafter.open(request_start([4, 5], GREEDY))
    drafter.link.set_trace(True)
    recorder.add(RoundRecord(drafter.propose(), result(1, 0, 1), [], True, 0.0, None, None))
    drafter.observe(result(1, 0, 1))
    drafter.propose()
    assert recorder.awaits_draft(0), "not in the midst of a request"
    recorder.begin(request_start([4, 5], GREEDY, request=2))
    drafter.open(request_start([4, 5], GREEDY, request=2))
    last = RoundRecord(drafter.propose(), result(2, 0, 1), [0.0] * 7, True, 0.0, None, None)
    recorder.add(last)
    drafter.link.drain_trace(0)
    timeline = last.line()["draft"]
    assert timeline["nodes"] == 1 and timeline["tree"]["tokens"].tolist() == [7]
