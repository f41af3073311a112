"""Runs tests in a process that is restarted after the current test whenever it hangs or breaks the GPU.

    python -m tools.gpu.resumable_tests --json out.json [--budget 60] [--timeout 8] tests/gpu/test_linear.py ...

A device error persists until its process ends, so a test that causes one is the last of its process. The exit code is 3
if a test failed, hung or was not reached in time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu.watchdog import FAILED, watch
from swiftspec.backends.cuda.devices import DEVICE_ERRORS

START = 60.0  # seconds to import torch and to create a context on the GPU
LOST = 70  # exit code of a process that can no longer use the GPU
LOST_DEVICE = ("cudaError", *DEVICE_ERRORS)
TAIL = 3000  # characters retained of a failure


@dataclass(slots=True)
class Found:
    """All results so far, as stored in the file. `outcomes`: by test, passed, skipped or the error text. `at`: the
    current test."""

    outcomes: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)  # tests that were not reached
    at: str | None = None

    @staticmethod
    def read(file: Path) -> Found:
        """Reads a file. Returns empty results if it does not exist."""
        return Found(**json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else Found()

    def write(self, file: Path) -> None:
        """Writes atomically: a reader always finds a complete file."""
        whole = file.with_suffix(".part")
        whole.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")
        whole.replace(file)

    @property
    def failed(self) -> dict[str, str]:
        return {name: said for name, said in self.outcomes.items() if said not in ("passed", "skipped")}


class Recorder:
    """pytest plugin that skips tests with an outcome in the file and records the outcomes of all others."""

    def __init__(self, file: Path, found: Found, until: float) -> None:
        self._file, self._found, self._until = file, found, until

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self._found.outcomes]
        self._found.left = [item.nodeid for item in items]
        self._found.write(self._file)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if time.monotonic() > self._until:
            pytest.exit("out of time", returncode=FAILED)
        self._found.at = nodeid
        self._found.left.remove(nodeid)
        self._found.write(self._file)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        said = self._found.outcomes.get(report.nodeid, "passed")
        if report.skipped:
            said = "skipped"
        elif report.failed:
            said = report.longreprtext[-TAIL:]
        self._found.outcomes[report.nodeid] = said
        self._found.write(self._file)
        if report.failed and any(error in said for error in LOST_DEVICE):
            pytest.exit("the GPU is unusable in this process", returncode=LOST)


def work(args: argparse.Namespace) -> int:
    """Runs the tests that have no outcome yet. Returns the exit code."""
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")  # creates the context before the time of the first test begins
    found, until = Found.read(args.json), time.monotonic() + args.budget
    limits = ["-o", f"faulthandler_timeout={max(args.timeout - 2, 1):g}", "-o", "timeout=0"]
    code = pytest.main(
        ["-m", args.mark, "-p", "no:cacheprovider", "-vv", *limits, *args.tests],
        plugins=[Recorder(args.json, found, until)],
    )
    if code in (LOST, pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
        return int(code)
    return FAILED if found.failed or found.left else 0


def give_up(file: Path, why: str) -> bool:
    """Records that a test hung or ended its process, so that the next process continues after it.

    Returns whether tests are left.
    """
    found = Found.read(file)
    if found.at is None:
        return False
    said = found.outcomes.get(found.at, "passed")
    if said == "passed":
        found.outcomes[found.at] = why
    went_on, found.at = bool(found.left), None
    found.write(file)
    print(f"tested: {why}, {len(found.left)} tests left", flush=True)
    return went_on


def summary(found: Found) -> dict[str, Any]:
    """Returns the counts, and the names of the tests that failed."""
    outcomes = list(found.outcomes.values())
    counted = {kind: outcomes.count(kind) for kind in ("passed", "skipped")}
    return {**counted, "failed": list(found.failed), "not reached": found.left}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="+", help="test files")
    parser.add_argument("--json", type=Path, required=True, help="file for the outcomes, written after every test")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds after which no further test starts")
    parser.add_argument("--timeout", type=float, default=8.0, help="seconds for setup, call and teardown each")
    parser.add_argument("--mark", default="gpu", help="marker expression for pytest -m")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "tools.gpu.resumable_tests",
        "--worker",
        "--json",
        str(args.json),
        "--mark",
        args.mark,
    ]
    command += ["--timeout", f"{args.timeout:g}", *args.tests]
    code = watch(command, args.json, args.budget, args.timeout, give_up, START)
    found = Found.read(args.json)
    for name, said in found.failed.items():
        print(f"\n== {name}\n{said}")
    print(json.dumps(summary(found)))
    return code if code not in (0, 1) else FAILED if found.failed or found.left else code


if __name__ == "__main__":
    sys.exit(main())
