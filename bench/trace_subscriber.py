"""Overhead of a subscriber of /v1/spec/events: the same requests with and without one, alternately.

    python -m bench.trace_subscriber [--steps full,2,5] [--ranks 1,2] [--requests 6] [--tokens 256] [--json out.json]

For each of --steps (as in bench.serve) and --ranks (1: serial mode; 2: the draft on a separate rank) a server answers
held-out prompts greedily. Prints the tokens per second of whole requests without and with a subscriber, the median
overhead per prompt, and the amount of data sent.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.common import server_options
from bench.serve import Answer, over_http, server

SETTLE = 0.2  # seconds until rank 0 knows that a subscriber has connected or disconnected


@contextmanager
def listener(url: str, file: Path) -> Iterator[None]:
    """Subscribes to the events of the server inside the context and appends them to `file`."""
    with file.open("ab") as out:
        reading = subprocess.Popen(["curl", "-sN", f"{url}/v1/spec/events"], stdout=out)
        try:
            time.sleep(SETTLE)
            yield
        finally:
            time.sleep(SETTLE)
            reading.terminate()
            reading.wait()
            time.sleep(SETTLE)


def measure(steps: str, ranks: int, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Measures one row of the table. `steps`, `ranks`: one of --steps and of --ranks. `tokens`: tokens per answer."""
    flags = server_options.flags(steps)
    if ranks > 1:
        flags += ["--mode", "async", "--draft-steps", "4"]
    found: dict[bool, list[Answer]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder, server(flags, ranks) as url:
        file = Path(folder) / "events"
        over_http(url, prompts[0], tokens)
        for number, prompt in enumerate(prompts):
            for watched in (False, True) if number % 2 else (True, False):
                if watched:
                    with listener(url, file):
                        found[True].append(over_http(url, prompt, tokens))
                else:
                    found[False].append(over_http(url, prompt, tokens))
        heard = file.read_bytes()
    rate = {watched: sum(a.tokens for a in some) / sum(a.seconds for a in some) for watched, some in found.items()}
    return {
        "steps": steps, "ranks": ranks, "tokens_per_second": rate[False], "watched_tokens_per_second": rate[True],
        "cost": statistics.median(w.seconds / a.seconds - 1 for a, w in zip(found[False], found[True], strict=True)),
        "rounds": heard.count(b"\nevent: round\n"), "expected": sum(a.rounds for a in found[True]),
        "bytes": len(heard), "answers": [[asdict(a) for a in some] for some in found.values()],
    }  # fmt: skip


def main() -> None:
    """Measures and prints the rows."""
    parser = server_options.options(__doc__)
    parser.add_argument("--ranks", default="1,2")
    args = parser.parse_args()
    prompts = server_options.prompts(args.requests)
    rows = []
    print("steps  ranks   alone tok/s   watched tok/s     cost   rounds heard   bytes/round")
    for steps in args.steps:
        for ranks in map(int, args.ranks.split(",")):
            row = measure(steps, ranks, prompts, args.tokens)
            rows.append(row)
            print(
                f"{steps:>5} {ranks:>6} {row['tokens_per_second']:>13.1f} {row['watched_tokens_per_second']:>15.1f}"
                f" {row['cost']:>8.2%} {row['rounds']:>6} of {row['expected']:<6}"
                f" {row['bytes'] / max(row['rounds'], 1):>10.0f}",
                flush=True,
            )
    server_options.write(args.json, rows)


if __name__ == "__main__":
    main()
