"""Messages between ranks and a launcher's variables: valid, mutated and random. A reader may raise ValueError, a
channel ConnectionError; a leader then has a lost drafter, any other rank a lost rank. Anything else is a fault."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from swiftspec.config import EngineConfig
from swiftspec.distributed.group.command_stream import CommandStream
from swiftspec.distributed.group.follower_dispatch import Action, FollowerDispatcher
from swiftspec.distributed.group.leader import FollowerGroup, LeaderDrafter, run_follower
from swiftspec.distributed.group.leader import dispatch_loop as follow_calls
from swiftspec.distributed.launch.launched_rank import launched
from swiftspec.distributed.launch.supervisor_link import Heartbeat
from swiftspec.distributed.remote.client import DraftLink, RemoteDrafter
from swiftspec.distributed.remote.served_roles import DraftTraceSender
from swiftspec.distributed.remote.server import DraftGroupServer
from swiftspec.distributed.remote.server_link import ServerLink
from swiftspec.distributed.remote.trace_codec import unpack_record
from swiftspec.distributed.transport.codec import (
    Words,
    pack_message,
    unpack_proposal,
    unpack_request_start,
    unpack_result,
)
from swiftspec.distributed.transport.request_state import RequestState
from swiftspec.distributed.transport.tcp import HEADER, TcpTransport
from swiftspec.distributed.worker_group import FollowerSessionRegistry
from swiftspec.errors import DrafterLost, RankLost, UserError
from swiftspec.messages import Proposal, RequestStart
from swiftspec.params import SamplingParams
from swiftspec.runtime.cancellation import CancelCheck
from swiftspec.tree.tree import DraftTree
from tests.support.fuzz import Target
from tests.support.fuzz.message_words import (
    BOUNDS,
    DRAFT,
    EDGES,
    OPENED,
    OPENED_TARGET,
    PROPOSAL_WORDS,
    RANDOM,
    RECORDS,
    REQUEST_START_WORDS,
    RESULT_WORDS,
    SESSIONS,
    TEXT,
    TIMES,
    Message,
    after,
)
from tests.support.fuzz.roles import FakeChannel, FakeRole, assert_valid_tokens


def check_round_trip(reader: Any, words: Words) -> str:
    """An unpacked message can be packed again, and is unpacked to the same."""
    try:
        found = reader(words)
    except ValueError as error:
        assert len(str(error)) < 400 and "\n" not in str(error)
        return "refused"
    if not isinstance(found, dict):
        unpacked = reader(pack_message(found))
        assert (
            replace(unpacked, draft_probs=None) == replace(found, draft_probs=None)
            if isinstance(found, Proposal)
            else unpacked == found
        )
    return "taken"


def feed_socket(pieces: tuple[bytes, list[int]]) -> str:
    """Bytes in pieces of any size, then the end."""
    data, cuts = pieces
    ours, theirs = socket.socketpair()
    channel = TcpTransport.__new__(TcpTransport)
    channel.peer, channel._sock, channel._buffer, channel._usable = "rank 9", ours, bytearray(), True
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    with ours, theirs:
        for first, last in pairwise(places):
            theirs.sendall(data[first:last])
            try:
                kind, words = channel.recv(0.0)
                assert 0 <= kind < 2**32 and all(-(2**31) <= word < 2**31 for word in words)
            except TimeoutError:
                continue
            except ConnectionError:
                return "refused"
    return "taken"


def read_timeline(parse: Callable[[], object]) -> None:
    """Reads a round of the draft's timeline into a trace line."""
    with suppress(ValueError):
        parse()


def group_client(messages: Sequence[Message], records: Any) -> RemoteDrafter:
    """The client of a draft group that sends these messages."""
    server = ServerLink(FakeChannel(messages), RequestState(BOUNDS), "draft")
    return RemoteDrafter(DraftLink(server, recorder=records), 3)


def run_draft_client(messages: Sequence[Message]) -> str:
    """A target's leader with a draft that sends arbitrary messages."""
    records = SimpleNamespace(draft=lambda request, round_, lane: read_timeline(lane), awaits_draft=lambda round_: True)
    drafter = group_client(messages, records)
    try:
        drafter.open(RequestStart(1, TEXT, SamplingParams(), len(TEXT)))
        found = drafter.propose()
    except DrafterLost as lost:
        assert "\n" not in str(lost)[:1000] and len(str(lost)) < 1000
        drafter.link.drain_trace(0)
        return "refused"
    assert_valid_tokens(found.tokens, BOUNDS.max_nodes)
    assert found.tokens[0] == TEXT[-1] and found.prefix_len == 2 and drafter.busy >= 0
    return "taken"


def read_step_times(messages: Sequence[Message]) -> str:
    """The step times that a draft reports."""
    try:
        times = group_client(messages, None).times()
    except DrafterLost:
        return "refused"
    assert times.overhead >= 0 and times.expansion > 0
    return "taken"


def run_draft_server(messages: Sequence[Message]) -> str:
    """A draft's leader with a target that sends arbitrary messages and finally closes, or is lost."""
    channel: Any = FakeChannel(messages)
    watched: Any = SimpleNamespace(
        runner=SimpleNamespace(hooks=[], cache=SimpleNamespace(prefix_len=[0])), tree=DraftTree(9, 2)
    )
    recording = DraftTraceSender(channel, watched, traced=False)
    drafter: Any = LeaderDrafter(FakeRole(), FollowerGroup([]))  # type: ignore[arg-type]
    service = DraftGroupServer(channel, drafter, BOUNDS, recording, CancelCheck(), Heartbeat())
    return _served(service.run)


def follow_target(messages: Sequence[Message]) -> str:
    """A follower with a leader that sends arbitrary messages."""
    role: Any = FakeRole()
    return _follow(messages, FollowerDispatcher(role, None, None, BOUNDS).decode)


def follow_sessions(messages: Sequence[Message]) -> str:
    """A follower of a worker's rank 0, which has several sessions."""

    def make(shape: EngineConfig, masked: tuple[int, ...]) -> FollowerDispatcher:
        role: Any = FakeRole()
        return FollowerDispatcher(role, None, None, BOUNDS)

    channel: Any = FakeChannel(messages)
    return _served(
        lambda: follow_calls(channel, CommandStream(channel), FollowerSessionRegistry(make).decode, Heartbeat())
    )


def follow_draft(messages: Sequence[Message]) -> str:
    """A follower of the draft group."""
    role: Any = FakeRole()
    return _follow(messages, FollowerDispatcher(None, role, None, BOUNDS).decode)


def _follow(messages: Sequence[Message], decode: Callable[[int, Words], Action]) -> str:
    channel: Any = FakeChannel(messages)
    return _served(lambda: run_follower(channel, decode, CancelCheck(), Heartbeat()))


def _served(run: Any) -> str:
    try:
        run()
    except RankLost as lost:
        assert "\n" not in str(lost) and len(str(lost)) < 1000
        return "taken" if "is gone" in str(lost) else "refused"
    return "taken"


def parse_launcher(environment: dict[str, str]) -> str:
    """A launcher's variables."""
    try:
        rank_info = launched(environment)
    except UserError as error:
        assert len(str(error)) < 300 and "\n" not in str(error)
        return "refused"
    assert rank_info is None or (
        0 <= rank_info.rank < rank_info.size and 0 <= rank_info.local_rank < rank_info.local_size <= rank_info.size
    )
    return "taken"


HEADERS = st.builds(HEADER.pack, st.integers(0, 30), EDGES.map(lambda n: n % 2**32))
VALID_FRAME = st.builds(
    lambda kind, words: HEADER.pack(kind, len(words)) + np.array(words, np.int32).tobytes(), st.integers(0, 30), RANDOM
)
STREAM = st.lists(VALID_FRAME | HEADERS | st.binary(max_size=20), max_size=5).map(b"".join)
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SETTING = st.sampled_from(["", "0", "1", "2", "3", "-1", "29500", "localhost"]) | st.text(max_size=5)


def target(name: str, strategy: st.SearchStrategy[Any], run: Callable[[Any], str]) -> Target:
    return Target(name, strategy, lambda value, folder: run(value))


TARGETS = (
    target("read_opening", REQUEST_START_WORDS, lambda words: check_round_trip(unpack_request_start, words)),
    target("read_proposal", PROPOSAL_WORDS, lambda words: check_round_trip(unpack_proposal, words)),
    target("read_result", RESULT_WORDS, lambda words: check_round_trip(unpack_result, words)),
    target(
        "read_record",
        RECORDS | RANDOM,
        lambda words: check_round_trip(lambda flat: unpack_record(flat, BOUNDS.vocab_size), words),
    ),
    target("TcpTransport", st.tuples(STREAM, st.lists(st.integers(0, 60), max_size=4)), feed_socket),
    target("RemoteDrafter", DRAFT, run_draft_client),
    target("RemoteDrafter.times", TIMES, read_step_times),
    target("DraftService", after(OPENED), run_draft_server),
    target("follow target", after(OPENED_TARGET), follow_target),
    target("follow draft", after(OPENED), follow_draft),
    target("follow sessions", SESSIONS, follow_sessions),
    target("launched", st.dictionaries(st.sampled_from(NAMES), SETTING), parse_launcher),
)
