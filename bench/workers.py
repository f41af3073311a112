"""Two local workers with the demo models at emulated step times, for benchmarks of the connection."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SERVE = [sys.executable, "-m", "swiftspec.serve"]
PACES = {"target": 30e-3, "draft": 3e-3}  # seconds per step
NODES = 16  # bs: a target of 30 ms verifies 16 nodes as fast as one
LEAVES = 32  # w: a draft of 3 ms expands 32 leaves as fast as one
SHAPE = ["--verify-batch", str(NODES), "--draft-leaves", str(LEAVES)]


@contextmanager
def started(command: Sequence[str], said: str, **how: Any) -> Iterator[str]:
    """Starts a process and yields the address that it prints. Kills the process afterwards.

    The address is the first group of the pattern, which is searched in every line of either output.
    """
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **how
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(said, line):
                yield found[1]
                return
        raise SystemExit(f"{' '.join(command)} exited before it listened")
    finally:
        process.kill()
        process.wait()


@contextmanager
def workers() -> Iterator[dict[str, str]]:
    """Starts both workers and yields their addresses."""
    with ExitStack() as both:
        yield {
            side: both.enter_context(started(_command(side, seconds), r"worker listening on (\S+)"))
            for side, seconds in PACES.items()
        }


def _command(side: str, seconds: float) -> list[str]:
    pace = ["--speculative-config.emulate", f"{side}={1e3 * seconds:g}ms", "--threads", "1"]
    return [*SERVE, "worker", side, "--listen", "127.0.0.1:0", *pace, *SHAPE]
