"""A drafter behind a `TreeDeltaSender` in a thread: a replica's link without a network."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from queue import Empty, Queue
from threading import Thread

from swiftspec.config import EngineConfig
from swiftspec.errors import DrafterLost
from swiftspec.messages import RequestStart, VerifyResult
from swiftspec.runtime.lookahead_drafter import LookaheadDrafter
from swiftspec.runtime.tree_delta_sender import TreeDeltaSender
from swiftspec.tree.replica import TreeDelta

LONG = 30.0  # seconds; more than anything takes


class ThreadedLink:
    """A `TreeDeltaLink`. `pause` is called before each action of the thread."""

    busy, answer_timeout_s = 0.0, LONG

    def __init__(self, drafter: LookaheadDrafter, config: EngineConfig, pause: Callable[[], None]) -> None:
        self._pause, self.vocab = pause, drafter.runner.vocab
        self._deltas: Queue[TreeDelta] = Queue()
        self._sender = TreeDeltaSender(drafter, lambda delta: self._deltas.put(delta), config)

    def open(self, start: RequestStart) -> None:
        self._messages: Queue[RequestStart | VerifyResult | None] = Queue()
        self._deltas = Queue()
        self._thread = Thread(target=self._serve, daemon=True)
        self._thread.start()
        self._messages.put(start)

    def send(self, result: VerifyResult) -> None:
        self._messages.put(result)

    def receive(self, deadline: float | None) -> TreeDelta | None:
        try:
            return self._deltas.get(deadline is not None, LONG)
        except Empty:
            if deadline is not None:
                raise DrafterLost("nothing more came") from None
            return None

    def close(self) -> None:
        self._messages.put(None)
        self._thread.join(LONG)

    def _serve(self) -> None:
        while (message := self._messages.get()) is not None:
            self._pause()
            if isinstance(message, RequestStart):
                self._sender.open(message)
            else:
                self._sender.observe(message)
            while self._messages.empty() and self._sender.grow():
                self._pause()
        self._sender.close()


def dawdle(seed: int) -> Callable[[], None]:
    """Waits occasionally, for as long as a few rounds of a tiny model."""
    dice = random.Random(seed)
    return lambda: time.sleep(dice.choice([0.0, 0.0, 0.0, 0.002, 0.02]))
