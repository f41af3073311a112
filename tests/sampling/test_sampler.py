"""Noise, filters and penalties compared with formulas written out in Python."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftspec import _C
from swiftspec.backends.reference.noise import gumbel, noise_bits, row_key
from swiftspec.params import SamplingParams
from swiftspec.sampling.filters import apply_filters
from swiftspec.sampling.logits_params import LogitsParams
from swiftspec.sampling.noise import PositionNoise
from swiftspec.sampling.sampler import History, Sampler

V = 50


def test_noise_has_its_golden_values() -> None:
    """The integers are part of the contract: other backends and later versions must give the same text."""
    assert row_key(2**40 + 5, 3, 77) == 2844048377
    assert noise_bits(2**40 + 5, 3, [77], range(4)).tolist() == [[3130501025, 2880942344, 4270514305, 2775747551]]


@given(
    st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4)
)
def test_noise_equals_that_of_the_native_extension(seed: int, stream: int, positions: list[int]) -> None:
    ours = noise_bits(seed, stream, positions, range(V)).numpy()
    where, native = np.array(positions, dtype=np.int32), np.zeros((len(positions), V), dtype=np.uint32)
    _C.noise_bits(seed, stream, where, native)
    assert (ours == native).all()
    bits = int(native[0, 0])
    exact = gumbel(torch.tensor([bits], dtype=torch.uint32), torch.float64)
    assert float(exact) == pytest.approx(-math.log(-math.log1p(-min((bits + 0.5) * 2.0**-32, 1 - 2.0**-24))), abs=1e-12)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**31 - 1))
def test_noise_depends_on_every_part_of_its_key(seed: int, stream: int, position: int) -> None:
    base = noise_bits(seed, stream, [position], range(V))
    assert base.dtype == torch.uint32
    for other in ((seed ^ 1, stream, position), (seed ^ 1 << 40, stream, position), (seed, stream ^ 1, position)):
        assert not torch.equal(base, noise_bits(*other[:2], [other[2]], range(V)))
    assert not torch.equal(base, noise_bits(seed, stream, [position + 1], range(V)))


def test_noise_is_uniform_and_uncorrelated() -> None:
    bits = noise_bits(7, 0, range(400), range(500)).double() / 2**32
    assert abs(bits.mean() - 0.5) < 0.003 and abs(bits.var() - 1 / 12) < 0.001
    centred = bits - bits.mean()
    assert abs((centred[1:] * centred[:-1]).mean()) < 0.001 and abs((centred[:, 1:] * centred[:, :-1]).mean()) < 0.001


def test_gumbel_is_exact_at_both_ends() -> None:
    bits = torch.tensor([0, 1, 2**31, 2**32 - 1], dtype=torch.uint32)
    expected = [-math.log(-math.log1p(-min((b + 0.5) / 2**32, 1 - 2**-24))) for b in bits.tolist()]
    for dtype in (torch.float32, torch.float64):
        torch.testing.assert_close(gumbel(bits, dtype).double(), torch.tensor(expected).double(), rtol=1e-6, atol=1e-6)


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 40)), min_size=1, max_size=6))
def test_blocks_of_noise_equal_single_rows(keys: list[tuple[int, int]]) -> None:
    noise = PositionNoise(3, "cpu")
    for low, span in keys:
        positions = torch.tensor([low, low + span])
        alone = gumbel(noise_bits(3, 0, positions.tolist(), range(V)), torch.float64)
        for tokens in (range(V), range(V), range(20, 33), range(7, 7)):
            block, rows = noise.rows(positions, tokens, torch.float64)
            assert torch.equal(block[rows], alone[:, tokens.start : tokens.stop])


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0]])
    sampler = Sampler(SamplingParams(temperature=0.7, seed=5), [0], 4, "cpu")
    n = 20_000
    tokens = sampler.draw(logits.expand(n, 4), None, torch.arange(n))
    observed = torch.bincount(tokens, minlength=4).double()
    expected = (logits[0].double() / 0.7).softmax(-1) * n
    assert ((observed - expected) ** 2 / expected).sum() < 16.3  # chi-square, 3 degrees of freedom, 0.1 %


def test_draws_depend_on_position_not_on_the_row() -> None:
    sampler = Sampler(SamplingParams(seed=11), [0], V, "cpu")
    logits = torch.randn(1, V, dtype=torch.float64).expand(4, V)
    moved = sampler.draw(logits, None, torch.tensor([9, 4, 9, 7]))
    again = Sampler(SamplingParams(seed=11), [0], V, "cpu").draw(logits[:1], None, torch.tensor([9]))
    assert moved[0] == moved[2] == again[0]


def naive_filter(logits: torch.Tensor, p: SamplingParams) -> torch.Tensor:
    x = (logits / p.temperature).tolist()
    allowed = set(range(len(x)))
    best = max(x)
    allowed = {t for t in allowed if x[t] - best >= (math.log(p.min_p) if p.min_p else -math.inf)}
    if p.top_k > 0:
        allowed = set(sorted(allowed, key=lambda t: -x[t])[: p.top_k])
    total = sum(math.exp(x[t] - best) for t in allowed)
    mass, nucleus = 0.0, set()
    for t in sorted(allowed, key=lambda t: -x[t]):
        if p.top_p < 1 and mass >= p.top_p:
            break
        nucleus.add(t)
        mass += math.exp(x[t] - best) / total
    return torch.tensor([x[t] if t in nucleus else -math.inf for t in range(len(x))], dtype=logits.dtype)


@settings(deadline=None)
@given(
    st.integers(0, 10_000),
    st.floats(0.2, 2.0),
    st.sampled_from([0, 1, 5, 49, 60]),
    st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    st.sampled_from([0.0, 0.05, 0.5]),
)
def test_filters(seed: int, temperature: float, k: int, p: float, m: float) -> None:
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    params = SamplingParams(temperature=temperature, top_k=k, top_p=p, min_p=m)
    shaped = Sampler(params, [0], V, "cpu").process_logits(logits, None)
    for row, out in zip(logits, shaped, strict=True):
        torch.testing.assert_close(out, naive_filter(row, params))


TOP_P = LogitsParams("cpu")
TOP_P.load(SamplingParams(top_p=0.9), noisy=True)


def test_top_p_considers_more_than_its_first_256_candidates() -> None:
    logits = torch.zeros(1, 1000, dtype=torch.float64) - torch.arange(1000) * 1e-4
    kept = apply_filters(logits, TOP_P)
    assert torch.isfinite(kept).sum() > 850
    torch.testing.assert_close(kept, naive_filter(logits[0], SamplingParams(top_p=0.9))[None])


def test_top_p_over_the_whole_row_reads_no_value() -> None:
    logits = 3 * torch.randn(4, 1000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.equal(apply_filters(logits, TOP_P, num_candidates=1000), apply_filters(logits, TOP_P))
    nowhere, top_p = logits.to("meta"), LogitsParams("meta")
    assert apply_filters(nowhere, top_p, num_candidates=1000).shape == (4, 1000)
    with pytest.raises(RuntimeError):
        apply_filters(nowhere, top_p)


@given(st.lists(st.integers(0, V - 1), min_size=1, max_size=9), st.lists(st.integers(0, V - 1), max_size=9), st.data())
def test_penalties_follow_the_path(prompt: list[int], output: list[int], data: st.DataObject) -> None:
    paths = data.draw(st.lists(st.lists(st.integers(0, V - 1), max_size=4), min_size=1, max_size=3))
    params = SamplingParams(
        temperature=0,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=-0.2,
        logit_bias={3: 2.0, 7: -5.0},
    )
    sampler = Sampler(params, prompt, V, "cpu")
    for token in output:
        sampler.observe([token])
    logits = torch.randn(len(paths), V + 3, dtype=torch.float64)  # three padded rows of the head
    shaped = sampler.process_logits(logits, paths)
    for row, path in enumerate(paths):
        for token in range(V):
            value = float(logits[row, token]) + {3: 2.0, 7: -5.0}.get(token, 0.0)
            count = [*output, *path].count(token)
            if token in prompt or count:
                value = value / 1.3 if value > 0 else value * 1.3
            value -= -0.2 * count + 0.4 * (count > 0)
            assert float(shaped[row, token]) == pytest.approx(value, abs=1e-6)
    assert shaped.shape == (len(paths), V)


def test_history_counts_repeated_tokens() -> None:
    history = History([1], V, "cpu")
    history.observe([2, 2, 3])
    counts = history.counts([[2, 4, 4], []])
    assert counts[0, [2, 3, 4]].tolist() == [3, 1, 2] and counts[1, [2, 3, 4]].tolist() == [2, 1, 0]


def test_children_are_ranked_by_the_targets_noise_when_coupled() -> None:
    """With q = p the best coupled child is the target's own token, at any temperature."""
    logits = torch.randn(6, V, dtype=torch.float64)
    sampler = Sampler(SamplingParams(temperature=1.2, seed=9), [0], V, "cpu")
    positions = torch.arange(20, 26)
    drawn = sampler.draw(logits, None, positions)
    tokens, logprobs = sampler.children(logits, None, positions, k=4, coupled=True, tau=0.5)
    assert torch.equal(tokens[:, 0], drawn) and (logprobs <= 0).all()
    tokens, logprobs = sampler.children(logits, None, positions, k=4)
    expected = (logits / 1.2).log_softmax(-1).topk(4)
    assert torch.equal(tokens, expected.indices)
    torch.testing.assert_close(logprobs, expected.values)


def test_a_draft_with_nan_logits_has_dead_children() -> None:
    logits = torch.full((2, V), float("nan"))
    logits[1] = torch.randn(V)
    sampler = Sampler(SamplingParams(temperature=0), [0], V, "cpu")
    _, logprobs = sampler.children(logits, None, torch.arange(2), k=4)
    assert (logprobs[0] == -math.inf).all() and torch.isfinite(logprobs[1]).all()
