"""Compares two drafters that should propose the same, or two verifiers that should sample the same, round by round; for
tests with and without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from torch import Tensor

from swiftspec.messages import NodeSource, Proposal, VerifyResult
from swiftspec.params import SamplingParams
from swiftspec.runtime.executors.graph import GraphForwardExecutor
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.runner import Runner
from swiftspec.runtime.verifier import LocalVerifier
from tests.support.proposals import draft_proposal
from tests.support.roles import request_start

WEIGHT_TOLERANCE = 1e-4  # the executors sum in different orders


def weights_by_path(proposal: Proposal) -> dict[tuple[int, ...], float]:
    """The weights of the nodes by their paths, since the drafters number them differently. Checks the rules of weights
    and sources that every proposal of a draft model follows."""
    assert proposal.sources == (NodeSource.ROOT, *[NodeSource.DRAFT_MODEL] * (len(proposal.tokens) - 1))
    assert list(proposal.weights) == sorted(proposal.weights, reverse=True) and proposal.weights[0] == 0.0
    rows: list[tuple[int, ...]] = []
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        rows.append((*(rows[parent] if parent >= 0 else ()), token))
    return dict(zip(rows, proposal.weights, strict=True))


def same_rounds(
    one: LocalDrafter,
    other: LocalDrafter,
    sampling: SamplingParams,
    vocab: int,
    *,
    rounds: int = 20,
    prompt_len: int = 9,
) -> None:
    """Two requests; the target accepts a path of the proposal, and a token that may be outside of it."""
    dice = np.random.default_rng(3)
    for request in range(2):
        prompt = dice.integers(0, vocab, prompt_len).tolist()
        for drafter in (one, other):
            drafter.open(request_start(prompt, sampling, request=request))
        for round_ in range(rounds):
            want, got = one.propose(), other.propose()
            paths = weights_by_path(want)
            assert weights_by_path(got) == pytest.approx(paths, rel=WEIGHT_TOLERANCE, abs=WEIGHT_TOLERANCE)
            assert got.prefix_len == want.prefix_len
            path = sorted(paths, key=lambda path: (len(path), path))[int(dice.integers(0, len(paths)))]
            tokens = (*path[1:], int(dice.integers(0, vocab)))
            result = VerifyResult(request, round_, want.prefix_len, tuple(range(len(tokens))), tokens)
            for drafter in (one, other):
                drafter.grow()
                drafter.observe(result)
        for drafter in (one, other):
            drafter.close()


def sampled_tokens(verifier: LocalVerifier, proposal: Proposal) -> list[int]:
    """The tokens that the target samples after every node, accepted or not."""
    found: list[Tensor] = []

    def recorded(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args: (found.append(call(*args)), found[-1])[1]

    sampler, steps = verifier._sampler, verifier.executor
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(sampler, "draw", recorded(sampler.draw)))
        if isinstance(steps, GraphForwardExecutor):
            patches.enter_context(mock.patch.object(steps, "run_batch", recorded(steps.run_batch)))
        verifier.submit(proposal).wait()
    return found[-1].tolist()


def folded_counts(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Returns a set to which every settlement of the delta cache adds the number of folded positions."""
    counts, cache = set[int](), runner.cache.delta
    assert cache is not None
    settle = cache.settle

    def counted(*args: int) -> None:
        settle(*args)
        counts.add(int(cache.folded[0]))

    monkeypatch.setattr(cache, "settle", counted)
    return counts


def same_hidden(one: Tensor | None, other: Tensor | None, rows: int) -> None:
    """Both are None, or the hidden states of this many rows."""
    if one is None or other is None:
        assert one is other
    else:
        assert one.shape == other.shape and len(one) == rows
        assert (one - other).abs().max() < 1e-12 * other.abs().max().clamp_min(1)


def same_verifications(
    one: LocalVerifier,
    other: LocalVerifier,
    sampling: SamplingParams,
    vocab: int,
    *,
    rounds: int = 20,
    prompt_len: int = 6,
) -> None:
    """Two requests with trees of changing size, which sometimes contain the child that the target sampled."""
    dice = np.random.default_rng(5)
    for request in range(2):
        prompt, output = dice.integers(0, vocab, prompt_len).tolist(), dice.integers(0, vocab, 3).tolist()
        for verifier in (one, other):
            seeded = replace(sampling, seed=sampling.seed + request)
            verifier.open(request_start([*prompt, *output], seeded, len(prompt), request))
        root = output[-1]
        for round_ in range(rounds):
            nodes, at = int(dice.choice([1, 2, 3, 5, 8])), one.runner.cache.prefix_len[0]
            parents = [-1, *(int(dice.integers(0, node)) for node in range(1, nodes))]
            proposal = draft_proposal(
                request, round_, at, (root, *dice.integers(0, vocab, nodes - 1).tolist()), tuple(parents)
            )
            likely = sampled_tokens(one, proposal)
            assert sampled_tokens(other, proposal) == likely
            for verifier in (one, other):
                verifier.runner.cache.commit(())
            guesses = [likely[parent] if dice.random() < 0.7 else likely[0] for parent in parents[1:]]
            proposal = replace(proposal, tokens=(root, *guesses))
            assert sampled_tokens(other, proposal) == sampled_tokens(one, proposal)
            assert other._accepted == one._accepted
            same_hidden(one.accepted_hidden(), other.accepted_hidden(), len(one._accepted.path))
            root = one._accepted.tokens[-1]
            for verifier in (one, other):
                verifier.settle()
        for verifier in (one, other):
            verifier.close()
