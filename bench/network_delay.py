"""Measures and predicts tokens per second with remote draft and target, at several network delays, in serial and
asynchronous mode.

    python -m bench.network_delay [--delays 0.2,2,20] [--bandwidth 1Gbit] [--tokens 128] [--json out.json]
                                  [--plot out.svg]

Runs the workers of bench/workers.py, each behind its own relay (tests/support/relay.py), and decodes through both, like
`generate`. Delays are milliseconds one way. The prediction is that of `bench.prediction --link` at its best d.
Its inputs are recorded rounds of the same prompts, the round trip of a Ping, and the time around the forwards, which
bench/rpc_latency.py measures without relays on other prompts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import rpc_latency
from bench.data.heldout import texts
from bench.figure import svg_axes
from bench.prediction import network, predictor
from bench.prediction.network_link import Link
from bench.prediction.simulation import RecordedAcceptance, SimulatedTimes
from bench.workers import LEAVES, NODES, PACES, SHAPE, started, workers
from swiftspec.cli.arguments import parse_command
from swiftspec.cli.terminal import StartupProgress
from swiftspec.startup.remote_session import open_local_or_remote

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PROMPTS = 12  # those of the recorded rounds
MODES = ("serial", "async")
AROUND = ("verify", "expand", "answer")


def measure(mode: str, urls: dict[str, str], tokens: int) -> dict[str, float]:
    """Decodes a few prompts through both workers. Returns tokens per second and tokens per round, without request
    starts."""
    flags = ["--target-url", urls["target"], "--draft-url", urls["draft"], "--mode", mode, "--raw", *SHAPE]
    flags += ["--temperature", "0", "--ignore-eos", "--max-tokens", str(tokens)]
    flags += [
        "--speculative-config.self_switch",
        "false",
    ]  # self-switch tries plain rounds, which are a large share of such a short request
    settings = parse_command(flags).settings
    session = open_local_or_remote(settings, StartupProgress(quiet=True))
    made = rounds = seconds = 0.0
    try:
        for prompt in texts()[:PROMPTS]:
            session.llm.generate(session.encode(prompt, settings), session.sampling_params(settings))
            stats = session.llm.stats
            made += stats.tokens
            seconds += stats.decode_time
            rounds += stats.rounds
    finally:
        session.close()
    return {"tokens_per_second": made / seconds, "tokens_per_round": made / rounds}


def predicted(link: Link, times: SimulatedTimes) -> dict[str, float]:
    """Returns the predicted tokens per second by mode."""
    known = RecordedAcceptance(json.loads(predictor.ACCEPTANCE.read_text(encoding="utf-8"))["rounds"])
    found = {
        plan.name: plan.outcome.speed
        for plan in network.predict_plans(link, known, NODES, LEAVES, plain=times, near=times, apart=times)
    }
    return {mode: found[f"{mode}, both remote"] for mode in MODES}


def rows(delays: Sequence[float], bandwidth: str, tokens: int) -> Iterator[dict[str, Any]]:
    """Yields one row for each delay and mode."""
    with workers() as at:
        times = SimulatedTimes(PACES["target"], PACES["draft"], **rpc_latency.worker_overhead(at))
        print("outside the models, ms: " + ", ".join(f"{name} {1e3 * getattr(times, name):.2f}" for name in AROUND))
        for delay in delays:
            text = f"{2 * delay:g}ms,{bandwidth}"
            with ExitStack() as relays:
                command = [sys.executable, "-m", "tests.support.relay", "--link", text, "--to"]
                urls = {
                    side: relays.enter_context(started([*command, url], r"^(\S+:\d+)$")) for side, url in at.items()
                }
                link = Link(rpc_latency.round_trip(urls["target"]), Link.parse(text).bandwidth)
                about, expected = {"delay_ms": delay, "ping_ms": 1e3 * link.round_trip}, predicted(link, times)
                for mode in MODES:
                    yield {**about, "mode": mode, "predicted": expected[mode], **measure(mode, urls, tokens)}


def draw(axes: Axes, found: Sequence[dict[str, Any]]) -> None:
    """Draws tokens per second against delay, measured values as lines and predictions as crosses."""
    for mode in MODES:
        own = [row for row in found if row["mode"] == mode]
        delays = [row["delay_ms"] for row in own]
        (line,) = axes.plot(delays, [row["tokens_per_second"] for row in own], "o-", label=mode)
        axes.plot(delays, [row["predicted"] for row in own], "x", color=line.get_color(), label=f"{mode}, predicted")
    axes.set(xscale="log", xlabel="one-way delay (ms)", ylabel="tokens per second", ylim=(0, None))
    known = sorted({row["delay_ms"] for row in found})
    axes.set_xticks(known, [f"{delay:g}" for delay in known], minor=False)
    axes.minorticks_off()
    axes.legend()


def main() -> None:
    """Measures and prints the rows."""
    parser = argparse.ArgumentParser(prog="python -m bench.network_delay", description=__doc__)
    parser.add_argument("--delays", type=lambda text: [float(part) for part in text.split(",")], default=[0.2, 2, 20])
    parser.add_argument("--bandwidth", default="1Gbit")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    found = []
    print(f"{'delay ms':>8}  {'ping ms':>7}  {'mode':6}  {'tok/s':>6}  {'predicted':>9}  tok/round")
    for row in rows(args.delays, args.bandwidth, args.tokens):
        found.append(row)
        error = row["predicted"] / row["tokens_per_second"] - 1
        print(
            f"{row['delay_ms']:8g}  {row['ping_ms']:7.2f}  {row['mode']:6}  {row['tokens_per_second']:6.1f}"
            f"  {row['predicted']:6.1f} ({error:+.0%})  {row['tokens_per_round']:.2f}", flush=True,
        )  # fmt: skip
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if args.plot is not None:
        with svg_axes(args.plot) as axes:
            draw(axes, found)


if __name__ == "__main__":
    main()
