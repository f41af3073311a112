"""What a rank is told while it reads a prompt: whether to go on."""

from __future__ import annotations

from swiftspec.distributed.transport.channel import Channel
from swiftspec.distributed.transport.codec import Words
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.errors import RankLost

END_OPCODES = (Opcode.DRAFTER_OPEN, Opcode.DRAFTER_CLOSE, Opcode.SHUTDOWN)  # what a target says once a request is over


class CommandStream:
    """The messages of a leader or of a target, in order, also of those that came while a prompt was read."""

    def __init__(self, giver: Channel) -> None:
        self._channel = giver
        self.buffered: list[tuple[int, Words]] = []  # read, and not yet taken

    def recv(self) -> tuple[int, Words]:
        """The next message; waits for it."""
        return self.buffered.pop(0) if self.buffered else self._channel.recv()

    def prefill_aborted(self) -> bool:
        """Whether a leader does not go on with an opening. Waits for its word; raises RankLost if none comes."""
        try:
            message = self.recv()
        except ConnectionError as error:
            raise RankLost(str(error)) from None
        if message[0] != Opcode.PREFILL_CONTINUE:
            self.buffered.append(message)
        return bool(self.buffered)

    def request_ended(self) -> bool:
        """Whether a target has ended the request already. Does not wait for its word."""
        try:
            self.buffered.append(self._channel.recv(0.0))
        except TimeoutError:
            return False
        except ConnectionError:  # who takes the next message finds it again
            return True
        return self.buffered[-1][0] in END_OPCODES
