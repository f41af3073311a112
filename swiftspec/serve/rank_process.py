"""One rank of a command, in the process that its keeper starts: `python -m swiftspec.serve.rank_process
CONTROL LIFE -- FLAGS`,
the number of an open file and how often that was."""

from __future__ import annotations

import socket
import sys
from typing import NoReturn

from swiftspec.serve.__main__ import guarded, leave, run
from swiftspec.serve.supervisor.supervisor_client import Kept


def main() -> NoReturn:
    """The life of the rank, from its start to its end."""
    control, life, _, *argv = sys.argv[1:]
    kept = Kept(socket.socket(fileno=int(control)), int(life))

    def part(first: bool) -> int:
        from swiftspec.serve.cli.arguments import parse

        return run(parse(argv), first, kept)

    leave(guarded(part, kept=True))


if __name__ == "__main__":
    main()
