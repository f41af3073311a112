"""One rank of a command, in the process that its keeper starts: `python -m swiftspec.serve.rank_process
CONTROL LIFE -- FLAGS`,
the number of an open file and how often that was."""

from __future__ import annotations

import socket
import sys
from typing import NoReturn

from swiftspec.serve.__main__ import exit_process, run_guarded, run_rank
from swiftspec.serve.supervisor.supervisor_client import SupervisorClient


def main() -> NoReturn:
    """The life of the rank, from its start to its end."""
    control, life, _, *argv = sys.argv[1:]
    kept = SupervisorClient(socket.socket(fileno=int(control)), int(life))

    def part(first: bool) -> int:
        from swiftspec.serve.cli.arguments import parse_command

        return run_rank(parse_command(argv), first, kept)

    exit_process(run_guarded(part, supervised=True))


if __name__ == "__main__":
    main()
