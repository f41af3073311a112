"""What each figure of tools/gpu_queue.py decides: a figure, what is expected of an H100, a threshold, and the decision.

Expectations are figures measured on an H100 (profiles/h100-*.json) and estimates from them; other GPUs differ mainly by
their memory, so thresholds of memory-bound figures follow the speed of a copy.
A rule whose step has no result decides nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tools.gpu.steps import MODELS, PAIR, PARTS, SMALL_PAIR, TRIAL, summed

Json = dict[str, Any]
Results = Mapping[str, Json]  # by step
H100_COPY_GB_S = 3015.6  # profiles/h100-kernels.json
UNIT_STEP_US = 1.0  # of attention over 500 tokens against 516, from which blocks are loaded unevenly


@dataclass(frozen=True, slots=True)
class Rule:
    """A figure and its decision. `figure`: computes it; KeyError and similar mean that it was not measured. The
    decision is `reached` if the figure is at least `threshold` (`lower`: at most), else `missed`. `memory_bound`: the
    threshold is that of an H100, see `on_gpu`."""

    name: str
    unit: str
    figure: Callable[[Results], float]
    expected: str
    threshold: float
    reached: str
    missed: str
    lower: bool = False
    memory_bound: bool = False

    def on_gpu(self, copy_gb_s: float) -> Rule:
        """Returns the rule for a GPU with this speed of a copy. Times shrink with it, and speeds (not `lower`) grow."""
        ratio = copy_gb_s / H100_COPY_GB_S if self.memory_bound else 1.0
        return replace(self, threshold=self.threshold / ratio if self.lower else self.threshold * ratio)

    def decide(self, value: float) -> str:
        reached = value <= self.threshold if self.lower else value >= self.threshold
        return self.reached if reached else self.missed


def _fallbacks(results: Results) -> float:
    """Returns the number of fallbacks of the trial, if it has run."""
    trial = results[TRIAL]
    if trial["problem"] is not None and not trial["fallbacks"]:
        raise KeyError("problem")
    return len(trial["fallbacks"])


def _tuned_shapes(results: Results) -> float:
    """Returns the number of shapes that the trial has tuned, if the tuner has run to its end."""
    if not results[TRIAL]["tuned"]:
        raise KeyError("tuned")
    return len(results[TRIAL]["tuning"]["tilings"])


def _copy_speed(results: Results) -> float:
    """Returns GB/s of a copy on this GPU; those of an H100 if no step has measured them."""
    return next((float(found["copy GB/s"]) for found in results.values() if "copy GB/s" in found), H100_COPY_GB_S)


def _us(results: Results, op: str, size: str, step: str = "footprint") -> float:
    return float(results[step]["us"][op][size])


def _chain(results: Results, model: str, what: str, step: str = "chain") -> float:
    return float(results[step]["models"][model][what])


def _kernel(results: Results, step: str, pattern: str, competitor: str = "swiftspec") -> float:
    """Returns the microseconds of the first case of this project, or of a variant, whose name matches."""
    for found in results[step]["results"]:
        if found["competitor"] == competitor and re.fullmatch(pattern, found["name"]):
            return float(found["microseconds"])
    raise KeyError(pattern)


def _two_shot(results: Results, ranks: int) -> float:
    """Returns the time of O and down of a 70B over 8 rows with two-shot sums, over that with one-shot sums."""
    us = {
        (found["competitor"], found["op"]): float(found["microseconds"])
        for found in results[summed(ranks)]["results"]
        if (found["model"], found["rows"]) == (SEVENTY, 8)
    }
    two_shot, one_shot = (sum(us[name, op] for op in ("o", "down")) for name in ("swiftspec two-shot", "swiftspec"))
    return two_shot / one_shot


def _paired(results: Results, model: str, context: int) -> float:
    """Returns the time of attention with two blocks per multiprocessor over that with one."""
    name = f"{model} attention {context} x8"
    return _kernel(results, "attention", name, "swiftspec paired") / _kernel(results, "attention", name)


def _forward(results: Results, pair: str, model: str, rows: int = 8) -> float:
    return float(results[f"decode {pair}"]["rows ms"][model][str(rows)])


def _best_tree(results: Results, pair: str) -> tuple[str, float]:
    trees = results[f"decode {pair}"]["trees"]
    best = max(trees, key=lambda shape: trees[shape]["tok/s"])
    return best, float(trees[best]["tok/s"])


def _tree_gain(results: Results, pair: str) -> float:
    trees = results[f"decode {pair}"]["trees"]
    return _best_tree(results, pair)[1] / float(trees["4,8"]["tok/s"])


def _adapted_share(results: Results, pair: str) -> float:
    return float(results[f"decode {pair}"]["adapt"]["tok/s"]) / _best_tree(results, pair)[1]


def _overlapped_gain(results: Results) -> float:
    """Returns the speed of mode async with the faster division of multiprocessors over that of mode serial."""
    fastest = max(float(results[f"decode {SMALL_PAIR}, async on {parts}"]["async"]["tok/s"]) for parts in PARTS)
    return fastest / float(results[f"decode {SMALL_PAIR}"]["serial"]["tok/s"])


def _clock_loss(results: Results) -> float:
    """Returns the lowest over the highest SM clock of busy samples, the smallest of all steps."""
    return min(found["gpu"]["lowest MHz"] / found["gpu"]["highest MHz"] for found in results.values() if found["gpu"])


def _stall(results: Results, name: str) -> float:
    """Returns the largest cycles per instruction that warps of an operator wait for this reason."""
    return max(launch[name] for launch in results["stalls"]["launches"])


def _stamp(results: Results, model: str, point: str) -> float:
    """Returns the microseconds from the start of a projection to a point, the mean over the projections of a layer."""
    [table] = [each for each in results["stamps"]["tables"] if each["model"] == model]
    found = [
        phase["since start us"]
        for kernel in table["kernels"]
        for phase in kernel["phases"]
        if phase["point"] == point and kernel["kernel"] != "attention"
    ]
    return sum(found) / len(found)


def _tilings(results: Results, model: str, of: str, against: str) -> float:
    """Returns the time of a layer's projections with some tilings over that with others."""
    sums = results["tilings"]["models"][model]
    return float(sums[f"{of} us"]) / float(sums[f"{against} us"])


def _busiest(results: Results) -> float:
    """Returns the largest share of blocks on a multiprocessor over the mean, of the projections of all models."""
    tables = results["stamps"]["tables"]
    return max(
        kernel["largest of mean"] for table in tables for kernel in table["kernels"] if kernel["kernel"] != "attention"
    )


EIGHT, SEVENTY, ONE = MODELS.split(",")  # billions of weights


def _working_set_rules() -> list[Rule]:
    """Returns the rules of the trial, the clocks and the working sets."""
    return [
        Rule(
            "operators that fall back in the trial", "", _fallbacks, "0", 0, "time all of them",
            "mend these first", lower=True,
        ),
        Rule(
            "SM clock, lowest of highest", "x", _clock_loss, "1.00", 0.97, "clocks explain nothing",
            "power or heat limits the clock: report it, and compare figures of one clock only",
        ),
        Rule(
            "70B SwiGLU, 0.25 GB against 1 GB", "x", lambda r: _us(r, "swiglu", "0.25") / _us(r, "swiglu", "1"), "1.00",
            0.95, "benchmarks of 256 MB are cold", "raise COLD (bench/gpu/cases.py)",
        ),
        Rule(
            "70B SwiGLU, 36 GB against 4 GB", "x", lambda r: _us(r, "swiglu", "36") / _us(r, "swiglu", "4"),
            "1.00 to 1.15", 1.03, "address translation costs: touch pages one kernel ahead", "footprint costs nothing",
        ),
        Rule(
            "70B down, 36 GB against 4 GB", "x", lambda r: _us(r, "down", "36") / _us(r, "down", "4"), "1.00 to 1.15",
            1.03, "address translation costs: touch pages one kernel ahead", "footprint costs nothing",
        ),
        Rule(
            "70B SwiGLU, pages touched against not", "x",
            lambda r: _us(r, "swiglu", "touched", "footprint, pages touched")
            / _us(r, "swiglu", "36", "footprint, pages touched"),
            "0.90 to 1.00", 0.98, "build the page touch into the projections", "drop the page touch", lower=True,
        ),
    ]  # fmt: skip


def _layer_rules() -> list[Rule]:
    """Returns the rules of layers in place."""
    return [
        Rule(
            "70B layer, all weights against those of 4", "x",
            lambda r: _chain(r, SEVENTY, "all") / _chain(r, SEVENTY, "few"), "1.00 to 1.15", 1.03,
            "the unexplained time of the 70B is footprint", "look for it between operators",
        ),
        *(
            Rule(
                f"{model} layer in place", "us", lambda r, model=model: _chain(r, model, "all"), expected, bound,
                "projections and attention need no change", "continue with attention and projections", lower=True,
                memory_bound=True,
            )
            for model, expected, bound in ((EIGHT, "82", 65.0), (SEVENTY, "208 to 241", 190.0), (ONE, "48", 33.0))
        ),
        *(
            Rule(
                f"{model} layer in place, tuned against the defaults", "x",
                lambda r, model=model: _chain(r, model, "all", "chain, tuned") / _chain(r, model, "all"), expected,
                0.98, "what the tuner gains shows in place", "the tuner gains nothing in place", lower=True,
            )
            for model, expected in ((EIGHT, "0.8 to 0.95"), (SEVENTY, "0.9 to 0.98"), (ONE, "0.65 to 0.8"))
        ),
        Rule(
            f"{ONE} layer in place, tuned", "us", lambda r: _chain(r, ONE, "all", "chain, tuned"), "30 to 38", 26.0,
            "a persistent kernel for the draft gains little", "write the persistent kernel: 21 us per layer",
            lower=True, memory_bound=True,
        ),
        *(
            Rule(
                f"{model} layer, gain of early starts", "us",
                lambda r, model=model: _chain(r, model, "all", "chain, nothing early") - _chain(r, model, "all"),
                "2 or more", 0.5, "keep early starts", "early starts gain nothing: remove them",
            )
            for model in (EIGHT, SEVENTY, ONE)
        ),
        *(
            Rule(
                f"{model} layer, gain of RoPE and append in QKV", "us",
                lambda r, model=model: -_chain(r, model, "append"), "1.5 to 2.2", 0.3,
                "keep them there", "they gain nothing: remove them from QKV",
            )
            for model in (EIGHT, SEVENTY, ONE)
        ),
    ]  # fmt: skip


def _kernel_rules() -> list[Rule]:
    """Returns the rules of single kernels."""
    return [
        Rule(
            "8B projections, dependencies to first tile", "us",
            lambda r: _stamp(r, EIGHT, "first tile") - _stamp(r, EIGHT, "dependencies"), "1.5 to 3.5", 1.5,
            "staging of x is short enough", "take the norm and the staging of x off the path to the first product",
            lower=True,
        ),
        Rule(
            "busiest multiprocessor of mean", "x", _busiest, "1.65", 1.15, "blocks lie evenly",
            "choose cluster sizes for even strips", lower=True,
        ),
        Rule(
            "stalls for instructions per issue", "cycles", lambda r: _stall(r, "no_instruction"), "unknown", 0.5,
            "split the kernels by template parameters", "the instruction cache suffices",
        ),
        Rule(
            "8B attention over 1,000", "us", lambda r: _kernel(r, "attention", r"Llama-3-8B TP1 attention 1000 x8"),
            "9.5 to 11.5", 9.0, "attention is done", "profile the attention kernel with Nsight Compute", lower=True,
        ),
        Rule(
            "8B attention, 500 against 516", "us",
            lambda r: _kernel(r, "attention", r"Llama-3-8B TP1 attention 500 x8")
            - _kernel(r, "attention", r"Llama-3-8B TP1 attention 516 x8"),
            "0", UNIT_STEP_US, "deal the units of single rows out, too", "units are dealt evenly",
        ),
        Rule(
            "70B attention on 1 of 4 ranks against 1 of 1", "x",
            lambda r: _kernel(r, "attention", r"Llama-3-70B TP4 attention 1000 x8")
            / _kernel(r, "attention", r"Llama-3-70B TP1 attention 1000 x8"),
            "0.95", 0.7, "the split of attention suffices", "split attention with few KV heads finer", lower=True,
        ),
        *(
            Rule(
                f"{model} attention over {context}, two blocks per multiprocessor against one", "x",
                lambda r, model=model, context=context: _paired(r, model, context), expected, 0.97,
                "the shape `paired` for caches of this length", "keep the shape; remove `paired` if it wins nowhere",
                lower=True,
            )
            for model, context, expected in (
                ("Llama-3-8B TP1", 1000, "0.9 to 1.2"), ("Llama-3-8B TP1", 4000, "0.4 to 0.7"),
                ("Llama-3-8B TP1", 32000, "0.4 to 0.7"), ("Llama-3-70B TP4", 4000, "0.4 to 0.7"),
            )
        ),
        Rule(
            "children of 8 rows", "us", lambda r: _kernel(r, "sampling", r".* children x8"), "6", 10.0,
            "top-k is done", "profile children_kernel with Nsight Compute", lower=True,
        ),
    ]  # fmt: skip


EXPECTED_OF_VARIANTS = {  # 8B, 70B, 1B: time with this variant where it is faster, over that without it
    "direct": ("0.85 to 0.95", "0.98 to 1.00", "0.66 to 0.80"),
    "stream": ("0.81 to 0.90", "0.89 to 0.95", "0.75 to 0.90"),
}


def _tiling_rules() -> list[Rule]:
    """Returns the rules of the variants of projections."""
    return [
        Rule(
            "shapes that the trial has tuned", "", _tuned_shapes, "8 of 12", 1,
            "keep the tuner", "the estimated tilings suffice: remove the tuner",
        ),
        *(
            Rule(
                f"{model} projections, {variant} against ring", "x",
                lambda r, model=model, variant=variant: _tilings(r, model, variant, "ring"), expected, 0.97,
                f"keep the variant {variant}", f"remove {variant}, unless other models or shapes need it", lower=True,
            )
            for variant, all_expected in EXPECTED_OF_VARIANTS.items()
            for model, expected in zip((EIGHT, SEVENTY, ONE), all_expected, strict=True)
        ),
        *(
            Rule(
                f"{model} projections, fastest tilings against the default", "x",
                lambda r, model=model: _tilings(r, model, "fastest", "default"), expected, 0.98,
                "leave the choice to the tuner", "the default tilings are the fastest", lower=True,
            )
            for model, expected in ((EIGHT, "0.81 to 0.95"), (SEVENTY, "0.90 to 0.98"), (ONE, "0.66 to 0.80"))
        ),
    ]  # fmt: skip


def _decode_rules() -> list[Rule]:
    """Returns the rules of forwards and decodes."""
    return [
        *(
            Rule(
                f"{model}, 8 rows", "ms", lambda r, pair=pair, model=model: _forward(r, pair, model), expected, bound,
                "goal reached", "goal missed", lower=True, memory_bound=True,
            )
            for pair, model, expected, bound in (
                (SMALL_PAIR, EIGHT, "3.08", 2.45), (PAIR, SEVENTY, "20.1", 16.5), (SMALL_PAIR, ONE, "0.90", 0.6),
            )
        ),
        *(
            Rule(
                f"{model}, 16 rows against 8", "x",
                lambda r, pair=pair, model=model: _forward(r, pair, model, 16) / _forward(r, pair, model), "1.05", 1.1,
                "rounds of 16 nodes pay", "rounds of 8 nodes, or speed up 16 rows", lower=True,
            )
            for pair, model in ((SMALL_PAIR, EIGHT), (PAIR, SEVENTY))
        ),
        *(
            Rule(
                f"{pair}, best tree against d 4, bs 8", "x", lambda r, pair=pair: _tree_gain(r, pair), expected, 1.02,
                "adaptation of bs pays", "16 rows cost more than expected: raise MIN_CANDIDATE_SHARE",
            )
            for pair, expected in ((SMALL_PAIR, "1.14"), (PAIR, "1.10 to 1.13"))
        ),
        *(
            Rule(
                f"{pair}, adapted against the best tree", "x", lambda r, pair=pair: _adapted_share(r, pair), "1.00",
                0.96, "measured times find the best tree", "compare the d and bs that it has chosen with the best ones",
            )
            for pair in (SMALL_PAIR, PAIR)
        ),
        *(
            Rule(
                f"{pair}, best tree", "tok/s", lambda r, pair=pair: _best_tree(r, pair)[1], expected, bound,
                "goal reached", "goal missed", memory_bound=True,
            )
            for pair, expected, bound in ((SMALL_PAIR, "540", 650.0), (PAIR, "157", 180.0))
        ),
        Rule(
            f"{SMALL_PAIR}, async on divided multiprocessors against serial", "x", _overlapped_gain, "0.9 to 1.2", 1.03,
            "mode async on one GPU divides the multiprocessors",
            "remove the division: mode serial is as fast on one GPU",
        ),
        Rule(
            "8B after 32,000 tokens", "ms",
            lambda r: r[f"decode {SMALL_PAIR}, 32000 tokens"]["step ms"][EIGHT], "6.9", 4.9,
            "long contexts are done", "load keys by a producer warp", lower=True, memory_bound=True,
        ),
    ]  # fmt: skip


def _sum_rules() -> list[Rule]:
    """Returns the rules of sums over several GPUs: from which number of ranks on two-shot sums are the default."""
    return [
        Rule(
            "70B O and down on 4 GPUs, two-shot against one-shot", "x", lambda r: _two_shot(r, 4), "1.00 to 1.05", 0.98,
            "two-shot sums are the default from 4 ranks on", "one-shot sums on 4 ranks", lower=True,
        ),
        Rule(
            "70B O and down on 8 GPUs, two-shot against one-shot", "x", lambda r: _two_shot(r, 8), "0.80 to 0.90", 0.98,
            "two-shot sums are the default on 8 ranks", "remove two-shot sums, unless 4 ranks gain by them", lower=True,
        ),
    ]  # fmt: skip


def rules(plan: str = "questions") -> list[Rule]:
    """Returns all rules of a plan, in the order of its steps."""
    if plan == "checks":
        return _sum_rules()
    return [*_working_set_rules(), *_layer_rules(), *_kernel_rules(), *_tiling_rules(), *_decode_rules()]


def table(results: Results, plan: str = "questions") -> list[Json]:
    """Returns name, measured value, unit, expectation, threshold and decision of each rule; without a value and with
    the decision "not measured" if a figure is missing."""
    lines, copy_gb_s = list[Json](), _copy_speed(results)
    for rule in (each.on_gpu(copy_gb_s) for each in rules(plan)):
        try:
            value = rule.figure(results)
        except (KeyError, ValueError, IndexError, ZeroDivisionError, TypeError):
            value = None
        bound = f"{'<=' if rule.lower else '>='} {rule.threshold:.4g}"
        decision = "not measured" if value is None else rule.decide(value)
        lines.append({
            "figure": rule.name, "measured": value, "unit": rule.unit, "expected": rule.expected, "threshold": bound,
            "decision": decision,
        })  # fmt: skip
    return lines


def outlook(plan: str = "questions") -> list[Json]:
    """Returns the table before anything is measured, with both decisions of each rule."""
    both = [f"{rule.reached}; else: {rule.missed}" for rule in rules(plan)]
    return [line | {"decision": decision} for line, decision in zip(table({}, plan), both, strict=True)]


def formatted(lines: list[Json]) -> str:
    """Returns the table as text."""
    rows = [("figure", "measured", "expected", "threshold", "", "decision")]
    for line in lines:
        value = "-" if line["measured"] is None else f"{line['measured']:.3g}"
        rows.append((line["figure"], value, line["expected"], line["threshold"], line["unit"], line["decision"]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)
