"""What a rank is told while it reads a prompt: whether to go on."""

from __future__ import annotations

from swiftspec.distributed.transport.channel import Channel
from swiftspec.distributed.transport.codec import Words
from swiftspec.distributed.transport.opcodes import Call
from swiftspec.errors import RankLost

ENDS = (Call.DRAFTER_OPEN, Call.DRAFTER_CLOSE, Call.LEAVE)  # what a target says once a request is over


class Orders:
    """The messages of a leader or of a target, in order, also of those that came while a prompt was read."""

    def __init__(self, giver: Channel) -> None:
        self._giver = giver
        self.early: list[tuple[int, Words]] = []  # read, and not yet taken

    def recv(self) -> tuple[int, Words]:
        """The next message; waits for it."""
        return self.early.pop(0) if self.early else self._giver.recv()

    def given_up(self) -> bool:
        """Whether a leader does not go on with an opening. Waits for its word; raises RankLost if none comes."""
        try:
            message = self.recv()
        except ConnectionError as error:
            raise RankLost(str(error)) from None
        if message[0] != Call.GO_ON:
            self.early.append(message)
        return bool(self.early)

    def over(self) -> bool:
        """Whether a target has ended the request already. Does not wait for its word."""
        try:
            self.early.append(self._giver.recv(0.0))
        except TimeoutError:
            return False
        except ConnectionError:  # who takes the next message finds it again
            return True
        return self.early[-1][0] in ENDS
