"""Channels: the messages about concurrent requests on the one transport between the leaders of the two groups.

Each request has a channel, with the same batch index on both sides. CHANNEL_SELECT precedes a message of another
channel than that of the message before it, so a request that runs alone sends nothing more than without channels. A
channel is a `Transport`: the client and the server of one request need no second form for several.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from swiftspec.distributed.transport.codec import Frame, Words, single_word
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.distributed.transport.request_state import in_range
from swiftspec.distributed.transport.transport import Transport
from swiftspec.runtime.coroutines import RECEIVE


class ChannelSet:
    """The channels of a transport."""

    def __init__(self, transport: Transport, count: int, wait: Callable[[ReceiveCall], object]) -> None:
        """`count`: number of channels. `wait`: suspends a request until a message on its channel has arrived, or raises
        the error of the call."""
        self.transport, self.wait = transport, wait
        self.channels = [Channel(self, index) for index in range(count)]
        self._sent = self._received = 0  # channels of the last message in each direction

    def renewed(self, transport: Transport) -> ChannelSet:
        """Returns the channels of another transport."""
        return ChannelSet(transport, len(self.channels), self.wait)

    def send(self, index: int, kind: int, words: Sequence[int]) -> None:
        """Sends a message on the channel with batch index `index`."""
        if index != self._sent:
            self.transport.send(Opcode.CHANNEL_SELECT, [index])
            self._sent = index
        self.transport.send(kind, words)

    def receive(self, timeout: float | None = None) -> None:
        """Receives a message, which its channel then returns. Raises TimeoutError if none arrives within `timeout`
        seconds, ConnectionError if the peer is lost, and ValueError if it selects a channel that does not exist."""
        self._sort(*self.transport.recv(timeout))

    def receive_available(self) -> None:
        """Receives the messages that have arrived. Raises the errors of `receive`, except TimeoutError."""
        with suppress(TimeoutError):
            while True:
                self.receive(0.0)

    def is_selected(self, index: int) -> bool:
        """Returns whether the next messages in both directions are of this channel unless one is selected before, and
        all that were received have been read."""
        return self._sent == self._received == index and not any(each.unread for each in self.channels)

    def receive_or_reply(self, reply: Any, asks: int, answers: int, note: int) -> bool:
        """Receives a message by `Transport.recv_or_reply`. Returns whether native code has replied to it."""
        kind, words, answered = self.transport.recv_or_reply(reply, asks, answers, note)
        self._sort(kind, words)
        return answered

    def _sort(self, kind: int, words: Words) -> None:
        if kind == Opcode.CHANNEL_SELECT:
            index = single_word(words, "channel")
            self._received = in_range(index, 0, len(self.channels) - 1, "the channel")
        elif kind == Opcode.SHUTDOWN:  # of the job, and so of every request
            for each in self.channels:
                each.unread.append((kind, words))
        else:
            self.channels[self._received].unread.append((kind, words))


class Channel:
    """The messages about one of several concurrent requests: a `Transport`.

    `peer`: name of the peer in messages to the user.
    `unread`: messages that were received and not returned by `recv` yet.
    """

    def __init__(self, owner: ChannelSet, index: int) -> None:
        self.peer, self.unread = owner.transport.peer, deque[Frame]()
        self._owner, self._index = owner, index

    @property
    def owner(self) -> ChannelSet:
        """The channels of the same transport."""
        return self._owner

    def send(self, kind: int, words: Sequence[int] = ()) -> None:
        self._owner.send(self._index, kind, words)

    def recv(self, timeout: float | None = None) -> Frame:
        """See `Receiver.recv`. Suspends the request while it waits."""
        if not self.unread and timeout == 0:
            self._receive_available()
        elif not self.unread:
            self._owner.wait(ReceiveCall(self, None if timeout is None else time.monotonic() + timeout))
        return self.unread.popleft()

    def _receive_available(self) -> None:
        try:
            self._owner.receive_available()
        except (ConnectionError, ValueError):
            if not self.unread:  # otherwise a message came before
                raise
        if not self.unread:
            raise TimeoutError(f"no message from {self.peer}")

    def recv_or_reply(self, reply: Any, asks: int, answers: int, note: int) -> tuple[int, Words, bool]:
        """See `Transport.recv_or_reply`. Other requests must not be running, since native code knows no channels."""
        answered = self._owner.is_selected(self._index) and self._owner.receive_or_reply(reply, asks, answers, note)
        return (*self.recv(), answered)

    def restart(self) -> None:
        pass  # the same channel serves all requests with its batch index

    def close(self) -> None:
        self._owner.transport.close()


@dataclass(eq=False, slots=True)
class ReceiveCall:
    """A wait for a message on the channel of one request. `deadline`: a `time.monotonic` time; None: no limit."""

    channel: Channel
    deadline: float | None
    result: Any = None
    error: Exception | None = None
    priority: int = RECEIVE

    @property
    def key(self) -> object:
        return self.channel.owner

    @property
    def ended(self) -> bool:
        """Whether there is a message, or an error."""
        return bool(self.channel.unread) or self.error is not None

    def run(self, others: Sequence[ReceiveCall]) -> None:
        """Receives until there is a message on the channel of each call, or its deadline has passed."""
        if not others:
            self.receive()
            return
        for call in (self, *others):
            try:
                call.receive()
            except Exception as error:  # the others still have their messages
                call.error = error

    def receive(self) -> None:
        """Receives until there is a message on the channel. Raises the errors of `ChannelSet.receive`."""
        while not self.channel.unread:
            left = None if self.deadline is None else max(self.deadline - time.monotonic(), 0.0)
            self.channel.owner.receive(left)
