"""Rejection sampling of sampled children: the engine's verifier compared with the definition, over the whole range of
its uniforms."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from swiftspec.messages import DraftProbs, Proposal
from swiftspec.params import SamplingParams
from swiftspec.sampling.noise import PositionNoise
from swiftspec.sampling.sampler import Sampler
from swiftspec.sampling.vocab import VocabShard
from swiftspec.tree import rejection
from swiftspec.tree.rejection import RejectionSampling, verify_siblings
from tests.support.cases import fast_first
from tests.support.enumeration import PROMPT, orders, outcomes, penalised
from tests.support.history_models import TextDistribution, filtered
from tests.support.proposals import LOOKUP, draft_proposal
from tests.support.thread_group import ThreadGroup, on_ranks

KINDS = ("random", "ties", "equal", "disjoint", "zeros", "one-hot draft", "one-hot target")


def distributions(kind: str, vocab: int, seed: int) -> tuple[list[float], list[float]]:
    """Distributions p and q over this number of tokens."""
    noise = torch.Generator().manual_seed(seed)
    p, q = torch.rand(2, vocab, generator=noise, dtype=torch.float64) ** 2 + 0.01
    half = torch.arange(vocab) < vocab // 2
    if kind == "ties":
        p, q = (torch.randint(1, 3, (vocab,), generator=noise).double() for _ in range(2))
    elif kind == "equal":
        q = p.clone()
    elif kind == "disjoint":
        p, q = p * half, q * ~half
    elif kind == "zeros":
        p, q = (x * ((torch.rand(vocab, generator=noise) < 0.6) | (x == x.max())) for x in (p, q))
    elif kind == "one-hot draft":
        q = (q == q.max()).double()
    elif kind == "one-hot target":
        p = (p == p.max()).double()
    return (p / p.sum()).tolist(), (q / q.sum()).tolist()


def acceptance_thresholds(p: Tensor, q: Tensor, places: Tensor, i: int) -> Tensor:
    """The probability [r, 1] that child i is accepted after all before it were rejected: the threshold of `judge`."""
    uniforms = torch.ones(places.shape, dtype=torch.float64)
    low, high = torch.zeros_like(p[:, :1]), torch.ones_like(p[:, :1])
    for _ in range(50):
        uniforms[:, i : i + 1] = middle = (low + high) / 2
        passes = verify_siblings(p, q, places, uniforms).accepted[:, None] == i
        low, high = torch.where(passes, middle, low), torch.where(passes, high, middle)
    return high


def verified_distribution(p: Tensor, q: Tensor, places: Tensor) -> Tensor:
    """The distribution [r, V] of the token after each of r nodes with these children [r, c]."""
    distribution, mass, count = torch.zeros_like(p), torch.ones_like(p[:, :1]), places.shape[1]
    for i in range(count):
        high = acceptance_thresholds(p, q, places, i)
        distribution.scatter_add_(1, places[:, i : i + 1], mass * high)
        mass = mass * (1 - high)
    last = verify_siblings(p, q, places, torch.ones(places.shape, dtype=torch.float64))
    left = torch.where(q > 0, last.inside, p * last.outside.exp()[:, None])
    over = mass < 1e-12  # one of the children is always accepted
    assert (over | torch.isfinite(left) & (last.accepted < 0)[:, None]).all()
    return distribution + torch.where(over, 0, mass * left)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", fast_first(KINDS, 2))
@pytest.mark.parametrize(("vocab", "count"), [(3, 1), (3, 2), (4, 3), (6, 2), (8, 1), (5, 4)])
def test_the_token_follows_p_for_any_children(kind: str, vocab: int, count: int) -> None:
    for seed in range(3):
        p, q = distributions(kind, vocab, seed)
        ways = list(orders(q, count))
        drawn = torch.tensor([order for order, _ in ways])[:, : min(count, sum(x > 0 for x in q))]
        chances = torch.tensor([[chance] for _, chance in ways], dtype=torch.float64)
        ps, qs = (torch.tensor([x] * len(ways), dtype=torch.float64) for x in (p, q))
        distribution = chances * verified_distribution(ps, qs, drawn)
        torch.testing.assert_close(distribution.sum(0), torch.tensor(p, dtype=torch.float64), atol=1e-12, rtol=0)
        overlap = verify_siblings(ps, qs, drawn, torch.ones(drawn.shape, dtype=torch.float64)).overlap
        first = (chances * acceptance_thresholds(ps, qs, drawn, 0)).sum().expand(len(ways))
        torch.testing.assert_close(overlap, first, atol=1e-12, rtol=0)
        assert overlap[0] == pytest.approx(1 - sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2)


@given(st.sampled_from(KINDS), st.integers(3, 8), st.integers(1, 4), st.integers(1, 5), st.integers(0, 99))
@settings(deadline=None)
def test_rows_are_verified_independently(kind: str, vocab: int, count: int, rows: int, seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    p, q = (
        torch.tensor(x, dtype=torch.float64) for x in zip(*(distributions(kind, vocab, seed + i) for i in range(rows)))
    )
    places = torch.stack([torch.randperm(vocab, generator=noise) for _ in range(rows)])[:, : min(count, vocab)]
    places = torch.where(q.gather(-1, places) > 0, places, -1).sort(-1, descending=True).values
    uniforms = torch.rand(places.shape, generator=noise, dtype=torch.float64)
    together = verify_siblings(p, q, places, uniforms)
    for row in range(rows):
        alone = verify_siblings(*(x[row : row + 1] for x in (p, q, places, uniforms)))
        assert torch.equal(alone.accepted[0], together.accepted[row])
        torch.testing.assert_close(alone.inside[0], together.inside[row])
        torch.testing.assert_close(alone.outside[0], together.outside[row])


def tree(vocab: int, seed: int) -> tuple[Proposal, np.ndarray]:
    """root -> two sampled children, the first of them with two more; and logits of these nodes."""
    noise = np.random.default_rng(seed)
    named = np.stack([noise.permutation(vocab)[: vocab - 1] for _ in range(2)]).astype(np.int32)
    probs = noise.dirichlet(np.ones(vocab - 1), 2).astype(np.float32)
    tokens = (0, int(named[0, 1]), int(named[0, 0]), int(named[1, 2]), int(named[1, 0]))
    proposal = draft_proposal(1, 0, 7, tokens, (-1, 0, 0, 1, 1), DraftProbs(named, probs))
    return proposal, 2 * noise.standard_normal((5, vocab))


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.6, top_k=3),
    SamplingParams(top_p=0.7),
    SamplingParams(min_p=0.2),
    SamplingParams(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.3),
    SamplingParams(logit_bias={1: 2.0, 3: -1e9}),
]


Found = tuple[list[int], list[float]]  # tokens, overlaps


def walk(proposal: Proposal, logits: torch.Tensor, sampling: SamplingParams, group: ThreadGroup | None) -> Found:
    vocab = logits.shape[1]
    shard = None if group is None else VocabShard(group, math.ceil(vocab / group.size), vocab)
    sampler = Sampler(sampling, PROMPT, vocab, "cpu", shard=shard)
    paths = [[], *([proposal.tokens[i]] for i in (1, 2)), *([proposal.tokens[1], proposal.tokens[i]] for i in (3, 4))]
    if group is not None:
        width = math.ceil(vocab / group.size)
        padded = torch.nn.functional.pad(logits, (0, width * group.size - vocab), value=1e9)
        logits = padded[:, group.rank * width :][:, :width]
    positions = torch.tensor([7, 8, 8, 9, 9])
    found = RejectionSampling(sampler)(proposal, logits, paths if sampling.penalised else None, positions)
    assert [proposal.tokens[node] for node in found.path[1:]] == found.tokens[:-1]
    assert len(found.overlaps) == sum(node in (0, 1) for node in found.path)  # the nodes that have children
    return found.tokens, list(found.overlaps)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sampling", PARAMS, ids=range(len(PARAMS)))
def test_every_rank_of_a_group_equals_one_rank(sampling: SamplingParams) -> None:
    for seed, size in itertools.product(range(6), (2, 3)):
        proposal, rows = tree(8, seed)
        one = walk(proposal, torch.from_numpy(rows), sampling, None)
        every = on_ranks(size, lambda group: walk(proposal, torch.from_numpy(rows), sampling, group))  # noqa: B023
        assert [tokens for tokens, _ in every] == [one[0]] * size
        for _, overlaps in every:
            assert overlaps == pytest.approx(one[1])


class Walked:
    """`Rejection` on one proposal, over all values of its uniforms and its noise."""

    def __init__(self, patch: pytest.MonkeyPatch, proposal: Proposal, logits: Tensor, sampling: SamplingParams) -> None:
        self._ask = lambda: tuple(walk(proposal, logits, sampling, None)[0])
        self._child_nodes = rejection._child_nodes(proposal)
        self._tokens = proposal.tokens
        self._uniforms = np.zeros((3, 2))  # by depth and sibling
        self._noise = np.zeros(logits.shape[1])
        self.distribution: TextDistribution = {}
        patch.setattr(rejection, "row_keys", lambda key, positions: positions)
        patch.setattr(rejection, "row_bits", self._bits)
        patch.setattr(PositionNoise, "rows", lambda *_: (torch.from_numpy(self._noise)[None], torch.tensor([0])))

    def _bits(self, positions: Tensor, counters: Tensor) -> Tensor:
        return torch.from_numpy(self._uniforms)[positions - 8, : counters.shape[-1]] * 2.0**32 - 0.5

    def visit(self, node: int = 0, text: tuple[int, ...] = (), mass: float = 1.0) -> None:
        """Adds the distribution of the tokens after this node: for each child the probability that it is accepted, by
        the threshold of its coin, then the rest."""
        mine = self._uniforms[len(text)]
        mine[:] = 1e-9
        for i, child in enumerate(self._child_nodes.get(node, [])):
            longer = (*text, self._tokens[child])

            def fails(coin: float, i: int = i, longer: tuple[int, ...] = longer) -> bool:
                mine[i] = coin
                found = self._ask()
                return found[:-1][: len(longer)] != longer  # the last one is the target's bonus token

            passes = halve(1.0, fails)
            if passes > 1e-9:
                mine[i] = 1e-9
                self.visit(child, longer, mass * passes)
            mine[i] = 1 - 1e-12
            mass *= 1 - passes
            if mass < 1e-9:
                return
        left = self._left()
        for token, chance in enumerate(left / left.sum()):
            self.distribution[(*text, token)] = self.distribution.get((*text, token), 0.0) + mass * chance

    def _left(self) -> NDArray[np.float64]:
        """The unnormalised distribution [V] of the last token: for two tokens at a time, by the noise at which the most
        likely one changes."""
        self._noise[:] = 0
        best, chances = self._ask()[-1], np.ones(len(self._noise))
        for token in {*range(len(chances))} - {best}:

            def wins(noise: float, token: int = token) -> bool:
                self._noise[:] = -1e6
                self._noise[[best, token]] = 0, noise
                return self._ask()[-1] == token

            chances[token] = math.exp(-halve(60.0, wins))
        return chances


def halve(most: float, true: Callable[[float], bool]) -> float:
    """The point between 0 and `most` from which on the predicate is true, by bisection."""
    low, high = 0.0, most
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if true(middle) else (middle, high)
    return high


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sampling", fast_first(PARAMS, 2), ids=range(len(PARAMS)))
@pytest.mark.parametrize("seed", [1, 6, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))])
def test_a_whole_tree_has_the_distribution_of_the_definition(
    monkeypatch: pytest.MonkeyPatch, sampling: SamplingParams, seed: int
) -> None:
    """As in tests/support/enumeration.py: the distribution of the tokens that follow, for a sampled proposal. The
    vocabulary has more tokens than q contains."""
    proposal, rows = tree(5, seed)
    logits = torch.from_numpy(rows)
    paths = {(): 0, **{(proposal.tokens[i],): i for i in (1, 2)},
             **{(proposal.tokens[1], proposal.tokens[i]): i for i in (3, 4)}}  # fmt: skip

    def p(text: tuple[int, ...]) -> list[float]:
        return filtered(penalised(logits[paths[text]], PROMPT, text, sampling), sampling).tolist()

    want = outcomes(proposal, p)
    walked = Walked(monkeypatch, proposal, logits, sampling)
    walked.visit()
    for text in {*want, *walked.distribution}:
        assert walked.distribution.get(text, 0.0) == pytest.approx(want.get(text, 0.0), abs=1e-7), text
    assert sum(walked.distribution.values()) == pytest.approx(1)


def test_overlaps_equal_those_of_the_filtered_distributions() -> None:
    seen = 0
    for seed in range(12):
        proposal, rows = tree(8, seed)
        assert proposal.draft_probs is not None
        overlaps = walk(proposal, torch.from_numpy(rows), SamplingParams(temperature=0.6), None)[1]
        for row, overlap in enumerate(overlaps):
            p = np.exp(rows[row] / 0.6) / np.exp(rows[row] / 0.6).sum()
            q = dict(
                zip(proposal.draft_probs.tokens[row].tolist(), proposal.draft_probs.probs[row].tolist(), strict=True)
            )
            assert overlap == pytest.approx(sum(min(p[token], chance) for token, chance in q.items()))
        seen += len(overlaps)
    assert seen > 12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_forbidden_tokens_are_never_sampled_and_nothing_is_nan(dtype: torch.dtype) -> None:
    """Only token 2 is allowed, and the draft mostly sampled others."""
    proposal, rows = tree(6, 3)
    logits = torch.full(rows.shape, -math.inf, dtype=dtype)
    logits[:, 2] = 1
    assert set(walk(proposal, logits, SamplingParams(), None)[0]) == {2}


def test_a_proposal_with_a_deterministic_node_is_refused() -> None:
    proposal, rows = tree(6, 1)
    mixed = replace(proposal, sources=(*proposal.sources[:-1], LOOKUP))
    with pytest.raises(ValueError, match="verify reject requires sampled nodes"):
        walk(mixed, torch.from_numpy(rows), SamplingParams(), None)


def test_a_proposal_without_draft_probabilities_is_refused() -> None:
    proposal, rows = tree(6, 1)
    bare = replace(proposal, draft_probs=None)
    with pytest.raises(ValueError, match="requires a proposal with draft distributions"):
        walk(bare, torch.from_numpy(rows), SamplingParams(), None)
    assert proposal.draft_probs is not None
    tokens, probs = proposal.draft_probs.tokens, proposal.draft_probs.probs
    never = DraftProbs(tokens, np.where(tokens == proposal.tokens[1], 0, probs))
    with pytest.raises(ValueError, match="token of node 1 does not match the draft distribution"):
        walk(replace(proposal, draft_probs=never), torch.from_numpy(rows), SamplingParams(), None)
