"""Predicts the decoding speed of a model pair on a machine that is not present: `python -m bench.prediction`.

Step times come from a latency model, a table or the paper; acceptance comes from rounds recorded with a real pair.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bench.prediction import batching, latency_model, network, simulation
from bench.prediction.latency_model import Constants
from bench.prediction.network_link import Link
from bench.prediction.simulation import RecordedAcceptance, SimulatedTimes
from swiftspec.cli.arguments import FlagParser
from swiftspec.config import MAX_CONCURRENT_REQUESTS, PopulationConfig
from swiftspec.errors import UserError
from swiftspec.model.config import ModelConfig
from swiftspec.observe.step_time_emulation import StepTimeEmulation
from swiftspec.profiles import emulation, store
from swiftspec.serve.__main__ import run_guarded

ACCEPTANCE = Path(__file__).with_name("acceptance.json")
ASSUMED = {"verify": 30e-6, "settle": 20e-6, "expand": 30e-6, "answer": 60e-6, "link": 10e-6}  # s, see `SimulatedTimes`


class StepTimesOf(Protocol):
    """Protocol of a function that returns the step times of a split as (slow, fast)."""

    def __call__(
        self, x: int, y: int, rows: int, leaves: int | None = None, sequences: int = 1
    ) -> tuple[SimulatedTimes, SimulatedTimes]:
        """Returns the (slow, fast) step times of a target on `x` ranks and a draft on `y` ranks.

        `rows`: rows of a target forward.
        `leaves`: rows of a draft forward; None: the value of --draft-leaves.
        `sequences`: number of requests that the rows belong to.
        """
        ...


@dataclass(frozen=True, slots=True)
class Row:
    """Predicted speed of one mode and split, at its best d.

    `low`, `speed`, `high`: tokens per second, see `simulation.interval`.
    `times`: mean of the slow and the fast step times.
    `outcome`: simulated with `times`.
    `advice`: the most effective change and its gain, see `simulation.best_improvement`.
    """

    mode: str
    target_tp: int
    draft_tp: int
    d: int
    low: float
    speed: float
    high: float
    times: SimulatedTimes
    outcome: simulation.Outcome
    advice: tuple[str, float]

    @property
    def title(self) -> str:
        split = f"{self.target_tp}+{self.draft_tp}" if self.mode == "async" else str(self.target_tp)
        return f"{self.mode} {split}"

    @property
    def limit(self) -> str:
        """Side that limits the speed."""
        if self.mode != "async":
            return "both" if self.mode == "serial" else "target"
        drafting = self.d * (self.times.draft + self.times.expand)
        return "draft" if drafting > self.times.target + self.times.verify else "target"


def candidates(ranks: int) -> list[tuple[str, int, int]]:
    """Returns (mode, target ranks, draft ranks) of every way to use all of `ranks` ranks."""
    pairs = [("async", x, ranks - x) for x in range(ranks - 1, 0, -1)]
    return [("ar", ranks, 0), ("serial", ranks, ranks), *pairs]


def predict(ranks: int, acceptance: RecordedAcceptance, bs: int, w: int, step_times: StepTimesOf) -> list[Row]:
    """Predicts every mode and split of `ranks` ranks, each at its best d. Returns the fastest first."""
    rows = []
    for mode, x, y in candidates(ranks):
        slow, fast = step_times(x, max(y, 1), 1 if mode == "ar" else bs)
        depths = [1] if mode == "ar" else acceptance.depths(mode, bs, w)
        middle = simulation.between(slow, fast)
        speeds = {d: simulation.run(mode, _rounds(acceptance, mode, bs, w, d), d, middle).speed for d in depths}
        d = max(depths, key=speeds.__getitem__)
        rounds = _rounds(acceptance, mode, bs, w, d)
        low, speed, high = simulation.interval(mode, rounds, d, slow, fast)
        row = Row(
            mode=mode,
            target_tp=x,
            draft_tp=y,
            d=d,
            low=low,
            speed=speed,
            high=high,
            times=middle,
            outcome=simulation.run(mode, rounds, d, middle),
            advice=simulation.best_improvement(mode, rounds, d, middle),
        )
        rows.append(row)
    return sorted(rows, key=lambda row: -row.speed)


def _rounds(known: RecordedAcceptance, mode: str, bs: int, w: int, d: int) -> simulation.Rounds:
    return [(0, 0)] if mode == "ar" else known.rounds(mode, bs, w, d)


def over_link(link: Link, ranks: int, acceptance: RecordedAcceptance, bs: int, w: int, step_times: StepTimesOf) -> str:
    """Predicts decoding over a network link, with only the draft remote and with both models remote: the target on
    `ranks` ranks, the draft on one. Returns a comparison with local decoding as text."""
    near, split = (simulation.between(*step_times(ranks, y, bs)) for y in (ranks, 1))
    plain = simulation.between(*step_times(ranks, 1, 1))
    found = network.predict_plans(link, acceptance, bs, w, plain=plain, near=near, apart=split)
    return f"\n{network.format_plans(found)}\n{network.format_verdict(found, link, bs, w, split)}\n"


def format_rows(rows: Sequence[Row]) -> str:
    """Formats the rows as an aligned table."""
    cells = [("run", "d", "tok/s", "5..95 %", "tok/round", "round ms", "target ms", "draft ms", "limit", "best gain")]
    for row in rows:
        cells.append(
            (
                row.title,
                str(row.d) if row.mode != "ar" else "",
                f"{row.speed:.1f}",
                f"{row.low:.1f}..{row.high:.1f}",
                f"{row.outcome.tokens_per_round:.2f}",
                f"{1e3 * row.outcome.round:.2f}",
                f"{1e3 * row.times.target:.2f}",
                f"{1e3 * row.times.draft:.2f}" if row.mode != "ar" else "",
                row.limit,
                f"{row.advice[0]}: {row.advice[1]:+.1%}",
            )
        )
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells)


def predict_concurrent(args: argparse.Namespace, acceptance: RecordedAcceptance, step_times: StepTimesOf) -> str:
    """Predicts concurrent requests on one rank and returns a table as text.

    Raises UserError if --groups, --particles or --smc-draft-tokens is out of range, or if no chains of that many draft
    tokens were recorded.
    """
    try:
        groups = [int(part) for part in args.groups.split(",")]
    except ValueError:
        groups = [0]
    config = PopulationConfig(args.particles, args.smc_draft_tokens)  # validates the bounds
    if not all(1 <= count <= MAX_CONCURRENT_REQUESTS for count in groups):
        raise UserError(
            f"--groups {args.groups!r}: expected numbers of requests in 1..{MAX_CONCURRENT_REQUESTS}, such as 1,2,4,8"
        )

    def forwards(rows: int, drafted: int, requests: int) -> tuple[SimulatedTimes, SimulatedTimes]:
        return step_times(1, 1, rows, drafted, requests)

    found = batching.predict_batches(groups, config.particles, config.smc_draft_tokens, acceptance, forwards)
    return f"\nconcurrent requests on one rank, total tokens per second:\n{batching.format_batches(found)}\n"


def compare_with_profile(rows: Sequence[Row], profile: dict[str, Any], bs: int, w: int) -> str:
    """Formats the predicted and the measured speed of each mode and split, each at its own best d."""
    lines, found = [], []
    for row in rows:
        tree = {} if row.mode == "ar" else {"verify_batch": bs, "draft_leaves": w}
        wanted = {"mode": row.mode, "target_tp": row.target_tp, "draft_tp": row.draft_tp, **tree}
        run = store.best_run(profile, wanted)
        if run is not None:
            found.append((row, run))
            measured, d = store.median_speed(run), run["plan"]["draft_steps"]
            lines.append(
                f"{row.title:12} predicted {row.speed:7.1f}  measured {measured:7.1f}{'' if d is None else f' (d {d})'}"
                f"  {row.speed / measured - 1:+.1%}"
            )
    if found:
        picked, top = store.median_speed(found[0][1]), max(store.median_speed(run) for _, run in found)
        lines.append(f"the predicted best, {found[0][0].title}, reaches {picked / top:.1%} of the measured best")
    return "\n".join(lines) or "the profile contains none of these splits"


def build_predict_parser() -> argparse.ArgumentParser:
    """Builds the parser of the flags of `predict`."""
    made = FlagParser(prog="python -m bench.prediction", description=__doc__)
    made.add_argument("--hardware", help=f"GPU and count, such as h200x8; GPUs: {', '.join(latency_model.GPUS)}")
    made.add_argument("--model", type=Path, help="config.json of the target, or its directory")
    made.add_argument("--draft-model", type=Path, help="config.json of the draft, or its directory")
    made.add_argument("--int4", action="store_true", help="assume 4-bit weights even if the config is not quantised")
    made.add_argument(
        "--context", type=int, default=latency_model.CONTEXT_TOKENS, help="tokens of context (default: 1000)"
    )
    made.add_argument(
        "--kernels", type=Path, help="file of measured operator times (default: profiles/GPU-kernels.json if present)"
    )
    made.add_argument("--emulate", metavar="SPEC", help="step times of models, instead of --hardware")
    made.add_argument(
        "--ranks", type=int, help="number of ranks, with --emulate (default: those of --against, otherwise 4)"
    )
    made.add_argument(
        "--link",
        type=Link.parse,
        help="also predict remote models over a network with this round trip and bandwidth, such as 40ms,1Gbit",
    )
    made.add_argument(
        "--groups",
        metavar="G,G,...",
        help="also predict these numbers of concurrent requests on one"
        " rank, in mode ar, as chains (trees with one leaf) and as particles, such as 1,2,4,8,16,32",
    )
    made.add_argument("--particles", type=int, default=4, help="particles per request, with --groups (default: 4)")
    made.add_argument(
        "--smc-draft-tokens", type=int, default=4, help="draft tokens per round of a particle or chain (default: 4)"
    )
    made.add_argument("--verify-batch", type=int, default=8, help="tree nodes verified per round, bs (default: 8)")
    made.add_argument("--draft-leaves", type=int, default=8, help="leaves expanded per draft forward, w (default: 8)")
    made.add_argument(
        "--acceptance", type=Path, help="profile whose recorded rounds are used (default: those of the demo models)"
    )
    made.add_argument(
        "--against",
        type=Path,
        help="profile to compare with; its time outside the models is used, and"
        " its emulated step times and ranks unless they are given",
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the predictions and returns the exit code."""
    return run_guarded(lambda first: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    args = build_predict_parser().parse_args(argv)
    profile = None if args.against is None else store.load(args.against)
    recorded = args.acceptance or (args.against if profile is not None and profile["rounds"] else None)
    acceptance = RecordedAcceptance(_records(recorded))
    around = ASSUMED if profile is None or not profile.get("around") else profile["around"]
    if args.hardware is not None:
        ranks, step_times, origin = _gpus(args, around)
    else:
        given = _emulation(args, profile)
        ranks = args.ranks or (4 if profile is None else profile["key"]["ranks"])
        step_times, origin = _table(args, given, around), "step times: as given or quoted from the paper"
    if ranks < 2 and args.link is None and args.groups is None:
        raise UserError("a prediction compares splits; use at least two ranks, --link or --groups")
    rows = predict(ranks, acceptance, args.verify_batch, args.draft_leaves, step_times)
    print(format_rows(rows))
    if args.link is not None:
        print(over_link(args.link, ranks, acceptance, args.verify_batch, args.draft_leaves, step_times))
    if args.groups is not None:
        print(predict_concurrent(args, acceptance, step_times))
    outside = "assumed" if around is ASSUMED else f"measured ({args.against})"
    pair = recorded or "the demo models"
    print(f"tok/s: predicted; {origin}; acceptance: measured on {pair}; time outside the models: {outside}")
    if profile is not None:
        print(compare_with_profile(rows, profile, args.verify_batch, args.draft_leaves))
    return 0


def _records(file: Path | None) -> list[dict[str, Any]]:
    if file is not None:
        return store.load(file)["rounds"]
    return json.loads(ACCEPTANCE.read_text(encoding="utf-8"))["rounds"]


def _emulation(args: argparse.Namespace, profile: dict[str, Any] | None) -> StepTimeEmulation:
    """Returns the step times of --emulate, else those that the profile was measured with.

    Raises UserError unless they include both models.
    """
    given = StepTimeEmulation()
    if args.emulate is not None:
        given = emulation.parse_emulation(args.emulate)
    elif profile is not None:
        given = StepTimeEmulation.from_dict(profile["key"]["emulate"])
    if args.emulate is None and given == StepTimeEmulation():
        raise UserError(
            "no step times are given: pass --hardware h200x8 --model ... --draft-model ..., or --emulate ... --ranks 4"
        )
    if given.target is None or given.draft is None:
        raise UserError("--emulate must contain step times of target and draft")
    return given


def _table(args: argparse.Namespace, given: StepTimeEmulation, around: dict[str, float]) -> StepTimesOf:
    target, draft = given.target, given.draft
    assert target is not None and draft is not None

    def step_times(
        x: int, y: int, rows: int, leaves: int | None = None, sequences: int = 1
    ) -> tuple[SimulatedTimes, SimulatedTimes]:
        times = SimulatedTimes(target.at(x, rows), draft.at(y, leaves or args.draft_leaves), **around)
        return times, times

    return step_times


def modelled_step_times(
    target: ModelConfig,
    draft: ModelConfig,
    ends: tuple[Constants, Constants],
    draft_leaves: int,
    *,
    int4: bool = False,
    context: int = latency_model.CONTEXT_TOKENS,
    around: Mapping[str, float] = ASSUMED,
) -> StepTimesOf:
    """Returns the step times of a pair by the latency model.

    `ends`: (slow, fast) constants. `draft_leaves`: rows of a draft forward, w. `int4`, `context`: see
    `latency_model.forward`. `around`: seconds outside the forwards, fields of `SimulatedTimes`.
    """

    def step_times(
        x: int, y: int, rows: int, leaves: int | None = None, sequences: int = 1
    ) -> tuple[SimulatedTimes, SimulatedTimes]:
        slow, fast = (
            SimulatedTimes(
                latency_model.forward(target, x, rows, lines, int4, context=context, sequences=sequences),
                latency_model.forward(
                    draft, y, leaves or draft_leaves, lines, int4, context=context, sequences=sequences
                ),
                **around,
            )
            for lines in ends
        )
        return slow, fast

    return step_times


def demo_acceptance() -> RecordedAcceptance:
    """Returns the rounds that were recorded with the demo models."""
    return RecordedAcceptance(_records(None))


def _gpus(args: argparse.Namespace, around: dict[str, float]) -> tuple[int, StepTimesOf, str]:
    name, count = latency_model.parse_hardware(args.hardware)
    if args.model is None or args.draft_model is None:
        raise UserError("--hardware requires --model and --draft-model (each a config.json or its directory)")
    target, draft = latency_model.config_at(args.model), latency_model.config_at(args.draft_model)
    kernels = args.kernels or Path("profiles") / f"{name}-kernels.json"
    measured = args.kernels is not None or kernels.is_file()
    ends = (
        latency_model.fitted(kernels, latency_model.GPUS[name])
        if measured
        else latency_model.constants(latency_model.GPUS[name])
    )
    step_times = modelled_step_times(
        target, draft, ends, args.draft_leaves, int4=args.int4, context=args.context, around=around
    )
    return count, step_times, f"operators: {ends[0].origin}, link: predicted"
