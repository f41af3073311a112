"""The device's verification of chains, run on a CPU under sanitizers, against smc/chain_verification.py in float64."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.native.test_cuda_code import AMPERE, COMPILER, HOPPER, build
from tests.support.chains import Chains, agree, chains, matched, rejected

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
PADDING = 3  # columns that belong to no row


@pytest.fixture(scope="module", params=[HOPPER, AMPERE])
def driver(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> str:
    return build(tmp_path_factory.mktemp("drivers"), "verify_driver", arch=request.param)


def launch(driver: str, c: Chains, *, draft: bool, keys: bool) -> tuple[Tensor, Tensor, Tensor]:
    """What tests/native/verify_driver.cpp makes of them. Padding is a logit that would win."""
    (batch, steps), vocab = c.tokens.shape, c.target.shape[-1]
    wide = c.target.dtype == torch.float32
    header = np.array([batch, steps, vocab, vocab + PADDING, draft, keys, wide, 5], dtype=np.int64)
    logits = [torch.nn.functional.pad(x, (0, PADDING), value=1e9) for x in (c.target, c.draft)[: 1 + draft]]
    raw = [x.contiguous().view(torch.int32 if wide else torch.int16).numpy() for x in logits]
    rest = [c.tokens.numpy(), *([c.coins.numpy()] if draft else []), *([c.keys.numpy()] if keys else [])]
    sent = b"".join(np.ascontiguousarray(x).tobytes() for x in (header, *raw, *rest))
    done = subprocess.run([driver], input=sent, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:].decode()
    accepted = np.frombuffer(done.stdout, np.uint8, batch * steps).reshape(batch, steps)
    numbers = np.frombuffer(done.stdout, np.int64, offset=batch * steps).reshape(2, batch)
    assert accepted.max(initial=0) <= 1
    return torch.tensor(accepted == 1), torch.tensor(numbers[0]), torch.tensor(numbers[1])


SHAPES = [(4, 0, 7), (5, 1, 1), (40, 3, 7), (6, 5, 700), (3, 4, 5003), (4, 40, 33), (2, 2, 40_000)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("batch", "steps", "vocab"), SHAPES)
def test_as_the_reference(driver: str, batch: int, steps: int, vocab: int, dtype: torch.dtype) -> None:
    for seed, apart in ((1, 1.0), (2, 0.05)):
        c = chains(seed, batch, steps, vocab, dtype, apart)
        greedy, match, reject = matched(c, noisy=False), matched(c, noisy=True), rejected(c)
        assert float(match[1].double().mean()) > 0.6 and float(reject[1].double().mean()) > 0.6
        agree(launch(driver, c, draft=False, keys=False), *greedy)
        agree(launch(driver, c, draft=False, keys=True), *match)
        agree(launch(driver, c, draft=True, keys=True), *reject)


@pytest.mark.slow
def test_every_end_of_a_chain_occurs(driver: str) -> None:
    """Chains of 35 tokens whose target likes the first n of them and forbids the next."""
    c = chains(3, 36, 35, 9, torch.float32)
    for n in range(36):
        for k in range(35):
            token = int(c.tokens[n, k])
            c.target[n, k, token] = 40 if k < n else -torch.inf
    for found in (launch(driver, c, draft=True, keys=True), launch(driver, c, draft=False, keys=False)):
        assert found[1].tolist() == list(range(36))
        assert torch.equal(found[0], torch.arange(35) < torch.arange(36)[:, None])
    want, sure = rejected(c)
    agree(launch(driver, c, draft=True, keys=True), want, sure)


@pytest.mark.slow
def test_laws_at_their_edges(driver: str) -> None:
    """p = q keeps all; disjoint supports keep nothing and replace by p; a row of nothing says token 0."""
    c = chains(4, 30, 3, 12, torch.float32)
    same = Chains(torch.cat([c.draft, c.target[:, :1]], 1), c.draft, c.tokens, c.coins.clamp_max(0.999), c.keys)
    assert launch(driver, same, draft=True, keys=True)[1].tolist() == [3] * 30
    apart = Chains(c.target.clone(), c.draft.clone(), c.tokens.clone(), c.coins, c.keys)
    apart.target[..., :6], apart.draft[..., 6:] = -torch.inf, -torch.inf
    apart.draft[..., 0] = 1
    apart.tokens[:] = 0
    accepted, count, bonus = launch(driver, apart, draft=True, keys=True)
    assert not accepted.any() and not count.any()
    assert torch.equal(bonus, (apart.target[:, 0].double() + c.noise[:, 0]).argmax(-1)) and int(bonus.min()) >= 6
    nothing = Chains(torch.full_like(c.target, -torch.inf), c.draft, c.tokens, c.coins, c.keys)
    for draft in (False, True):
        assert launch(driver, nothing, draft=draft, keys=True)[2].tolist() == [0] * 30


@pytest.mark.slow
def test_of_equal_logits_the_first(driver: str) -> None:
    c = chains(5, 20, 4, 3000, torch.float32)
    rough = Chains(c.target.round(), c.draft, c.tokens, c.coins, c.keys)
    want, sure = matched(rough, noisy=False)
    agree(launch(driver, rough, draft=False, keys=False), want, sure)
