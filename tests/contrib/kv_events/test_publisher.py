"""Publisher of KV events: messages, replay, limits, addresses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from swiftspec.contrib.kv_events.publisher import KvEventPublisher, ReplayBuffer
from swiftspec.errors import UserError
from swiftspec.settings.kv_events_config import KvEventsConfig
from tests.support.kv_events import ClearedEvent, EventBatch, KvIndex, KvSubscriber

SIZE, TOPIC = 4, "kv@10.0.0.1:8000@model"
TEXTS = [np.arange(0, 20), np.arange(0, 30), np.arange(50, 60)]


@pytest.fixture
def config(tmp_path: Path) -> KvEventsConfig:
    return KvEventsConfig(
        endpoint=f"ipc://{tmp_path}/events", replay_endpoint=f"ipc://{tmp_path}/replay", topic=TOPIC, block_size=SIZE
    )


@pytest.fixture
def publisher(config: KvEventsConfig) -> Iterator[KvEventPublisher]:
    made = KvEventPublisher(config, "model")
    yield made
    made.close()


@pytest.fixture
def subscriber(config: KvEventsConfig, publisher: KvEventPublisher) -> Iterator[KvSubscriber]:
    """A subscriber that is connected. The last update before it is the empty one."""
    made = KvSubscriber(config.endpoint, config.replay_endpoint, b"kv@")
    while made.receive(0.05) is None:  # until the subscription has arrived
        publisher.publish([TEXTS[2]])
        publisher.publish([])
    while made.receive(0.2) is not None:
        pass
    yield made
    made.close()


def test_live_events_and_their_replay(publisher: KvEventPublisher, subscriber: KvSubscriber) -> None:
    index, first = KvIndex(SIZE), subscriber.number + 1
    for count, text in enumerate(TEXTS):
        publisher.publish([text])
        batch = subscriber.receive()
        assert batch is not None and batch.ts > 1e9 and batch.data_parallel_rank == 0
        assert subscriber.number == first + count
        index.apply(batch)
        assert index.matched_tokens(text.tolist()) == len(text) // SIZE * SIZE
        assert len(index.keys) == len(text) // SIZE, "the others are removed"
    again, late = subscriber.replay(), KvIndex(SIZE)
    assert [number for number, _ in again] == [*range(subscriber.number + 1)]
    assert again[0][1].events[0] == ClearedEvent()
    for _, batch in again:
        late.apply(batch)
    assert late.keys == index.keys
    assert [number for number, _ in subscriber.replay(subscriber.number)] == [subscriber.number]
    assert subscriber.replay(subscriber.number + 1) == []


def test_an_update_without_changes_sends_nothing(publisher: KvEventPublisher, subscriber: KvSubscriber) -> None:
    publisher.publish([TEXTS[1]])
    assert subscriber.receive() is not None
    publisher.publish([TEXTS[1]])
    assert subscriber.receive(0.2) is None


def test_the_end_clears_all_blocks(config: KvEventsConfig) -> None:
    publisher, subscriber = KvEventPublisher(config, "model"), KvSubscriber(config.endpoint)
    while subscriber.receive(0.05) is None:
        publisher.publish([TEXTS[0]])
        publisher.publish([])
    publisher.publish([TEXTS[0]])
    publisher.close()
    batches: list[EventBatch] = []
    while (batch := subscriber.receive(0.2)) is not None:
        batches.append(batch)
    assert batches[-1].events == [ClearedEvent()]
    subscriber.close()
    KvEventPublisher(config, "model").close()  # the addresses are free again


def test_invalid_replay_requests_are_ignored(
    config: KvEventsConfig, publisher: KvEventPublisher, subscriber: KvSubscriber
) -> None:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    assert config.replay_endpoint is not None
    dealer.connect(config.replay_endpoint)
    for frames in ([b"a"], [b"", b"12"], [b"x", bytes(8)], [b"", bytes(8), b""], [b"", b"9" * 9]):
        dealer.send_multipart(frames)
    assert dealer.poll(200) == 0
    assert subscriber.replay(2**64 - 1) == []
    context.destroy(linger=0)


def test_a_subscriber_that_binds(tmp_path: Path) -> None:
    """A central subscriber, to whose address servers connect."""
    context = zmq.Context()
    central = context.socket(zmq.SUB)
    port = central.bind_to_random_port("tcp://127.0.0.1")
    central.subscribe(b"")
    publisher = KvEventPublisher(KvEventsConfig(endpoint=f"tcp://127.0.0.1:{port}", block_size=SIZE), "model")
    while not central.poll(50):
        publisher.publish([TEXTS[0]])
        publisher.publish([])
    topic, number, payload = central.recv_multipart()
    assert topic == b"" and len(number) == 8 and payload
    publisher.close()
    context.destroy(linger=0)


def test_an_address_in_use_is_one_line(config: KvEventsConfig) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.PUB)
    port = socket.bind_to_random_port("tcp://*")
    for taken in (
        KvEventsConfig(endpoint=f"tcp://*:{port}", replay_endpoint=None, topic="", block_size=SIZE),
        KvEventsConfig(endpoint=config.endpoint, replay_endpoint=f"tcp://*:{port}", topic="", block_size=SIZE),
    ):
        with pytest.raises(UserError, match=rf"cannot bind tcp://\*:{port}: Address already in use$"):
            KvEventPublisher(taken, "model")
    context.destroy(linger=0)


def test_the_replay_buffer_is_bounded() -> None:
    buffer = ReplayBuffer(max_batches=3, max_bytes=10)
    for number in range(5):
        buffer.append(number, b"12")
    assert [number for number, _ in buffer.since(0)] == [2, 3, 4]
    buffer.append(5, b"12345678")
    assert buffer.since(3) == [(4, b"12"), (5, b"12345678")]
    buffer.append(6, bytes(11))
    assert buffer.since(0) == []


def test_the_end_does_not_wait_for_a_socket_that_stays_open(
    config: KvEventsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ's context ends after all of its sockets: one that something holds must not keep a server alive."""
    monkeypatch.setattr("swiftspec.contrib.kv_events.publisher.MAX_TERM_MS", 10)
    publisher = KvEventPublisher(config, "model")
    held = publisher._context.socket(zmq.PUB)
    publisher.close()
    held.close(linger=0)
