"""Draft and target behind a slow wire: tokens a second against its delay, serial and async, beside the prediction.

    python -m bench.wire [--delays 0.2,2,20] [--bandwidth 1Gbit] [--tokens 128] [--json out.json] [--plot out.svg]

Two workers on this machine run the embedded pair at emulated step times (30 ms and 3 ms), each behind a relay of its
own (tests/support/relay.py); `generate` decodes through both. Delays are milliseconds one way. The prediction is that
of `swiftspec.profile predict --link`, at the d that is best there, from rounds of the same prompts on one machine and
the round trip of a Ping.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc

from bench.data.heldout import texts
from swiftspec.distributed.grpc.service import TARGET as TARGET_SERVICE
from swiftspec.lab import apart, predict
from swiftspec.lab.link import Link
from swiftspec.lab.simulate import Acceptance, Times

ROOT = Path(__file__).parents[1]
SERVE = [sys.executable, "-m", "swiftspec.serve"]
TARGET, DRAFT = 30e-3, 3e-3  # seconds a step
NODES = 16  # bs and w: a target of 30 ms verifies 16 as fast as one
PROMPTS = 12  # those whose rounds the prediction knows, and as many tokens of each
MODES = ("serial", "async")


@contextmanager
def started(command: Sequence[str], said: str, **how: Any) -> Iterator[str]:
    """A process that says where it listens, on either of its outputs, in a line like `said`."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **how
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(said, line):
                yield found[1]
                return
        raise SystemExit(f"{' '.join(command)} said nowhere that it listens")
    finally:
        process.kill()
        process.wait()


def worker(side: str, seconds: float) -> list[str]:
    """The command of one."""
    pace = ["--emulate", f"{side}={1e3 * seconds:g}ms", "--threads", "1"]
    shape = ["--verify-batch", str(NODES), "--draft-leaves", str(NODES)]
    return [*SERVE, "worker", side, "--listen", "127.0.0.1:0", *pace, *shape]


def measure(mode: str, urls: dict[str, str], tokens: int) -> dict[str, float]:
    """Tokens a second and tokens a round of a few answers, and of nothing but their rounds."""
    made = rounds = seconds = 0.0
    for prompt in texts()[:PROMPTS]:
        flags = ["--target-url", urls["target"], "--draft-url", urls["draft"], "--mode", mode, "--json", "--raw"]
        flags += ["--verify-batch", str(NODES), "--draft-leaves", str(NODES), "--temperature", "0", "--ignore-eos"]
        flags += ["--no-self-switch"]  # whose trials of plain rounds are many in a request so short
        command = [*SERVE, "generate", *flags, "--max-tokens", str(tokens), "--prompt", prompt]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(done.stderr)
        answer = json.loads(done.stdout)
        made += answer["timings"]["predicted_n"]
        seconds += 1e-3 * answer["timings"]["predicted_ms"]
        rounds += answer["metrics"]["speculative_decoding"]["num_spec_steps"]
    return {"tokens_per_second": made / seconds, "tokens_per_round": made / rounds}


def round_trip(url: str) -> float:
    """Seconds of a call that does nothing, median of 20."""
    with grpc.insecure_channel(url) as channel:
        ping, seconds = channel.unary_unary(f"/{TARGET_SERVICE}/Ping"), []
        for _ in range(20):
            began = time.perf_counter()
            ping(b"")
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def predicted(link: Link) -> dict[str, float]:
    """Tokens a second by mode."""
    known = Acceptance(json.loads(predict.ACCEPTANCE.read_text(encoding="utf-8"))["rounds"])
    times = Times(TARGET, DRAFT, **predict.ASSUMED)
    found = {plan.name: plan.outcome.speed for plan in apart.plans(link, known, NODES, NODES, times, times, times)}
    return {mode: found[f"{mode}, both apart"] for mode in MODES}


def rows(delays: Sequence[float], bandwidth: str, tokens: int) -> Iterator[dict[str, Any]]:
    """One for each delay and mode."""
    with ExitStack() as workers:
        at = {
            side: workers.enter_context(started(worker(side, seconds), r"worker listening on (\S+)"))
            for side, seconds in (("target", TARGET), ("draft", DRAFT))
        }
        for delay in delays:
            text = f"{2 * delay:g}ms,{bandwidth}"
            with ExitStack() as relays:
                command = [sys.executable, "-m", "tests.support.relay", "--link", text, "--to"]
                urls = {
                    side: relays.enter_context(started([*command, url], r"^(\S+:\d+)$")) for side, url in at.items()
                }
                link = Link(round_trip(urls["target"]), Link.parse(text).bandwidth)
                about, expected = {"delay_ms": delay, "ping_ms": 1e3 * link.round_trip}, predicted(link)
                for mode in MODES:
                    yield {**about, "mode": mode, "predicted": expected[mode], **measure(mode, urls, tokens)}


def plot(found: Sequence[dict[str, Any]], file: Path) -> None:
    """Tokens a second against delay: what was measured as lines, what was predicted as crosses."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5))
    for mode in MODES:
        own = [row for row in found if row["mode"] == mode]
        delays = [row["delay_ms"] for row in own]
        (line,) = axes.plot(delays, [row["tokens_per_second"] for row in own], "o-", label=mode)
        axes.plot(delays, [row["predicted"] for row in own], "x", color=line.get_color(), label=f"{mode}, predicted")
    axes.set(xscale="log", xlabel="delay one way (ms)", ylabel="tokens a second", ylim=(0, None))
    axes.legend()
    figure.savefig(file, bbox_inches="tight")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m bench.wire", description=__doc__)
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
        plot(found, args.plot)


if __name__ == "__main__":
    main()
