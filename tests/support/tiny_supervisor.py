"""A supervisor of small processes, run as a process: `python -m tests.support.tiny_supervisor REPORT_FD JOB`.

The job is JSON. Each of its processes executes one line of Python and writes its reports, one JSON line each, to the
inherited file descriptor REPORT_FD.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

from swiftspec.distributed.launch import supervised_process, supervisor
from swiftspec.distributed.launch.control_socket import SupervisorClient
from swiftspec.distributed.launch.supervised_process import Program

RUN_PROCESS = [
    sys.executable,
    "-c",
    "import tests.support.tiny_supervisor; tests.support.tiny_supervisor.run_process()",
]
FOREVER = """
import time
while True:  # Python does not see a signal that comes just before it waits: no wait is long
    time.sleep(0.05)
"""


def program(report_fd: int, name: str, code: str, fail_to_start: Sequence[int] = (), **options: Any) -> Program:
    """A process that reports its start and then executes `code`. Its incarnations `fail_to_start` cannot be started."""

    def command(control: int, incarnation: int) -> list[str]:
        start = ["/no/such/program"] if incarnation in fail_to_start else RUN_PROCESS
        return [*start, str(control), str(incarnation), str(report_fd), name, code]

    return Program(name, command, inherited_fds=(report_fd,), **options)


def run_process() -> None:
    """Runs such a process. Its code can use `client`, `incarnation` and `report`."""
    control, incarnation, report_fd = map(int, sys.argv[1:4])
    name, code = sys.argv[4:6]
    client = SupervisorClient(socket.socket(fileno=control), incarnation)

    def report(**facts: Any) -> None:
        line = json.dumps({"name": name, "incarnation": incarnation, "pid": os.getpid(), **facts})
        os.write(report_fd, f"{line}\n".encode())

    report()
    exec(code, {"client": client, "incarnation": incarnation, "report": report})


def echo(client: SupervisorClient, report: Callable[..., None], text: str) -> None:
    """Sends `text` on each engine link and reports what it receives, until the shutdown message."""
    while (link := client.wait_for_link()) is not None:
        link.sendall(text.encode())
        report(received=link.recv(100).decode())


def main() -> int:
    """Supervises the job's processes."""
    report_fd, job = int(sys.argv[1]), json.loads(sys.argv[2])
    for module, name in (
        (supervisor, "SIGTERM_GRACE_S"),
        (supervisor, "SHUTDOWN_GRACE_S"),
        (supervised_process, "MAX_RESTARTS"),
    ):
        setattr(module, name, job.get(name, getattr(module, name)))
    supervised_process.RESTART_DELAYS_S = tuple(job.get("RESTART_DELAYS_S", supervised_process.RESTART_DELAYS_S))
    programs = {name: program(report_fd, name, **values) for name, values in job["programs"].items()}
    frontend = programs.pop("frontend", None)
    shares = job.get("shares_terminal", False)
    log = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    return supervisor.Supervisor(list(programs.values()), frontend, log=log, shares_terminal=shares).run()


if __name__ == "__main__":
    sys.exit(main())
