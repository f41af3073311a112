"""Leaves a tensor-parallel group within a limited time."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

import torch

from swiftspec.distributed.collectives.join import RankGroup
from swiftspec.runtime.current_device import set_current_device

LEAVE_TIMEOUT_S = 4.0  # seconds; shorter than supervisor.SHUTDOWN_GRACE_S, after which a rank is terminated


def leave_group(
    group: RankGroup, device: torch.device, release_graphs: Callable[[], None], *, lost: bool
) -> str | None:
    """Leaves a group. Returns after LEAVE_TIMEOUT_S at the latest, and never raises: returns why the group could not be
    left, in one line, or None.

    `release_graphs`: frees the captured graphs of this process, which must not outlive the communicator whose
        collectives they contain: NCCL would wait for them forever.
    `lost`: a rank of the group is lost or blocked. The communicator is then aborted, because closing it would wait for
        that rank, and so would freeing graphs and memory that kernels still use: the process has to exit next.

    If a reason is returned, or if `lost`, the interpreter's shutdown may wait for the group as well; see
    `serve.__main__.exit_process`.
    """

    def close() -> None:
        set_current_device(device)
        if device.type == "cuda" and not lost:
            torch.cuda.synchronize(device)
            release_graphs()
        if lost:
            group.abort()
        else:
            group.close()

    return _run_bounded(close)


def _run_bounded(work: Callable[[], None]) -> str | None:
    """Runs `work` in a thread. Returns None once it has ended, or why it failed or did not end in time."""
    problems = [f"not within {LEAVE_TIMEOUT_S:g} s"]

    def run() -> None:
        try:
            work()
            problems.clear()
        except Exception as error:
            problems[:] = [" ".join(str(error).split()) or type(error).__name__]

    thread = Thread(target=run, name="leave group", daemon=True)
    thread.start()
    thread.join(LEAVE_TIMEOUT_S)
    return next(iter(problems), None)
