"""Chains verified in one launch, against spec/verify.py in float64 on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.ops.cuda_verify import ChainVerifier
from tests.chains import Chains, agree, chains, matched, rejected

READY = _C.cuda_built and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not READY, reason="no Hopper GPU, or no CUDA kernels")]
BF16 = torch.bfloat16


def on_device(c: Chains) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Target and draft in rows that are padded with what would win."""
    vocab = c.target.shape[-1]
    target, draft = (torch.nn.functional.pad(x, (0, 5), value=1e9).cuda()[..., :vocab] for x in (c.target, c.draft))
    return target, draft, c.tokens.cuda(), c.coins.cuda(), c.keys.cuda()


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize(
    ("batch", "steps", "vocab"), [(4, 0, 7), (40, 3, 7), (4, 40, 33), (16, 5, 5003), (2, 8, 128256)]
)
def test_as_the_reference_time_after_time(batch: int, steps: int, vocab: int, dtype: torch.dtype) -> None:
    """Always by the same object, whose scratch the launches before must have left as it was."""
    ours = ChainVerifier(batch, steps, "cuda")
    for seed, apart in ((1, 1.0), (2, 0.05)):
        c = chains(seed, batch, steps, vocab, dtype, apart)
        target, draft, tokens, coins, keys = on_device(c)
        greedy, match, reject = matched(c, noisy=False), matched(c, noisy=True), rejected(c)
        for _ in range(3):
            agree(ours.greedy(target, tokens), *greedy)
            agree(ours.match(target, tokens, keys), *match)
            agree(ours.reject(target, draft, tokens, coins, keys), *reject)


def test_run_to_run_and_in_a_graph() -> None:
    c = chains(7, 8, 5, 128256, torch.float32)
    given, ours = on_device(c), ChainVerifier(8, 5, "cuda")
    first = ours.reject(*given)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(ours.reject(*given), first, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ours.reject(*given)
    for _ in range(3):
        captured[2].fill_(-1)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, first, strict=True))


def test_nonsense_is_refused() -> None:
    target, draft, tokens, coins, keys = on_device(chains(1, 2, 3, 50, torch.float32))
    ours = ChainVerifier(2, 3, "cuda")
    for bad in (target[:1], target.double(), target.cpu(), target.transpose(0, 1)):
        with pytest.raises(ValueError, match="target must be") as refused:
            ours.greedy(bad, tokens)
        assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="draft must be"):
        ours.reject(target, draft.bfloat16(), tokens, coins, keys)
    with pytest.raises(ValueError, match="keys must be"):
        ours.match(target, tokens, keys.long())
