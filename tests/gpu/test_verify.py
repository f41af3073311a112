"""Chains verified in one launch, against smc/chain_verification.py in float64 on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swiftspec.chains.cuda import ChainVerifier
from tests.gpu.device import DEVICE, EMULATED, captured, most, needs_kernels
from tests.support.chains import Chains, agree, chains, matched, rejected

pytestmark = [pytest.mark.gpu, needs_kernels]
BF16 = torch.bfloat16


def on_device(c: Chains) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Target and draft in rows that are padded with what would win."""
    vocab = c.target.shape[-1]
    target, draft = (torch.nn.functional.pad(x, (0, 5), value=1e9).to(DEVICE)[..., :vocab] for x in (c.target, c.draft))
    return target, draft, c.tokens.to(DEVICE), c.coins.to(DEVICE), c.keys.to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize(
    ("batch", "steps", "vocab"),
    most([(4, 0, 7), (3, 2, 7), (1, 35, 33), (2, 3, 700), (40, 3, 7), (4, 40, 33), (16, 5, 5003), (2, 8, 128256)], 4),
)
def test_as_the_reference_time_after_time(batch: int, steps: int, vocab: int, dtype: torch.dtype) -> None:
    """Always by the same object, whose scratch the launches before must have left as it was."""
    ours = ChainVerifier(batch, steps, DEVICE)
    for seed, apart in ((1, 1.0), (2, 0.05)):
        c = chains(seed, batch, steps, vocab, dtype, apart)
        target, draft, tokens, coins, keys = on_device(c)
        greedy, match, reject = matched(c, noisy=False), matched(c, noisy=True), rejected(c)
        for _ in range(1 if EMULATED else 3):
            agree(ours.greedy(target, tokens), *greedy)
            agree(ours.match(target, tokens, keys), *match)
            agree(ours.reject(target, draft, tokens, coins, keys), *reject)


def test_run_to_run_and_in_a_graph() -> None:
    batch, steps, vocab, times = (2, 2, 301, 5) if EMULATED else (8, 5, 128256, 20)
    c = chains(7, batch, steps, vocab, torch.float32)
    given, ours = on_device(c), ChainVerifier(batch, steps, DEVICE)
    first = ours.reject(*given)
    for _ in range(times):
        assert all(torch.equal(a, b) for a, b in zip(ours.reject(*given), first, strict=True))
    replay = captured(lambda: ours.reject(*given))
    for _ in range(3):
        found = replay()
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True))
        found[2].fill_(-1)


def test_nonsense_is_refused() -> None:
    target, draft, tokens, coins, keys = on_device(chains(1, 2, 3, 50, torch.float32))
    ours = ChainVerifier(2, 3, DEVICE)
    elsewhere = target.to("meta")
    for bad in (target[:1], target.double(), elsewhere, target.transpose(0, 1)):
        with pytest.raises(ValueError, match="target: expected") as refused:
            ours.greedy(bad, tokens)
        assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="draft: expected"):
        ours.reject(target, draft.bfloat16(), tokens, coins, keys)
    with pytest.raises(ValueError, match="keys: expected"):
        ours.match(target, tokens, keys.long())
