"""A keeper of tiny processes, in a process of its own: `python -m tests.support.tiny_supervisor REPORT JOB`. What a
process of it
does is a line of Python in the job, which is JSON; what it tells goes to the open file REPORT, a line each."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

from swiftspec.serve.supervisor import restart_policy, supervisor
from swiftspec.serve.supervisor.supervised_process import Program
from swiftspec.serve.supervisor.supervisor_client import Kept

LIVE = [sys.executable, "-c", "import tests.support.tiny_supervisor; tests.support.tiny_supervisor.live()"]
FOR_EVER = """
import time
while True:  # Python does not see a signal that comes just before it waits: no wait is long
    time.sleep(0.05)
"""


def program(report: int, name: str, does: str, nowhere: Sequence[int] = (), **more: Any) -> Program:
    """A process that tells that it lives, and does what that line says. The lives `nowhere` cannot be started."""

    def command(control: int, life: int) -> list[str]:
        return [*(["/no/such/program"] if life in nowhere else LIVE), str(control), str(life), str(report), name, does]

    return Program(name, command, files=(report,), **more)


def live() -> None:
    """The life of such a process. Its line can use `kept`, `life` and `tell`."""
    control, life, report = map(int, sys.argv[1:4])
    name, does = sys.argv[4:6]
    kept = Kept(socket.socket(fileno=control), life)

    def tell(**facts: Any) -> None:
        line = json.dumps({"name": name, "life": life, "pid": os.getpid(), **facts})
        os.write(report, f"{line}\n".encode())

    tell()
    exec(does, {"kept": kept, "life": life, "tell": tell})


def echo(kept: Kept, tell: Callable[..., None], says: str) -> None:
    """Sends a word on each wire and tells what comes, until told to leave."""
    while (wire := kept.wire()) is not None:
        wire.sendall(says.encode())
        tell(heard=wire.recv(100).decode())


def main() -> int:
    """Keeps the job's processes."""
    report, job = int(sys.argv[1]), json.loads(sys.argv[2])
    supervisor.TERM, supervisor.HOME = job.get("TERM", supervisor.TERM), job.get("HOME", supervisor.HOME)
    restart_policy.DELAYS, restart_policy.MOST = (
        tuple(job.get("DELAYS", restart_policy.DELAYS)),
        job.get("MOST", restart_policy.MOST),
    )
    made = {name: program(report, name, **values) for name, values in job["programs"].items()}
    front = made.pop("front", None)
    shares = job.get("shares_terminal", False)
    say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    return supervisor.Keeper(list(made.values()), front, say=say, shares_terminal=shares).run()


if __name__ == "__main__":
    sys.exit(main())
