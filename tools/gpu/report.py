"""Compares the measurements of tools/gpu_check.py with the targets of bench/gpu/targets.py, line by line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.gpu import targets
from bench.gpu.targets import Constants

Json = dict[str, Any]
Found = dict[str, Json]  # results of one case, by competitor
USUAL_CONTEXT = 1000  # context length of the targets
OURS, SUMMED = "swiftspec", "swiftspec, summed"


@dataclass(frozen=True, slots=True)
class Line:
    """A measured figure with a target. Lower is better, unless `more` is set."""

    what: str
    unit: str
    got: float
    accept: float
    goal: float
    more: bool = False

    def __str__(self) -> str:
        reached = [self.got >= bound if self.more else self.got <= bound for bound in (self.accept, self.goal)]
        verdict = "goal" if reached[1] else "ok" if reached[0] else "MISS"
        return f"{self.what:62} {self.got:9.2f} {self.accept:9.2f} {self.goal:9.2f} {self.unit:6} {verdict}"


def lines(
    decodes: list[Json], kernels: Json | None, constants: Json | None, sums: Sequence[Json] = ()
) -> Iterator[Line]:
    """Yields all measured figures with a target: operators, speedups over competitors, ratios among own operators,
    steps, decodes.

    `decodes`, `kernels`, `constants`, `sums`: documents of bench.gpu.step, bench.gpu.kernels, bench.gpu.constants and
    bench.gpu.all_reduce.
    """
    copy = targets.ASSUMED.copy if kernels is None else kernels["machine"]["copy GB/s"]
    on = Constants.of(constants, copy)
    if kernels is not None:
        by_case: dict[str, Found] = {}
        for result in kernels["results"]:
            by_case.setdefault(result["name"], {})[result["competitor"]] = result
        for name, found in by_case.items():
            if OURS in found:
                yield from _operator(name, found, on)
        yield from _beside_each_other([found[OURS] for found in by_case.values() if OURS in found])
    yield from _all_reduces([result for document in sums for result in document["results"]])
    for decoded in decodes:
        baseline = "unfused" in decoded.get("ops", ()) or not decoded.get("early starts", True)
        if not baseline and "split" not in decoded and decoded.get("context", USUAL_CONTEXT) == USUAL_CONTEXT:
            yield from _decode(decoded, on)


def _operator(name: str, found: Found, on: Constants) -> Iterator[Line]:
    ours, moved = found[OURS], found[OURS]["moved"] / 1e6
    took, eight = ours["microseconds"], ours["rows"] == 8
    if ours["accept"] is not None and (eight or ours["op"] in ("draw", "children")):
        yield Line(name, "us", took, ours["accept"], ours["goal"])
    for rival, accept, goal in targets.ratios(ours["op"], moved, ours["rows"]):
        if rival in found:
            yield Line(f"{name} against {rival}", "x", found[rival]["microseconds"] / took, accept, goal, more=True)
    published = None if ours["op"] not in targets.INT4 else targets.marlin_published(moved, on)
    if published is not None and eight:
        yield Line(f"{name} against Marlin's published (quoted)", "x", published / took, 1.4, 1.7, more=True)
    if SUMMED in found:
        more = found[SUMMED]["microseconds"] - took
        yield Line(f"{name}, added by the all-reduce", "us", more, targets.SUMMED.accept, targets.SUMMED.goal)


def _all_reduces(results: Iterable[Json]) -> Iterator[Line]:
    """Yields how much faster a projection with its all-reduce in the kernel is than with a library's after it."""
    took = {(r["model"], r["ranks"], r["op"], r["rows"], r["competitor"]): r["microseconds"] for r in results}
    for (model, ranks, op, rows, competitor), us in took.items():
        ours = took.get((model, ranks, op, rows, OURS))
        if ours is not None and competitor not in (OURS, "product"):
            name = f"{model} over {ranks} GPUs {op} x{rows}, all-reduced, against {competitor}"
            yield Line(name, "x", us / ours, 1.0, 1.0, more=True)


def _beside_each_other(ours: Iterable[Json]) -> Iterator[Line]:
    """Yields ratios among own operators: 16 and 32 rows to 8; context 4000 to 500 on one of four ranks; 64 particles to
    8."""
    took = {(r["model"], r["tp"], r["op"], r["rows"]): r["microseconds"] for r in ours}
    for (model, tp, op, rows), us in took.items():
        name, eight = f"{model} TP{tp} {op} x{rows}", took.get((model, tp, op, 8))
        bound = {16: 1.1, 32: 1.6}.get(rows)
        if bound is not None and eight is not None and op not in ("draw", "children"):
            yield Line(f"{name} against x8", "x", us / eight, bound, bound)
        short = took.get((model, tp, "attention 500", rows))
        if (tp, op, rows) == (4, "attention 4000", 8) and short is not None:
            yield Line(f"{name} against context 500", "x", us / short, 1.6, 1.6)
        few = next(
            (t for (m, p, o, _), t in took.items() if (m, p, o) == (model, tp, "attention of 8 particles")), None
        )
        if op == "attention of 64 particles" and few is not None:
            yield Line(f"{name} against 8 particles", "x", us / few, 3.0, 3.0)


def _decode(decoded: Json, on: Constants) -> Iterator[Line]:
    """Yields the figures of a decode. A decode that ended early yields those measured before."""
    for shape, took in decoded.get("step ms", {}).items():
        target = targets.step(shape, on)
        if target is not None:
            yield Line(f"step {shape}", "ms", took, target.accept, target.goal)
    target = targets.decode(decoded["pair"].partition(",")[0], on)
    for mode, how in (("serial", ""), ("async", " async")):
        if target is not None and mode in decoded:
            name = f"decode {decoded['pair']}{how}"
            yield Line(name, "tok/s", decoded[mode]["tok/s"], target.accept, target.goal, more=True)


def report(whole: Json, kernels: Json | None, constants: Json | None, sums: Sequence[Json] = ()) -> None:
    where = "measured" if constants is not None else "assumed"
    print(f"\ntargets computed from {where} constants\n{'':62} {'measured':>9} {'accept':>9} {'goal':>9}")
    found = list(lines(whole["decodes"], kernels, constants, sums))
    for line in found:
        print(line)
    for decoded in whole["decodes"]:
        rates = [
            f"{mode} {of['tok/s']:.0f} tok/s" for mode, of in decoded.items() if isinstance(of, dict) and "tok/s" in of
        ]
        same = [f"{decoded['same text']:.0%} of the text equals the small model's"] if "same text" in decoded else []
        on = " and ".join(decoded.get("ops", ()))
        print(f"{decoded['step']}{on and f' on {on}'}: {', '.join(rates + same) or 'nothing'}")
    for said in (kernels["rivals"] + kernels["failed"]) if kernels is not None else []:
        print(said)
    for document in sums:
        print("\n".join(document["failed"]))
    for step in whole["steps"]:
        print(f"{step['name']:62} {step['state']}, {step['seconds']:.0f} s")
    print(f"{sum('MISS' in str(line) for line in found)} of {len(found)} targets missed")
