"""What a program under comparison is asked to do, and what it then says of itself. No torch: peers read this, too."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

WARM_UP = 8  # tokens that everybody decodes before anything counts


@dataclass(frozen=True, slots=True)
class Work:
    """Long prompts, of which one token is asked, and short ones, answered greedily with exactly `tokens` tokens."""

    long: list[list[int]]
    short: list[list[int]]
    tokens: int

    @staticmethod
    def of(texts: list[list[int]], *, long: int, short: int, length: int, requests: int, tokens: int) -> Work:
        """Cuts `long` prompts of `length` and `requests` short ones from tokenised texts, no two alike at the start."""
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
        """The same with fewer requests."""
        return Work(self.long, self.short[:requests], self.tokens)


@dataclass(slots=True)
class Measured:
    """What a process did. Rates in tokens a second."""

    start: float  # seconds from the start of the process until it takes requests
    load: float | None = None  # of these, loading the models; None where it does not say
    peak: int = 0  # bytes that were resident at most (VmHWM), mapped files among them
    prompts: list[float] = field(default_factory=list)  # of each long prompt
    rates: list[float] = field(default_factory=list)  # of each request, from the end of the prompt
    decoded: int = 0  # tokens of all requests, where `rounds` is known
    rounds: int = 0  # forwards of the target that gave them
    drafted: int = 0
    accepted: int = 0
    texts: list[list[int]] = field(default_factory=list)  # what was said to each request
    notes: dict[str, Any] = field(default_factory=dict)


def peak_of(process: int | str = "self") -> int:
    """Bytes that a process had resident at most, mapped pages counted; 0 where the system does not say."""
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    lines = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return 1024 * int(lines.get("VmHWM", "0 kB").split()[0])


@dataclass(frozen=True, slots=True)
class Task:
    """What a child process is to run, and on which work."""

    what: dict[str, Any]
    work: Work
    began: float = 0.0  # when the task was written, on a clock that all processes of a machine share

    def write(self, file: Path) -> None:
        """For a child that starts now."""
        file.write_text(json.dumps(asdict(self) | {"began": time.monotonic()}), encoding="utf-8")

    @staticmethod
    def given() -> Task:
        """The one that the first argument names."""
        data = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        return Task(data["what"], Work(**data["work"]), data["began"])


def answer(measured: Measured) -> None:
    """A child's last line."""
    print(json.dumps(asdict(measured)), flush=True)
