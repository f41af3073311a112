"""Measures a start of SwiftSpec and a workload in this process. The session is opened as by the command.

python -m bench.startup TASK.json        # started by bench/large.py, which writes the task: `Bench._ours`
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from bench.workload import COMMON_SAMPLING, WARM_UP, Measured, Task, answer, peak_of
from swiftspec.cli.terminal import StartupProgress
from swiftspec.errors import UserError
from swiftspec.llm import llm_settings
from swiftspec.params import SamplingParams
from swiftspec.startup.session import Session, open_session

QUIET, LONGEST = 3.0, 300.0  # seconds without a change after which a folder counts as complete, and the timeout


def main() -> None:
    """Runs a task and prints its measurements."""
    task = Task.given()
    settings = llm_settings(task.what["settings"])
    settings.raw = True  # prompts are token ids
    import swiftspec.llm_engine  # noqa: F401 # torch, and all that the models need: what comes after is loading

    began = time.monotonic()
    session = open_session(settings, StartupProgress(quiet=True))
    now = time.monotonic()
    measured = Measured(now - task.began, load=now - began)
    try:
        run(session, task, measured)
        if task.what["cache"] is not None:
            settle(Path(task.what["cache"]))
    finally:
        session.close()
    measured.peak = peak_of()
    answer(measured)


def run(session: Session, task: Task, measured: Measured) -> None:
    """Runs all requests of a task greedily, ignoring end tokens. With `sampled` in the task, the short prompts run at
    COMMON_SAMPLING as well."""

    def generate(prompt: list[int], tokens: int, **sampling: Any) -> list[int]:
        params = SamplingParams(**{"temperature": 0, **sampling}, max_tokens=tokens, ignore_eos=True)
        return session.llm.generate(prompt, params).token_ids

    generate(task.work.short[0], WARM_UP)
    first = list[float]()
    for prompt in task.work.long:
        generate(prompt, 1)
        measured.prompts.append(len(prompt) / session.llm.stats.prompt_time)
        first.append(session.llm.stats.first_token_time)
    for prompt in task.work.short:
        measured.texts.append(generate(prompt, task.work.tokens))
        stats = session.llm.stats
        measured.rates.append(stats.tokens / stats.decode_time)
        measured.decoded += stats.tokens
        measured.rounds += stats.rounds
        measured.drafted += stats.drafted
        measured.accepted += stats.accepted
        if task.what["sampled"]:
            generate(prompt, task.work.tokens, **COMMON_SAMPLING)
            stats = session.llm.stats
            measured.sampled_rates.append(stats.tokens / stats.decode_time)
            measured.sampled_decoded += stats.tokens
            measured.sampled_rounds += stats.rounds
    measured.notes = {"dtype": session.dtype, "threads": session.threads, "first_token_seconds_of_long_prompts": first}


def settle(folder: Path) -> None:
    """Waits until a folder has not changed for QUIET seconds, so that files written in the background are complete."""
    until, seen, since = time.monotonic() + LONGEST, None, time.monotonic()
    while time.monotonic() < min(until, since + QUIET):
        now = state(folder)
        if now != seen:
            seen, since = now, time.monotonic()
        time.sleep(0.1)


def state(folder: Path) -> list[tuple[str, int, int]]:
    """Returns name, modification time in nanoseconds and bytes of every file.

    A file that is renamed concurrently is left out until the next call.
    """
    found: list[tuple[str, int, int]] = []
    for file in sorted(folder.rglob("*")):
        try:
            found.append((str(file), file.stat().st_mtime_ns, file.stat().st_size))
        except OSError:
            continue
    return found


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
