"""Rank 0's side of the wire, with requests side by side: a real engine, and a front end that a test plays."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.llm import LLM, Running
from swiftspec.params import SamplingParams
from swiftspec.serve.http.engine_link import frames
from swiftspec.serve.http.engine_link.engine_server import Service
from swiftspec.serve.http.engine_link.frame_socket import Frames, Wire, packed
from swiftspec.serve.http.engine_link.frames import FromEngine
from tests.support.tiny_checkpoints import make_pair
from tests.support.workers import on_workers, started

LONG: dict[str, Any] = {"temperature": 0.8, "max_tokens": 60, "ignore_eos": True}


class Front:
    """A front end, and rank 0 in a thread behind it."""

    def __init__(self, llm: Running, *, spans: bool = False) -> None:
        here, self._end = socket.socketpair()
        self._heard, self._told = os.pipe()
        self._frames, self._in = Frames(FromEngine), list[Any]()
        self._wire = Wire(here)
        teller: Any = SimpleNamespace(wire=self._wire, renew=lambda beside: False)
        kept: Any = SimpleNamespace(pulse=SimpleNamespace(work=lambda: None, rest=lambda: None), first=b"")
        stopping: Any = SimpleNamespace(asked=False, heard=self._heard)
        session: Any = SimpleNamespace(llm=llm)
        self.thread = threading.Thread(target=Service(session, teller, stopping, kept, spans=spans).run)
        self._end.settimeout(60)
        self.thread.start()

    def say(self, *said: frames.Frame) -> None:
        self._end.sendall(b"".join(map(packed, said)))

    def next(self) -> Any:
        while not self._in:
            self._in += self._frames.push(self._end.recv(1 << 16))
        return self._in.pop(0)

    def until_all_end(self, *numbers: int) -> dict[int, list[Any]]:
        """All frames of these requests, the last of each being what ended it."""
        found: dict[int, list[Any]] = {number: [] for number in numbers}
        while not all(told and isinstance(told[-1], frames.Done | frames.Failed) for told in found.values()):
            frame = self.next()
            found[frame.request].append(frame)
        return found

    def close(self) -> None:
        self.say(frames.Leave())
        self.thread.join(60)
        self._wire.close(1)
        for number in (self._heard, self._told):
            os.close(number)
        self._end.close()
        assert not self.thread.is_alive()


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    pair = make_pair(tmp_path_factory.mktemp("pair"))
    plan = EngineConfig("smc", population=PopulationConfig(2, 2, smc_groups=2))
    return LLM(*pair, plan, max_model_len=96, dtype=torch.float64)


@pytest.fixture
def front(llm: LLM) -> Iterator[Front]:
    made = Front(llm)
    yield made
    made.close()


def tokens(told: list[Any]) -> list[int]:
    return [token for frame in told if isinstance(frame, frames.Chunk) for token in frame.token_ids]


def test_requests_join_end_and_leave_and_each_has_its_own_text(llm: LLM, front: Front) -> None:
    asked: dict[int, dict[str, Any]] = {n: LONG | {"seed": n, "max_tokens": 20 + 8 * n} for n in range(1, 6)}
    wanted = {n: llm.generate([5, n], SamplingParams(**sampling)).token_ids for n, sampling in asked.items()}
    front.say(*(frames.Start(n, [5, n], sampling) for n, sampling in asked.items()))
    front.say(frames.Cancel(77))  # one that has ended, or never was
    found = front.until_all_end(*asked)
    assert {n: tokens(told) for n, told in found.items()} == wanted
    for n, told in found.items():
        assert isinstance(told[-1], frames.Done) and told[-1].timings["predicted_n"] == len(wanted[n])
        assert told[-1].more["particles"] == 2 and told[-2].finish_reason == "length"


def test_choices_are_told_where_they_are_asked_for(llm: LLM, front: Front) -> None:
    alone = llm.generate([5, 1], SamplingParams(**LONG)).stats.population
    for number, choices in ((1, None), (2, (2, 2)), (3, (1, 2))):
        front.say(frames.Start(number, [5, 1], LONG, choices))
    done = {number: told[-1] for number, told in front.until_all_end(1, 2, 3).items()}
    both = [([*each.tokens], "length", pytest.approx(each.weight)) for each in alone.choices(2)]
    told = {n: [(each.token_ids, each.finish_reason, each.weight) for each in done[n].choices] for n in done}
    assert len(both) == 2 and told == {1: [], 2: both, 3: both[:1]}


def test_one_that_is_cancelled_or_refused_ends_alone(llm: LLM, front: Front) -> None:
    wanted = llm.generate([5, 1], SamplingParams(**LONG)).token_ids
    front.say(frames.Start(1, [5, 1], LONG), frames.Start(2, [5, 2], LONG))
    first = {front.next().request for _ in range(8)}
    assert first == {1, 2}, "side by side"
    front.say(frames.Start(3, [5], {"temperature": 0.0}), frames.Start(4, [], LONG), frames.Start(5, [5, 5], LONG))
    front.say(frames.Start(6, [5] * 96, LONG), frames.Cancel(5), frames.Cancel(2))
    found = front.until_all_end(1, 2, 3, 4, 5, 6)
    assert tokens(found[1])[-20:] == wanted[-20:]
    assert isinstance(found[2][-1], frames.Done) and len(tokens(found[2])) < 60
    assert found[3] == [frames.Failed(3, found[3][0].message, True)] and "mode smc samples" in found[3][0].message
    assert found[4][-1].user and "empty" in found[4][-1].message
    assert found[6][-1].user and "the prompt of 96 tokens does not fit" in found[6][-1].message
    assert isinstance(found[5][-1], frames.Done) and tokens(found[5]) == []


def test_a_front_end_that_is_gone_ends_them_all(llm: LLM) -> None:
    front = Front(llm)
    front.say(frames.Start(1, [5, 1], LONG), frames.Start(2, [5, 2], LONG))
    front.next()
    front._end.shutdown(socket.SHUT_RDWR)
    front.thread.join(60)
    assert not front.thread.is_alive()
    front._wire.close(1)
    assert llm.generate([5], SamplingParams(max_tokens=2)).finish_reason is not None


def test_exchanges_with_a_worker_go_with_the_tokens_of_their_round(tmp_path: Path) -> None:
    """Each request has its own; nobody hears of them where no spans are made."""
    target, draft = make_pair(tmp_path)
    asked = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    with started("draft", draft) as worker, on_workers(target, worker.named(), mode="serial", draft_steps=2) as running:
        for spans in (True, False):
            front = Front(running, spans=spans)
            try:
                for number in (1, 2):
                    front.say(frames.Start(number, [5, number], asked))
                    *chunks, done = front.until_all_end(number)[number]
                    rounds = [[hop.round for hop in chunk.hops] for chunk in chunks]
                    assert rounds == ([[at - 1] for at in range(len(chunks))] if spans else [[]] * len(chunks))
                    assert isinstance(done, frames.Done) and done.metrics["drafter_lost"] is None
            finally:
                front.close()
