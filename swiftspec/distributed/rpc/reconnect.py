"""Looks for a draft's worker that cannot be reached, while the target decodes."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread

from swiftspec.distributed.rpc import swiftspec_pb2 as pb
from swiftspec.distributed.rpc.connection import WorkerConnection
from swiftspec.distributed.rpc.protobuf_codec import ModelIdentity
from swiftspec.distributed.rpc.status import WorkerLost
from swiftspec.errors import UserError

MIN_DELAY_S, MAX_DELAY_S = 0.1, 5.0  # seconds between two looks: twice as many each time, up to the latter
PING_TIMEOUT_S = 2.0  # seconds for a worker to answer


class WorkerReconnector:
    """A thread from the start to `close`, at work from `lost` until the worker answers again."""

    def __init__(self, link: WorkerConnection[pb.DraftAnswer], check: Callable[[pb.PingAnswer], None]) -> None:
        """`check` raises UserError on a worker that is none for this target."""
        self._link, self._check = link, check
        self._reachable: ModelIdentity | None = None
        self._wanted, self._closing = Event(), Event()
        Thread(target=self._run, name="redial", daemon=True).start()

    def probe(self) -> ModelIdentity:
        """One look, now. Raises WorkerLost, and UserError on a worker that is none for this target."""
        answer = self._link.ping(PING_TIMEOUT_S)
        self._check(answer)
        return ModelIdentity(answer.model, answer.tokenizer)

    def poll(self) -> ModelIdentity | None:
        """A worker that can be reached again, once."""
        back, self._reachable = self._reachable, None
        return back

    def on_lost(self) -> None:
        """The worker does not answer any more."""
        self._wanted.set()

    def close(self) -> None:
        self._closing.set()
        self._wanted.set()

    def _run(self) -> None:
        while self._wanted.wait() and not self._closing.is_set():
            self._wanted.clear()
            pause = MIN_DELAY_S
            while not self._closing.wait(pause):
                try:
                    self._reachable = self.probe()
                    break
                except (WorkerLost, UserError):
                    pause = min(2 * pause, MAX_DELAY_S)
