"""Rules of the GPU queue."""

from __future__ import annotations

import pytest

from bench.gpu import tilings
from tools.gpu import decisions
from tools.gpu.decisions import Rule
from tools.gpu.steps import MODELS, TRIAL, checks, questions

TILINGS = {
    "qkv": [{"tiling": [variant, 1, 8, 1, 1], "us": {8: us}} for variant, us in
            (("ring", 7.0), ("ring", 6.0), ("direct", 4.0))],
    "down": [{"tiling": ["ring", 1, 8, 1, 1], "us": {8: 6.0}}],  # has no other variant
}  # fmt: skip


@pytest.mark.parametrize("rule", [*decisions.rules(), *decisions.rules("checks")], ids=lambda rule: rule.name)
def test_a_threshold_separates_two_decisions(rule: Rule) -> None:
    better, worse = (-1, 1) if rule.lower else (1, -1)
    assert rule.decide(rule.threshold) == rule.decide(rule.threshold + better) == rule.reached
    assert rule.decide(rule.threshold + worse) == rule.missed != rule.reached


def test_rules_read_the_documents_of_the_steps() -> None:
    """Figures of a 70B that slows down with its footprint, of busy clocks, and of a step without a result."""
    sizes = {"0.25": 92.0, "1": 93.0, "4": 93.0, "36": 102.3}
    phases = [{"point": point, "since start us": us} for point, us in (("dependencies", 1.0), ("first tile", 3.0))]
    kernel = {"kernel": "linear 4096 x 6144", "largest of mean": 1.38, "phases": phases}
    attention = {"kernel": "attention", "largest of mean": 9.0, "phases": []}
    tables = [{"model": model, "kernels": [kernel, attention]} for model in MODELS.split(",")]
    results = {
        "footprint": {"us": {"swiglu": sizes}, "gpu": {"lowest MHz": 1600, "highest MHz": 1980}},
        "stamps": {"tables": tables, "gpu": {}},
        "tilings": {"models": {"Llama-3.2-1B": tilings.summary(TILINGS)}, "gpu": {}},
        "attention": {
            "results": [
                {"name": f"Llama-3-8B TP1 attention {context} x8", "competitor": "swiftspec", "microseconds": us}
                for context, us in ((500, 15.0), (516, 12.0), (1000, 8.5))
            ],
            "gpu": {},
        },
    }  # fmt: skip
    found = {line["figure"]: line for line in decisions.table(results)}
    assert found["70B SwiGLU, 36 GB against 4 GB"]["measured"] == pytest.approx(1.1)
    assert found["70B SwiGLU, 36 GB against 4 GB"]["decision"].startswith("address translation costs")
    assert found["70B down, 36 GB against 4 GB"]["decision"] == "not measured"
    assert found["SM clock, lowest of highest"]["decision"].startswith("power or heat limits")
    assert found["busiest multiprocessor of mean"]["measured"] == 1.38, "of projections only"
    assert found["8B projections, dependencies to first tile"]["measured"] == 2.0
    assert found["8B attention, 500 against 516"]["decision"] == "deal the units of single rows out, too"
    assert found["8B attention over 1,000"]["decision"] == "attention is done"
    assert found["Llama-3.2-1B projections, direct against ring"]["measured"] == pytest.approx(10 / 12)
    line = found["Llama-3.2-1B projections, fastest tilings against the default"]
    assert (line["measured"], line["decision"]) == (pytest.approx(10 / 13), "leave the choice to the tuner")
    assert "8B attention over 1,000" in decisions.formatted([*found.values()])


@pytest.mark.parametrize(
    ("trial", "fallbacks", "tuned"),
    [
        ({}, 0, 2), ({"problem": "its process ended"}, None, 2),
        ({"fallbacks": {"cache": "off"}, "problem": "late"}, 1, 2),
        ({"tuned": False}, 0, None), ({"tuning": {"tilings": {}}}, 0, 0),
    ],
)  # fmt: skip
def test_a_trial_that_has_not_run_decides_nothing(trial: dict[str, object], fallbacks: int | None, tuned: int) -> None:
    done = {"fallbacks": {}, "problem": None, "tuned": True, "tuning": {"tilings": {"a": [], "b": []}}}
    found = {line["figure"]: line["measured"] for line in decisions.table({TRIAL: done | trial})}
    assert found["operators that fall back in the trial"] == fallbacks
    assert found["shapes that the trial has tuned"] == tuned


def test_thresholds_of_memory_follow_the_copy_of_the_gpu() -> None:
    """A GPU of twice the speed must be as close to its memory; a ratio of two times needs no other threshold."""
    decode = {"rows ms": {"Llama-3-8B": {"8": 1.5, "16": 1.6}}, "trees": {"4,8": {"tok/s": 900.0}}}
    results = {"decode Llama-3-8B,Llama-3.2-1B": decode | {"copy GB/s": 2 * decisions.H100_COPY_GB_S}}
    found = {line["figure"]: (line["threshold"], line["decision"]) for line in decisions.table(results)}
    assert found["Llama-3-8B, 8 rows"] == ("<= 1.225", "goal missed")
    assert found["Llama-3-8B,Llama-3.2-1B, best tree"] == (">= 1300", "goal missed")
    assert found["Llama-3-8B, 16 rows against 8"] == ("<= 1.1", "rounds of 16 nodes pay")


def test_two_shot_sums_are_compared_with_one_shot_ones() -> None:
    """Of O and down together, with 8 rows; not measured if a sum failed."""

    def case(op: str, competitor: str, us: float, rows: int = 8) -> dict[str, object]:
        return {"model": "Llama-3-70B", "op": op, "rows": rows, "competitor": competitor, "microseconds": us}

    cases = [
        case("o", "swiftspec", 8.0), case("down", "swiftspec", 12.0), case("o", "swiftspec two-shot", 7.0),
        case("down", "swiftspec two-shot", 9.0), case("down", "product + nccl", 30.0), case("o", "swiftspec", 99.0, 32),
    ]  # fmt: skip
    four, eight = decisions.table({"all-reduce over 8 GPUs": {"results": cases}}, "checks")
    assert (eight["measured"], eight["decision"]) == (pytest.approx(0.8), "two-shot sums are the default on 8 ranks")
    assert four["decision"] == "not measured"
    assert decisions.table({"all-reduce over 8 GPUs": {"results": cases[:3]}}, "checks")[1]["measured"] is None


@pytest.mark.parametrize("plan", ["questions", "checks"])
def test_every_rule_has_a_step(plan: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A rule that reads a step of another name would never decide anything."""
    asked: set[str] = set()

    class Asked(dict[str, dict[str, object]]):
        def __missing__(self, name: str) -> dict[str, object]:
            asked.add(name)
            raise KeyError(name)

    decisions.table(Asked(), plan)
    steps = questions(tmp_path_factory.getbasetemp(), "gpu") if plan == "questions" else checks(8)
    assert asked and asked <= {step.name for step in steps}
