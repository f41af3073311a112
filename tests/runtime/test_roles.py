"""Invariant 2 on real models: after any sequence of rounds every live KV slot equals recomputation from scratch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swiftspec.backends.reference import reference
from swiftspec.cache.model_cache import ModelCache
from swiftspec.config import EngineConfig
from swiftspec.llm_engine import LLMEngine
from swiftspec.messages import Proposal, VerifyResult
from swiftspec.model.batch import Batch, ForwardOutput
from swiftspec.model.loader import load_model
from swiftspec.params import SamplingParams
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.runner import PREFILL_CHUNK_TOKENS, Runner
from tests.support import roles
from tests.support.cases import examples
from tests.support.proposals import draft_proposal
from tests.support.roles import request_start
from tests.support.tiny_checkpoints import make_checkpoint

VOCAB = 40
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
TREE = 60
GREEDY = SamplingParams(temperature=0)
NEGATIVE = (7, 30, 12)
GUIDED = SamplingParams(temperature=0, guidance_scale=2.0, negative_prompt_ids=NEGATIVE)
POISON = 1e4  # in every free slot, so that an invalid read is detected

SLIDING = pytest.param("gemma3_text", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=["llama", "qwen3", SLIDING])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without and with a norm of query and key heads, and with sliding windows."""
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, family=request.param, vocab=VOCAB, layers=2, dtype=torch.float64, seed=3)
    return path


def text_of(checkpoint: Path, sampling: SamplingParams) -> list[int]:
    sampling = replace(sampling, max_tokens=60, ignore_eos=True)
    return PROMPT + LLMEngine(checkpoint, dtype=torch.float64).generate(PROMPT, sampling).token_ids


@pytest.fixture(scope="module")
def target_text(checkpoint: Path) -> list[int]:
    """The prompt and the target's continuation."""
    return text_of(checkpoint, GREEDY)


def make_runner(path: Path, context: int = 400) -> Runner:
    model = load_model(path, dtype=torch.float64, ops=reference, max_positions=context + TREE)
    return roles.make_runner(model, reference, context=context, tree_slots=TREE)


def poison_free(runner: Runner) -> None:
    for sequence, used in enumerate(runner.cache.kv_len()):
        runner.cache.kv.k[:, sequence, :, used:] = POISON
        runner.cache.kv.v[:, sequence, :, used:] = POISON


def texts(runner: Runner, verified: list[int]) -> list[list[int]]:
    """The tokens of each sequence."""
    guided = len(runner.cache.prefix_len) == 2
    return [verified, [*NEGATIVE, *verified[len(PROMPT) :]]] if guided else [verified]


class Oracle:
    """Recomputes the KV of the last of some tokens from an empty cache."""

    def __init__(self, path: Path) -> None:
        self.runner = make_runner(path)

    def kv(self, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        self.runner.cache.reset()
        self.runner.prefill(tokens)
        at = len(tokens) - 1
        return self.runner.cache.kv.k[:, 0, :, at].clone(), self.runner.cache.kv.v[:, 0, :, at].clone()

    def check(self, runner: Runner, slot: int, tokens: Sequence[int], sequence: int = 0) -> None:
        k, v = self.kv(tokens)
        torch.testing.assert_close(runner.cache.kv.k[:, sequence, :, slot], k, atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(runner.cache.kv.v[:, sequence, :, slot], v, atol=1e-9, rtol=1e-9)


def check_drafter(drafter: LocalDrafter, oracle: Oracle, verified: list[int]) -> None:
    """`verified` ends with the root."""
    cache, tree = drafter.runner.cache, drafter.tree
    prefix = cache.prefix_len[0]
    assert verified[:-1] == verified[:prefix] + drafter.pending
    assert cache.tree_len == tree.expanded
    paths = tree.path_tokens(np.arange(tree.count))
    for sequence, (text, prefix) in enumerate(zip(texts(drafter.runner, verified), cache.prefix_len, strict=True)):
        assert prefix == len(text) - 1 - len(drafter.pending)
        for slot in range(prefix):
            oracle.check(drafter.runner, slot, text[: slot + 1], sequence)
        for slot, path in zip(tree.slot[: tree.count].tolist(), paths, strict=True):
            if slot < tree.slots:
                oracle.check(drafter.runner, prefix + slot, [*text, *path], sequence)


@pytest.mark.sampled(1)
@settings(max_examples=examples(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_draft_cache_equals_a_recomputation(checkpoint: Path, data: st.DataObject) -> None:
    w, d, sampling = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 3), st.sampled_from([GREEDY, GUIDED])))
    plan = EngineConfig(verify_batch=5, draft_leaves=w, draft_steps=d)
    ahead, oracle = data.draw(st.booleans()), Oracle(checkpoint)
    drafter = roles.make_drafter(make_runner(checkpoint), plan, ahead=ahead)
    drafter.open(request_start(PROMPT, sampling))
    verified = list(PROMPT)
    proposal = drafter.propose()
    for round_ in range(data.draw(st.integers(1, 5))):
        tokens = answer(proposal, data)
        poison_free(drafter.runner)
        result = VerifyResult(1, round_, len(verified) - 1, tuple(range(len(tokens))), tuple(tokens))
        drafter.observe(result)
        proposal = drafter.propose()
        verified += tokens
        assert proposal.prefix_len == len(verified) - 1 and proposal.tokens[0] == verified[-1]
        for _ in range(data.draw(st.integers(0, 2))):
            drafter.expand()
        drafter.settle()
        check_drafter(drafter, oracle, verified)


def answer(proposal: Proposal, data: st.DataObject) -> list[int]:
    """Some path down the proposal, then tokens that may or may not be in the tree: sometimes more than w of them."""
    tokens, node = [], 0
    while data.draw(st.booleans(), label="deeper"):
        children = [i for i, parent in enumerate(proposal.parents) if parent == node]
        if not children:
            break
        node = data.draw(st.sampled_from(children))
        tokens.append(proposal.tokens[node])
    extra = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=0 if tokens else 1, max_size=6))
    return tokens + extra


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sampling", [GREEDY, GUIDED], ids=["alone", "guided"])
@settings(max_examples=examples(8), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_target_cache_equals_a_recomputation(
    checkpoint: Path, sampling: SamplingParams, data: st.DataObject
) -> None:
    """Proposals hide the target's own next tokens among others, at slots that have to be moved."""
    verifier, oracle = roles.make_verifier(make_runner(checkpoint)), Oracle(checkpoint)
    target_text = text_of(checkpoint, sampling)
    verifier.open(request_start(PROMPT, sampling))
    verified = list(PROMPT)
    for round_ in range(4):
        tokens, parents, path = [verified[-1]], [-1], [0]
        for token in target_text[len(verified) : len(verified) + data.draw(st.integers(0, 4))]:
            for _ in range(data.draw(st.integers(0, 2))):  # in between, nodes that the target will not accept
                parents.append(data.draw(st.integers(0, len(tokens) - 1)))
                tokens.append(VOCAB)
            parents.append(path[-1])
            path.append(len(tokens))
            tokens.append(token)
        wrong = next(t for t in range(VOCAB) if t not in target_text[len(verified) : len(verified) + 6])
        tokens = [token if token < VOCAB else wrong for token in tokens]
        result = verifier.submit(draft_proposal(1, round_, len(verified) - 1, tuple(tokens), tuple(parents))).wait()
        verifier.settle()
        assert list(result.tokens) == target_text[len(verified) : len(verified) + len(result.tokens)]
        assert len(result.path) >= len(path)
        poison_free(verifier.runner)
        verified += result.tokens
        cache = verifier.runner.cache
        assert cache.tree_len == 0
        for sequence, (text, prefix) in enumerate(zip(texts(verifier.runner, verified), cache.prefix_len, strict=True)):
            assert prefix == len(text) - 1
            for slot in range(prefix):
                oracle.check(verifier.runner, slot, text[: slot + 1], sequence)


def test_nothing_is_computed_twice(checkpoint: Path, target_text: list[int]) -> None:
    """Every draft row is a verified token's or a node's, once: rows run = slots ever handed out."""
    runner = make_runner(checkpoint)
    rows, forward = 0, runner.model.forward

    def count(batch: Batch, cache: ModelCache, *, head: bool = True) -> ForwardOutput:
        nonlocal rows
        rows += len(batch)
        return forward(batch, cache, head=head)

    runner.model.forward = count  # type: ignore[method-assign]
    drafter = roles.make_drafter(runner, EngineConfig(verify_batch=4, draft_leaves=3, draft_steps=2))
    drafter.open(request_start(PROMPT, GREEDY))
    assert rows == len(PROMPT) - 1
    drafter.propose()
    at, reused = len(PROMPT), 0
    for round_ in range(12):
        before, tokens = rows, target_text[at : at + 1 + round_ % 3]
        used = runner.cache.prefix_len[0] + runner.cache.tree_len
        drafter.observe(VerifyResult(1, round_, at - 1, tuple(range(len(tokens))), tuple(tokens)))
        drafter.propose()
        at += len(tokens)
        after = runner.cache.prefix_len[0] + runner.cache.tree_len
        added = rows - before  # with what survived, these are all the slots in use: no row ran for a slot that had KV
        survived = after - added
        assert 0 <= survived <= used
        reused += survived - (at - 1 - len(tokens))
        assert added <= 2 * 3 + len(tokens)
    assert reused > 0


def test_chunked_prefill_equals_a_prompt_in_tree_rows(checkpoint: Path) -> None:
    tokens = torch.randint(VOCAB, (PREFILL_CHUNK_TOKENS + 30,), generator=torch.Generator().manual_seed(0)).tolist()
    whole, single = make_runner(checkpoint), make_runner(checkpoint)
    whole.prefill(tokens)
    for token in tokens:
        single.prefill([token])
    used = len(tokens)
    torch.testing.assert_close(whole.cache.kv.k[..., :used, :], single.cache.kv.k[..., :used, :], atol=1e-9, rtol=1e-9)


def test_a_full_tree_region_stops_only_expansions(checkpoint: Path) -> None:
    """Repeated expansions without a result, as with a slow target."""
    drafter = roles.make_drafter(make_runner(checkpoint), EngineConfig(verify_batch=2, draft_leaves=8, draft_steps=8))
    drafter.open(request_start(PROMPT, GREEDY))
    drafter.propose()
    for _ in range(20):
        drafter.expand()
    assert TREE - 8 < drafter.tree.expanded <= TREE
    _, tokens, *_ = drafter.tree.best_subtree(2)
    drafter.observe(VerifyResult(1, 0, len(PROMPT) - 1, (0, 1), (tokens[1], 7)))
    proposal = drafter.propose()
    assert proposal.tokens[0] == 7
    check_drafter(drafter, Oracle(checkpoint), [*PROMPT, tokens[1], 7])
