"""Reconnects to a draft worker that cannot be reached, while the target decodes."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread

from swiftspec.distributed.rpc import swiftspec_pb2 as pb
from swiftspec.distributed.rpc.connection import WorkerConnection
from swiftspec.distributed.rpc.protobuf_codec import ModelIdentity
from swiftspec.distributed.rpc.status import WorkerLost
from swiftspec.errors import UserError

MIN_DELAY_S, MAX_DELAY_S = 0.1, 5.0  # seconds between two pings, doubled up to the maximum
PING_TIMEOUT_S = 2.0  # seconds; timeout of a ping


class WorkerReconnector:
    """Reconnector of a draft worker: after `on_lost`, a background thread pings the worker until it answers."""

    def __init__(self, link: WorkerConnection[pb.DraftAnswer], check: Callable[[pb.PingAnswer], None]) -> None:
        """`check`: raises UserError if the worker's model does not match this target."""
        self._link, self._check = link, check
        self._reachable: ModelIdentity | None = None
        self._wanted, self._closing = Event(), Event()
        Thread(target=self._run, name="redial", daemon=True).start()

    def probe(self) -> ModelIdentity:
        """Pings the worker once and returns its identity. Raises WorkerLost if it does not answer, and UserError if its
        model does not match this target."""
        answer = self._link.ping(PING_TIMEOUT_S)
        self._check(answer)
        return ModelIdentity(answer.model, answer.tokenizer)

    def poll(self) -> ModelIdentity | None:
        """Returns the worker's identity once after it has answered again, and None at all other times."""
        back, self._reachable = self._reachable, None
        return back

    def on_lost(self) -> None:
        """Starts to ping the worker."""
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
