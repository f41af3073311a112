"""bench/quality.py: where a generated function ends, whether it passes, and the comparisons."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bench.data.functions import FUNCTIONS, Function
from bench.data.tasks import numbers_of
from bench.quality import System, finished, judged, of_functions, of_sums, stratified, table
from bench.sandbox import Sandbox

METHOD = "class A:\n    def f(self):\n        return"


def test_a_completion_ends_with_its_function() -> None:
    assert finished("def f(x):\n    return", " x\n\ndef g():\n    pass") == " x\n"
    assert finished(METHOD, " 1\n\n    def g(self):\n        return 2") == " 1\n"
    assert finished(METHOD, " [\n            1]\n        # more\n") == " [\n            1]\n        # more\n"


def test_every_prompt_needs_a_completion() -> None:
    """The prompt alone is not a complete program, and its checks fail without a completion."""
    for each in FUNCTIONS:
        with pytest.raises(SyntaxError):
            compile(each.prompt + "(", "prompt", "exec")
        compile(each.asserts, "asserts", "exec")
        assert finished(each.prompt, " x") == " x"


@pytest.mark.slow
def test_programs_run_within_limits() -> None:
    with Sandbox() as sandbox:
        for program, passes in (
            ("assert 1 + 1 == 2", True), ("assert False", False), ("while True: pass", False), ("import os", False),
            ("open('x', 'w')", False), ("x = [0] * 10**9", False), ("print('a' * 9)", True), ("(", False),
        ):  # fmt: skip
            assert sandbox.passes(program) is passes, program


def system(name: str, texts: list[str], seconds: float, particles: list[list[str]]) -> System:
    """A system that generates these texts for its only task, one character per token."""
    made = System(name, None, 0.7)  # type: ignore[arg-type]
    for text, rest in zip(texts, particles, strict=True):
        end = None if not rest else SimpleNamespace(particles=[SimpleNamespace(tokens=each) for each in rest])
        answer: Any = SimpleNamespace(
            token_ids=text, stats=SimpleNamespace(population=end, decode_time=seconds / len(texts), rounds=len(text))
        )
        made.add(0, answer, lambda tokens: "".join(map(str, tokens)))
        made.likelihood.append(-float(len(text)))
    return made


@pytest.mark.slow
def test_autoregressive_and_particle_answers_are_scored_alike() -> None:
    with Sandbox() as sandbox:
        score = of_functions([Function("def f(x):\n    return", "assert f(2) == 2")], sandbox)
        right, wrong, broken = " x", " 3", " ("
        plain = judged(system("plain", [right, wrong, broken, wrong], 2.0, [[]] * 4), score)
        assert plain.parses[0] == 0.75 and plain.passes[0] == 0.25 and plain.any_passes[0] == 1.0
        assert (plain.few, plain.different, plain.log_p[0]) == (4, 3.0, -2.0)
        smc = judged(system("smc", [right, wrong], 4.0, [[right, right, wrong], [wrong, broken, wrong]]), score)
        assert smc.passes[0] == 0.5 and smc.any_passes[0] == 0.5 and (smc.few, smc.different) == (3, 2.0)
        lines = table([plain, smc]).splitlines()
    assert lines[2].startswith("| plain | 4 | 1.00x | 1.00 | 75.0 ± ") and "| 100.0 % of 4 |" in lines[2]
    assert lines[3].startswith("| smc | 1 | 0.25x | 1.00 | 100.0 ± 0.0 % | 50.0 ± 50.0 % | 50.0 ± 50.0 % of 3 | 2.00 |")


def test_standard_errors_are_those_over_seeds() -> None:
    mean, error = stratified([[0, 1, 0, 1], [1, 1, 1, 1]])
    assert mean == 0.75 and error == pytest.approx((1 / 3 / 4) ** 0.5 / 2)


def test_sums_are_compared_by_their_last_number() -> None:
    assert numbers_of("It is $1,234.00, or -5 and 2.50.") == ["1234", "-5", "2.50"]
    score = of_sums(["18"])
    assert score(0, "3 + 15 = 18") == (True, True) and score(0, "no idea") == (False, False)
    assert score(0, "18 or 19") == (True, False)
