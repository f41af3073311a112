"""Speed of the first answers of a new engine, with and without row times, on a simulated clock.

    python -m bench.first_answer [--requests 10] [--tokens 64]

The demo models decode held-out prompts greedily in serial mode, with adaptive d, bs and use of the draft. The clock
advances by a given time per verification and per expansion, so the result does not depend on the machine or its load.
The times are examples of an 8B target with a 1B draft on two cores. Prints the tokens per second of each answer; the
last one repeats the first prompt.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from bench.adapt import Clock, TimedDrafter, TimedVerifier
from bench.common.roles import local_roles
from bench.data.heldout import DEMO, read_token_ids
from bench.workload import Work
from swiftspec.builder.rules import resolve_config
from swiftspec.config import EngineConfig
from swiftspec.control.controller import Controller
from swiftspec.control.policy import initial_stats
from swiftspec.control.row_times import PairTimes, RowTimes
from swiftspec.decode import decode
from swiftspec.llm_engine import LLMEngine
from swiftspec.messages import RequestStart, VerifyResult
from swiftspec.params import SamplingParams

ROWS = (1, 4, 8, 16, 32)
TIMES = {  # milliseconds: a target forward over each of ROWS, and an expansion
    "expensive rows": ((160.0, 190.0, 250.0, 370.0, 600.0), 35.0),
    "cheap rows": ((160.0, 162.0, 165.0, 180.0, 230.0), 30.0),
    "very expensive rows": ((400.0, 700.0, 1200.0, 2300.0, 4500.0), 90.0),
}
SHORT = 64  # tokens of a prompt


class TableVerifier(TimedVerifier):
    """Verifier whose forwards advance the clock by a time from a table."""

    times: tuple[float, ...] = ()

    def wait(self) -> VerifyResult:
        self.clock.now += float(np.interp(len(self._proposal.tokens), ROWS, self.times))
        return self._verifier.submit(self._proposal).wait()


def run(times: tuple[float, ...], expansion: float, work: Work, *, known: bool) -> tuple[list[float], list[int]]:
    """Decodes the short prompts, and the first one again at the end. Returns the tokens per second and the
    autoregressive rounds of each answer. `known`: whether the row times are known before the first round."""
    config = EngineConfig("serial", self_switch=True, adapt_steps=True, adapt_batch=True)
    config = resolve_config(config, DEMO / "draft", "cpu") if known else config
    llm = LLMEngine(DEMO / "target", DEMO / "draft", config, dtype=torch.bfloat16, device="cpu", threads=1)
    drafter, verifier = local_roles(llm)
    table = PairTimes(RowTimes(ROWS, times), RowTimes((1, 4), (expansion, expansion))) if known else None
    stats, clock = initial_stats(config, table), Clock(0.0, 0.0, expansion)
    drafter.max_nodes = max(stats.batch_sizes)
    timed = TableVerifier(verifier, clock)
    timed.times = times
    controller = Controller(TimedDrafter(drafter, clock), lambda kind: stats, clock=clock)
    rates, plain = list[float](), list[int]()
    for number, prompt in enumerate([*work.short, work.short[0]]):
        start = RequestStart(number, tuple(prompt), SamplingParams(temperature=0), len(prompt))
        controller.open(start)
        timed.open(start)
        began, count = clock.now, 0
        for _, result in decode(controller, timed):
            count += len(result.tokens)
            if count >= work.tokens:
                break
        report = controller.report()
        plain.append(0 if report is None else report.ar_rounds)
        controller.close()
        timed.close()
        rates.append(1e3 * count / (clock.now - began))
    return rates, plain


def main() -> None:
    """Prints the speeds of each answer for all of TIMES."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=64, help="least tokens per answer")
    args = parser.parse_args()
    work = Work.of(read_token_ids(8), long=1, short=SHORT, length=SHORT, requests=args.requests, tokens=args.tokens)
    for name, (times, expansion) in TIMES.items():
        for known in (False, True):
            rates, plain = run(times, expansion, work, known=known)
            speeds = " ".join(f"{rate:.2f}" for rate in rates)
            print(f"{name}, row times {'known' if known else 'unknown'}: {speeds} tok/s; autoregressive rounds {plain}")


if __name__ == "__main__":
    main()
