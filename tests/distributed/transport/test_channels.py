"""Channels: each request gets its messages, in order, and an error after those that came before it."""

from __future__ import annotations

import pytest

from swiftspec.distributed.transport.channels import ChannelSet, ReceiveCall
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.distributed.transport.transport import Transport
from swiftspec.runtime.coroutines import CallQueue
from tests.support.transports import both_ends


def ends(near: Transport, far: Transport, count: int = 3) -> tuple[ChannelSet, ChannelSet]:
    return ChannelSet(near, count, CallQueue().wait), ChannelSet(far, count, CallQueue().wait)


@pytest.mark.parametrize("kind", ["shared", "tcp"])
def test_each_channel_receives_its_messages_in_order(kind: str) -> None:
    with both_ends(kind) as pair:
        near, far = ends(*pair)
        for index, word in [(0, 1), (2, 2), (2, 3), (0, 4), (1, 5)]:
            near.channels[index].send(Opcode.OBSERVE, [word])
        assert far.channels[1].recv(5) == (Opcode.OBSERVE, [5])
        assert [far.channels[0].recv(5)[1], far.channels[0].recv()[1]] == [[1], [4]]
        assert [far.channels[2].recv(0.0)[1], far.channels[2].recv()[1]] == [[2], [3]]
        with pytest.raises(TimeoutError):
            far.channels[0].recv(0.0)
        with pytest.raises(TimeoutError):
            far.channels[0].recv(0.01)


def test_one_channel_alone_sends_no_selection() -> None:
    with both_ends("shared") as (near, far):
        channels = ChannelSet(near, 2, CallQueue().wait)
        channels.channels[0].send(Opcode.OBSERVE, [1])
        channels.channels[0].send(Opcode.OBSERVE, [2])
        assert [far.recv(5), far.recv(5)] == [(Opcode.OBSERVE, [1]), (Opcode.OBSERVE, [2])]
        channels.channels[1].send(Opcode.OBSERVE, [3])
        assert [far.recv(5), far.recv(5)] == [(Opcode.CHANNEL_SELECT, [1]), (Opcode.OBSERVE, [3])]


def test_a_shutdown_ends_every_request() -> None:
    with both_ends("shared") as (near, far):
        channels = ChannelSet(far, 3, CallQueue().wait)
        near.send(Opcode.CHANNEL_SELECT, [1])
        near.send(Opcode.OBSERVE, [7])
        near.send(Opcode.SHUTDOWN)
        near.close()
        assert channels.channels[2].recv(5)[0] == Opcode.SHUTDOWN
        assert channels.channels[1].recv(0.0) == (Opcode.OBSERVE, [7])
        assert channels.channels[1].recv(0.0)[0] == Opcode.SHUTDOWN
        assert channels.channels[0].recv(0.0)[0] == Opcode.SHUTDOWN
        with pytest.raises(ConnectionError):
            channels.channels[0].recv(0.0)


@pytest.mark.parametrize("words", [[3], [-1], [], [0, 0]])
def test_the_selection_of_a_channel_that_does_not_exist_is_refused(words: list[int]) -> None:
    with both_ends("shared") as (near, far):
        channels = ChannelSet(far, 3, CallQueue().wait)
        near.send(Opcode.CHANNEL_SELECT, words)
        with pytest.raises(ValueError, match="channel"):
            channels.channels[0].recv(5)


def test_joint_waits_end_each_with_its_message_or_its_own_error() -> None:
    with both_ends("shared") as pair:
        near, far = ends(*pair)
        near.channels[2].send(Opcode.OBSERVE, [1])
        near.channels[0].send(Opcode.OBSERVE, [2])
        calls = [ReceiveCall(channel, 0.0) for channel in far.channels]  # the deadline has passed
        CallQueue().run(calls)
        assert [type(call.error) for call in calls] == [type(None), TimeoutError, type(None)]
        assert far.channels[0].recv(0.0)[1] == [2] and far.channels[2].recv(0.0)[1] == [1]
