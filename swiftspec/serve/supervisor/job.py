"""What a keeper keeps: the rank that a launcher has started it for (`here`), or all `ranks` of a command that no
launcher has started."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace

from swiftspec.distributed.launch.launcher import Launched
from swiftspec.serve.supervisor.supervised_process import Program
from swiftspec.serve.supervisor.supervisor import Keeper
from swiftspec.serve.supervisor.supervisor_link import link


def keep_server(here: Launched | None, ranks: int, argv: Sequence[str], front: Program, url: str) -> int:
    """A server: rank 0, and its front end, which can be reached at `url`. Returns the exit code."""
    programs = _programs(here, ranks, argv)
    programs[0] = replace(programs[0], first=url.encode(), reads=True)
    return Keeper(programs, front, say=_say, link=None if here is None else link(here)).run()


def keep_command(here: Launched | None, ranks: int, argv: Sequence[str]) -> int:
    """A chat or a single answer. A person sees how rank 0 ends: it is not started
    again, and nobody but the person watches it. In a terminal it stays where Ctrl-C is heard and keys are read."""
    terminal = _in_terminal()
    programs = _programs(here, ranks, argv)
    programs[0] = replace(programs[0], session=not terminal, silence=None, again=False, reads=True)
    return Keeper(programs, say=_say, link=None if here is None else link(here), shares_terminal=terminal).run()


def keep_rank(here: Launched, argv: Sequence[str]) -> int:
    """Any other rank that a launcher has started."""
    return Keeper([_program(here.rank, argv)], say=_say, link=link(here)).run()


def _programs(here: Launched | None, ranks: int, argv: Sequence[str]) -> list[Program]:
    if here is not None or ranks == 1:
        return [_program(0, argv)]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    job |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", 1)}  # as torchrun has it
    made = []
    for rank in range(ranks):
        variables = {name: str(value) for name, value in {**job, "RANK": rank, "LOCAL_RANK": rank}.items()}
        made.append(replace(_program(rank, argv), variables=variables))
    return made


def _program(rank: int, argv: Sequence[str]) -> Program:
    """One rank. Without rank 0 or the front end there is no job; without another rank there may be one, if it is only
    the draft that is lost."""

    def command(control: int, life: int) -> list[str]:
        return [sys.executable, "-m", "swiftspec.serve.rank_process", str(control), str(life), "--", *argv]

    return Program(f"rank {rank}", command, vital=rank == 0)


def _in_terminal() -> bool:
    """Whether we are what a terminal's keys go to."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _say(text: str) -> None:
    print(f"swiftspec: {text}", file=sys.stderr, flush=True)
