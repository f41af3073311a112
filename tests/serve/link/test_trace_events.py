"""The ring buffer of trace events, and its endpoint."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from starlette.types import Message

from swiftspec.messages import RequestStart, VerifyResult
from swiftspec.observe.trace_format import RoundRecord
from swiftspec.params import SamplingParams
from swiftspec.serve.api.events import trace_events_router
from swiftspec.serve.link import frames
from swiftspec.serve.link import trace_events as module
from swiftspec.serve.link.engine_loop import to_trace_frame
from swiftspec.serve.link.frames import EngineInfo, TraceEvent
from swiftspec.serve.link.remote_engine_client import RemoteEngineClient
from swiftspec.serve.link.trace_events import TraceEventBuffer
from swiftspec.text.codec import TextCodec
from swiftspec.tree.tree import DraftTree
from tests.support.http import Player
from tests.support.proposals import draft_proposal
from tests.support.scripted_rank import Link, Rank0, run_link, run_with_rank0

READY = EngineInfo("m", None, 100, 50, [1], {}, {"mode": "ar"}, 1.0, {"swiftspec_trace": 1})


@pytest.fixture(autouse=True)
def immediate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLUSH_INTERVAL_S", 0.0)


def line(number: int, *tokens: int) -> TraceEvent:
    return TraceEvent("round", b'{"round":%d}' % number, list(tokens))


async def read(events: TraceEventBuffer, after: int | None, count: int) -> list[Any]:
    """The next `count` items of a subscriber: events, or the number of missed ones."""
    got: list[Any] = []
    async with aclosing(events.subscribe(after)) as followed:
        async for some in followed:
            got += [one if isinstance(one, int) else {"id": one.number, **json.loads(one.event.line)} for one in some]
            if len(got) >= count:
                break
    return got


def run(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scene, 20))


def test_a_subscriber_resumes_and_receives_missed_events() -> None:
    async def scene() -> None:
        subscriptions: list[bool] = []
        events = TraceEventBuffer(subscriptions.append, max_events=4)
        events.begin(READY)  # 1
        events.put(line(2), line(3))
        head = {"id": 0, "swiftspec_trace": 1}
        assert await read(events, 1, 3) == [head, {"id": 2, "round": 2}, {"id": 3, "round": 3}]
        events.put(*(line(number) for number in range(4, 11)))
        seen = await read(events, 3, 6)
        assert seen == [head, 3, *({"id": number, "round": number} for number in range(7, 11))]
        assert await read(events, 99, 2) == [head, 6, *seen[2:]], "an id from before a restart"
        assert subscriptions == [True, False] * 3

    run(scene())


def test_the_ring_is_bounded_in_bytes() -> None:
    async def scene() -> None:
        events = TraceEventBuffer(lambda on: None, max_bytes=40)
        events.put(*(line(number) for number in range(10)))
        assert await read(events, 0, 4) == [7, *({"id": number + 1, "round": number} for number in (7, 8, 9))]
        events.put(TraceEvent("begin", b"x" * 41, []))
        events.put(line(0))
        assert await read(events, 10, 2) == [1, {"id": 12, "round": 0}]

    run(scene())


class Caller:
    """A client of the endpoint that can disconnect."""

    def __init__(
        self, events: TraceEventBuffer, codec: TextCodec | None, query: str = "", last: str | None = None
    ) -> None:
        self._app = FastAPI()
        self._app.include_router(trace_events_router(events, lambda: codec))
        headers = [] if last is None else [(b"last-event-id", last.encode())]
        self._scope = {
            "type": "http", "method": "GET", "path": "/v1/spec/events", "raw_path": b"/v1/spec/events",
            "scheme": "http", "query_string": query.encode(), "headers": headers, "http_version": "1.1",
            "asgi": {"spec_version": "2.4"},
        }  # fmt: skip
        self.disconnected, self.came, self.text, self.status = asyncio.Event(), asyncio.Event(), "", 0

    async def run(self) -> None:
        await self._app(self._scope, self._receive, self._send)

    async def until(self, text: str) -> None:
        while text not in self.text:
            self.came.clear()
            await self.came.wait()

    async def _receive(self) -> Message:
        await self.disconnected.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.status = message.get("status", self.status)
        self.text += message.get("body", b"").decode()
        self.came.set()


def test_the_stream_has_ids_kinds_and_each_text_once(player: Player) -> None:
    codec = player.codec

    async def scene() -> None:
        subscriptions: list[bool] = []
        events = TraceEventBuffer(subscriptions.append)
        events.begin(READY)
        caller = Caller(events, codec, "after=1")
        task = asyncio.create_task(caller.run())
        await caller.until("head")
        assert subscriptions == [True] and caller.status == 200
        one, other = codec.encode("a", add_special_tokens=False)[0], codec.encode("b", add_special_tokens=False)[0]
        events.put(line(2, one), line(3, one, other))
        await caller.until("id: 3")
        caller.disconnected.set()
        await task
        assert subscriptions == [True, False]
        parts = [part.split("\n") for part in caller.text.split("\n\n")[1:4]]
        assert parts[0] == ["event: head", 'data: {"swiftspec_trace":1}']
        assert parts[1] == ["id: 2", "event: round", f'data: {{"round":2,"texts":{{"{one}":"a"}}}}']
        assert parts[2] == ["id: 3", "event: round", f'data: {{"round":3,"texts":{{"{other}":"b"}}}}']

    run(scene())


@pytest.mark.parametrize(("query", "last"), [("after=5", None), ("", "5"), ("after=9", "5")])
def test_a_browser_reconnects(query: str, last: str | None) -> None:
    async def scene() -> None:
        events = TraceEventBuffer(lambda on: None, max_events=3)
        events.put(*(line(number) for number in range(1, 10)))
        caller = Caller(events, None, query, last)
        task = asyncio.create_task(caller.run())
        await caller.until("id: 9")
        events.close()
        await task
        assert 'event: gap\ndata: {"missed":1}\n\nid: 7\n' in caller.text

    run(scene())


def test_every_rank_0_receives_the_subscription() -> None:
    async def scene(link: Link) -> None:
        engine, first = link.engine, link.rank0
        reading = asyncio.create_task(read(engine.events, None, 3))
        assert await first.next() == frames.SubscribeFrame(True)
        first.send(frames.TraceEventsFrame([line(1), line(2)]))
        assert len(await reading) == 3
        assert await first.next() == frames.SubscribeFrame(False)
        reader = asyncio.create_task(read(engine.events, None, 2))
        assert await first.next() == frames.SubscribeFrame(True)
        await link.lose_rank0()
        second = await link.restart_rank0(READY)
        assert await second.next() == frames.SubscribeFrame(True)
        assert (await reader)[1] == {"id": 4, "swiftspec_trace": 1}
        await link.lose_rank0()

    run_link(scene, READY)


def test_without_subscribers_nothing_is_recorded() -> None:
    async def scene(engine: RemoteEngineClient, rank0: Rank0) -> None:
        engine.announce_serving()
        assert await rank0.next() == frames.ServingFrame()

    run_with_rank0(scene)


def test_lines_on_the_engine_link() -> None:
    tree = DraftTree(9, 2)
    tree.reset(7)
    tree.add_children(tree.best_leaves(1).nodes, np.array([[3, 4]]), np.array([[-0.5, float("-inf")]]))
    start = RequestStart(1, (5, 6), SamplingParams(logit_bias={3: 1.0}), 2)
    start_request = {"request": 1, "begin": {"prompt": start.prompt, "sampling": {"logit_bias": {3: 1.0}}}}
    proposal, result = draft_proposal(1, 0, 1, (7, 3), (-1, 0)), VerifyResult(1, 0, 1, (0,), (9,))
    grown: Any = tree.state.tobytes(), 1, [(0.0, 0.5, 1)]
    noted = RoundRecord(proposal, result, [float(at) for at in range(7)], True, 0.5, [0.25], (grown, grown))
    trace_events = to_trace_frame([start_request, noted, {"request": 1, "end": {}}]).events
    assert [event.kind for event in trace_events] == ["begin", "round", "end"]
    assert trace_events[0].tokens == [5, 6] and trace_events[1].tokens == [3, 4, 7, 9]
    assert json.loads(trace_events[1].line)["draft"]["tree"] == {
        "tokens": [7, 3, 4], "parents": [-1, 0, 0], "logprobs": [0.0, -0.5, -9999.0], "expanded": [1, 0, 0],
    }  # fmt: skip
