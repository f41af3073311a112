"""Chains verified in batches: their law by the definition, alone and together, in every precision."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swiftspec.spec import verify
from tests.test_reject import KINDS, laws

V = 7


def chain(seed: int, batch: int, steps: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """target, draft, tokens drawn from it, coins, noise."""
    noise = torch.Generator().manual_seed(seed)
    target, draft = (2 * torch.randn(batch, steps + extra, V, generator=noise).to(dtype) for extra in (1, 0))
    target[torch.rand(target.shape, generator=noise) < 0.3] = -math.inf
    target[..., seed % V] = 1
    tokens = (
        torch.multinomial(draft.double().softmax(-1).view(-1, V), 1, generator=noise).view(batch, steps)
        if steps
        else torch.zeros(batch, 0, dtype=torch.int64)
    )
    coins = torch.rand(batch, steps, generator=noise, dtype=torch.float64)
    gumbel = -torch.rand(batch, V, generator=noise, dtype=torch.float64).log().neg().log()
    return target, draft, tokens, coins, gumbel


@pytest.mark.parametrize("kind", KINDS)
def test_rejection_gives_p(kind: str) -> None:
    """The law of the first token of a chain: of every token drawn, the coin where it fails and what then comes."""
    for seed in range(5):
        p, q = laws(kind, V, seed)
        target, draft = (torch.tensor([rows], dtype=torch.float64).log() for rows in ([p, p], [q]))
        law = torch.zeros(V, dtype=torch.float64)
        for token, chance in enumerate(q):
            if chance == 0:
                continue
            draws = torch.tensor([[token]])
            passes = min(1.0, p[token] / chance)
            for coin, mass in ((passes * (1 - 1e-9), passes), (passes + (1 - passes) / 2, 1 - passes)):
                if mass <= 0:
                    continue
                coins = torch.tensor([[coin]], dtype=torch.float64)
                found = verify.reject(target, draft, draws, coins, torch.zeros(1, V, dtype=torch.float64))
                assert bool(found.accepted) == (mass == passes and coin < passes)
                if found.count == 1:
                    law[token] += chance * mass
                    continue
                left = [max(0.0, a - b) for a, b in zip(p, q)]
                assert left[int(found.bonus)] == pytest.approx(max(left))
                law += chance * mass * torch.tensor(left, dtype=torch.float64) / sum(left)
        torch.testing.assert_close(law, torch.tensor(p, dtype=torch.float64))


def test_what_replaces_a_token_follows_the_residual() -> None:
    p, q = laws("random", V, 3)
    n = 40_000
    noise = torch.Generator().manual_seed(5)
    target = torch.tensor([p, p]).double().log().expand(n, 2, V)
    draft = torch.tensor([q]).double().log().expand(n, 1, V)
    tokens = torch.multinomial(torch.tensor(q), n, replacement=True, generator=noise)[:, None]
    gumbel = -torch.rand(n, V, generator=noise, dtype=torch.float64).log().neg().log()
    found = verify.reject(target, draft, tokens, torch.rand(n, 1, generator=noise, dtype=torch.float64), gumbel)
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
def test_a_batch_is_its_rows(seed: int, batch: int, steps: int, dtype: torch.dtype) -> None:
    target, draft, tokens, coins, noise = chain(seed, batch, steps, dtype)
    rows = noise[:, None].expand(-1, steps + 1, -1)
    together = (
        verify.greedy(target, tokens),
        verify.match(target, tokens, rows),
        verify.reject(target, draft, tokens, coins, noise),
    )
    for b in range(batch):
        one = slice(b, b + 1)
        alone = (
            verify.greedy(target[one], tokens[one]),
            verify.match(target[one], tokens[one], rows[one]),
            verify.reject(target[one], draft[one], tokens[one], coins[one], noise[one]),
        )
        for single, every in zip(alone, together):
            for name in ("accepted", "count", "bonus"):
                assert torch.equal(getattr(single, name)[0], getattr(every, name)[b])
    for found in together:
        assert torch.equal(found.accepted.sum(-1), found.count)
        here = target.gather(1, found.count[:, None, None].expand(-1, 1, V)).squeeze(1)
        assert (here.gather(1, found.bonus[:, None]) > -math.inf).all(), "a forbidden token"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_decides_as_float64_does(dtype: torch.dtype) -> None:
    target, draft, tokens, coins, noise = chain(4, 500, 3, dtype)
    low = verify.reject(target, draft, tokens, coins, noise)
    high = verify.reject(target.double(), draft.double(), tokens, coins, noise)
    assert (low.count == high.count).double().mean() > 0.99 and (low.bonus == high.bonus).double().mean() > 0.99


def test_match_is_plain_decoding_and_greedy_its_limit() -> None:
    target, _, _, _, noise = chain(9, 6, 3)
    rows = noise[:, None].expand(-1, 4, -1)
    best = (target + rows).argmax(-1)
    drafts = best[:, :3].clone()
    drafts[1, 0], drafts[2, 1], drafts[3, 2] = V - 1 - best[1, 0], V - best[2, 1] - 2, (best[3, 2] + 1) % V
    found = verify.match(target, drafts, rows)
    for b in range(6):
        text, _ = verify.walk([0, *drafts[b].tolist()], [-1, 0, 1, 2], best[b].tolist())
        assert int(found.count[b]) == len(text) - 1 and int(found.bonus[b]) == int(best[b, len(text) - 1])
    assert torch.equal(verify.greedy(target, drafts).count, verify.match(target, drafts, 0 * noise[0, 0]).count)
