"""The exactness command: its statistics; exact configurations pass, inexact ones are detected."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.exactness import trial
from bench.exactness.__main__ import main
from bench.exactness.statistics import chi_square, compare, holm, pooled, survival, total_variation
from swiftspec.config import EngineConfig
from swiftspec.errors import DrafterLost
from swiftspec.llm_engine import LLMEngine
from swiftspec.messages import VerifyResult
from swiftspec.params import SamplingParams
from swiftspec.runtime.executors.eager import EagerExecutor
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.target_verifier import TargetVerifier
from tests.serve.test_serve import bare_environment, pair
from tests.support.biased_acceptance import LongestBranch
from tests.support.roles import replace_roles, verifier_of

__all__ = ["bare_environment", "pair"]  # fixtures

TABLE = [(3.841, 1, 0.05), (18.307, 10, 0.05), (10.828, 1, 0.001), (29.588, 10, 0.001), (149.449, 100, 0.001)]


@pytest.mark.parametrize(("square", "freedom", "p"), TABLE)
def test_survival_function_equals_the_tables(square: float, freedom: int, p: float) -> None:
    assert survival(square, freedom) == pytest.approx(p, rel=2e-3)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []


def test_rare_cells_are_pooled() -> None:
    a, b = pooled("x" * 20 + "y" * 3 + "z", "x" * 11 + "y" * 12 + "w" * 2)
    assert (a.tolist(), b.tolist()) == ([20, 3, 1], [11, 12, 2])
    assert chi_square(*pooled("x" * 9, "x" * 30)) == (0.0, 1.0)


def test_p_values_are_uniform_for_equal_distributions() -> None:
    noise = np.random.default_rng(3)
    law = noise.dirichlet(np.ones(12))
    found = [chi_square(noise.multinomial(900, law), noise.multinomial(400, law))[1] for _ in range(1500)]
    for level in (0.01, 0.05, 0.5):
        assert np.mean(np.array(found) < level) == pytest.approx(level, abs=4 * (level / 1500) ** 0.5)


def test_the_interval_contains_the_true_total_variation() -> None:
    noise = np.random.default_rng(5)
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.3, 0.3, 0.4])
    held = 0
    for seed in range(60):
        apart, low, high = total_variation(noise.multinomial(800, p), noise.multinomial(800, q), seed)
        assert low <= apart <= high
        held += low <= 0.2 <= high
    assert held >= 57
    assert compare("x", [1] * 90 + [2] * 90, [1] * 90 + [2] * 90).low == 0


def test_the_interval_contains_zero_for_equal_distributions() -> None:
    """For any number of cells: the more there are, the larger is the distance of two samples of one distribution."""
    noise = np.random.default_rng(6)
    for cells in (2, 100):
        law = noise.dirichlet(np.ones(cells))
        pairs = [noise.multinomial(1000, law, 2) for _ in range(15)]
        held = [total_variation(one, other)[1] == 0 for one, other in pairs]
        assert sum(held) >= 12


@pytest.mark.slow
def test_the_biased_verifier_is_detected_and_the_exact_one_passes(pair: list[str]) -> None:
    target, draft = Path(pair[1]), Path(pair[3])
    sampling = SamplingParams(temperature=0.7, top_k=3, max_tokens=3)
    plain = LLMEngine(target)
    tree = LLMEngine(target, draft, EngineConfig(verify="reject", draft_steps=2))
    assert trial.compare_samples(plain, tree, [5, 17, 40], sampling, 300, lambda: None).same
    runner = verifier_of(tree).runner
    replace_roles(
        tree,
        verifier=TargetVerifier(runner, [EagerExecutor(runner)], LongestBranch),
    )
    assert not trial.compare_samples(plain, tree, [5, 17, 40], sampling, 300, lambda: None).same


@pytest.mark.slow
def test_the_command(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*pair, "--raw", "--temperature", "0.7", "--top-k", "4", "--samples", "40", "--greedy-tokens", "20"]
    assert main(flags) == 0
    out = capsys.readouterr().out
    assert "greedy: 8 of 8 answers are identical" in out and "sampled, same seed: 8 of 8" in out
    assert "tokens 3, 4" in out and "no difference found" in out
    assert int(re.findall(r"(\d+) draft tokens were accepted", out)[0]) > 40
    assert main([*flags, "--temperature", "0"]) == 0


def test_synthetic_acceptance_is_refused(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*pair, "--speculative-config.synthetic_acceptance_length", "2"]) == 2
    assert "not supported by the exactness test, since its output is" in capsys.readouterr().err


@pytest.mark.slow
def test_guided_requests_are_guided_by_the_negative_prompt(
    pair: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = []
    whole = trial.compare_samples

    def noted(
        plain: LLMEngine, tree: trial.CountingEngine, prompt: Any, sampling: SamplingParams, *more: Any
    ) -> trial.SampleVerdict:
        prompts.append(sampling)
        assert isinstance(tree.engine, LLMEngine) and not tree.engine.config.self_switch
        return whole(plain, tree, prompt, sampling, *more)

    monkeypatch.setattr(trial, "compare_samples", noted)
    flags = [*pair, "--raw", "--temperature", "0.7", "--samples", "20", "--greedy-tokens", "20"]
    assert main([*flags, "--guidance-scale", "2", "--negative-prompt", "class", "--prompt", "a"]) == 0
    assert prompts[0].guidance_scale == 2 and len(prompts[0].negative_prompt_ids) > 0


def test_an_unused_draft_proves_nothing(
    pair: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(drafter: LocalDrafter, result: VerifyResult) -> None:
        raise DrafterLost("it left")

    monkeypatch.setattr(LocalDrafter, "observe", fails)
    assert main([*pair, "--raw", "--temperature", "0", "--greedy-tokens", "9"]) == 1
    assert "NOT TESTED: the drafter was lost (it left)" in capsys.readouterr().out
    idle = trial.CountingEngine(LLMEngine(Path(pair[1])))
    idle.generate([5, 17, 40], SamplingParams(max_tokens=3))
    assert idle.idle == "no draft token was accepted"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_models_pass() -> None:
    flags = ["--raw", "--temperature", "1", "--samples", "400"]
    assert main(flags) == 0
    assert main([*flags, "--verify", "reject"]) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mode", "ar"], "--mode ar is not supported by the exactness test, since it does not use speculation"),
        (["--mode", "smc"], "since it is approximate by design"),
        (["--samples", "0"], "--samples must be at least 1"),
        (["--samples", "many"], "--samples: invalid int value"),
        (["--json"], "--json is not supported by the exactness test"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt-file", "/nowhere"], "--prompt-file /nowhere cannot be read"),
        (
            ["--verify", "reject", "--speculative-config.proposal", "top"],
            "with --verify reject; use --speculative-config.proposal sample",
        ),
        (["--verify", "reject", "--temperature", "0"], "temperature 0 is not supported with"),
    ],
)
def test_invalid_flags_are_refused_in_one_line(
    pair: list[str], capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main([*pair, "--raw", *flags]) in (1, 2)
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("swiftspec: error: ") and message in error
