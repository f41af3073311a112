"""A replica of a draft tree in another process: with fixed d its rounds are those of a local drafter, with free d its
output is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swiftspec import _C
from swiftspec.backends.cpu import cpu
from swiftspec.backends.reference import reference
from swiftspec.config import EngineConfig
from swiftspec.decode import decode
from swiftspec.errors import DrafterLost
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.model.loader import load_model
from swiftspec.params import SamplingParams
from swiftspec.runtime.drafter import Drafter, NoDrafter
from swiftspec.runtime.lookahead_drafter import LookaheadDrafter
from swiftspec.runtime.replica_drafter import ReplicaDrafter
from swiftspec.runtime.runner import Runner
from swiftspec.runtime.verifier import LocalVerifier
from swiftspec.tree.replica import TreeDelta, TreeReplica
from swiftspec.tree.tree import DraftTree
from tests.support.cases import fast_first
from tests.support.roles import make_drafter, make_runner, make_verifier, request_start
from tests.support.toy_pair import VOCAB, make_pair
from tests.support.tree_delta_source import ThreadedLink, dawdle

PROMPT = [5, 17, 3, 29, 11]
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.8, seed=7)
SLOTS = 64
DEMO = Path(__file__).parents[2] / "swiftspec" / "demo"
OPS: dict[str, Any] = {"eager": reference, "native": cpu}
Rounds = list[tuple[Proposal, VerifyResult]]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Target and draft for each executor: the native one needs wider heads than a toy model has."""
    return {"eager": make_pair(tmp_path_factory.mktemp("pair")), "native": (DEMO / "target", DEMO / "draft")}


def runner(path: Path, steps: str) -> Runner:
    if steps == "native" and _C.level() == "none":
        pytest.skip("this CPU has no AVX2")
    ops = OPS[steps]
    dtype = torch.float64 if steps == "eager" else torch.bfloat16
    model = load_model(path, dtype=dtype, ops=ops, max_positions=250)
    return make_runner(model, ops, context=180, tree_slots=SLOTS)


def drafter_on(path: Path, config: EngineConfig, steps: str) -> LookaheadDrafter:
    drafter = make_drafter(runner(path, steps), config)
    assert isinstance(drafter, LookaheadDrafter)
    return drafter


def rounds(drafter: Drafter, verifier: LocalVerifier, sampling: SamplingParams, tokens: int = 40) -> Rounds:
    """Two requests, one after the other."""
    found: Rounds = []
    for request in (1, 2):
        opened = request_start(PROMPT[: 3 + request], sampling, request=request)
        verifier.open(opened)
        drafter.open(opened)
        made = 0
        for proposal, result in decode(drafter, verifier):
            found.append((proposal, result))
            made += len(result.tokens)
            if made >= tokens:
                break
        verifier.close()
        drafter.close()
    return found


def replica_drafter(path: Path, config: EngineConfig, steps: str, pause: Callable[[], None]) -> ReplicaDrafter:
    link = ThreadedLink(drafter_on(path, config, steps), config, pause)
    return ReplicaDrafter(link, TreeReplica(DraftTree(1 + SLOTS * config.children_per_leaf, SLOTS), link.vocab), config)


SHAPES = {
    "d 1": (EngineConfig("async", verify_batch=6, draft_leaves=3, draft_steps=1), GREEDY),
    "d 4": (EngineConfig("async", verify_batch=4, draft_leaves=4, draft_steps=4), SAMPLED),
    "the paper's rule": (EngineConfig("async", verify_batch=6, draft_leaves=2, draft_steps=2, catch_up=False), SAMPLED),
    "of a request": (EngineConfig("async"), replace(SAMPLED, verify_batch=5, draft_steps=2)),
    "a full tree": (EngineConfig("async", verify_batch=8, draft_leaves=8, draft_steps=7), GREEDY),
}


CASES = [*((name, "eager") for name in SHAPES), ("d 4", "native"), ("the paper's rule", "native")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "steps"), fast_first(CASES, 3, unpack=True))
def test_with_fixed_d_the_rounds_equal_those_of_a_local_drafter(
    pairs: dict[str, tuple[Path, Path]], name: str, steps: str
) -> None:
    config, sampling = SHAPES[name]
    target, draft = pairs[steps]
    verifier = make_verifier(runner(target, steps))
    local = rounds(drafter_on(draft, config, steps), verifier, sampling)
    assert rounds(replica_drafter(draft, config, steps, dawdle(3)), verifier, sampling) == local
    assert any(len(result.path) > 1 for _, result in local)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_with_free_d_the_output_equals_the_targets(
    pairs: dict[str, tuple[Path, Path]], sampling: SamplingParams
) -> None:
    config = EngineConfig("async", verify_batch=6, draft_leaves=3)
    target, draft = pairs["eager"]
    verifier = make_verifier(runner(target, "eager"))
    plain = text(rounds(NoDrafter(), verifier, sampling))
    found = rounds(replica_drafter(draft, config, "eager", dawdle(5)), verifier, sampling)
    assert text(found) == plain and len(found) < 70, "of 80 tokens"


def text(found: Rounds) -> list[list[int]]:
    """The first tokens of both requests."""
    both = [
        [token for _, result in found if result.request == request for token in result.tokens] for request in (1, 2)
    ]
    return [tokens[:40] for tokens in both]


class Script:
    """A link that returns given deltas and records whether it was waited for."""

    busy, answer_timeout_s = 0.0, 30.0

    def __init__(self, deltas: list[TreeDelta | None]) -> None:
        """A delta None: nothing has arrived; a wait skips it."""
        self.deltas, self.waits = deltas, 0

    def open(self, start: RequestStart) -> None:
        pass

    def send(self, result: VerifyResult) -> None:
        pass

    def receive(self, deadline: float | None) -> TreeDelta | None:
        delta = self.deltas.pop(0) if self.deltas else None
        if delta is None and deadline is not None:
            self.waits += 1
            return self.receive(deadline)
        return delta

    def close(self) -> None:
        pass


def delta(
    round_: int, first: int, parents: list[int], tokens: list[int], request: int = 1, verified: int = 0
) -> TreeDelta:
    """`verified`: tokens that the target has verified since the prompt."""
    weights, prefix_len = -np.arange(first, first + len(parents)) / 8, len(PROMPT) - 1 + verified
    return TreeDelta(
        request, round_, prefix_len, 1, first, np.array(parents, np.int64), np.array(tokens, np.int64), weights
    )


def scripted(
    *deltas: TreeDelta | None, steps: int | None = None, catch_up: bool = True
) -> tuple[ReplicaDrafter, Script]:
    config = EngineConfig("async", verify_batch=3, draft_leaves=2, draft_steps=steps, catch_up=catch_up)
    link = Script(list(deltas))
    drafter = ReplicaDrafter(link, TreeReplica(DraftTree(40, 20), VOCAB), config)
    drafter.open(request_start(PROMPT, GREEDY))
    return drafter, link


def test_with_free_d_it_waits_only_for_missing_nodes() -> None:
    stale = delta(0, 1, [0], [9], request=7)
    drafter, link = scripted(
        None, None, stale, delta(0, 1, [0, 0, 1, 1, 3], [8, 9, 8, 9, 8]), None,  # a wait, then a proposal
        None, None,  # the next delta has already arrived
        None, None, delta(1, 6, [4], [7], verified=1),
        delta(2, 8, [7, 7, 7], [1, 2, 3], verified=2), None,  # text beyond the tree
        delta(3, 11, [], [], verified=3),  # and the draft's last delta
    )  # fmt: skip
    first = drafter.propose()
    assert (link.waits, first.tokens, first.parents) == (1, (PROMPT[-1], 8, 9), (-1, 0, 0))
    at = first.prefix_len
    drafter.observe(VerifyResult(1, 0, at, (0, 1), (8,)))
    drafter.grow()
    assert (
        drafter.propose() == Proposal.from_draft_model(1, 1, at + 1, (8, 8, 9), (-1, 0, 0), (0, -1 / 4, -3 / 8))
        and link.waits == 1
    )
    drafter.observe(VerifyResult(1, 1, at + 1, (0,), (4,)))
    assert (
        drafter.propose() == Proposal.from_draft_model(1, 2, at + 2, (4, 1, 2), (-1, 0, 0), (0, -1, -9 / 8))
        and link.waits == 2
    )
    drafter.observe(VerifyResult(1, 2, at + 2, (0, 1), (1,)))
    assert drafter.propose() == Proposal.from_draft_model(1, 3, at + 3, (1,), (-1,), (0,)) and link.waits == 2


def test_with_fixed_d_a_round_without_a_proposal_also_has_deltas() -> None:
    drafter, link = scripted(
        replace(delta(0, 1, [0, 0], [8, 9]), expansions=4), replace(delta(0, 3, [1], [8]), expansions=4),
        delta(1, 5, [4, 4], [8, 9], verified=1),
        replace(delta(1, 7, [5], [8], verified=1), expansions=4),  # where the text left the tree
        delta(4, 9, [8, 8], [8, 9], verified=4),  # and again, three rounds later
        steps=4, catch_up=False,
    )  # fmt: skip
    at = drafter.propose().prefix_len
    drafter.observe(VerifyResult(1, 0, at, (0,), (7,)))
    drafter.observe(VerifyResult(1, 3, at + 1, (0, 1, 2), (1, 2, 3)))
    assert (
        drafter.propose() == Proposal.from_draft_model(1, 4, at + 4, (3, 8, 9), (-1, 0, 0), (0, -9 / 8, -5 / 4))
        and link.waits == 0
    )


@pytest.mark.parametrize(("catch_up", "waits"), [(True, 3), (False, 1)])
def test_with_free_d_it_waits_for_a_profitable_expansion(catch_up: bool, waits: int) -> None:
    many = replace(delta(0, 1, [0, 0], [8, 9]), expansions=10)  # a tenth of a round each
    drafter, link = scripted(
        many, None, None, None, None, delta(1, 4, [3, 3], [8, 9], verified=1),  # where the text left the tree
        None, None, delta(1, 6, [4, 4, 5], [8, 9, 8], verified=1),
        None, None, delta(1, 9, [], [], verified=1),
        catch_up=catch_up,
    )  # fmt: skip
    first = drafter.propose()
    assert link.waits == 0 and len(first.tokens) == 3
    drafter.observe(VerifyResult(1, 0, first.prefix_len, (0,), (7,)))
    assert drafter.propose().tokens == (7, 8, 9) and link.waits == waits


NONSENSE = {
    "expected node 1": delta(0, 2, [0], [8]),
    "a parent in the delta is not in the tree": delta(0, 1, [5], [8]),
    "2 expansions, expected at most 1": replace(delta(0, 1, [0], [8]), expansions=2),
}


@pytest.mark.parametrize("reason", NONSENSE)
def test_a_draft_that_sends_an_invalid_delta_is_lost(reason: str) -> None:
    drafter, _ = scripted(NONSENSE[reason], steps=1)
    with pytest.raises(DrafterLost, match=reason):
        drafter.propose()


class Late(Script):
    """A link that times out if nothing has arrived."""

    def receive(self, deadline: float | None) -> TreeDelta | None:
        if deadline is not None and not self.deltas:
            raise DrafterLost("late")
        return self.deltas.pop(0) if self.deltas else None


@pytest.mark.parametrize("steps", [None, 1])
def test_a_late_draft_has_caught_up_once_it_has_answered(steps: int | None) -> None:
    """With fixed d, deltas that arrive late are assigned to their rounds as if they had been waited for."""
    config = EngineConfig("async", verify_batch=3, draft_leaves=2, draft_steps=steps, catch_up=False)
    link = Late([])
    drafter = ReplicaDrafter(link, TreeReplica(DraftTree(40, 20), VOCAB), config)
    drafter.open(request_start(PROMPT, GREEDY))
    with pytest.raises(DrafterLost, match="late"):
        drafter.propose()
    assert not drafter.poll()
    link.deltas += [delta(0, 1, [0, 0], [8, 9]), delta(0, 3, [1], [7])]
    assert drafter.poll()
    at = len(PROMPT) - 1
    drafter.catch_up(VerifyResult(1, 3, at, (0, 1, 2), (8, 7, 5)))  # it has the first two of these
    with pytest.raises(DrafterLost, match="late"):
        drafter.propose()
    link.deltas += [delta(4, 5, [4, 4], [1, 2], verified=3)]
    assert drafter.poll()
    assert drafter.propose() == Proposal.from_draft_model(1, 4, at + 3, (5, 1, 2), (-1, 0, 0), (0, -5 / 8, -3 / 4))


def test_the_end_of_expansions_is_detected_between_deltas() -> None:
    """Otherwise a proposal with too few nodes would wait until the draft counts as late."""
    config = EngineConfig(mode="async", verify_batch=16, draft_leaves=2)
    tokens, end = np.arange(3), np.zeros(0, np.int64)
    arrivals = [
        TreeDelta(1, 0, len(PROMPT) - 1, 1, 1, np.zeros(3, np.int64), tokens, np.full(3, -0.1)),
        TreeDelta(1, 0, len(PROMPT) - 1, 1, 4, end, end, np.zeros(0)),
    ]

    class ReplyLink(ThreadedLink):
        answer_timeout_s = 0.0

        def __init__(self) -> None: ...
        def open(self, start: RequestStart) -> None: ...
        def receive(self, deadline: float | None) -> TreeDelta | None:
            if not arrivals and deadline is not None:
                raise DrafterLost("it waits in vain")
            return arrivals.pop(0) if arrivals else None

    drafter = ReplicaDrafter(ReplyLink(), TreeReplica(DraftTree(1 + SLOTS * 16, SLOTS), VOCAB), config)
    drafter.open(request_start(PROMPT, GREEDY, request=1))
    assert len(drafter.propose().tokens) == 4
