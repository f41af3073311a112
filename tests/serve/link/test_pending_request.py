"""Request groups: the time that each request spends in the queue."""

from __future__ import annotations

import asyncio

import pytest

from swiftspec.params import SamplingParams
from swiftspec.serve.link.engine_client import EngineRequest
from swiftspec.serve.link.pending_request import PendingGroup


def test_the_time_in_the_queue_excludes_attempts_that_were_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 5.0
    monkeypatch.setattr(PendingGroup, "time", lambda group: now)

    async def scene() -> None:
        nonlocal now
        group = PendingGroup([EngineRequest([1], SamplingParams()), EngineRequest([2], SamplingParams())], None)
        first, second = group.members
        now = 7.0
        group.start(first, None)
        now = 10.0
        group.start(second, None)
        now = 20.0  # the first one has run for 13 seconds when the engine is lost
        group.reset_for_retry(first)
        now = 21.0
        group.start(first, None)
        assert (first.queue_time_s, second.queue_time_s) == (3.0, 5.0)

    asyncio.run(scene())
