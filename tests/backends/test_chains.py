"""Batched verification of chains: its distribution by the definition, alone and in batches, in every precision."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swiftspec.backends.reference import chains as verify
from swiftspec.tree import acceptance as tree_walk
from tests.support.cases import fast_first
from tests.tree.test_rejection import KINDS, distributions

V = 7


def chain(seed: int, batch: int, steps: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """target, draft, tokens sampled from it, uniforms, noise."""
    noise = torch.Generator().manual_seed(seed)
    target, draft = (2 * torch.randn(batch, steps + extra, V, generator=noise).to(dtype) for extra in (1, 0))
    target[torch.rand(target.shape, generator=noise) < 0.3] = -math.inf
    target[..., seed % V] = 1
    tokens = (
        torch.multinomial(draft.double().softmax(-1).view(-1, V), 1, generator=noise).view(batch, steps)
        if steps
        else torch.zeros(batch, 0, dtype=torch.int64)
    )
    uniforms = torch.rand(batch, steps, generator=noise, dtype=torch.float64)
    gumbel = -torch.rand(batch, V, generator=noise, dtype=torch.float64).log().neg().log()
    return target, draft, tokens, uniforms, gumbel


class HistoryDistributions:
    """Distributions p and q [V] after every text, by kind, including zeros and ties."""

    def __init__(self, kind: str, vocab: int, seed: int) -> None:
        self.kind, self.vocab, self.seed = kind, vocab, seed

    def after(self, text: Sequence[int]) -> tuple[list[float], list[float]]:
        number = sum((token + 1) * (self.vocab + 1) ** place for place, token in enumerate(text))
        return distributions(self.kind, self.vocab, 7919 * self.seed + number)

    def rows(self, chains: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Logits of p [n, K + 1, V] and q [n, K, V] along chains of K tokens."""
        found = [[self.after(chain[:at]) for at in range(len(chain) + 1)] for chain in chains]
        p = torch.tensor([[p for p, _ in row] for row in found], dtype=torch.float64)
        q = torch.tensor([[q for _, q in row[:-1]] for row in found], dtype=torch.float64)
        return p.log(), q.log()


def thresholds(target: Tensor, draft: Tensor, tokens: Tensor) -> Tensor:
    """The coin [n, K] below which each token is accepted, by bisection, given that all before it are accepted."""
    found = torch.zeros(tokens.shape, dtype=torch.float64)
    for k in range(tokens.shape[1]):
        low, high = torch.zeros(len(tokens), dtype=torch.float64), torch.ones(len(tokens), dtype=torch.float64)
        for _ in range(45):
            uniforms = torch.full(tokens.shape, 1e-300, dtype=torch.float64)
            uniforms[:, k] = middle = (low + high) / 2
            passes = verify.verify_by_rejection(target, draft, tokens, uniforms, torch.zeros(1, 1)).count > k
            low, high = torch.where(passes, middle, low), torch.where(passes, high, middle)
        found[:, k] = high
    return found


def left_after(target: Tensor, draft: Tensor, tokens: Tensor, uniforms: Tensor) -> Tensor:
    """The distribution [n, V] of the bonus token after these uniforms: for two tokens at a time, from the noise at
    which one replaces the other."""
    n, vocab = len(tokens), target.shape[-1]
    silent = torch.full((n, vocab), -1e6, dtype=torch.float64)
    first = verify.verify_by_rejection(target, draft, tokens, uniforms, torch.zeros(1, 1)).bonus[:, None]
    logs = torch.zeros(n, vocab, dtype=torch.float64)
    for token in range(vocab):
        low, high = (torch.full((n, 1), end, dtype=torch.float64) for end in (-1.0, 60.0))
        for _ in range(55):
            middle = (low + high) / 2
            noise = silent.scatter(1, first, 0)
            noise[:, token : token + 1] = torch.where(first == token, 0.0, middle)
            wins = verify.verify_by_rejection(target, draft, tokens, uniforms, noise).bonus[:, None] == token
            low, high = torch.where(wins, low, middle), torch.where(wins, middle, high)
        logs[:, token] = torch.where(first == token, 0.0, -high).squeeze(1)
    return torch.where(logs < -50, -math.inf, logs).softmax(-1)


@pytest.mark.parametrize("kind", fast_first(KINDS, 2))
@pytest.mark.parametrize(("vocab", "steps"), [(3, 1), (3, 3), (2, 4), (4, 2), (8, 1)])
def test_whole_chains_follow_p(kind: str, vocab: int, steps: int) -> None:
    """By enumeration: every chain sampled from q, every position of a rejection, and the token that then replaces it.
    After the end of a chain p continues. Nothing about rejection sampling is assumed: probabilities and residuals are
    measured."""
    model = HistoryDistributions(kind, vocab, 5)
    chains = list(itertools.product(range(vocab), repeat=steps))
    target, draft = model.rows(chains)
    drawn = draft.exp().gather(2, torch.tensor(chains)[..., None]).prod(1).squeeze(1)
    sampled = drawn > 0
    tokens, target, draft, drawn = torch.tensor(chains)[sampled], target[sampled], draft[sampled], drawn[sampled]
    passes = thresholds(target, draft, tokens)
    law: dict[tuple[int, ...], float] = {}
    mass = drawn.clone()
    for fails in range(steps + 1):
        uniforms = torch.full(tokens.shape, 1e-300, dtype=torch.float64)
        if fails < steps:
            uniforms[:, fails] = 1 - 1e-16
        found = verify.verify_by_rejection(target, draft, tokens, uniforms, torch.zeros(1, 1))
        reached = mass * (1 - passes[:, fails]) if fails < steps else mass
        bonus = left_after(target, draft, tokens, uniforms)
        for row in torch.nonzero(reached > 1e-12).flatten().tolist():
            assert int(found.count[row]) == fails
            for token in range(vocab):
                text = (*tokens[row, :fails].tolist(), token)
                law[text] = law.get(text, 0.0) + float(reached[row] * bonus[row, token])
        mass = mass * passes[:, fails] if fails < steps else mass
    whole = dict.fromkeys(itertools.product(range(vocab), repeat=steps + 1), 0.0)
    want = dict(whole)
    for text in whole:
        want[text] = math.prod(model.after(text[:at])[0][token] for at, token in enumerate(text))
        for length in range(1, steps + 2):
            rest = math.prod(model.after(text[:at])[0][text[at]] for at in range(length, steps + 1))
            whole[text] += law.get(text[:length], 0.0) * rest
    assert sum(whole.values()) == pytest.approx(1)
    assert max(abs(whole[text] - want[text]) for text in whole) < 1e-9


def test_the_replacement_of_a_token_follows_the_residual_distribution() -> None:
    p, q = distributions("random", V, 3)
    n = 40_000
    noise = torch.Generator().manual_seed(5)
    target = torch.tensor([p, p]).double().log().expand(n, 2, V)
    draft = torch.tensor([q]).double().log().expand(n, 1, V)
    tokens = torch.multinomial(torch.tensor(q), n, replacement=True, generator=noise)[:, None]
    gumbel = -torch.rand(n, V, generator=noise, dtype=torch.float64).log().neg().log()
    found = verify.verify_by_rejection(
        target, draft, tokens, torch.rand(n, 1, generator=noise, dtype=torch.float64), gumbel
    )
    first = torch.where(found.accepted[:, 0], tokens[:, 0], found.bonus)
    for drawn in (first, found.bonus[found.count == 1]):  # and the bonus token follows p too
        expected = torch.tensor(p, dtype=torch.float64) * len(drawn)
        apart = (torch.bincount(drawn, minlength=V) - expected) ** 2 / expected
        assert float(apart.sum()) < 24.1  # chi-square, 6 degrees of freedom, 0.05 %


@given(
    st.integers(0, 999),
    st.integers(1, 5),
    st.integers(0, 4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
@settings(deadline=None)
def test_a_batch_equals_its_rows(seed: int, batch: int, steps: int, dtype: torch.dtype) -> None:
    target, draft, tokens, uniforms, noise = chain(seed, batch, steps, dtype)
    best = (target + noise[:, None]).argmax(-1)
    together = (
        verify.accept_matching_prefix(best, tokens),
        verify.verify_by_rejection(target, draft, tokens, uniforms, noise),
    )
    for b in range(batch):
        one = slice(b, b + 1)
        alone = (
            verify.accept_matching_prefix(best[one], tokens[one]),
            verify.verify_by_rejection(target[one], draft[one], tokens[one], uniforms[one], noise[one]),
        )
        for single, every in zip(alone, together):
            for name in ("accepted", "count", "bonus"):
                assert torch.equal(getattr(single, name)[0], getattr(every, name)[b])
    for found in together:
        assert torch.equal(found.accepted.sum(-1), found.count)
        chosen = target.gather(1, found.count[:, None, None].expand(-1, 1, V)).squeeze(1)
        assert (chosen.gather(1, found.bonus[:, None]) > -math.inf).all(), "a forbidden token"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_gives_the_decisions_of_float64(dtype: torch.dtype) -> None:
    target, draft, tokens, uniforms, noise = chain(4, 500, 3, dtype)
    low = verify.verify_by_rejection(target, draft, tokens, uniforms, noise)
    high = verify.verify_by_rejection(target.double(), draft.double(), tokens, uniforms, noise)
    assert (low.count == high.count).double().mean() > 0.99 and (low.bonus == high.bonus).double().mean() > 0.99


def test_tokens_are_accepted_while_they_equal_those_of_autoregressive_decoding() -> None:
    target, _, _, _, noise = chain(9, 6, 3)
    best = (target + noise[:, None]).argmax(-1)
    drafts = best[:, :3].clone()
    drafts[1, 0], drafts[2, 1], drafts[3, 2] = V - 1 - best[1, 0], V - best[2, 1] - 2, (best[3, 2] + 1) % V
    found = verify.accept_matching_prefix(best, drafts)
    for b in range(6):
        text, _ = tree_walk.match_path([0, *drafts[b].tolist()], [-1, 0, 1, 2], best[b].tolist())
        assert int(found.count[b]) == len(text) - 1 and int(found.bonus[b]) == int(best[b, len(text) - 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_draft_without_probabilities_gives_p(dtype: torch.dtype) -> None:
    target, draft, tokens, uniforms, noise = chain(2, 64, 2, dtype)
    draft[:, 1] = -math.inf
    found = verify.verify_by_rejection(target, draft, tokens, uniforms, noise)
    reached = found.count == 1
    assert (found.count < 2).all() and reached.any()
    assert torch.equal(found.bonus[reached], (target[:, 1].double() + noise).argmax(-1)[reached])


def test_invalid_shapes_are_named() -> None:
    target, draft, tokens, uniforms, noise = chain(1, 3, 2)
    with pytest.raises(ValueError, match=r"target must have shape \[3, 3, 7\] for tokens \[3, 2\], not \[3, 2, 7\]"):
        verify.verify_by_rejection(draft, draft, tokens, uniforms, noise)
    with pytest.raises(ValueError, match=r"target must have shape \[3, 2, 7\] for tokens \[3, 1\]"):
        verify.verify_by_rejection(target, draft, tokens[:, :1], uniforms, noise)
    with pytest.raises(ValueError, match=r"draft must have shape \[3, 2, 7\] for tokens \[3, 2\], not \[3, 3, 7\]"):
        verify.verify_by_rejection(target, target, tokens, uniforms, noise)
    with pytest.raises(ValueError, match=r"uniforms must have the shape of tokens, \[3, 2\], not \[3\]"):
        verify.verify_by_rejection(target, draft, tokens, uniforms[:, 0], noise)
    with pytest.raises(ValueError, match=r"tokens must have shape \[requests, draft tokens\], not \[3\]"):
        verify.verify_by_rejection(target, draft, tokens[:, 0], uniforms, noise)
