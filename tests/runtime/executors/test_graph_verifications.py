"""A verification as one graph against the eager one, on a CPU with the stand-ins of tests/support/fake_cuda_graphs.py.

tests/gpu/test_graph.py uses real graphs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swiftspec.backends.unfused import unfused
from swiftspec.config import EngineConfig
from swiftspec.messages import DraftProbs, Proposal
from swiftspec.model.batch import HostBatch
from swiftspec.model.loader import load_model
from swiftspec.params import SamplingParams
from swiftspec.runtime.executors.graph import (
    CAPTURED_ROWS,
    BatchKey,
    GraphForwardExecutor,
    GraphInputs,
    chain_shapes,
)
from swiftspec.runtime.executors.graph_verifications import AncestorPaths, DeviceHistory, GraphVerificationExecutor
from swiftspec.runtime.graph_capture import capture_graphs, num_captures
from swiftspec.runtime.verifier import LocalVerifier
from swiftspec.sampling.vocab import TOP_CANDIDATES
from swiftspec.tree import mask as tree_mask
from tests.runtime.executors.test_graph_expansions import peers
from tests.support.cases import fast_first
from tests.support.fake_cuda_graphs import Recorder, Rerun, RerunWithoutReads
from tests.support.proposals import draft_proposal
from tests.support.roles import make_runner, make_verifier, request_start
from tests.support.same_rounds import same_verifications, sampled_tokens
from tests.support.thread_group import ThreadGroup, on_ranks
from tests.support.tiny_checkpoints import make_checkpoint

VOCAB = 600  # more than the candidates of the filters
PROMPT = [3, 1, 4, 1, 5, 9]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verify")
    make_checkpoint(path, vocab=VOCAB, num_attention_heads=8)
    return path


def verifiers(
    checkpoint: Path, group: Any = None, method: str = "match", ops: Any = unfused, **more: Any
) -> tuple[LocalVerifier, LocalVerifier, Rerun]:
    """One without graphs, one with graphs."""
    model = load_model(checkpoint, dtype=torch.float64, ops=ops, max_positions=256, group=group)
    capture = Rerun() if ops is not unfused else Recorder() if group is None else RerunWithoutReads()
    steps, graphed = (
        make_verifier(make_runner(model, ops, context=160, tree_slots=64), method, each, **more)
        for each in (None, capture)
    )
    return steps, graphed, capture


def in_one_graph(verifier: LocalVerifier) -> bool:
    """Whether the request's verifications are one graph."""
    return isinstance(verifier.executor, GraphVerificationExecutor)


GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=0.8, seed=5)
BIAS = {7: 4.0, 11: -3.0, 20: 2.0}
SAMPLING = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "biased": replace(SAMPLED, logit_bias=BIAS),
    "top_k": replace(SAMPLED, top_k=20, min_p=0.01),
    "top_p": replace(SAMPLED, top_p=0.8),
    "flat": SamplingParams(temperature=30.0, top_p=0.95, seed=2),
    "penalised": replace(SAMPLED, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
    "penalised, greedy": replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.4),
    "all": replace(SAMPLED, logit_bias=BIAS, top_k=90, top_p=0.9, min_p=0.003, frequency_penalty=0.3),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", fast_first(SAMPLING, 2))
def test_one_graph_samples_the_same_tokens(checkpoint: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every row, also in requests with another seed. Rows whose top candidates do not suffice for a filter are
    sampled outside the graph."""
    outside, accept = [], GraphVerificationExecutor.accept
    monkeypatch.setattr(GraphVerificationExecutor, "accept", lambda *a: outside.append(a[0]) or accept(*a))
    steps, graphed, capture = verifiers(checkpoint)
    same_verifications(steps, graphed, SAMPLING[name], VOCAB)
    assert not in_one_graph(steps) and in_one_graph(graphed)
    assert capture.replays == 80 and len(outside) == (80 if name == "flat" else 0)
    assert capture.captures <= 4, "1, 2, 4 and 8 rows, all of one width, and nothing for the forwards alone"


@pytest.mark.slow
@pytest.mark.parametrize("name", fast_first(["all", "greedy", "flat"], 1))
def test_synthetic_acceptance_has_the_same_rounds(checkpoint: Path, name: str) -> None:
    steps, graphed, _ = verifiers(checkpoint, synthetic_length=2.5)
    same_verifications(steps, graphed, SAMPLING[name], VOCAB)
    assert in_one_graph(graphed)
    proposal = draft_proposal(9, 0, len(PROMPT) - 1, (PROMPT[-1], 4, 5, 6), (-1, 0, 1, 2))
    for verifier in (steps, graphed):
        verifier.open(request_start(PROMPT, SAMPLING[name], request=9))
        assert verifier.verify(proposal).tokens[:-1] in ((4,), (4, 5))


@pytest.mark.slow
@pytest.mark.parametrize("name", fast_first(["flat", "top_k"], 1))
def test_graphs_of_several_lengths_sample_the_same_tokens(
    checkpoint: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each graph has its own logits, from which rows are sampled outside of it ("flat")."""
    monkeypatch.setattr(unfused, "MIN_BUCKET_SLOTS", 8)
    steps, graphed, capture = verifiers(checkpoint)
    same_verifications(steps, graphed, SAMPLING[name], VOCAB)
    assert in_one_graph(graphed) and capture.captures > 4


@pytest.mark.slow
@pytest.mark.parametrize("size", fast_first([3, 2, 6], 1))
@pytest.mark.parametrize("name", fast_first(["all", "greedy", "sampled", "top_p", "flat"], 1))
def test_a_group_samples_the_same_tokens(checkpoint: Path, size: int, name: str) -> None:
    def work(group: ThreadGroup) -> int:
        steps, graphed, capture = verifiers(checkpoint, peers(group, 1 << 16))
        same_verifications(steps, graphed, SAMPLING[name], VOCAB, rounds=4)
        assert in_one_graph(graphed)
        return capture.captures

    assert len(set(on_ranks(size, work))) == 1


def test_a_group_with_library_gathers_does_not_use_one_graph(checkpoint: Path) -> None:
    longest = 4 * CAPTURED_ROWS[-1] * (TOP_CANDIDATES + 1)

    def work(group: ThreadGroup) -> list[bool]:
        found = []
        for most, top_k in (
            (longest - 1, 0),
            (longest, 0),
            (longest, 2 * TOP_CANDIDATES - 1),
            (longest, 2 * TOP_CANDIDATES),
        ):
            _, graphed, _ = verifiers(checkpoint, peers(group, most))
            graphed.open(request_start(PROMPT, replace(SAMPLED, top_k=top_k), request=0))
            found.append(in_one_graph(graphed))
        return found

    assert on_ranks(2, work) == [[False, True, True, False]] * 2


def test_unsupported_verifications_run_without_one_graph(checkpoint: Path) -> None:
    """Guided requests, where operators support one sequence, and proposals of too many nodes. After a guided request,
    whose cache is reallocated, graphs are captured anew."""
    steps, graphed, capture = verifiers(checkpoint)
    same_verifications(steps, graphed, SAMPLED, VOCAB, rounds=2)
    before = capture.captures
    same_verifications(
        steps, graphed, replace(SAMPLED, guidance_scale=1.5, negative_prompt_ids=(7, 2)), VOCAB, rounds=3
    )
    assert not in_one_graph(graphed) and capture.captures == before
    same_verifications(steps, graphed, SAMPLED, VOCAB, rounds=2)
    assert in_one_graph(graphed) and capture.captures > before
    many = draft_proposal(0, 0, 5, tuple(range(CAPTURED_ROWS[-1] + 1)), tuple(range(-1, CAPTURED_ROWS[-1])))
    before = capture.captures
    for verifier in (steps, graphed):
        verifier.open(request_start(PROMPT, SAMPLED, request=0))
    assert sampled_tokens(graphed, many) == sampled_tokens(steps, many) and capture.captures == before


def drawn_proposal(dice: np.random.Generator, at: int, root: int, round_: int) -> Proposal:
    """A tree whose children are among the tokens of a q, some of which have no probability."""
    nodes, width = int(dice.choice([1, 2, 4, 7])), 16
    parents = [-1, *sorted(int(dice.integers(0, node)) for node in range(1, nodes))]
    inner = sorted(set(parents[1:]))
    named = np.stack([dice.permutation(VOCAB)[:width] for _ in inner] or [np.arange(width)]).astype(np.int32)
    probs = dice.dirichlet(np.ones(width), max(len(inner), 1)).astype(np.float32)
    named[:, -1], probs[:, -1] = named[:, 0], 0
    left = {node: list(row[:-1]) for node, row in zip(inner, named, strict=False)}
    tokens = (root, *(int(left[parent].pop(int(dice.integers(0, 3)))) for parent in parents[1:]))
    return draft_proposal(0, round_, at, tokens, tuple(parents), DraftProbs(named, probs) if inner else None)


def same_rejections(steps: LocalVerifier, graphed: LocalVerifier, sampling: SamplingParams) -> None:
    dice, root = np.random.default_rng(4), PROMPT[-1]
    for seed in (5, 6):
        for verifier in (steps, graphed):
            verifier.open(request_start(PROMPT, replace(sampling, seed=seed), request=0))
        for round_ in range(10):
            proposal = drawn_proposal(dice, steps.runner.cache.prefix_len[0], root, round_)
            for verifier in (steps, graphed):
                verifier.submit(proposal).wait()
            assert graphed._accepted == steps._accepted
            root = steps._accepted.tokens[-1]
            for verifier in (steps, graphed):
                verifier.settle()


@pytest.mark.parametrize("name", fast_first(["all", "sampled", "biased", "top_k", "top_p", "flat"], 2))
def test_rejection_in_one_graph(checkpoint: Path, name: str) -> None:
    """Accepted nodes, the token after them and the overlaps are bitwise identical; the host waits once."""
    steps, graphed, capture = verifiers(checkpoint, method="reject")
    same_rejections(steps, graphed, SAMPLING[name])
    assert not in_one_graph(steps) and in_one_graph(graphed) and capture.replays == 20


@pytest.mark.slow
def test_all_ranks_of_a_group_reject_the_same_nodes(checkpoint: Path) -> None:
    def work(group: ThreadGroup) -> int:
        steps, graphed, capture = verifiers(checkpoint, peers(group, 1 << 16), method="reject")
        same_rejections(steps, graphed, SAMPLING["all"])
        assert in_one_graph(graphed)
        return capture.captures

    assert len(set(on_ranks(2, work))) == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", fast_first(["sampled", "greedy", "flat", "all"], 1))
def test_guided_requests_in_one_graph(checkpoint: Path, size: int, name: str) -> None:
    """Where a capture may hold several sequences; torch's operators may not, so the stand-in does not check it here."""
    ops = unfused.with_operators(MAX_CAPTURED_SEQUENCES=2)
    guided = replace(SAMPLING[name], guidance_scale=1.5, negative_prompt_ids=(7, 2))

    def work(group: ThreadGroup | None) -> int:
        steps, graphed, capture = verifiers(checkpoint, group and peers(group, 1 << 16), ops=ops)
        same_verifications(steps, graphed, guided, VOCAB, rounds=4)
        assert in_one_graph(graphed)
        before = capture.captures
        same_verifications(steps, graphed, replace(guided, guidance_scale=2.5), VOCAB, rounds=4)
        scored = replace(guided, guidance_scale=3.0, logprobs=0)
        assert capture.captures == before
        same_verifications(steps, graphed, scored, VOCAB, rounds=2)
        assert type(graphed.executor) is GraphForwardExecutor
        return capture.captures

    assert work(None) > 0 if size == 1 else len(set(on_ranks(size, work))) == 1


def mixed_sampling(dice: np.random.Generator) -> SamplingParams:
    """Random parameters of a request without guidance, each of them set in some requests."""

    def some(value: Any, otherwise: Any) -> Any:
        return value if dice.random() < 0.4 else otherwise

    return SamplingParams(
        temperature=float(dice.choice([0.0, 0.6, 1.3])), seed=int(dice.integers(9)), top_k=some(20, 0),
        top_p=some(0.8, 1.0), min_p=some(0.02, 0.0), logit_bias=some(BIAS, {}),
        repetition_penalty=some(1.2, 1.0), presence_penalty=some(0.3, 0.0), frequency_penalty=some(0.4, 0.0),
        min_tokens=some(2, 0), logprobs=some(2, None), bad_words_ids=some(((3,), (4, 5)), ()),
    )  # fmt: skip


@pytest.mark.slow
def test_requests_capture_no_graph_after_the_start(checkpoint: Path) -> None:
    """Over a mix of all sampling parameters, in proposals of all sizes."""
    steps, graphed, capture = verifiers(checkpoint)
    config = EngineConfig("serial", verify_batch=11)
    capture_graphs(graphed, None, config, None)
    before, dice = capture.captures, np.random.default_rng(4)
    assert before == 3 * len(chain_shapes(11))
    for _ in range(40):
        sampling = mixed_sampling(dice)
        for verifier in (steps, graphed):
            verifier.open(request_start(PROMPT, sampling, request=0))
        nodes = int(dice.integers(1, 12))
        parents = (-1, *(int(dice.integers(0, node)) for node in range(1, nodes)))
        proposal = draft_proposal(0, 0, len(PROMPT) - 1, tuple(dice.integers(0, VOCAB, nodes).tolist()), parents)
        assert graphed.verify(proposal) == steps.verify(proposal), sampling
        for verifier in (steps, graphed):
            verifier.settle()
            verifier.close()
    assert capture.captures == before == num_captures(graphed, None)


@given(st.integers(1, 8), st.data())
def test_a_graph_counts_the_tokens_of_a_path(nodes: int, data: st.DataObject) -> None:
    """Except the root's, and those of padding rows."""
    parents = [-1, *(data.draw(st.integers(0, node - 1)) for node in range(1, nodes))]
    tokens = data.draw(st.lists(st.integers(0, 3), min_size=nodes, max_size=nodes))
    prefix = data.draw(st.integers(0, 20))
    mask, slots = tree_mask.from_parents(parents), np.arange(prefix, prefix + nodes)
    inputs, zeros = GraphInputs(BatchKey(8, 8), 1, torch.device("cpu")), np.zeros(nodes, np.int64)
    inputs.fill(HostBatch(np.array(tokens), slots, slots, tree_mask.pad_left(mask), zeros, np.array([prefix + nodes])))
    history = DeviceHistory([1, 2], 4, "cpu")
    history.observe([0, 3, 3])
    assert torch.equal(
        history.counts(AncestorPaths.of(inputs.batch, 8))[:nodes], history.counts(tree_mask.paths(tokens, parents))
    )
