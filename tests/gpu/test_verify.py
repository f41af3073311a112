"""Chains verified in one launch equal backends/reference/chains.py in float64 on the CPU."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from swiftspec.backends.cuda import chains, cuda
from swiftspec.backends.reference.chains import ChainVerdict, accept_matching_prefix
from swiftspec.backends.reference.sampling import Scores
from tests.gpu.device import DEVICE, EMULATED, captured, most, needs_kernels
from tests.support.chains import Chains, check_equal, make_chains, matched, rejected

pytestmark = [pytest.mark.gpu, needs_kernels]
BF16 = torch.bfloat16
PLAIN = Scores()


def on_device(c: Chains) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Target and draft, in rows that are padded with logits that would win, then tokens, uniforms and keys."""
    vocab = c.target.shape[-1]
    target, draft = (torch.nn.functional.pad(x, (0, 5), value=1e9).to(DEVICE)[..., :vocab] for x in (c.target, c.draft))
    return target, draft, c.tokens.to(DEVICE), c.uniforms.to(DEVICE), c.keys.to(DEVICE)


def one_key(c: Chains) -> Chains:
    """`reject_chains` has one noise key per request."""
    return Chains(c.target, c.draft, c.tokens, c.uniforms, c.keys[:, :1].expand_as(c.keys))


def tensors(verdict: ChainVerdict) -> list[Tensor]:
    return [getattr(verdict, field.name) for field in fields(verdict)]


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize(
    ("batch", "steps", "vocab"),
    most([(4, 0, 7), (3, 2, 7), (1, 35, 33), (2, 3, 700), (40, 3, 7), (4, 40, 33), (16, 5, 5003), (2, 8, 128256)], 4),
)
def test_verdicts_equal_the_reference(batch: int, steps: int, vocab: int, dtype: torch.dtype) -> None:
    for seed, apart in ((1, 1.0), (2, 0.05)):
        c = one_key(make_chains(seed, batch, steps, vocab, dtype, apart))
        target, draft, tokens, uniforms, keys = on_device(c)
        greedy, match, reject = matched(c, noisy=False), matched(c, noisy=True), rejected(c)
        check_equal(chains.match_chains(target, vocab, tokens, None, PLAIN), *greedy)
        check_equal(chains.match_chains(target, vocab, tokens, keys.contiguous(), PLAIN), *match)
        check_equal(chains.reject_chains(target, draft, tokens, uniforms, keys[:, 0].contiguous()), *reject)


def test_matching_equals_keyed_draws() -> None:
    """Bitwise: with bias and temperature, and -1 where logits are not finite."""
    batch, steps, vocab = (4, 3, 301) if EMULATED else (16, 5, 128256)
    c = make_chains(9, batch, steps, vocab, torch.float32)
    c.target[0, 0], c.target[1, 1, 5] = -torch.inf, torch.nan
    target, _, _, _, keys = on_device(c)
    bias = torch.randn(vocab, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    scores = Scores(0.7, bias)
    best = cuda.draw_keyed(target.flatten(0, 1), vocab, keys.flatten(), scores)[0].view(batch, steps + 1)
    tokens = best[:, :steps].clamp_min(0)
    tokens[2:, -1] += 1
    tokens %= vocab
    want = accept_matching_prefix(best, tokens)
    found = chains.match_chains(target, vocab, tokens, keys, scores)
    assert all(torch.equal(a, b) for a, b in zip(tensors(found), tensors(want), strict=True))
    assert found.bonus.tolist()[:2] == [-1, -1] and found.count.tolist()[:2] == [0, 1]


def test_run_to_run_and_in_a_graph() -> None:
    batch, steps, vocab, times = (2, 2, 301, 5) if EMULATED else (8, 5, 128256, 20)
    target, draft, tokens, uniforms, keys = on_device(make_chains(7, batch, steps, vocab, torch.float32))
    first_keys = keys[:, 0].contiguous()

    def verify() -> list[Tensor]:
        return tensors(chains.reject_chains(target, draft, tokens, uniforms, first_keys))

    first = verify()
    for _ in range(times):
        assert all(torch.equal(a, b) for a, b in zip(verify(), first, strict=True))
    replay = captured(verify)
    for _ in range(3):
        found = replay()
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True))
        found[2].fill_(-1)


def test_invalid_arguments_are_refused() -> None:
    target, draft, tokens, uniforms, keys = on_device(make_chains(1, 2, 3, 50, torch.float32))
    for bad in (target[:1], target.double(), target.to("meta"), target.transpose(0, 1)):
        with pytest.raises(ValueError, match="target: expected") as refused:
            chains.match_chains(bad, 50, tokens, None, PLAIN)
        assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="draft: expected"):
        chains.reject_chains(target, draft.bfloat16(), tokens, uniforms, keys[:, 0])
    with pytest.raises(ValueError, match="keys: expected"):
        chains.match_chains(target, 50, tokens, keys.long(), PLAIN)
