"""Messages between ranks and a launcher's variables, well formed, mutated and random. A reader may raise ValueError, a
channel ConnectionError; a leader then has a lost drafter, any other rank a lost rank. Nothing else."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from swiftspec.distributed.bridge import GroupDrafter
from swiftspec.distributed.calls import Call
from swiftspec.distributed.draft_service import DraftService, Recording
from swiftspec.distributed.followers import LeadingDrafter, Team, follow
from swiftspec.distributed.keeping import Pulse
from swiftspec.distributed.launcher import launched
from swiftspec.distributed.records import COUNTS, pack_record, read_record
from swiftspec.distributed.standing import Bounds
from swiftspec.distributed.tcp import HEAD, TcpChannel
from swiftspec.distributed.wire import (
    Words,
    bytes_to_words,
    pack,
    read_opening,
    read_proposal,
    read_result,
    to_words,
)  # fmt: skip
from swiftspec.errors import DrafterLost, RankLost, UserError
from swiftspec.messages import Drawn, Opening, Proposal, VerifyResult
from swiftspec.observe.lines import opened
from swiftspec.params import SamplingParams
from swiftspec.runtime.pause import Pause
from swiftspec.tree.tree import DraftTree
from tests.support.fuzz import Target

BOUNDS = Bounds(vocab=40, context=30, nodes=6)
TEXT = (3, 1, 4)  # the request that is open; its root is the last token
EDGES = st.sampled_from([-(2**31), -1, 0, 1, 2, 3, 4, 5, 39, 40, 64, 65, 2**24, 2**31 - 1])
WORD = EDGES | st.integers(-(2**31), 2**31 - 1)
NEARLY = st.sampled_from([1.5, "1", True, [1], ["a"], [1.5], {"1": "a"}, {"5": 1}])  # of another type than it should be
VALUES = NEARLY | st.recursive(
    st.none() | st.booleans() | st.integers(-(10**400), 10**400) | EDGES | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
Message = tuple[int, Words]


def proposal() -> st.SearchStrategy[Proposal]:
    """Valid ones for the open request, some with what they were drawn from."""

    @st.composite
    def made(draw: st.DrawFn) -> Proposal:
        count = draw(st.integers(1, BOUNDS.nodes))
        parents = (-1, *(draw(st.integers(0, i - 1)) for i in range(1, count)))
        tokens = (TEXT[-1], *draw(st.lists(st.integers(5, 39), min_size=count - 1, max_size=count - 1, unique=True)))
        return Proposal(1, 0, 2, tokens, parents, draw(st.none() | st.just(_drawn(tokens, parents))))

    return made()


def _drawn(tokens: Sequence[int], parents: Sequence[int]) -> Drawn | None:
    """Each row names all children, so that every child can have been drawn there."""
    rows = len({*parents[1:]})
    if rows == 0:
        return None
    named = np.tile(np.array(tokens[1:], np.int32), (rows, 1))
    return Drawn(named, np.full(named.shape, 1 / named.shape[1], np.float32))


SAMPLING = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0, 0.5, 1]),
    top_k=st.integers(0, 9),
    logit_bias=st.dictionaries(st.integers(0, 39), st.floats(-5, 5), max_size=3),
    stop=st.lists(st.text(min_size=1, max_size=3), max_size=2).map(tuple),
    max_tokens=st.none() | st.integers(1, 9),
    negative_prompt_ids=st.lists(st.integers(0, 39), max_size=3).map(tuple),
)
STEPS = st.sampled_from(["", "eager", "x"])
KEPT = st.sampled_from([None, (), (0,), (0, 0), (2,), (1, 1)])
OPENINGS = st.builds(Opening, st.just(1), st.just(TEXT), SAMPLING, st.integers(1, 3), STEPS, KEPT)
TOKENS = st.lists(st.integers(0, 39), min_size=1, max_size=3)
RESULTS = TOKENS.map(lambda tokens: VerifyResult(1, 0, 2, tuple(range(len(tokens))), tuple(tokens)))
JUNK = ("", "[", "[" * 50_000, "{}", "1", '{"request": 1, "round": []}', "\0", "NaN", "9" * 5000)
JUNK_TEXT = st.integers(0, len(JUNK) - 1).map(JUNK.__getitem__)
LINES = JUNK_TEXT.map(to_words)


@st.composite
def damaged(draw: st.DrawFn, sound: st.SearchStrategy[Words]) -> Words:
    """Words with a few of them changed, lost or put in."""
    words = list(draw(sound))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, max(len(words) - 1, 0)))
        words[at : at + draw(st.integers(0, 2))] = draw(st.lists(WORD, max_size=2))
    return words


@st.composite
def bent_opening(draw: st.DrawFn) -> Words:
    """An opening whose parameters are JSON, but of any kind."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(SamplingParams())))
    for name in draw(st.lists(st.sampled_from([*values, "more"]), max_size=2)):
        values[name] = draw(VALUES)
    told = {"steps": draw(st.sampled_from(["", "eager"])), "kept": draw(st.just([0]) | VALUES), "sampling": values}
    whole = st.just(json.dumps(told))
    text = draw(whole | whole | JUNK_TEXT).encode()
    return [1, 2, len(TEXT), *TEXT, len(text), *bytes_to_words(text)]


TOKEN = st.integers(0, 39) | EDGES
PLACE = st.tuples(st.sampled_from([1, 1, 1, 2]), st.just(0), st.sampled_from([2, 2, 2, 3]))  # request, round, prefix


@st.composite
def strange(draw: st.DrawFn) -> Words:
    """A proposal that is whole, but may be about something else, from another root, too large or of no tokens."""
    count = draw(st.integers(1, 8))
    parents = (-1, *(draw(st.integers(0, i - 1)) for i in range(1, count)))
    root = draw(st.just(TEXT[-1]) | TOKEN)
    return pack(Proposal(*draw(PLACE), (root, *(draw(TOKEN) for _ in parents[1:])), parents))


@st.composite
def strange_result(draw: st.DrawFn) -> Words:
    """As `strange`."""
    count = draw(st.integers(1, 3) | st.just(40))
    path = draw(st.just(tuple(range(count))) | st.lists(EDGES, min_size=count, max_size=count).map(tuple))
    return pack(VerifyResult(*draw(PLACE), path, tuple(draw(TOKEN) for _ in path)))


@st.composite
def strange_opening(draw: st.DrawFn) -> Words:
    """As `strange`."""
    tokens = draw(st.lists(TOKEN, min_size=1, max_size=4) | st.just([1] * 99))
    bias = draw(st.dictionaries(TOKEN, st.just(1.0), max_size=1))
    negative = tuple(draw(st.lists(TOKEN, max_size=1)))
    sampling = SamplingParams(logit_bias=bias, negative_prompt_ids=negative, top_k=draw(st.sampled_from([0, 9, 41])))
    return pack(Opening(1, tuple(tokens), sampling, 1, draw(STEPS)))


@st.composite
def records(draw: st.DrawFn) -> Words:
    """A round of the draft's lane, whose tree may be none."""
    count, moment = draw(st.integers(1, 4)), st.just(0.5) | st.floats()
    parents = [-1, *(draw(st.integers(-1, i)) for i in range(count - 1))]
    tree = {
        "tokens": np.array([draw(st.integers(-1, 40)) for _ in parents], np.int32),
        "parents": np.array(parents, np.int32), "expanded": np.array(parents) < 0,
        "logprobs": np.array([draw(st.just(0.0) | st.floats(width=32)) for _ in parents], np.float32),
    }  # fmt: skip
    head = {name: draw(st.integers(-1, 3)) for name in COUNTS}
    spans = draw(st.fixed_dictionaries({}, optional={"grow": st.tuples(moment, moment)}))
    forwards = draw(st.lists(st.tuples(moment, moment, EDGES), max_size=2))
    return pack_record(
        1, draw(st.integers(-1, 2)), head | spans | {"forwards": forwards, "tree": SimpleNamespace(arrays=lambda: tree)}
    )


RANDOM = st.lists(WORD, max_size=20)
OPENING_WORDS = damaged(OPENINGS.map(pack)) | bent_opening() | strange_opening() | RANDOM
PROPOSAL_WORDS = damaged(proposal().map(pack)) | strange() | RANDOM
RESULT_WORDS = damaged(RESULTS.map(pack)) | strange_result() | RANDOM
KIND = st.sampled_from([*map(int, Call)]) | WORD
RECORDS = damaged(records()) | records()
BODY = st.one_of(RANDOM, OPENING_WORDS, PROPOSAL_WORDS, RESULT_WORDS, LINES)
DRAFT_SAYS = st.one_of(
    st.tuples(st.just(int(Call.PROPOSAL)), st.builds(lambda spent, words: [spent, *words], EDGES, PROPOSAL_WORDS)),
    st.tuples(st.just(int(Call.TRACE)), RECORDS | LINES),
    st.tuples(st.just(int(Call.LOST)), RANDOM),
    st.tuples(KIND, BODY),
)
TARGET_SAYS = st.one_of(
    st.tuples(st.sampled_from([int(Call.DRAFTER_OPEN), int(Call.VERIFIER_OPEN)]), OPENING_WORDS),
    st.tuples(st.just(int(Call.VERIFY)), PROPOSAL_WORDS),
    st.tuples(st.just(int(Call.OBSERVE)), RESULT_WORDS),
    st.tuples(st.sampled_from([int(Call.STEPS), int(Call.PACE), int(Call.WATCH)]), st.lists(EDGES, max_size=2)),
    st.tuples(KIND, BODY),
)


FLAGS = ("ignore_eos", "stop", "stop_token_ids", "negative_prompt_ids", "logit_bias")  # that are no numbers


class FakeChannel:
    """Says what it is told to, then is gone."""

    peer = "rank 9"

    def __init__(self, says: Sequence[Message]) -> None:
        self._says = iter(says)

    def send(self, kind: int, words: Sequence[int] = ()) -> None:
        np.array(words, np.int32)  # as a wire does

    def recv(self, timeout: float | None = None) -> Message:
        try:
            kind, words = next(self._says)
        except StopIteration:
            raise ConnectionError("rank 9 is gone") from None
        return kind, list(words)

    def close(self) -> None: ...


class FakeRole:
    """Verifier and drafter of one rank. Holds what it is given to what a model could index by."""

    runner = None  # which keeps nothing

    def __init__(self) -> None:
        self.busy, self.draft_steps = 0.0, 3
        self.steps_known = [SimpleNamespace(name="eager")]
        self.opening: Opening | None = None

    def choose(self, opening: Opening) -> SimpleNamespace:
        assert opening.steps in ("", "eager")
        return self.steps_known[0]

    def open(self, opening: Opening) -> None:
        sound(opening.tokens)
        typed(opening.sampling)
        self.opening, self.at, self.root, self.round = opening, len(opening.tokens) - 1, opening.tokens[-1], 0

    def verify(self, proposal: Proposal) -> VerifyResult:
        assert self.opening is not None and (proposal.prefix_len, proposal.tokens[0]) == (self.at, self.root)
        sound(proposal.tokens, BOUNDS.nodes)
        self._move((7,))
        return VerifyResult(proposal.request, proposal.round, proposal.prefix_len, (0,), (7,))

    def settle(self) -> None: ...

    def observe(self, result: VerifyResult) -> None:
        assert self.opening is not None and result.prefix_len == self.at
        sound(result.tokens)
        self.round = result.round
        self._move(result.tokens)

    def propose(self) -> Proposal:
        assert self.opening is not None
        return Proposal.root_only(self.opening.request, self.round, self.at, self.root)

    def grow(self) -> None:
        assert self.opening is not None

    def reply(self) -> None:
        return None

    def close(self) -> None:
        self.opening = None

    def _move(self, tokens: Sequence[int]) -> None:
        self.at, self.root = self.at + len(tokens), tokens[-1]


def sound(tokens: Sequence[int], most: int = BOUNDS.context + BOUNDS.nodes) -> None:
    """What a model's embedding can be asked for."""
    assert 1 <= len(tokens) <= most and all(0 <= token < BOUNDS.vocab for token in tokens)


def typed(sampling: SamplingParams) -> None:
    """What a sampler can compute with, and what a model's sizes allow."""
    default = asdict(SamplingParams(max_tokens=1))
    for name, value in asdict(sampling).items():
        assert value is None or type(value) in (type(default[name]), *([int] if name not in FLAGS else [])), name
    whole = (
        *sampling.stop_token_ids,
        *sampling.negative_prompt_ids,
        *sampling.logit_bias,
        sampling.seed,
        sampling.top_k,
    )
    assert all(type(each) is int for each in whole) and all(type(each) is str for each in sampling.stop)
    assert sampling.top_k <= BOUNDS.vocab
    assert all(0 <= each < BOUNDS.vocab for each in (*sampling.logit_bias, *sampling.negative_prompt_ids))


def read(reader: Any, words: Words) -> str:
    """What is read can be packed again, and is read the same."""
    try:
        found = reader(words)
    except ValueError as error:
        assert len(str(error)) < 400 and "\n" not in str(error)
        return "refused"
    if not isinstance(found, dict):
        again = reader(pack(found))
        assert (
            replace(again, drawn=None) == replace(found, drawn=None) if isinstance(found, Proposal) else again == found
        )
    return "taken"


def feed_socket(pieces: tuple[bytes, list[int]]) -> str:
    """Bytes in pieces of any size, then the end."""
    data, cuts = pieces
    ours, theirs = socket.socketpair()
    channel = TcpChannel.__new__(TcpChannel)
    channel.peer, channel._sock, channel._buffer, channel._sound = "rank 9", ours, bytearray(), True
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


def ask_draft(says: Sequence[Message]) -> str:
    """A target's leader with a draft that says anything."""
    records = SimpleNamespace(draft=lambda request, round_, lane: opened({"draft": lane}), lacks=lambda round_: True)
    drafter = GroupDrafter(FakeChannel(says), 3, BOUNDS, records=records)  # type: ignore[arg-type]
    try:
        drafter.open(Opening(1, TEXT, SamplingParams(), len(TEXT)))
        found = drafter.propose()
    except DrafterLost as lost:
        assert "\n" not in str(lost)[:1000] and len(str(lost)) < 1000
        drafter.drain(0)
        return "refused"
    sound(found.tokens, BOUNDS.nodes)
    assert found.tokens[0] == TEXT[-1] and found.prefix_len == 2 and drafter.busy >= 0
    return "taken"


def ask_times(says: Sequence[Message]) -> str:
    """The pace that a draft says it has."""
    try:
        times = GroupDrafter(FakeChannel(says), 3, BOUNDS).times()  # type: ignore[arg-type]
    except DrafterLost:
        return "refused"
    assert times.turn >= 0 and times.expansion > 0
    return "taken"


def serve_target(says: Sequence[Message]) -> str:
    """A draft's leader with a target that says anything; it leaves, or is alone at the end."""
    channel: Any = FakeChannel(says)
    watched: Any = SimpleNamespace(
        runner=SimpleNamespace(hooks=[], cache=SimpleNamespace(prefix_len=[0])), tree=DraftTree(9, 2)
    )
    recording = Recording(channel, watched, traced=False)
    drafter: Any = LeadingDrafter(FakeRole(), Team([]))  # type: ignore[arg-type]
    service = DraftService(channel, drafter, BOUNDS, recording, Pause(), Pulse())
    return _served(service.run)


def obey(says: Sequence[Message]) -> str:
    """A follower with a leader that says anything."""
    role: Any = FakeRole()
    return _served(lambda: follow(FakeChannel(says), role, None, None, BOUNDS, Pause(), Pulse()))  # type: ignore[arg-type]


def obey_draft(says: Sequence[Message]) -> str:
    """A follower of the draft's group."""
    role: Any = FakeRole()
    return _served(lambda: follow(FakeChannel(says), None, role, None, BOUNDS, Pause(), Pulse()))  # type: ignore[arg-type]


def _served(run: Any) -> str:
    try:
        run()
    except RankLost as lost:
        assert "\n" not in str(lost) and len(str(lost)) < 1000
        return "taken" if "is gone" in str(lost) else "refused"
    return "taken"


def launch(environment: dict[str, str]) -> str:
    """A launcher's variables."""
    try:
        here = launched(environment)
    except UserError as error:
        assert len(str(error)) < 300 and "\n" not in str(error)
        return "refused"
    assert here is None or (0 <= here.rank < here.size and 0 <= here.local_rank < here.local_size <= here.size)
    return "taken"


HEADS = st.builds(HEAD.pack, st.integers(0, 30), EDGES.map(lambda n: n % 2**32))
WHOLE = st.builds(
    lambda kind, words: HEAD.pack(kind, len(words)) + np.array(words, np.int32).tobytes(), st.integers(0, 30), RANDOM
)
STREAM = st.lists(WHOLE | HEADS | st.binary(max_size=20), max_size=5).map(b"".join)
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SETTING = st.sampled_from(["", "0", "1", "2", "3", "-1", "29500", "localhost"]) | st.text(max_size=5)
DRAFT = st.lists(DRAFT_SAYS, max_size=4)
TIMES = st.lists(st.tuples(st.sampled_from([int(Call.TIME), 99]), st.lists(EDGES, max_size=3)), max_size=2)
NONE_KEPT = OPENINGS.map(lambda o: replace(o, steps="eager", kept=(0,)))
OPENED = NONE_KEPT.map(lambda o: (int(Call.DRAFTER_OPEN), pack(o)))
OPENED_TARGET = NONE_KEPT.map(
    lambda o: (int(Call.VERIFIER_OPEN), pack(replace(o, kept=(0, 0) if o.sampling.guided else (0,))))
)


def after(opened: st.SearchStrategy[Message]) -> st.SearchStrategy[list[Message]]:
    """What is said once a request is open, or before."""
    rest = st.lists(TARGET_SAYS, max_size=4)
    return st.builds(lambda first, more: [first, *more], opened, rest) | rest


def target(name: str, strategy: st.SearchStrategy[Any], run: Callable[[Any], str]) -> Target:
    return Target(name, strategy, lambda value, folder: run(value))


TARGETS = (
    target("read_opening", OPENING_WORDS, lambda words: read(read_opening, words)),
    target("read_proposal", PROPOSAL_WORDS, lambda words: read(read_proposal, words)),
    target("read_result", RESULT_WORDS, lambda words: read(read_result, words)),
    target("read_record", RECORDS | RANDOM, lambda words: read(lambda flat: read_record(flat, BOUNDS.vocab), words)),
    target("TcpChannel", st.tuples(STREAM, st.lists(st.integers(0, 60), max_size=4)), feed_socket),
    target("GroupDrafter", DRAFT, ask_draft),
    target("GroupDrafter.times", TIMES, ask_times),
    target("DraftService", after(OPENED), serve_target),
    target("follow target", after(OPENED_TARGET), obey),
    target("follow draft", after(OPENED), obey_draft),
    target("launched", st.dictionaries(st.sampled_from(NAMES), SETTING), launch),
)
