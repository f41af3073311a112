"""Phases as native calls equal eager ones: bitwise identical trees, caches, proposals and tokens."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swiftspec import _C
from swiftspec.backends.cpu import cpu as host
from swiftspec.backends.cpu import shm
from swiftspec.backends.cpu.shm import ShmCollectives
from swiftspec.config import EngineConfig
from swiftspec.distributed.transport.codec import pack_message, unpack_proposal
from swiftspec.messages import Proposal, VerifyResult
from swiftspec.model.loader import load_model
from swiftspec.params import SamplingParams
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.runner import Runner
from tests.support import roles
from tests.support.cases import examples, fast_first
from tests.support.proposals import draft_proposal
from tests.support.roles import request_start
from tests.support.tiny_checkpoints import make_checkpoint
from tests.support.token_constraints import DiceRules

pytestmark = pytest.mark.skipif(_C.level() == "none", reason="this CPU has no AVX2")

T = TypeVar("T")
VOCAB, TREE = 40, 60
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SAMPLINGS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8, seed=5),
    SamplingParams(temperature=1.3, seed=6, logit_bias={7: 2.0, 9: -3.0}),
    SamplingParams(temperature=0.9, seed=7, grammar="dice"),
    SamplingParams(temperature=0.9, seed=8, allowed_token_ids=tuple(range(1, VOCAB, 3)), bad_words_ids=((4,), (7, 10))),
    SamplingParams(temperature=0.7, seed=9, min_tokens=8, stop_token_ids=(5, 6, 7), logit_bias={5: 3.0}),
    SamplingParams(temperature=0.6, seed=10, top_k=7, top_p=0.95, repetition_penalty=1.05),
    SamplingParams(temperature=1.1, seed=11, min_p=0.02, logit_bias={7: 2.0}, presence_penalty=0.4),
    SamplingParams(temperature=0.9, seed=12, top_p=0.8, grammar="dice", frequency_penalty=0.7),
    SamplingParams(temperature=0, repetition_penalty=1.4, presence_penalty=-0.3, frequency_penalty=0.2),
    SamplingParams(temperature=0.8, seed=13, guidance_scale=1.7, negative_prompt_ids=(2, 7, 1), top_p=0.9),
]
NOISY = [each for each in SAMPLINGS if not each.greedy]
FREE = [each for each in SAMPLINGS if not (each.grammar or each.excludes_tokens or each.has_path_rules)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, vocab=VOCAB, layers=2, dtype=torch.float32, seed=3, hidden_size=64, intermediate_size=48)
    return path


def make_runner(path: Path, dtype: torch.dtype) -> Runner:
    return runner_on(load_model(path, dtype=dtype, ops=host, max_positions=200 + TREE))


def runner_on(model: Any) -> Runner:
    runner = roles.make_runner(model, host, context=200, tree_slots=TREE)
    runner.make_constraint = lambda grammar: DiceRules(VOCAB)
    return runner


def same_caches(one: Runner, other: Runner) -> None:
    assert one.cache.prefix_len == other.cache.prefix_len and one.cache.tree_len == other.cache.tree_len
    used = one.cache.kv_len()[0]
    assert torch.equal(one.cache.kv.k[..., :used, :], other.cache.kv.k[..., :used, :])
    assert torch.equal(one.cache.kv.v[..., :used, :], other.cache.kv.v[..., :used, :])


def same_trees(one: LocalDrafter, other: LocalDrafter) -> None:
    a, b = one.tree, other.tree
    assert (a.count, a.expanded, one.pending) == (b.count, b.expanded, other.pending)
    for name in ("token", "parent", "slot", "logprob"):
        np.testing.assert_array_equal(getattr(a, name)[: a.count], getattr(b, name)[: a.count])
    np.testing.assert_array_equal(a.visible[: a.expanded, : a.expanded], b.visible[: a.expanded, : a.expanded])


def same_proposals(one: Proposal, other: Proposal) -> None:
    """Also in the draft distributions of sampled children."""
    assert replace(one, draft_probs=None) == replace(other, draft_probs=None)
    if one.draft_probs is None or other.draft_probs is None:
        assert one.draft_probs is other.draft_probs
        return
    live = one.draft_probs.probs > 0
    np.testing.assert_array_equal(one.draft_probs.probs, other.draft_probs.probs)
    np.testing.assert_array_equal(one.draft_probs.tokens[live], other.draft_probs.tokens[live])


def any_result(proposal: Proposal, data: st.DataObject) -> VerifyResult:
    """The tokens down to some node of a proposal, then possibly others; sometimes more than w of them have no KV."""
    node = data.draw(st.integers(0, len(proposal.tokens) - 1))
    tokens: list[int] = []
    while node > 0:
        tokens.insert(0, proposal.tokens[node])
        node = proposal.parents[node]
    tokens += data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=0 if tokens else 1, max_size=7))
    return VerifyResult(1, proposal.round, proposal.prefix_len, tuple(range(len(tokens))), tuple(tokens))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_drafts(checkpoint: Path, dtype: torch.dtype, data: st.DataObject) -> None:
    method: dict[str, Any] = data.draw(
        st.sampled_from([{"proposal": "top"}, {"proposal": "coupled"}, {"verify": "reject"}])
    )
    plan = EngineConfig(
        verify_batch=data.draw(st.integers(1, 6)),
        draft_leaves=data.draw(st.integers(1, 5)),
        draft_steps=data.draw(st.integers(1, 4)),
        **method,
        calibration=data.draw(st.sampled_from([None, 1.3])),
    )
    sampling = data.draw(st.sampled_from(NOISY if plan.proposal == "sample" else SAMPLINGS))
    fused, stepped = (roles.make_drafter(make_runner(checkpoint, dtype), plan) for _ in range(2))
    roles.restrict_executors(stepped, "eager")
    fused.open(request_start(PROMPT, sampling))
    stepped.open(request_start(PROMPT, sampling))
    assert (fused.executor.name, stepped.executor.name) == ("native", "eager")
    for _ in range(data.draw(st.integers(1, 5))):
        proposal = fused.propose()
        same_proposals(proposal, stepped.propose())
        same_trees(fused, stepped)
        same_caches(fused.runner, stepped.runner)
        result = any_result(proposal, data)
        fused.observe(result)
        stepped.observe(result)
    assert fused.busy > 0


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_native_replies_equal_the_proposals_of_the_drafter(checkpoint: Path, data: st.DataObject) -> None:
    """The fast reply equals the drafter's own proposal, without an expansion."""
    plan = EngineConfig(
        verify_batch=data.draw(st.integers(1, 6)), draft_leaves=3, draft_steps=data.draw(st.integers(1, 4)),
        catch_up=data.draw(st.booleans()),
    )  # fmt: skip
    drafter = roles.make_drafter(make_runner(checkpoint, torch.float32), plan, ahead=True)
    drafter.open(request_start(PROMPT, SAMPLINGS[0]))
    proposal = drafter.propose()
    for _ in range(4):
        drafter.grow()
        reply, result = drafter.fast_reply(), any_result(proposal, data)
        answer = reply.reply(pack_message(result))
        for other in (replace(result, request=2), replace(result, prefix_len=result.prefix_len + 1)):
            assert reply.reply(pack_message(other)) == []
        assert reply.reply(pack_message(result)[:-1]) == reply.reply([]) == []
        busy = drafter.busy
        drafter.observe(result)
        proposal = drafter.propose()
        if answer:
            assert unpack_proposal(answer) == proposal and drafter.busy == busy
        else:
            assert drafter.busy > busy or plan.verify_batch == 1, "a fresh root, or too few nodes"


@pytest.mark.parametrize("sampling", FREE)
def test_synthetic_acceptance(checkpoint: Path, sampling: SamplingParams) -> None:
    """Paths that the target does not sample, with the caches and the penalties that follow from them."""
    fused, stepped = (
        roles.make_verifier(make_runner(checkpoint, torch.float32), synthetic_length=2.5) for _ in range(2)
    )
    roles.restrict_executors(stepped, "eager")
    for verifier in (fused, stepped):
        verifier.open(request_start(PROMPT, sampling))
    assert (fused.executor.name, stepped.executor.name) == ("native", "eager")
    text, lengths = list(PROMPT), list[int]()
    for round_ in range(6):
        tokens, parents = (text[-1], 11, 12, 13, 14, 15), (-1, 0, 0, 1, 2, 3)
        result = fused.verify(draft_proposal(1, round_, len(text) - 1, tokens, parents))
        assert result == stepped.verify(draft_proposal(1, round_, len(text) - 1, tokens, parents))
        assert result.path == (0, 1, 3)[: len(result.tokens)] and result.tokens[:-1] == (11, 13)[: len(result.path) - 1]
        fused.settle()
        stepped.settle()
        same_caches(fused.runner, stepped.runner)
        text += result.tokens
        lengths.append(len(result.tokens))
    assert sorted(lengths) == [2, 2, 2, 3, 3, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_verifications(checkpoint: Path, dtype: torch.dtype, data: st.DataObject) -> None:
    sampling = data.draw(st.sampled_from(SAMPLINGS))
    fused, stepped = (roles.make_verifier(make_runner(checkpoint, dtype)) for _ in range(2))
    roles.restrict_executors(stepped, "eager")
    fused.open(request_start(PROMPT, sampling))
    stepped.open(request_start(PROMPT, sampling))
    plain = roles.make_verifier(make_runner(checkpoint, dtype))  # one token ahead, to have something to accept
    text = list(PROMPT)
    for round_ in range(4):
        root, at = text[-1], len(text) - 1
        plain.open(request_start(text, sampling, len(PROMPT)))
        (likely,) = plain.verify(Proposal.root_only(1, 0, at, root)).tokens
        tokens, parents = [root, likely], [-1, 0]
        for _ in range(data.draw(st.integers(0, 6))):
            parents.append(data.draw(st.integers(0, len(tokens) - 1)))
            taken = {t for t, p in zip(tokens, parents, strict=False) if p == parents[-1]}
            tokens.append(data.draw(st.integers(0, VOCAB - 1).filter(lambda t, taken=taken: t not in taken)))
        proposal = draft_proposal(1, round_, at, tuple(tokens), tuple(parents))
        result = fused.verify(proposal)
        assert result == stepped.verify(proposal) and result.tokens[0] == likely and len(result.tokens) >= 2
        fused.settle()
        stepped.settle()
        same_caches(fused.runner, stepped.runner)
        text += result.tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rejection_sampling(checkpoint: Path, dtype: torch.dtype) -> None:
    """Equal decisions, with the draft's own proposals; also where a node is the root alone."""
    accepted = list[int]()
    for sampling in NOISY:
        plan = EngineConfig(verify_batch=6, draft_leaves=3, draft_steps=2, verify="reject")
        drafter = roles.make_drafter(make_runner(checkpoint, dtype), plan)
        fused, stepped = (roles.make_verifier(make_runner(checkpoint, dtype), "reject") for _ in range(2))
        roles.restrict_executors(stepped, "eager")
        for role in (drafter, fused, stepped):
            role.open(request_start(PROMPT, sampling))
        assert (drafter.executor.name, fused.executor.name) == ("native", "native")
        for round_ in range(12):
            proposal = drafter.propose()
            if round_ % 4 == 3:
                proposal = Proposal.root_only(1, round_, proposal.prefix_len, proposal.tokens[0])
            result, other = fused.verify(proposal), stepped.verify(proposal)
            assert result == other and result.overlaps == pytest.approx(other.overlaps, abs=1e-5)
            for verifier in (fused, stepped):
                verifier.settle()
            same_caches(fused.runner, stepped.runner)
            drafter.observe(result)
            accepted.append(len(result.path) - 1)
    assert {0, 1, 2} <= {*accepted}, "children are accepted and rejected"


@dataclass
class Ranks:
    """One rank of a group, over shared memory; the ranks are threads."""

    memory: ShmCollectives

    def __post_init__(self) -> None:
        self.rank, self.size = self.memory.rank, self.memory.size
        self.all_reduce, self.all_gather = self.memory.all_reduce, self.memory.all_gather

    def captures(self, x: torch.Tensor) -> bool:
        return False

    def lost(self, error: Exception) -> Exception:
        return error


def in_a_group(size: int, work: Callable[[Ranks], T]) -> list[T]:
    name = shm.new_name()
    with ThreadPoolExecutor(size) as pool:
        return list(
            pool.map(lambda r: work(Ranks(ShmCollectives(name, r, size, spin=False, timeout_s=20))), range(size))
        )


def group_rounds(path: Path, ranks: Ranks, sampling: SamplingParams, steps: str, method: str) -> list[Any]:
    """A draft's trees and a target's results, round by round, on one rank."""
    runners = []
    for _ in range(2):
        model = load_model(path, dtype=torch.float32, ops=host, max_positions=200 + TREE, group=ranks)
        runners.append(runner_on(model))
    drafter = roles.make_drafter(runners[0], EngineConfig(verify_batch=6, draft_leaves=3, draft_steps=3, verify=method))
    verifier = roles.make_verifier(runners[1], method)
    for role in (drafter, verifier):
        roles.restrict_executors(role, steps)
    drafter.open(request_start(PROMPT, sampling))
    verifier.open(request_start(PROMPT, sampling))
    seen: list[Any] = []
    for _ in range(12):
        proposal = drafter.propose()
        result = verifier.verify(proposal)
        logprob = drafter.tree.logprob[: drafter.tree.count].copy()
        # Nodes that a filter has excluded may hold any token.
        tokens = np.where(np.isfinite(logprob), drafter.tree.token[: len(logprob)], -1)
        seen.append((proposal, result, tokens.tolist(), logprob))
        verifier.settle()
        drafter.observe(result)
    return seen


GROUPS = [  # of 4 ranks, one has none of the tokens
    *fast_first(product([2, 4, 3], SAMPLINGS, ["match"]), 1, unpack=True),
    *fast_first(product([2, 4, 3], NOISY, ["reject"]), 1, unpack=True),
]


@pytest.mark.parametrize(("size", "sampling", "method"), GROUPS)
def test_a_group_of_ranks(checkpoint: Path, size: int, sampling: SamplingParams, method: str) -> None:
    """Every rank sees the same rounds, equal to the eager ones."""
    first, *others = in_a_group(size, lambda ranks: group_rounds(checkpoint, ranks, sampling, "native", method))
    stepped = in_a_group(size, lambda ranks: group_rounds(checkpoint, ranks, sampling, "eager", method))
    for rank in others:
        for (proposal, *facts, logprob), (same_proposal, *same, also) in zip(first, rank, strict=True):
            same_proposals(proposal, same_proposal)
            assert facts == same
            np.testing.assert_array_equal(logprob, also)
    for (native, *facts, logprob), (eager, *same, also) in zip(first, stepped[0], strict=True):
        assert facts == same
        assert replace(eager, weights=native.weights, draft_probs=None) == replace(native, draft_probs=None)
        np.testing.assert_allclose(native.weights, eager.weights, atol=2e-5)
        np.testing.assert_allclose(logprob, also, atol=2e-5)
    assert any(len(result.tokens) > 1 for _, result, *_ in first), "the target follows a child now and then"


def test_requests_that_a_leader_runs_eagerly_run_eagerly(checkpoint: Path) -> None:
    """Also on a follower, which receives the leader's choice."""
    verifier = roles.make_verifier(make_runner(checkpoint, torch.float32))
    for sampling in SAMPLINGS:
        assert verifier.select_executor(request_start(PROMPT, sampling)).name == "native"
        assert verifier.select_executor(replace(request_start(PROMPT, sampling), executor="eager")).name == "eager"


@pytest.mark.parametrize("sampling", [SAMPLINGS[1], SAMPLINGS[8], SAMPLINGS[10]])
def test_log_probabilities_are_those_of_the_raw_logits(checkpoint: Path, sampling: SamplingParams) -> None:
    """Also if a grammar, penalties or filters change the logits that tokens are drawn from, and with guidance."""
    sampling, found = replace(sampling, logprobs=3), list[Any]()
    for name in ("native", "eager"):
        verifier = roles.make_verifier(make_runner(checkpoint, torch.float32))
        roles.restrict_executors(verifier, name)
        verifier.open(request_start(PROMPT, sampling))
        result = verifier.verify(draft_proposal(1, 0, len(PROMPT) - 1, (PROMPT[-1], 4, 5, 6), (-1, 0, 0, 1)))
        found.append((result, result.logprobs))
        assert verifier.executor.name == name and result.logprobs is not None
    assert found[0] == found[1]


def test_invalid_arguments_are_refused(checkpoint: Path) -> None:
    """An invalid number from Python raises an exception instead of crashing."""
    runner = make_runner(checkpoint, torch.float32)
    model: Any = runner.model
    rounds = model.fused.rounds(runner.cache)
    scoring = rounds.scoring(VOCAB, 1.0, None, False, 0, 0)
    for tokens, parents, prefix, message in [
        ([1, 2], [-1], 0, "has a parent"),
        ([1, 2, 3], [-1, 0, 2], 0, "topological"),
        ([1, VOCAB], [-1, 0], 0, "vocabulary"),
        ([1, 2], [-1, 0], 200 + TREE - 1, "fit the cache"),
    ]:
        with pytest.raises(ValueError, match=message):
            rounds.verify([(tokens, parents, 0, prefix, scoring, None, None, None, None)])
    with pytest.raises(ValueError, match="allowed"):
        rounds.verify([([1, 2], [-1, 0], 0, 0, scoring, np.zeros((2, VOCAB // 8 - 1), np.uint8), None, None, None)])
    with pytest.raises(ValueError, match="does not have this sequence"):
        rounds.verify([([1, 2], [-1, 0], 0, 0, scoring, None, (1, 1, 0, 2.0), None, None)])
    with pytest.raises(ValueError, match="the same sequence"):
        rounds.verify([([1], [-1], 0, 0, scoring, None, None, None, None)] * 2)
    for path, message in (([], "begins at the root"), ([1], "begins at"), ([0, 2], "not a child"), ([0, 0], "not a")):
        with pytest.raises(ValueError, match=message):
            rounds.verify([([1, 2], [-1, 0], 0, 0, scoring, None, None, path, None)])
    for drafted, message in (  # children of the root, whose distribution covers tokens 2 and 3
        ((np.array([[2, 3]], np.int32), np.array([[0.0, 1.0]], np.float32)), "does not match the draft distribution"),
        ((np.array([[2, VOCAB]], np.int32), np.ones((1, 2), np.float32)), "outside the vocabulary"),
        ((np.array([[2, 3]], np.int32), np.ones((1, 3), np.float32)), "probs: expected"),
        ((np.array([[2, 3]] * 2, np.int32), np.ones((2, 2), np.float32)), "tokens: expected"),
    ):
        with pytest.raises(ValueError, match=message):
            rounds.verify([([1, 2], [-1, 0], 0, 0, scoring, None, None, None, drafted)])
    with pytest.raises(ValueError, match="need noise"):
        scoring.set_filters({"top_k": 5, "top_p": 1.0, "min_p": 0.0})
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    for value, message in (
        ({"top_k": -1}, "out of range"),
        ({"top_p": 1.5}, "out of range"),
        ({"min_p": -1.0}, "out of range"),
        ({"top_a": 0.5}, "expected the filters"),
    ):
        with pytest.raises(ValueError, match=message):
            rounds.scoring(VOCAB, 1.0, None, True, 0, 0).set_filters(off | value)
    penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    for prompt, output in (([VOCAB], []), ([1], [-1])):
        with pytest.raises(ValueError, match="vocabulary"):
            scoring.set_penalties(penalties, prompt, output)
    with pytest.raises(ValueError, match="than were verified"):
        rounds.logits([0], np.zeros((1, model.fused.num_logits), np.float32))
    drafter = roles.make_drafter(runner, EngineConfig())
    tree: Any = drafter.tree
    with pytest.raises(ValueError, match="full"):
        rounds.expand([(tree.native, 0, 0, [], TREE + 1, 2, scoring, False, 1.0, None, None)])
    with pytest.raises(ValueError, match="allowed"):
        bad = lambda nodes: np.zeros((1, 1), np.uint8)  # noqa: E731
        rounds.expand([(tree.native, 0, 0, [], 1, 2, scoring, False, 1.0, bad, None)])
    state = (0, 0, 0.2, np.zeros((TREE - 1, 8), np.int32), np.zeros((TREE - 1, 8), np.float32))
    with pytest.raises(ValueError, match="do not fit the tree"):
        rounds.expand([(tree.native, 0, 0, [], 1, 2, scoring, False, 1.0, None, state)])
    with pytest.raises(ValueError, match="does not have"):
        tree.reroot(3)
