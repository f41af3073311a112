"""Transport through shared memory, between ranks of one machine. A message takes microseconds, and tens of microseconds
through a socket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swiftspec.backends.cpu.shm import Mailbox
from swiftspec.distributed.transport.codec import Words

NO_TIMEOUT_S = 1e9  # seconds; in effect without limit


class ShmTransport:
    """A `Transport` over a mailbox. The first word of a message is its opcode."""

    def __init__(self, name: str, side: int, peer: str, *, spin: bool, timeout: float) -> None:
        self.peer = peer
        self._mailbox = Mailbox(name, side, spin=spin, attach_timeout_s=timeout)

    def send(self, kind: int, words: Sequence[int] = ()) -> None:
        try:
            self._mailbox.send([kind, *words])
        except OSError as error:
            raise ConnectionError(f"{self.peer} disconnected ({error})") from None

    def recv(self, timeout: float | None = None) -> tuple[int, Words]:
        try:
            kind, *words = self._mailbox.recv(NO_TIMEOUT_S if timeout is None else timeout)
        except TimeoutError:
            raise TimeoutError(f"no message from {self.peer} within {timeout:g} s") from None
        except OSError as error:
            raise ConnectionError(f"{self.peer} disconnected ({error})") from None
        return kind, words

    def recv_or_reply(self, reply: Any, asks: int, answers: int, note: int) -> tuple[int, Words, bool]:
        """Receives like `recv`, without a timeout, and replies in native code, see `Transport.recv_or_reply`."""
        try:
            (kind, *words), answered = self._mailbox.recv_or_reply(reply, asks, answers, note, NO_TIMEOUT_S)
        except OSError as error:
            raise ConnectionError(f"{self.peer} disconnected ({error})") from None
        return kind, words, answered

    def restart(self) -> None:
        pass  # the same mailbox serves all requests

    def close(self) -> None:
        self._mailbox.close()
