"""Stream of the messages that a follower receives from its leader, or a server from its client. Detects cancellation
during a prefill."""

from __future__ import annotations

import contextlib

from swiftspec.distributed.transport.codec import Frame
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.distributed.transport.transport import Receiver
from swiftspec.errors import RankLost

# A message with one of these opcodes means that the client has ended the request.
END_OPCODES = (
    Opcode.DRAFTER_OPEN, Opcode.DRAFTER_CLOSE, Opcode.VERIFIER_OPEN, Opcode.VERIFIER_CLOSE, Opcode.SESSION_ATTACH,
    Opcode.SESSION_CLOSE, Opcode.SHUTDOWN,
)  # fmt: skip


class CommandStream:
    """The messages of a leader or client, in order. Messages that arrive during a prefill are buffered."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self.buffered: list[Frame] = []  # received during a prefill and not yet returned by `recv`

    def recv(self, timeout: float | None = None) -> Frame:
        """Returns opcode and words of the next message. Raises TimeoutError if it does not arrive within `timeout`
        seconds (None: no limit)."""
        return self.buffered.pop(0) if self.buffered else self._receiver.recv(timeout)

    def prefill_aborted(self) -> bool:
        """Returns whether the leader has aborted the prefill; blocks until it continues or aborts. Raises RankLost if
        the leader is gone."""
        try:
            message = self.recv()
        except ConnectionError as error:
            raise RankLost(str(error)) from None
        if message[0] != Opcode.PREFILL_CONTINUE:
            self.buffered.append(message)
        return bool(self.buffered)

    def request_ended(self) -> bool:
        """Returns whether the client has already ended the request, or its connection is lost. Does not block."""
        try:
            while True:
                self.buffered.append(self._receiver.recv(0.0))
                if self.buffered[-1][0] in END_OPCODES:
                    return True
        except TimeoutError:
            return False
        except (ConnectionError, ValueError):  # a lost connection raises again in the next `recv`
            return True

    def received_shutdown(self) -> bool:
        """Returns whether a lost leader has sent SHUTDOWN before its end. Discards its remaining messages."""
        with contextlib.suppress(ConnectionError, TimeoutError):
            while True:
                if self.recv(0.0)[0] == Opcode.SHUTDOWN:
                    return True
        return False
