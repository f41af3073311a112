"""Process of one rank, which a supervisor starts: `python -m swiftspec.serve.rank_process CONTROL INCARNATION --
FLAGS`.

CONTROL is the file descriptor of the control socket, INCARNATION the number of restarts of this rank so far.
"""

from __future__ import annotations

import socket
import sys
import traceback
from typing import NoReturn

from swiftspec.distributed.launch.control_socket import SupervisorClient
from swiftspec.serve.__main__ import exit_process, run_guarded, run_rank


def main() -> NoReturn:
    """Runs the rank in this process and exits with its exit code."""
    control, incarnation, _, *argv = sys.argv[1:]
    supervisor = SupervisorClient(socket.socket(fileno=int(control)), int(incarnation))

    def run(first: bool) -> int:
        from swiftspec.cli.arguments import parse_command

        return run_rank(parse_command(argv), first, supervisor)

    try:
        code = run_guarded(run, supervised=True)
    except Exception:  # an internal error; the interpreter's shutdown may wait for a GPU or for other ranks
        traceback.print_exc()
        code = 1
    exit_process(code)


if __name__ == "__main__":
    main()
