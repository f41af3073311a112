"""EngineServer with concurrent requests: a real engine, and a front end played by the test."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.llm_engine import LLMEngine
from swiftspec.params import SamplingParams
from swiftspec.serve.link import frames
from swiftspec.serve.link.engine_server import EngineServer
from swiftspec.serve.link.frame_socket import FrameDecoder, FrameSocket, encode_frame
from swiftspec.serve.link.frames import FromEngine
from swiftspec.token_engine import TokenEngine
from tests.support.tiny_checkpoints import make_pair
from tests.support.workers import client_on_workers, started

LONG = SamplingParams(temperature=0.8, max_tokens=60, ignore_eos=True)


class Front:
    """A front end, and an engine server in a thread."""

    def __init__(
        self, llm: TokenEngine, *, send_rpc_records: bool = False, on_cache_change: Callable[[Any], None] | None = None
    ) -> None:
        rank0_end, self._end = socket.socketpair()
        self._wakeup_fds = os.pipe()
        self._frames, self._in = FrameDecoder(FromEngine), list[Any]()
        self._socket = FrameSocket(rank0_end)
        publisher: Any = SimpleNamespace(socket=self._socket, reconnect=lambda wakeup_fd: False)
        heartbeat = SimpleNamespace(mark_busy=lambda: None, mark_idle=lambda: None)
        supervisor: Any = SimpleNamespace(heartbeat=heartbeat, first_message=b"")
        stop: Any = SimpleNamespace(requested=False, wakeup_fd=self._wakeup_fds[0])
        server = EngineServer(
            llm, publisher, stop, supervisor, send_rpc_records=send_rpc_records, on_cache_change=on_cache_change
        )
        self.thread = threading.Thread(target=server.run)
        self._end.settimeout(60)
        self.thread.start()

    def send(self, *sent: frames.Frame) -> None:
        self._end.sendall(b"".join(map(encode_frame, sent)))

    def next(self) -> Any:
        while not self._in:
            self._in += self._frames.push(self._end.recv(1 << 16))
        return self._in.pop(0)

    def until_all_end(self, *numbers: int) -> dict[int, list[Any]]:
        """All frames of these requests up to the last one of each."""
        found: dict[int, list[Any]] = {number: [] for number in numbers}
        while not all(
            received and isinstance(received[-1], frames.DoneFrame | frames.FailedFrame) for received in found.values()
        ):
            frame = self.next()
            found[frame.request].append(frame)
        return found

    def close(self) -> None:
        self.send(frames.ShutdownFrame())
        self.thread.join(60)
        self._socket.close(1)
        for descriptor in self._wakeup_fds:
            os.close(descriptor)
        self._end.close()
        assert not self.thread.is_alive()


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLMEngine:
    pair = make_pair(tmp_path_factory.mktemp("pair"))
    plan = EngineConfig("smc", population=PopulationConfig(2, 2, smc_groups=2))
    return LLMEngine(*pair, plan, max_model_len=96, dtype=torch.float64)


@pytest.fixture
def front(llm: LLMEngine) -> Iterator[Front]:
    made = Front(llm)
    yield made
    made.close()


def tokens(received: list[Any]) -> list[int]:
    return [token for frame in received if isinstance(frame, frames.TokensFrame) for token in frame.token_ids]


def test_requests_are_admitted_and_released_and_keep_their_texts(llm: LLMEngine, front: Front) -> None:
    bodies = {n: replace(LONG, seed=n, max_tokens=20 + 8 * n) for n in range(1, 6)}
    wanted = {n: llm.generate([5, n], sampling).token_ids for n, sampling in bodies.items()}
    front.send(*(frames.StartFrame(n, [5, n], sampling) for n, sampling in bodies.items()))
    front.send(frames.CancelFrame(77))  # one that has ended, or never existed
    found = front.until_all_end(*bodies)
    assert {n: tokens(received) for n, received in found.items()} == wanted
    for n, received in found.items():
        assert isinstance(received[-1], frames.DoneFrame) and received[-1].timings["predicted_n"] == len(wanted[n])
        assert received[-1].extra["particles"] == 2 and received[-2].finish_reason == "length"


def test_choices_are_returned_only_if_requested(llm: LLMEngine, front: Front) -> None:
    alone = llm.generate([5, 1], LONG).stats.population
    for number, choices in ((1, None), (2, (2, 2)), (3, (1, 2))):
        front.send(frames.StartFrame(number, [5, 1], LONG, choices))
    done = {number: received[-1] for number, received in front.until_all_end(1, 2, 3).items()}
    both = [([*each.tokens], "length", pytest.approx(each.weight)) for each in alone.choices(2)]
    received = {n: [(each.token_ids, each.finish_reason, each.weight) for each in done[n].choices] for n in done}
    assert len(both) == 2 and received == {1: [], 2: both, 3: both[:1]}


def test_a_cancelled_or_refused_request_does_not_affect_others(llm: LLMEngine, front: Front) -> None:
    wanted = llm.generate([5, 1], LONG).token_ids
    front.send(frames.StartFrame(1, [5, 1], LONG), frames.StartFrame(2, [5, 2], LONG))
    first = {front.next().request for _ in range(8)}
    assert first == {1, 2}, "side by side"
    front.send(
        frames.StartFrame(3, [5], SamplingParams(temperature=0.0)),
        frames.StartFrame(4, [], LONG),
        frames.StartFrame(5, [5, 5], LONG),
    )
    front.send(frames.StartFrame(6, [5] * 96, LONG), frames.CancelFrame(5), frames.CancelFrame(2))
    found = front.until_all_end(1, 2, 3, 4, 5, 6)
    assert tokens(found[1])[-20:] == wanted[-20:]
    assert isinstance(found[2][-1], frames.DoneFrame) and len(tokens(found[2])) < 60
    assert (
        found[3] == [frames.FailedFrame(3, found[3][0].message, True)]
        and "not supported in mode smc" in found[3][0].message
    )
    assert found[4][-1].user and "empty" in found[4][-1].message
    assert found[6][-1].user and "the prompt of 96 tokens does not fit" in found[6][-1].message
    assert isinstance(found[5][-1], frames.DoneFrame) and tokens(found[5]) == []


def test_losing_the_front_end_ends_all_requests(llm: LLMEngine) -> None:
    front = Front(llm)
    front.send(frames.StartFrame(1, [5, 1], LONG), frames.StartFrame(2, [5, 2], LONG))
    front.next()
    front._end.shutdown(socket.SHUT_RDWR)
    front.thread.join(60)
    assert not front.thread.is_alive()
    front._socket.close(1)
    assert llm.generate([5], SamplingParams(max_tokens=2)).finish_reason is not None


def test_rpcs_are_sent_with_the_tokens_of_their_round(tmp_path: Path) -> None:
    """Each request has its own; without spans they are not sent."""
    target, draft = make_pair(tmp_path)
    body = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with (
        started("draft", draft) as worker,
        client_on_workers(target, worker.client_address(), mode="serial", draft_steps=2) as running,
    ):
        for send_rpc_records in (True, False):
            front = Front(running, send_rpc_records=send_rpc_records)
            try:
                for number in (1, 2):
                    front.send(frames.StartFrame(number, [5, number], body))
                    *chunks, done = front.until_all_end(number)[number]
                    rounds = [[rpc.round for rpc in chunk.rpc_records] for chunk in chunks]
                    wanted = [[at - 1] for at in range(len(chunks))] if send_rpc_records else [[]] * len(chunks)
                    assert rounds == wanted
                    assert isinstance(done, frames.DoneFrame) and done.metrics["drafter_lost"] is None
            finally:
                front.close()


@pytest.mark.parametrize(
    "plan", [EngineConfig("ar"), EngineConfig("serial", draft_steps=2, max_num_seqs=2)], ids=["one", "batch"]
)
def test_changes_of_the_cache_are_reported(tmp_path: Path, plan: EngineConfig) -> None:
    """At the start, after the first tokens of a request, and when it has ended."""
    llm = LLMEngine(*make_pair(tmp_path), plan, max_model_len=96, dtype=torch.float64)
    reports = list[list[list[int]]]()
    front = Front(llm, on_cache_change=lambda texts: reports.append([[*map(int, text)] for text in texts]))
    prompt, sampling = [3 + i for i in range(40)], replace(LONG, seed=1)
    front.send(frames.StartFrame(1, prompt, sampling))
    answer = tokens(front.until_all_end(1)[1])
    front.send(frames.StartFrame(2, [5], sampling), frames.CancelFrame(2))
    front.until_all_end(2)
    front.close()
    longest = [max((text for text in each if text[:20] == prompt[:20]), key=len, default=[]) for each in reports]
    assert longest[0] == [] and len(longest) >= 3
    begun = next(text for text in longest if text)
    assert prompt[:-1] == begun[:39] and len(begun) < 60, "the answer has just begun"
    if plan.max_num_seqs == 1:
        assert longest[2] == [*prompt, *answer][: len(longest[2])] and len(longest[2]) >= len(prompt) + len(answer) - 1
