"""Noise, draws and children: the native operators against the reference, and both against float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cpu import cpu as host
from swiftspec.backends.reference import noise, reference
from swiftspec.backends.reference.sampling import Scores
from swiftspec.params import FILTERS, SamplingParams
from swiftspec.sampling import filters
from swiftspec.sampling.logits_params import LogitsParams

U32 = 2**32 - 1


def gumbel_of(bits: np.ndarray) -> np.ndarray:
    bits, out = np.ascontiguousarray(bits), np.empty(len(bits), dtype=np.float32)
    _C.gumbel_of(bits, out)
    return out


def exact_gumbel(bits: np.ndarray) -> np.ndarray:
    """Gumbel noise of the float32 uniform of noise.h, in float64."""
    v = np.minimum((bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1 - 2.0**-24))
    return -np.log(-np.log1p(-v.astype(np.float64)))


def check_gumbel(bits: np.ndarray) -> None:
    """Within 4e-7 relative to max(1, |noise|): an error of a few ulp."""
    want = exact_gumbel(bits)
    assert (np.abs(gumbel_of(bits) - want) <= 4e-7 * np.maximum(np.abs(want), 1)).all()


def test_noise_is_accurate_everywhere(level: str) -> None:
    ends = np.arange(70_001, dtype=np.uint32)
    for bits in (ends, np.uint32(U32) - ends, np.arange(0, U32, 4099, dtype=np.uint32)):
        check_gumbel(bits)
    for power in range(1, 32):
        around = np.arange(-300, 300, dtype=np.int64) + 2**power
        check_gumbel(np.clip(around, 0, U32).astype(np.uint32))


@pytest.mark.slow
def test_noise_is_accurate_and_monotonic_over_all_bits() -> None:
    """Over ascending runs of an eighth of all bits, the noise never rises by more than a rounding error."""
    last = math.inf
    for start in range(0, 2**32, 2**24):
        bits = np.arange(start, start + 2**21, dtype=np.int64).astype(np.uint32)
        if start == 2**32 - 2**24:
            bits += np.uint32(2**24 - 2**21)  # the last values
        ours = gumbel_of(bits)
        check_gumbel(bits[:: 7 if start else 1])
        steps = np.diff(ours, prepend=np.float32(min(last, 3e38)))
        assert (steps <= 2.5e-7 * np.maximum(np.abs(ours), 1)).all()
        last = float(ours[-1])


@pytest.mark.parametrize("vocab", [1, 15, 16, 4097])
def test_noise_rows(level: str, vocab: int) -> None:
    positions = torch.tensor([0, 1, 7, 2**31 - 1])
    got = host.gumbel_rows(2**63 + 5, 3, positions, range(vocab))
    bits = noise.noise_bits(2**63 + 5, 3, positions.tolist(), range(vocab)).numpy()
    assert np.array_equal(got.numpy(), gumbel_of(bits.ravel()).reshape(bits.shape)), "the documented integers"
    part = range(vocab // 3, vocab)
    assert torch.equal(host.gumbel_rows(2**63 + 5, 3, positions, part), got[:, part.start :])
    torch.testing.assert_close(got, reference.gumbel_rows(2**63 + 5, 3, positions, range(vocab)), rtol=1e-6, atol=1e-6)


def test_noise_is_the_same_at_every_isa_level() -> None:
    best, bits = _C.level(), np.random.default_rng(0).integers(0, 2**32, 100_003, dtype=np.uint32)
    made = [gumbel_of(bits) for name in _C.levels() if _C.use_level(name)]
    assert _C.use_level(best)
    assert all(np.array_equal(gumbel_of(bits), other) for other in made)


def random_scores(rows: int, vocab: int, seed: int, noisy: bool, biased: bool) -> tuple[Tensor, Scores]:
    """Logits [rows, vocab + 5], of which the last five columns are padding."""
    dice = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab + 5, generator=dice) * 4
    logits[:, vocab:] = 1e9
    if vocab > 8:
        logits[0, :vocab:2] = -torch.inf
    bias = torch.randn(vocab, generator=dice) if biased else None
    if not noisy:
        return logits, Scores(0.7 if biased else 1.0, bias)
    block = reference.gumbel_rows(seed, 0, torch.arange(3), range(vocab))
    return logits, Scores(1.3, bias, block, torch.randint(0, 3, (rows,), generator=dice), 0.7)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("vocab", [1, 5, 16, 33, 4096, 5003])
def test_draw_and_children(level: str, vocab: int, noisy: bool, biased: bool) -> None:
    logits, scores = random_scores(9, vocab, vocab, noisy, biased)
    assert torch.equal(host.draw(logits, vocab, scores), reference.draw(logits, vocab, scores))
    for k in {1, min(8, vocab), min(40, vocab)}:
        tokens, values = host.children(logits, vocab, k, scores)
        want_tokens, want = reference.children(logits, vocab, k, scores)
        torch.testing.assert_close(values, want, rtol=1e-5, atol=2e-5)
        finite = want > -torch.inf
        assert torch.equal(tokens[finite], want_tokens[finite])
        one = host.children(logits[3:4], vocab, k, Scores(scores.temperature, scores.bias))
        again = host.children(logits, vocab, k, Scores(scores.temperature, scores.bias))
        assert all(torch.equal(a[0], b[3]) for a, b in zip(one, again, strict=True)), "a row depends on itself"


def test_drawn_tokens_follow_the_softmax(level: str) -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, -torch.inf]]).repeat(40_000, 1)
    block = host.gumbel_rows(7, 0, torch.arange(40_000), range(5))
    drawn = host.draw(logits, 5, Scores(0.8, None, block, torch.arange(40_000)))
    shares = torch.bincount(drawn, minlength=5) / 40_000
    assert float((shares - (logits[0] / 0.8).softmax(0)).abs().max()) < 0.01


def test_other_dtypes_use_the_reference() -> None:
    logits, scores = random_scores(4, 50, 1, True, True)
    assert torch.equal(host.draw(logits.double(), 50, scores), reference.draw(logits.double(), 50, scores))
    values = host.children(logits.double(), 50, 4, scores)[1]
    assert values.dtype == torch.float64


@pytest.mark.parametrize(("vocab", "k"), [(1, 1), (5, 5), (16, 3), (33, 8), (4096, 8), (4096, 64)])
def test_log_top_k(level: str, vocab: int, k: int) -> None:
    scores = torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    if vocab > 8:
        scores[1, ::2] = -torch.inf
        scores[2, 3] = 1e9
    tokens, values = host.children(scores, scores.shape[1], k)
    torch.testing.assert_close(values, reference.children(scores, scores.shape[1], k)[1], rtol=1e-5, atol=1e-5)
    assert torch.equal(scores.gather(1, tokens), scores.topk(k).values)


def test_log_top_k_without_candidates(level: str) -> None:
    scores = torch.full((2, 20), torch.nan)
    scores[1] = -torch.inf
    tokens, values = host.children(scores, scores.shape[1], 4)
    assert not (values > -torch.inf).any() and ((tokens >= 0) & (tokens < 20)).all()
    tied, _ = host.children(torch.zeros(1, 20), 20, 4)
    assert tied.tolist() == [[0, 1, 2, 3]], "of equal scores the earlier tokens"


def test_invalid_arguments_are_refused() -> None:
    logits, noise = torch.zeros(2, 6), torch.zeros(1, 6)
    good: dict[str, Any] = {"logits": logits, "vocab": 6, "bias": None, "noise": None, "noise_rows": None}
    good |= {"temperature": 1.0, "tokens": torch.zeros(2, dtype=torch.int64)}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"temperature": 0.0}, "above 0"),
        ({"vocab": 0}, "fewer columns"),
        ({"vocab": 7}, "fewer columns"),
        ({"logits": torch.zeros(6, 2).t()}, "rows not contiguous"),
        ({"logits": torch.zeros(6).expand(2, 6)}, "overlap"),
        ({"logits": logits.double()}, r"expected float32\[\*, \*\] on cpu, got float64\[2, 6\]"),
        ({"logits": torch.zeros(3, 6)}, r"tokens: expected int64\[3\] on cpu, got int64\[2\]"),
        ({"bias": torch.zeros(5)}, r"bias: expected float32\[6\]"),
        ({"noise": noise}, "come together"),
        ({"noise": noise, "noise_rows": torch.tensor([0, 1])}, "not there"),
    ]
    for bad, message in cases:
        with pytest.raises(ValueError, match=message):
            _C.draw(**(good | bad))
    for k in (0, 7):
        with pytest.raises(ValueError, match="number of children must be between 1"):
            tokens, values = torch.zeros(2, k, dtype=torch.int64), torch.zeros(2, k)
            _C.children(**(good | {"tau": 1.0, "tokens": tokens, "values": values}))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("vocab", [1, 15, 16, 33, 4097])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_keyed_draws_equal_draws_with_precomputed_noise(level: str, vocab: int, spread: float) -> None:
    """Bitwise identical although most of the noise is never computed: for flat logits, where any token may win, and for
    peaked ones."""
    positions = torch.arange(64)
    keys = torch.tensor([noise.row_key(9, 40, p) for p in positions.tolist()], dtype=torch.uint32).view(torch.int32)
    logits = spread * torch.randn(64, vocab + 3, generator=torch.Generator().manual_seed(vocab))
    logits[:, vocab:] = 1e9
    if vocab > 1:
        logits[3, : vocab // 2] = -torch.inf
    bias = torch.randn(vocab, generator=torch.Generator().manual_seed(1))
    scores = Scores(0.7, bias, host.gumbel_rows(9, 40, positions, range(vocab)), torch.arange(64))
    tokens, values = host.draw_keyed(logits, vocab, keys, scores)
    assert torch.equal(tokens, host.draw(logits, vocab, scores))
    some = tokens >= 0
    assert torch.equal(values[some], host.log_probs(logits, vocab, tokens.clamp_min(0), scores)[some])
    theirs, log_probs = reference.draw_keyed(logits, vocab, keys, Scores(0.7, bias))
    assert (tokens == theirs).float().mean() > 0.95, "noise of the reference differs by 1e-6"
    torch.testing.assert_close(values[tokens == theirs], log_probs[tokens == theirs], rtol=1e-5, atol=2e-5)


def test_keyed_draws_without_a_token(level: str) -> None:
    logits = torch.zeros(4, 40)
    logits[0, 39], logits[1, 7], logits[2] = torch.nan, torch.inf, -torch.inf
    keys = torch.arange(4, dtype=torch.int32)
    for ops in (host, reference):
        tokens, values = ops.draw_keyed(logits, 40, keys)
        assert tokens[:3].tolist() == [-1, -1, -1] and 0 <= tokens[3] < 40
        assert values.isnan().tolist() == [True, True, True, False]
        assert (ops.draw_keyed(logits[:1], 39, keys[:1])[0] >= 0).all(), "beyond the vocabulary"


FILTER_CASES = [
    {"top_k": 1}, {"top_k": 20}, {"top_k": 300}, {"top_p": 0.9}, {"top_p": 0.999999}, {"top_p": 1e-6}, {"min_p": 0.05},
    {"top_k": 20, "top_p": 0.95}, {"min_p": 0.01, "top_p": 0.8}, {"top_k": 12, "top_p": 0.7, "min_p": 0.001},
]  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize("vocab", [1, 15, 16, 33, 4097])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_filtered_draws_equal_draws_from_filtered_logits(level: str, vocab: int, spread: float) -> None:
    """For flat logits, in which all tokens are tied, and for peaked ones."""
    positions, rows = torch.arange(32), 32
    keys = torch.tensor([noise.row_key(9, 40, p) for p in positions.tolist()], dtype=torch.uint32).view(torch.int32)
    logits = spread * torch.randn(rows, vocab + 3, generator=torch.Generator().manual_seed(vocab))
    logits[:, vocab:] = 1e9
    if vocab > 1:
        logits[3, : vocab // 2] = -torch.inf
    bias = torch.randn(vocab, generator=torch.Generator().manual_seed(1))
    gumbel = Scores(1.0, None, host.gumbel_rows(9, 40, positions, range(vocab)), torch.arange(rows))
    for values in FILTER_CASES:
        params = SamplingParams(temperature=0.7, **values)
        tokens = torch.empty(rows, dtype=torch.int64)
        _C.draw_filtered(logits, vocab, bias, 0.7, params.values_of(FILTERS), keys, tokens)
        whole, scores = (logits[:, :vocab] + bias) / 0.7, logits.clone()
        device_params = LogitsParams("cpu")
        device_params.load(params, noisy=True)
        kept = filters.apply_filters(whole, device_params)
        assert torch.equal(tokens, host.draw(kept, vocab, gumbel)), values
        _C.filter_scores(scores, vocab, bias, 0.7, params.values_of(FILTERS))
        assert torch.equal(tokens, host.draw(scores, vocab, gumbel)), values
        assert torch.equal(scores[:, vocab:], logits[:, vocab:]), "only the vocabulary is written"
        scores = scores[:, :vocab]
        if params.top_p == 0.999999:  # the reference adds probabilities in float32, which rounds the last ones away
            kept = whole.masked_fill(scores == -torch.inf, -torch.inf)
        assert torch.equal(scores, kept), values


def test_filtered_draws_without_a_token(level: str) -> None:
    logits, tokens = torch.zeros(4, 40), torch.empty(4, dtype=torch.int64)
    logits[0, 39], logits[1, 7], logits[2] = torch.nan, torch.inf, -torch.inf
    chosen = {"top_k": 3, "top_p": 0.9, "min_p": 0.0}
    _C.draw_filtered(logits, 40, None, 1.0, chosen, torch.arange(4, dtype=torch.int32), tokens)
    assert tokens[:3].tolist() == [-1, -1, -1] and 0 <= tokens[3] < 40
    scores = logits.clone()
    _C.filter_scores(scores, 40, None, 1.0, chosen)
    assert torch.equal(scores[:3].nan_to_num(nan=9.0), logits[:3].nan_to_num(nan=9.0)), "not filtered"


@pytest.mark.parametrize("vocab", [1, 15, 16, 33, 4097])
def test_log_probs(level: str, vocab: int) -> None:
    """Against float64, with and without bias. The noise of the scores is ignored."""
    for biased in (False, True):
        logits, scores = random_scores(5, vocab, vocab, noisy=True, biased=biased)
        tokens = torch.randint(vocab, (5,), generator=torch.Generator().manual_seed(3))
        got = host.log_probs(logits, vocab, tokens, scores)
        bias = 0 if scores.bias is None else scores.bias.double()
        exact = ((logits[:, :vocab].double() + bias) / scores.temperature).log_softmax(-1).gather(1, tokens[:, None])
        torch.testing.assert_close(got.double(), exact[:, 0], atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(reference.log_probs(logits, vocab, tokens, scores), got, atol=2e-5, rtol=1e-5)
    logits[1, vocab - 1] = torch.nan
    results = (host.log_probs(logits, vocab, tokens, scores), reference.log_probs(logits, vocab, tokens, scores))
    assert all(found.isnan().tolist() == [False, True, False, False, False] for found in results)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        host.log_probs(logits, vocab, tokens + vocab, scores)
