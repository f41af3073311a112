"""Starts the supervisors of a command.

Under a launcher such as torchrun, each rank has its own supervisor, and `launched` is the rank that this one
supervises. Without a launcher `launched` is None, and one supervisor runs all `ranks` ranks.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace

from swiftspec.distributed.launch.job_link import job_link
from swiftspec.distributed.launch.launched_rank import LaunchedRank
from swiftspec.distributed.launch.supervised_process import Program
from swiftspec.distributed.launch.supervisor import Supervisor


def supervise_server(
    launched: LaunchedRank | None, ranks: int, argv: Sequence[str], frontend: Program, url: str
) -> int:
    """Supervises a server until it ends: its ranks, and the front end, whose address is `url`. Returns the exit
    code."""
    programs = _programs(launched, ranks, argv)
    programs[0] = replace(programs[0], first_message=url.encode(), inherit_stdin=True)
    return Supervisor(programs, frontend, log=_log, link=None if launched is None else job_link(launched)).run()


def supervise_command(launched: LaunchedRank | None, ranks: int, argv: Sequence[str]) -> int:
    """Supervises a chat or a single answer until it ends. Returns the exit code.

    Rank 0 is not restarted and has no heartbeat timeout, because the user sees how it ends. In a terminal, rank 0 stays
    in the foreground process group, which receives Ctrl-C and reads keys.
    """
    terminal = _in_terminal()
    programs = _programs(launched, ranks, argv)
    programs[0] = replace(
        programs[0], new_session=not terminal, heartbeat_timeout_s=None, restart=False, inherit_stdin=True
    )
    link = None if launched is None else job_link(launched)
    return Supervisor(programs, log=_log, link=link, shares_terminal=terminal).run()


def supervise_rank(launched: LaunchedRank, argv: Sequence[str]) -> int:
    """Supervises a rank other than 0 that a launcher has started, until it ends. Returns the exit code."""
    return Supervisor([_program(launched.rank, argv)], log=_log, link=job_link(launched)).run()


def _programs(launched: LaunchedRank | None, ranks: int, argv: Sequence[str]) -> list[Program]:
    if launched is not None or ranks == 1:
        return [_program(0, argv)]
    with socket.create_server(("127.0.0.1", 0)) as placeholder:
        port = placeholder.getsockname()[1]
    environment = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", 1)}  # the default of torchrun
    programs = []
    for rank in range(ranks):
        values = {**environment, "RANK": rank, "LOCAL_RANK": rank}
        rank_environment = {name: str(value) for name, value in values.items()}
        programs.append(replace(_program(rank, argv), environment=rank_environment))
    return programs


def _program(rank: int, argv: Sequence[str]) -> Program:
    """Returns the program of one rank. Only rank 0 is critical: without a draft rank the target continues to decode."""

    def command(control: int, incarnation: int) -> list[str]:
        return [sys.executable, "-m", "swiftspec.serve.rank_process", str(control), str(incarnation), "--", *argv]

    return Program(f"rank {rank}", command, critical=rank == 0)


def _in_terminal() -> bool:
    """Returns whether this process is in the foreground process group of a terminal."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _log(text: str) -> None:
    print(f"swiftspec: {text}", file=sys.stderr, flush=True)
