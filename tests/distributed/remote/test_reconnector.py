"""A recovered draft group serves each of several requests on its channel of the new connection."""

from __future__ import annotations

from typing import Any

from swiftspec.distributed.remote.reconnector import SharedReconnector
from swiftspec.distributed.transport.channels import ChannelSet


class FakeReconnector:
    def __init__(self) -> None:
        self.recovered: Any = None
        self.losses = 0

    def poll(self) -> Any:
        found, self.recovered = self.recovered, None
        return found

    def on_lost(self) -> None:
        self.losses += 1


class FakeTransport:
    peer = "the draft group"


def channels(transport: Any) -> ChannelSet:
    return ChannelSet(transport, 3, lambda call: None)


def test_each_request_gets_its_channel_of_the_latest_connection_once() -> None:
    reconnector: Any = FakeReconnector()
    shared = SharedReconnector(reconnector, channels(FakeTransport()))
    assert [part.poll() for part in shared.parts] == [None] * 3
    transports = [FakeTransport(), FakeTransport()]
    reconnector.recovered = transports[0]
    found: Any = shared.parts[1].poll()
    assert found.owner.transport is transports[0] and found is found.owner.channels[1]
    assert shared.parts[1].poll() is None
    reconnector.recovered = transports[1]  # lost again before the other requests have noticed
    polled: list[Any] = [part.poll() for part in shared.parts]
    assert [channel.owner.channels.index(channel) for channel in polled] == [0, 1, 2]
    assert all(channel.owner.transport is transports[1] for channel in polled)
    assert [part.poll() for part in shared.parts] == [None] * 3


def test_the_loss_of_an_earlier_connection_is_no_loss_of_the_present_one() -> None:
    reconnector: Any = FakeReconnector()
    shared = SharedReconnector(reconnector, channels(FakeTransport()))
    shared.parts[0].on_lost()
    assert reconnector.losses == 1
    reconnector.recovered = FakeTransport()
    assert shared.parts[0].poll() is not None
    shared.parts[1].on_lost()  # it has still had the lost connection
    assert reconnector.losses == 1
    assert shared.parts[1].poll() is not None
    shared.parts[1].on_lost()
    assert reconnector.losses == 2
