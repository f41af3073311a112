"""The verification of chains on a device, run on a CPU under sanitizers, equals backends/reference/chains.py in
float64."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import numpy as np
import pytest
import torch

from swiftspec.backends.reference.chains import ChainVerdict
from tests.native.test_cuda_code import AMPERE, COMPILER, HOPPER, build
from tests.support.chains import Chains, check_equal, make_chains, matched, rejected

pytestmark = [pytest.mark.slow, pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")]
PADDING = 3  # columns that belong to no row


@pytest.fixture(scope="module", params=[HOPPER, AMPERE])
def driver(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> str:
    return build(tmp_path_factory.mktemp("drivers"), "chains_driver", arch=request.param)


def launch(
    driver: str, c: Chains, *, draft: bool, keys: bool, temperature: float = 1.0, bias: torch.Tensor | None = None
) -> ChainVerdict:
    """The verdict of tests/native/chains_driver.cpp. Padding is a logit that would win."""
    (batch, steps), vocab = c.tokens.shape, c.target.shape[-1]
    wide = c.target.dtype == torch.float32
    numbers = [batch, steps, vocab, vocab + PADDING, draft, keys, bias is not None, wide, 5]
    header = np.array(numbers, dtype=np.int64)
    logits = [torch.nn.functional.pad(x, (0, PADDING), value=1e9) for x in (c.target, c.draft)[: 1 + draft]]
    raw = [x.contiguous().view(torch.int32 if wide else torch.int16).numpy() for x in logits]
    rest = [c.tokens.numpy(), *([c.uniforms.numpy()] if draft else []), *([c.keys.numpy()] if keys else [])]
    rest += [np.array([temperature], np.float32), *([] if bias is None else [bias.numpy()])]
    sent = b"".join(np.ascontiguousarray(x).tobytes() for x in (header, *raw, *rest))
    done = subprocess.run([driver], input=sent, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:].decode()
    accepted = np.frombuffer(done.stdout, np.uint8, batch * steps).reshape(batch, steps)
    counts = np.frombuffer(done.stdout, np.int64, offset=batch * steps).reshape(2, batch)
    assert accepted.max(initial=0) <= 1
    return ChainVerdict(torch.tensor(accepted == 1), torch.tensor(counts[0]), torch.tensor(counts[1]))


SHAPES = [(4, 0, 7), (5, 1, 1), (40, 3, 7), (6, 5, 700), (3, 4, 5003), (4, 40, 33), (2, 2, 40_000)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("batch", "steps", "vocab"), SHAPES)
def test_verdicts_equal_the_reference(driver: str, batch: int, steps: int, vocab: int, dtype: torch.dtype) -> None:
    for seed, apart in ((1, 1.0), (2, 0.05)):
        c = make_chains(seed, batch, steps, vocab, dtype, apart)
        greedy, match, reject = matched(c, noisy=False), matched(c, noisy=True), rejected(c)
        assert float(match[1].double().mean()) > 0.6 and float(reject[1].double().mean()) > 0.6
        check_equal(launch(driver, c, draft=False, keys=False), *greedy)
        check_equal(launch(driver, c, draft=False, keys=True), *match)
        check_equal(launch(driver, c, draft=True, keys=True), *reject)


def test_bias_and_temperature(driver: str) -> None:
    c = make_chains(8, 30, 4, 700, torch.float32)
    bias = torch.randn(700, generator=torch.Generator().manual_seed(1))
    want, sure = matched(c, noisy=True, temperature=0.7, bias=bias)
    assert float(sure.double().mean()) > 0.6
    check_equal(launch(driver, c, draft=False, keys=True, temperature=0.7, bias=bias), want, sure)


def test_every_end_of_a_chain_occurs(driver: str) -> None:
    """Chains of 35 tokens whose target likes the first n of them and forbids the next."""
    c = make_chains(3, 36, 35, 9, torch.float32)
    for n in range(36):
        for k in range(35):
            token = int(c.tokens[n, k])
            c.target[n, k, token] = 40 if k < n else -torch.inf
    for found in (launch(driver, c, draft=True, keys=True), launch(driver, c, draft=False, keys=False)):
        assert found.count.tolist() == list(range(36))
        assert torch.equal(found.accepted, torch.arange(35) < torch.arange(36)[:, None])
    want, sure = rejected(c)
    check_equal(launch(driver, c, draft=True, keys=True), want, sure)


def test_equal_and_disjoint_distributions(driver: str) -> None:
    """p = q accepts everything; with disjoint supports nothing is accepted, and the bonus token is drawn from p."""
    c = make_chains(4, 30, 3, 12, torch.float32)
    same = replace(c, target=torch.cat([c.draft, c.target[:, :1]], 1), uniforms=c.uniforms.clamp_max(0.999))
    assert launch(driver, same, draft=True, keys=True).count.tolist() == [3] * 30
    apart = replace(c, target=c.target.clone(), draft=c.draft.clone(), tokens=c.tokens.clone())
    apart.target[..., :6], apart.draft[..., 6:] = -torch.inf, -torch.inf
    apart.draft[..., 0] = 1
    apart.tokens[:] = 0
    found = launch(driver, apart, draft=True, keys=True)
    assert not found.accepted.any() and not found.count.any()
    bonus = (apart.target[:, 0].double() + c.noise[:, 0]).argmax(-1)
    assert torch.equal(found.bonus, bonus) and int(bonus.min()) >= 6


@pytest.mark.parametrize("wrong", [torch.nan, -torch.inf, torch.inf])
@pytest.mark.parametrize("position", [0, 2, 3])
def test_logits_that_are_not_finite_have_no_bonus_token(driver: str, wrong: float, position: int) -> None:
    """All logits of a position, or a single NaN. Tokens before the position are accepted."""
    c = make_chains(6, 20, 3, 40, torch.float32, 0.0)
    target = torch.cat([c.draft, c.target[:, :1]], 1)
    target[:, position] = wrong
    rest = replace(c, target=target, uniforms=c.uniforms.clamp_max(0.999))
    for draft in (True, False):
        tokens = c.tokens if draft else torch.cat([(target + c.noise).argmax(-1)], -1)[:, :3]
        found = launch(driver, replace(rest, tokens=tokens.clamp_max(39)), draft=draft, keys=True)
        assert found.count.tolist() == [position] * 20 and found.bonus.tolist() == [-1] * 20
    one = replace(c, target=c.target.clone())
    one.target[:, 0, 17] = torch.nan
    assert launch(driver, one, draft=False, keys=True).bonus.tolist() == [-1] * 20


def test_the_first_of_equal_logits_is_chosen(driver: str) -> None:
    c = make_chains(5, 20, 4, 3000, torch.float32)
    rough = replace(c, target=c.target.round())
    want, sure = matched(rough, noisy=False)
    check_equal(launch(driver, rough, draft=False, keys=False), want, sure)
