"""Predicts times of projections on an H100 by the clock of the emulated GPU (simt/clock.h, clocked.cpp), so that
variants that cannot win are found without a GPU. Predictions of an emulator; nothing here runs on a GPU.

    python -m tests.simt.clock measured             the clock beside profiles/h100-kernels.json
    python -m tests.simt.clock rules                the clock beside launch_ns, over all ring tilings of some shapes
    python -m tests.simt.clock variants [--again]   the fastest tiling of each variant; --again: with other costs
    python -m tests.simt.clock phases               the points of bench/gpu/stamps.py, which a GPU records too
    python -m tests.simt.clock fit                  fits the costs FITTED to the measurements of FIT

`--cost NAME=VALUE` changes a cost of simt/clock.h. The profile's kernels are those of 2026-11-26.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.gpu.shapes import RankShape
from bench.gpu.stamps import LINEAR
from tests.simt.emulate import CSRC, FLAGS, HOPPER, ROOT, device_code

SIMT = Path(__file__).resolve().parent
KERNELS = tuple(CSRC / f"cuda/linear/{name}.cu" for name in ("linear", "direct", "stream"))
# memory accesses of the kernels call functions of clocked.cpp; its warnings about code with instrumentation mislead
STAMPS = "-DSWIFTSPEC_STAMPS=1"
INSTRUMENTED = ("-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0", "-fno-threadsafe-statics",
                "-Wno-maybe-uninitialized")  # fmt: skip
PROFILE = ROOT / "profiles/h100-kernels.json"
OPS = ("qkv", "o", "swiglu", "down")
MODELS = ("Llama-3.2-1B", "Llama-3.2-3B", "Llama-3-8B", "Llama-3-70B")
VARIANTS = ("ring", "direct", "stream")
FIT = ("Llama-3.2-1B", "Llama-3-8B")  # models whose measurements fit the costs; the others are held out
FITTED = ("launch", "cluster", "access")  # costs
VARIED = (*FITTED, "product", "drain")
INSTRUCTIONS = (3200, 3100, 3400)  # of the kernels of the variants, about
EACH = 4  # candidates of a variant, as swiftspec/backends/cuda/tuner.py times
RULE_SHAPES = (("Llama-3-8B", "o"), ("Llama-3-8B", "down"), ("Llama-3-70B", "qkv"), ("Llama-3.2-1B", "swiglu"))

Costs = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Tiling:
    """A row of candidates.h, and its estimated nanoseconds."""

    variant: int
    ctas: int
    warps: int
    strips: int
    blocks: int
    estimated_ns: int

    def __str__(self) -> str:
        return f"{self.ctas} {self.warps} {self.strips} {self.blocks}"


@dataclass(frozen=True, slots=True)
class Projection:
    model: str
    tp: int
    op: str
    rows: int = 8

    def shape(self) -> tuple[int, int, int]:
        """Inputs, outputs, and inputs per int4 group."""
        outputs, inputs, group = RankShape.of(self.model, self.tp).projection(self.op)
        return inputs, outputs, group

    def line(self, tiling: Tiling) -> str:
        """The case as clocked.cpp reads it."""
        normed, swiglu = int(self.op in ("qkv", "swiglu")), int(self.op == "swiglu")
        row = (tiling.variant, tiling.ctas, tiling.warps, tiling.strips, tiling.blocks)
        return " ".join(map(str, (*self.shape(), self.rows, normed, swiglu, *row)))

    def __str__(self) -> str:
        return f"{self.model} TP{self.tp} {self.op} x{self.rows}"


def build(compiler: str, folder: Path, csrc: Path = CSRC) -> Path:
    """Compiles the program of clocked.cpp, with the kernels of `csrc`, into `folder`. Returns its path."""
    plain = [*sorted(SIMT.glob("simt/*.cpp")), SIMT / "clocked.cpp"]
    jobs: list[tuple[Path, tuple[str, ...]]] = [(source, ()) for source in plain]
    jobs += [(csrc / source.relative_to(CSRC), (*device_code(HOPPER), *INSTRUMENTED)) for source in KERNELS]
    jobs.append((csrc / "cuda/device/device.cu", device_code(HOPPER)))

    def compile_one(job: tuple[Path, tuple[str, ...]]) -> str:
        source, more = job
        out = folder / f"{source.name}.o"
        command = [compiler, *FLAGS, "-O2", STAMPS, f"-I{SIMT}", f"-I{csrc}", *more, "-c", str(source), "-o", str(out)]
        subprocess.run(command, check=True)
        return str(out)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, jobs))
    program = folder / "clocked"
    subprocess.run([compiler, "-o", str(program), *objects, "-lrt", "-pthread"], check=True)
    return program


@dataclass(frozen=True, slots=True)
class Emulator:
    program: Path
    costs: Costs
    early: bool = True  # early starts

    def tilings(self, projection: Projection, each: int) -> list[Tiling]:
        """The default tiling and `each` candidates of every variant; with 0, all of the variant ring."""
        command = [str(self.program), "tilings", *map(str, projection.shape()), str(each)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return [Tiling(*map(int, line.split())) for line in said.splitlines()]

    def cost(self, name: str) -> float:
        """A cost in cycles (simt/clock.h)."""
        if name in self.costs:
            return self.costs[name]
        command = [str(self.program), "cost", name]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    def changed(self, name: str, factor: float) -> Emulator:
        return replace(self, costs={**self.costs, name: self.cost(name) * factor})

    def microseconds(self, cases: Sequence[tuple[Projection, Tiling]]) -> list[float]:
        return [figures[0] for figures in self.times(cases)]

    def times(self, cases: Sequence[tuple[Projection, Tiling]]) -> list[list[float]]:
        """The time of each case in microseconds, then those of its points. In two processes."""
        order = sorted(range(len(cases)), key=lambda i: math.prod(cases[i][0].shape()), reverse=True)
        halves = [order[0::2], order[1::2]]
        found: list[list[float]] = [[]] * len(cases)

        def run(half: list[int]) -> None:
            costs = [f"{name}={value}" for name, value in self.costs.items()]
            done = subprocess.run(
                [str(self.program), "times", *costs], input="".join(cases[i][0].line(cases[i][1]) + "\n" for i in half),
                capture_output=True, text=True, check=False,
                env=os.environ | {"SWIFTSPEC_EARLY_STARTS": str(int(self.early))},
            )  # fmt: skip
            if done.returncode != 0:
                raise RuntimeError(f"{self.program}: {done.stdout[-500:]}{done.stderr[-500:]}")
            for i, line in zip(half, done.stdout.splitlines(), strict=True):
                found[i] = list(map(float, line.split()))

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(run, halves))
        return found


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 0; equal values share the mean of theirs."""
    return [sum(w < v for w in values) + (sum(w == v for w in values) - 1) / 2 for v in values]


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    x, y = ranks(a), ranks(b)
    mean = (len(x) - 1) / 2
    both = sum((p - mean) * (q - mean) for p, q in zip(x, y, strict=True))
    return both / math.sqrt(sum((p - mean) ** 2 for p in x) * sum((q - mean) ** 2 for q in y))


def measurements() -> list[tuple[Projection, float]]:
    """Projections of the ring kernel in the profile, and their microseconds."""
    results: list[dict[str, Any]] = json.loads(PROFILE.read_text(encoding="utf-8"))["results"]
    return [(Projection(r["model"], r["tp"], r["op"], r["rows"]), r["microseconds"])
            for r in results if r["competitor"] == "swiftspec" and r["op"] in OPS]  # fmt: skip


def held_out(projection: Projection) -> bool:
    return projection.model not in FIT


def errors(pairs: Iterable[tuple[float, float]]) -> tuple[float, float, float]:
    """Of pairs (clock, measured): mean and largest absolute relative error, and Spearman's rank correlation."""
    several = list(pairs)
    off = [abs(clock / us - 1) for clock, us in several]
    return sum(off) / len(off), max(off), spearman(*zip(*several, strict=True))


def compare(emulator: Emulator) -> list[tuple[Projection, float, float]]:
    """Projection, clock and measurement of everything that was measured, with the default tilings."""
    known = measurements()
    cases = [(projection, emulator.tilings(projection, EACH)[0]) for projection, _ in known]
    clocks = emulator.microseconds(cases)
    return [(projection, clock, us) for (projection, us), clock in zip(known, clocks, strict=True)]


def show_measured(emulator: Emulator) -> None:
    found = compare(emulator)
    for projection, clock, us in found:
        print(f"{projection!s:32} {us:7.2f} us measured {clock:7.2f} clock {clock / us - 1:+7.1%}")
    for name, wanted in (("fit", False), ("held out", True)):
        mean, most, rank = errors((clock, us) for p, clock, us in found if held_out(p) == wanted)
        print(f"{name}: mean error {mean:.1%}, largest {most:.1%}, Spearman {rank:.3f}")


def show_rules(emulator: Emulator) -> None:
    for model, op in RULE_SHAPES:
        projection = Projection(model, 1, op)
        tilings = emulator.tilings(projection, 0)
        clocks = emulator.microseconds([(projection, tiling) for tiling in tilings])
        estimates = [tiling.estimated_ns / 1000 for tiling in tilings]
        chosen = estimates[clocks.index(min(clocks))]
        print(f"{projection}: {len(tilings)} tilings, Spearman {spearman(clocks, estimates):.3f}; launch_ns of the "
              f"clock's best {chosen:.2f} us, of its own best {min(estimates):.2f}", flush=True)  # fmt: skip


Best = dict[tuple[Projection, int], tuple[float, Tiling]]  # by projection and variant


def best_tilings(emulator: Emulator, cases: Sequence[tuple[Projection, Tiling]]) -> Best:
    """The fastest tiling of each variant among the cases."""
    best: Best = {}
    for (projection, tiling), us in zip(cases, emulator.microseconds(cases), strict=True):
        at = (projection, tiling.variant)
        if at not in best or us < best[at][0]:
            best[at] = us, tiling
    return best


def row_of(best: Best, projection: Projection) -> dict[int, float]:
    return {variant: best[projection, variant][0] for variant in range(3) if (projection, variant) in best}


def show_variants(emulator: Emulator, again: bool) -> None:
    """`again`: for fewer models, whose best tilings are timed again with each of VARIED 30 % lower and higher."""
    projections = [Projection(model, 1, op) for model in (FIT if again else MODELS) for op in OPS]
    cases = [(p, tiling) for p in projections for tiling in emulator.tilings(p, EACH)]
    best = best_tilings(emulator, cases)
    winners: dict[Projection, int] = {}
    for projection in projections:
        row = row_of(best, projection)
        winners[projection] = min(row, key=row.__getitem__)
        words = [f"{VARIANTS[v]} {us:6.2f} ({best[projection, v][1]})" for v, us in row.items()]
        print(f"{projection!s:28} {VARIANTS[winners[projection]]:6} {'; '.join(words)}", flush=True)
    chosen = [(projection, tiling) for (projection, _), (_, tiling) in best.items()]
    if again:
        show_changes(emulator, best, chosen, winners)


def show_changes(
    emulator: Emulator, best: Best, chosen: Sequence[tuple[Projection, Tiling]], winners: Mapping[Projection, int]
) -> None:
    """Which projections have another winner if costs change."""

    def show(what: str, changed: Best) -> None:
        rows = {projection: row_of(changed, projection) for projection in winners}
        now = {projection: min(row, key=row.__getitem__) for projection, row in rows.items()}
        others = [f"{p} {VARIANTS[now[p]]}" for p in rows if now[p] != winners[p]]
        # the ring where a variant has no tiling
        sums = [sum(row.get(v, row[0]) for row in rows.values()) for v in range(3)]
        print(f"{what}: {', '.join(f'{v} {us:.1f}' for v, us in zip(VARIANTS, sums, strict=True))} us in all; other "
              f"winners: {', '.join(others) or 'none'}", flush=True)  # fmt: skip

    show("as fitted", best)
    smaller = best_tilings(emulator, [case for case in chosen if case[1].variant == 0])
    for variant in (1, 2):
        share = INSTRUCTIONS[variant] / INSTRUCTIONS[0]
        smaller |= best_tilings(emulator.changed("launch", share), [c for c in chosen if c[1].variant == variant])
    show("launch in proportion to instructions", smaller)
    for name in VARIED:
        for factor in (0.7, 1.3):
            show(f"{name} x {factor}", best_tilings(emulator.changed(name, factor), chosen))


def show_phases(emulator: Emulator) -> None:
    """Median microseconds from the start of a warp to each point, of the first tiling of each variant."""
    for op, variant in itertools.product(OPS, range(len(VARIANTS))):
        projection = Projection("Llama-3-8B", 1, op)
        tiling = next(t for t in emulator.tilings(projection, EACH) if t.variant == variant)
        us, *points = emulator.times([(projection, tiling)])[0]
        words = [f"{name} {at:.2f}" for name, at in zip(LINEAR, points, strict=True) if at >= 0]
        print(f"{projection} {VARIANTS[variant]}: {us:.2f} us; {', '.join(words)}", flush=True)


def fit(emulator: Emulator) -> Costs:
    """Coordinate descent: the root mean square of the logarithms of the errors falls."""
    known = [(projection, us) for projection, us in measurements() if not held_out(projection)]
    cases = [(projection, emulator.tilings(projection, EACH)[0]) for projection, _ in known]

    def error(costs: Costs) -> float:
        clocks = replace(emulator, costs=costs).microseconds(cases)
        logs = [math.log(clock / us) for clock, (_, us) in zip(clocks, known, strict=True)]
        return math.sqrt(sum(value * value for value in logs) / len(logs))

    costs = {name: emulator.cost(name) for name in FITTED}
    best = error(costs)
    for factor in (1.15, 1 / 1.15):
        for name in FITTED:
            while (found := error(changed := {**costs, name: costs[name] * factor})) < best - 1e-4:
                best, costs = found, changed
                print(f"{best:.4f} {costs}", flush=True)
    return costs


def cost(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    return name, float(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measured", "rules", "variants", "phases", "fit"))
    parser.add_argument("--cost", type=cost, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--again", action="store_true", help="variants: with other costs, of fewer models")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        emulator = Emulator(build(str(shutil.which("g++")), Path(folder)), dict(args.cost))
        if args.what == "measured":
            show_measured(emulator)
        elif args.what == "rules":
            show_rules(emulator)
        elif args.what == "variants":
            show_variants(emulator, args.again)
        elif args.what == "phases":
            show_phases(emulator)
        else:
            fit(emulator)


if __name__ == "__main__":
    main()
