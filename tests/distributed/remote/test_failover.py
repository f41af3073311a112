"""A draft group that is late, lost or recovered at any moment: every proposal is for the current root, and the draft
receives exactly the verified text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from swiftspec.distributed.remote.client import DrafterLate, DraftLink, RemoteDrafter
from swiftspec.distributed.remote.failover import FailoverDrafter, RemoteDraft
from swiftspec.distributed.remote.server_link import ServerLink
from swiftspec.distributed.transport.codec import Words, pack_message, unpack_request_start, unpack_result
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.distributed.transport.request_state import ModelLimits, RequestState
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.params import SamplingParams
from swiftspec.runtime.drafter import DrafterWrapper, NoDrafter
from tests.support.cases import examples
from tests.support.proposals import draft_proposal

BOUNDS = ModelLimits(vocab_size=40, max_model_len=4000, max_nodes=8)


def following(text: Sequence[int]) -> int:
    """The token after a text, a function of the whole text."""
    return sum((i + 1) * token for i, token in enumerate(text)) % 40


class FakeDraft:
    """The remote end of a channel: proposes the correct token if it has the correct text. Its messages arrive
    immediately unless it is `slow`; `dead` means that the connection is lost."""

    def __init__(self) -> None:
        self.peer = "the draft group"
        self.slow = self.dead = False
        self.pending: list[tuple[int, Words]] = []
        self.text: list[int] = []
        self.openings = 0

    def send(self, kind: int, words: Sequence[int] = ()) -> None:
        self._check()
        if kind == Opcode.DRAFTER_OPEN:
            start = unpack_request_start(list(words))
            self.request, self.round, self.text = start.request, 0, list(start.tokens)
            self.openings += 1
        elif kind == Opcode.OBSERVE:
            result = unpack_result(list(words))
            assert (result.request, result.prefix_len) == (self.request, len(self.text) - 1)
            self.round, self.text = result.round + 1, [*self.text, *result.tokens]
        else:
            return
        nodes = (self.text[-1], following(self.text))
        answer = draft_proposal(self.request, self.round, len(self.text) - 1, nodes, (-1, 0))
        self.pending.append((Opcode.PROPOSAL, [0, *pack_message(answer)]))

    def recv(self, timeout: float | None = None) -> tuple[int, Words]:
        self._check()
        if self.slow or not self.pending:
            raise TimeoutError
        return self.pending.pop(0)

    def recv_or_reply(self, reply: object, asks: int, answers: int, note: int) -> tuple[int, Words, bool]:
        raise AssertionError("the target does not reply")

    def restart(self) -> None: ...

    def close(self) -> None:
        self.dead = True

    def _check(self) -> None:
        if self.dead:
            raise ConnectionError("the draft group is gone")


class FakeReconnector:
    """Returns a restarted draft group once there is one."""

    def __init__(self) -> None:
        self.back: FakeDraft | None = None
        self.losses = 0

    def poll(self) -> FakeDraft | None:
        back, self.back = self.back, None
        return back

    def on_lost(self) -> None:
        self.losses += 1


class Machine(RuleBasedStateMachine):
    """A target that decodes, and every event that can happen to a draft group meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.draft, self.reconnector = FakeDraft(), FakeReconnector()
        link = DraftLink(ServerLink(self.draft, RequestState(BOUNDS), "draft"))
        group = RemoteDrafter(link, 3)
        remote = RemoteDraft(group, link, self.reconnector)  # type: ignore[arg-type]
        self.failover_drafter = FailoverDrafter(group, remote, clock=lambda: self.now)
        self.request = 0
        self.good = 0  # consecutive rounds without a fault of the draft
        self.begin()

    @rule()
    def begin(self) -> None:
        if self.request:
            self.failover_drafter.close()
        self.request, self.round, self.text = self.request + 1, 0, [self.request % 40, 5, 6]
        self.failover_drafter.open(RequestStart(self.request, tuple(self.text), SamplingParams(temperature=0), 3))
        self.good = 0

    @rule()
    def decode(self) -> None:
        """One round of the decoding loop."""
        self.now += 0.01
        proposal = self.failover_drafter.propose()
        where = proposal.request, proposal.round, proposal.prefix_len, proposal.tokens[0]
        assert where == (self.request, self.round, len(self.text) - 1, self.text[-1])
        self.failover_drafter.grow()
        tokens = [following(self.text)]
        if len(proposal.tokens) > 1:
            assert proposal.tokens[1] == tokens[0], "the draft was told another text"
            tokens.append(following([*self.text, *tokens]))
        path = tuple(range(len(tokens)))
        self.failover_drafter.observe(VerifyResult(self.request, self.round, len(self.text) - 1, path, tuple(tokens)))
        self.text += tokens
        self.round += 1
        self.good = 0 if self.draft.slow or self.draft.dead else self.good + 1

    @rule()
    def decode_on(self) -> None:
        for _ in range(20):
            self.decode()

    @rule()
    def slow(self) -> None:
        self.draft.slow = True

    @rule()
    def quick(self) -> None:
        self.draft.slow = False

    @rule()
    def die(self) -> None:
        self.draft.dead = True

    @precondition(lambda self: self.draft.dead)
    @rule()
    def come_back(self) -> None:
        self.draft = self.reconnector.back = FakeDraft()
        self.good = 0

    @invariant()
    def outages_are_in_order(self) -> None:
        times = [
            time for each in self.failover_drafter.outages for time in (each.since, each.until) if time is not None
        ]
        assert times == sorted(times)
        assert all(each.until is not None for each in self.failover_drafter.outages[:-1])

    @invariant()
    def a_draft_that_is_well_is_used_again(self) -> None:
        if self.good > 300:  # after many timeouts it is asked rarely
            assert self.failover_drafter.lost_reason is None

    @invariant()
    def a_draft_that_died_is_missed(self) -> None:
        if self.draft.dead and self.failover_drafter.lost_reason is not None:
            assert self.draft.openings == 0 or self.reconnector.losses > 0 or not self.failover_drafter._lost


TestPatience = Machine.TestCase
TestPatience.settings = settings(max_examples=examples(20), stateful_step_count=40)


def decoded(machine: Machine, rounds: int) -> float:
    """Tokens per round over this number of rounds."""
    before = len(machine.text)
    for _ in range(rounds):
        machine.decode()
    return (len(machine.text) - before) / rounds


def test_a_draft_that_is_late_once_misses_a_round() -> None:
    machine = Machine()
    assert decoded(machine, 3) == 2
    machine.slow()
    assert decoded(machine, 1) == 1
    machine.quick()
    assert decoded(machine, 3) == 2
    (outage,) = machine.failover_drafter.outages
    assert outage.until is not None and outage.reason == "the draft did not answer in time"


def test_the_timeout_adapts_to_a_draft_that_is_always_slow() -> None:
    machine = Machine()
    group = machine.failover_drafter._remote.drafter
    assert isinstance(group, RemoteDrafter)
    link = group.link
    answer, waits = group.propose, list[float]()

    def slowly() -> Proposal:
        """Takes 0.8 s, also for other waiting threads."""
        if link.answer_timeout_s < 0.8:
            machine.now += link.answer_timeout_s
            raise DrafterLate("late")
        machine.now += 0.8
        return answer()

    machine.decode()
    group.propose = slowly
    for _ in range(1000):
        machine.decode()
        waits.append(link.answer_timeout_s)
    assert 0.8 < waits[-1] < 5 and machine.failover_drafter.lost_reason is None


def test_a_recovered_draft_continues_within_the_request() -> None:
    machine = Machine()
    machine.decode_on()
    machine.die()
    assert decoded(machine, 5) == 1
    machine.come_back()
    assert decoded(machine, 1) == 1, "it reads the text meanwhile"
    assert decoded(machine, 5) == 2
    assert machine.draft.openings == 1 and machine.reconnector.losses > 0
    assert [outage.until is None for outage in machine.failover_drafter.outages] == [False]


class OpensLater(DrafterWrapper[RemoteDrafter]):
    """Opens the draft after three rounds of a request, as a controller does that decodes without it first."""

    def open(self, start: RequestStart) -> None:
        self.opening, self.text, self.rounds = start, list(start.tokens), 0
        self.none = NoDrafter()
        self.none.open(start)

    def propose(self) -> Proposal:
        if self.rounds < 3:
            return self.none.propose()
        if self.rounds == 3:
            self.inner.open(replace(self.opening, tokens=tuple(self.text)))
        return replace(self.inner.propose(), round=self.none.propose().round)

    def observe(self, result: VerifyResult) -> None:
        if self.rounds >= 3:
            self.inner.observe(replace(result, round=self.rounds - 3))
        self.none.observe(result)
        self.text += result.tokens
        self.rounds += 1


def test_a_recovered_draft_continues_if_a_controller_opens_it_later() -> None:
    machine = Machine()
    failover = machine.failover_drafter
    failover.inner = OpensLater(failover._remote.drafter)  # type: ignore[arg-type]
    machine.begin()
    assert [decoded(machine, 1) for _ in range(3)] == [1, 1, 1]
    machine.die()
    machine.decode()
    assert failover.lost_reason is not None
    machine.come_back()
    assert [decoded(machine, 1) for _ in range(6)] == [1, 1, 1, 2, 2, 2]
    assert failover.lost_reason is None and machine.draft.openings == 1


def test_a_draft_that_is_always_late_is_asked_with_backoff() -> None:
    """Each attempt costs the target a wait."""
    machine, waits = Machine(), 0
    for _ in range(1000):
        machine.slow()
        machine.decode()
        waits += machine.failover_drafter._in_step is False and machine.failover_drafter._rounds_to_skip > 0
        machine.quick()
        machine.draft.slow = bool(machine.failover_drafter._in_step)
    assert len(machine.failover_drafter.outages) < 40
