"""The arithmetic of a population: its noise, its weights, its resampling."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftspec.backends.reference import resampling
from swiftspec.backends.reference.noise import counters, noise_bits, row_bits, row_key
from swiftspec.smc import weights
from swiftspec.smc.noise_streams import ParticleStreams, StreamPurpose, stream_of
from tests.support.cases import examples

POWERS = [0.5, 1.0, 2.0]


@settings(max_examples=examples(30))
@given(seed=st.integers(0, 2**64 - 1), clock=st.integers(0, 2**31 - 1))
def test_noise_equals_that_of_every_backend(seed: int, clock: int) -> None:
    streams = ParticleStreams(1, 3, "cpu")
    streams.seed(0, seed)
    clocks = torch.tensor([[clock, clock + 1]])
    for purpose, keys, at in zip(
        (StreamPurpose.DRAFT, StreamPurpose.BONUS), streams.round_keys(clocks), clocks[0].tolist(), strict=True
    ):
        want = [noise_bits(seed, stream_of(particle, purpose), [at], range(17)) for particle in range(3)]
        assert torch.equal(row_bits(keys, counters(range(17))), torch.cat(want))
    bits = [
        int(noise_bits(seed, stream_of(i, StreamPurpose.COIN), [clock], range(1)).to(torch.int64)) for i in range(3)
    ]
    assert streams.uniforms(torch.tensor([[clock]]))[0, :, 0].tolist() == [(b + 0.5) / 2**32 for b in bits]


def test_no_two_particles_or_purposes_share_noise() -> None:
    """At one clock tick every stream has its own key: the hash is a bijection."""
    keys = {row_key(7, stream_of(i, p), 99) for i in range(64) for p in StreamPurpose}
    assert len(keys) == 64 * len(StreamPurpose) and row_key(7, 0, 99) not in keys
    streams = ParticleStreams(1, 1, "cpu")
    streams.seed(0, 7)
    tick = torch.tensor([4])
    drawn = {float(streams.resampling(torch.tensor([0]))), streams.pick(0), float(streams.uniforms(tick[None]))}
    assert len(drawn) == 3 and all(0 < u < 1 for u in drawn)


@pytest.mark.parametrize("power", POWERS)
def test_the_terms_match_the_distribution(power: float) -> None:
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    p = logits.softmax(-1)
    whole, tokens = logits.logsumexp(-1), torch.tensor([0, 5, 2, 2])
    torch.testing.assert_close(weights.log_prob(logits, whole, tokens), p[torch.arange(4), tokens].log())
    torch.testing.assert_close(weights.log_normaliser(logits, whole, power), (p**power).sum(-1).log())


@pytest.mark.parametrize("power", POWERS)
def test_rejection_sampling_gives_the_power_target_for_any_draft(power: float) -> None:
    """Summed, not sampled: q(x) min(1, b/q) + (rejected mass) x residual = b."""
    noise = torch.Generator().manual_seed(2)
    target, draft = (2 * torch.randn(5, 7, generator=noise, dtype=torch.float64) for _ in range(2))
    b, q = (power * target).softmax(-1), draft.softmax(-1)
    fine = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000
    accepted = torch.empty_like(b)
    for token in range(7):
        proposed = torch.full((5, len(fine)), token)
        p, d = (logits[:, None].expand(-1, len(fine), -1) for logits in (target, draft))
        accepted[:, token] = weights.accept_drafts(p, d, proposed, fine.expand(5, -1), power).double().mean(1)
    rejected = (q * (1 - accepted)).sum(-1, keepdim=True)
    law = q * accepted + rejected * weights.log_residual(target, draft, power).softmax(-1)
    torch.testing.assert_close(law, b, atol=2e-4, rtol=0)


def test_an_empty_residual_is_replaced_by_the_target() -> None:
    logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    torch.testing.assert_close(weights.log_residual(logits, logits, 1.0).softmax(-1), logits.softmax(-1))


def test_probability_mass_inside_the_filters() -> None:
    draft = torch.tensor([0.5, 0.3, 0.2]).log()
    target = torch.tensor([0.0, -math.inf, 1.0])
    assert float(weights.log_mass_inside(target, draft)) == pytest.approx(math.log(0.7))


def test_effective_sample_size() -> None:
    for shares, want in (([1 / 8] * 8, 8), ([1, 0, 0], 1), ([0.5, 0.25, 0.25], 1 / (0.25 + 2 / 16))):
        assert float(resampling.effective_sample_size(torch.tensor(shares, dtype=torch.float64))) == pytest.approx(want)


log_weights = st.lists(st.floats(-8, 8), min_size=1, max_size=12)


@settings(max_examples=examples(20))
@given(values=log_weights)
def test_resampling_is_unbiased(values: list[float]) -> None:
    """Averaged over its only random number, on a fine grid, the number of copies of i is N w_i. It never differs from
    that by one or more."""
    shares = torch.tensor(values, dtype=torch.float64).softmax(0)
    want = len(values) * shares
    copies, grid = torch.zeros(len(values), dtype=torch.float64), 200
    for step in range(grid):
        source = resampling.systematic_resample(shares, torch.tensor((step + 0.5) / grid, dtype=torch.float64))
        got = torch.bincount(source, minlength=len(values))
        assert ((got - want).abs() < 1 + 1e-9).all()
        copies += got / grid
    torch.testing.assert_close(copies, want, atol=2 / grid, rtol=0)


@settings(max_examples=examples(60))
@given(values=log_weights, uniform=st.floats(0.001, 0.999))
def test_surviving_particles_keep_their_rows(values: list[float], uniform: float) -> None:
    shares = torch.tensor(values, dtype=torch.float64).softmax(0)
    source = resampling.systematic_resample(shares, torch.tensor(uniform, dtype=torch.float64)).tolist()
    assert all(source[row] == row for row in source)


def test_uniform_weights_cause_no_resampling() -> None:
    for count in (1, 3, 7, 64):
        flat = torch.full((count,), -3.0, dtype=torch.float64).softmax(0)
        for uniform in (1e-9, 0.3, 1 - 1e-9):
            source = resampling.systematic_resample(flat, torch.tensor(uniform, dtype=torch.float64))
            assert source.tolist() == list(range(count))


@settings(max_examples=examples(40))
@given(parts=st.lists(st.integers(1, 40), min_size=1, max_size=9), count=st.integers(1, 10))
@pytest.mark.slow
def test_a_few_texts_represent_the_population(parts: list[int], count: int) -> None:
    """Over all uniform numbers the mean weight of each is its share; `count` of them are left, and heavy ones are
    unchanged."""
    shares = torch.tensor(parts, dtype=torch.float64) / sum(parts)
    many = 4 * sum(parts)  # a multiple of 1 / many is never where a text begins, in the middle of two
    drawn = [weights.thin_weights(shares, count, (i + 0.5) / many) for i in range(many)]
    assert all(int((each > 0).sum()) == min(count, len(parts)) for each in drawn)
    fine = 400 // many + 1
    mean = torch.stack(
        [weights.thin_weights(shares, count, (i + 0.5) / (fine * many)) for i in range(fine * many)]
    ).mean(0)
    torch.testing.assert_close(mean, shares, atol=0.01, rtol=0)
    level = min(float(each[each > 0].min()) for each in drawn)
    for share, *seen in zip(shares.tolist(), *(each.tolist() for each in drawn), strict=True):
        own = share > level + 1e-12
        assert all(weight == share for weight in seen) if own or count >= len(parts) else len({*seen} - {0.0}) <= 1
    assert all(float(each.sum()) == pytest.approx(1) for each in drawn)


def test_sampling_one_text_follows_the_shares() -> None:
    shares = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    for uniform, row in ((0.1, 0), (0.21, 1), (0.69, 1), (0.71, 2), (0.999999, 2)):
        assert weights.thin_weights(shares, 1, uniform).tolist() == [float(at == row) for at in range(3)]


def test_the_returned_particle_follows_the_weights() -> None:
    uniforms = [(i + 0.5) / 1000 for i in range(1000)]
    logs = [5 + math.log(share) for share in (0.2, 0.5, 0.3)]
    picks = [weights.pick_particle(logs, uniform)[0] for uniform in uniforms]
    assert [picks.count(row) for row in range(3)] == [200, 500, 300]
    assert weights.pick_particle(logs, 0.1)[1] == pytest.approx([0.2, 0.5, 0.3])
    assert {weights.pick_particle([-math.inf, -math.inf, 0.0], uniform)[0] for uniform in uniforms} == {2}
