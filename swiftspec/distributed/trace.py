"""How the draft's lane of a trace reaches rank 0's file: on the bridge, between the answers, and only while tracing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

from swiftspec.distributed.channel import Channel
from swiftspec.distributed.followers import Call, to_text, to_words
from swiftspec.messages import Words
from swiftspec.observe.trace import Record, TraceLog

LAST_ROUND = 1.0  # seconds to wait for what the draft says of a request's last round


class TracedBridge:
    """Rank 0's end of the bridge, which puts the draft's records into the log and everything else through."""

    def __init__(self, bridge: Channel, log: TraceLog) -> None:
        self.peer = bridge.peer
        self._bridge, self._log = bridge, log
        log.drain = self.drain

    def send(self, kind: int, words: Sequence[int] = ()) -> None:
        self._bridge.send(kind, words)

    def recv(self, timeout: float | None = None) -> tuple[int, Words]:
        while True:
            kind, words = self._bridge.recv(timeout)
            if kind != Call.TRACE:
                return kind, words
            self._log.draft(json.loads(to_text(words)))

    def drain(self, round_: int) -> None:
        """Takes records until that round's is there; what else comes belongs to a request that is over."""
        deadline = time.monotonic() + LAST_ROUND
        try:
            while self._log.lacks(round_):
                kind, words = self._bridge.recv(max(deadline - time.monotonic(), 0.0))
                if kind == Call.TRACE:
                    self._log.draft(json.loads(to_text(words)))
        except (ConnectionError, TimeoutError):
            return  # the line has no draft lane then

    def close(self) -> None:
        self._bridge.close()


def teller(bridge: Channel) -> Callable[[Record], None]:
    """What the draft's leader sends its records with. Request 0 is no request: the pace is measured under it."""

    def tell(record: Record) -> None:
        if record["request"] != 0:
            bridge.send(Call.TRACE, to_words(json.dumps(record)))

    return tell
