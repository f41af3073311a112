"""Workload of a program in a comparison, and the measurements that the program reports.

Imports no torch, since baselines use it too.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

WARM_UP = 8  # warm-up tokens of every system
COMMON_SAMPLING: dict[str, Any] = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
"""Sampling values that the generation_config.json of many models has."""


@dataclass(frozen=True, slots=True)
class Work:
    """Prompts of a comparison: `long` ones for one new token each, `short` ones for exactly `tokens` greedy tokens
    each."""

    long: list[list[int]]
    short: list[list[int]]
    tokens: int

    @staticmethod
    def of(texts: list[list[int]], *, long: int, short: int, length: int, requests: int, tokens: int) -> Work:
        """Cuts prompts with different beginnings from tokenised texts.

        `long`: number of long prompts, of `length` tokens each. `requests`: number of short prompts, of `short` tokens
        each.
        """
        ids, starts = sum(texts, list[int]()), [0]
        for text in texts[:-1]:
            starts.append(starts[-1] + len(text))

        def cut(number: int, size: int, shift: int) -> list[int]:
            turn, text = divmod(number, len(starts))
            at = (starts[text] + shift + 101 * turn) % len(ids)
            return (ids * (size // len(ids) + 2))[at : at + size]

        prompts = [cut(i, length, 50) for i in range(long)]
        return Work(prompts, [cut(i, short, 0) for i in range(requests)], tokens)

    def less(self, requests: int) -> Work:
        """Returns the workload with at most `requests` short prompts."""
        return Work(self.long, self.short[:requests], self.tokens)


@dataclass(slots=True)
class Measured:
    """Measurements of a process. Rates are tokens per second."""

    start: float  # seconds from process start until it accepts requests
    load: float | None = None  # part of `start` for loading the models; None if unknown
    peak: int = 0  # peak resident bytes (VmHWM), mapped files included
    prompts: list[float] = field(default_factory=list)  # of each long prompt
    rates: list[float] = field(default_factory=list)  # of each request, after the prefill
    decoded: int = 0  # tokens of all requests, if `rounds` is known
    rounds: int = 0  # target forwards for these tokens
    drafted: int = 0
    accepted: int = 0
    texts: list[list[int]] = field(default_factory=list)  # answer to each request
    sampled_rates: list[float] = field(default_factory=list)  # of each request at COMMON_SAMPLING, if measured
    sampled_decoded: int = 0  # their tokens
    sampled_rounds: int = 0  # target forwards for these tokens
    notes: dict[str, Any] = field(default_factory=dict)


def peak_of(process: int | str = "self") -> int:
    """Returns the peak resident bytes of a process, mapped pages included, or 0 if the system does not report it."""
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    lines = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return 1024 * int(lines.get("VmHWM", "0 kB").split()[0])


@dataclass(frozen=True, slots=True)
class Task:
    """The task of a child process: what to run, and on which workload."""

    what: dict[str, Any]
    work: Work
    began: float = 0.0  # time of writing, on a clock that all processes of the machine share

    def write(self, file: Path) -> None:
        """Writes the task for a child that starts now."""
        file.write_text(json.dumps(asdict(self) | {"began": time.monotonic()}), encoding="utf-8")

    @staticmethod
    def given() -> Task:
        """Reads the task file that the only command-line argument names."""
        parser = argparse.ArgumentParser(description="Started by bench.large, which writes the task.")
        parser.add_argument("task", type=Path)
        data = json.loads(parser.parse_args().task.read_text(encoding="utf-8"))
        return Task(data["what"], Work(**data["work"]), data["began"])


def answer(measured: Measured) -> None:
    """Prints the measurements as the last line of a child's output."""
    print(json.dumps(asdict(measured)), flush=True)
