"""Stream of the commands that a rank receives from the rank that leads it. Detects cancellation during a prefill."""

from __future__ import annotations

from swiftspec.distributed.transport.channel import Channel
from swiftspec.distributed.transport.codec import Words
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.errors import RankLost

# A message with one of these opcodes means that the target has ended the request.
END_OPCODES = (Opcode.DRAFTER_OPEN, Opcode.DRAFTER_CLOSE, Opcode.SHUTDOWN)


class CommandStream:
    """The commands that a follower receives from its leader, or the draft's leader from the target's leader, in order.
    Commands that arrive during a prefill are buffered."""

    def __init__(self, giver: Channel) -> None:
        self._channel = giver
        self.buffered: list[tuple[int, Words]] = []  # received during a prefill and not yet returned by `recv`

    def recv(self) -> tuple[int, Words]:
        """Returns opcode and words of the next message; blocks until a message arrives."""
        return self.buffered.pop(0) if self.buffered else self._channel.recv()

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
        """Returns whether the target has already ended the request, or its connection is lost. Does not block."""
        try:
            self.buffered.append(self._channel.recv(0.0))
        except TimeoutError:
            return False
        except ConnectionError:  # the next `recv` raises it again
            return True
        return self.buffered[-1][0] in END_OPCODES
