"""Real ranks for tests: processes that take jobs, forked from one that has imported torch, so that they cost little.

`Pool` is used by the tests; `python -m tests.support.ranks FD [FD ...]` is what it starts, one process per socket.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
JOB_TIMEOUT_S = 600.0  # seconds for a job: far more than any needs


class Pool:
    """`size` processes. A job runs on the first ones, each as one rank of a separate world."""

    def __init__(self, size: int) -> None:
        pairs = [socket.socketpair() for _ in range(size)]
        self._ends = [near for near, _ in pairs]
        numbers = [far.fileno() for _, far in pairs]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.ranks", *map(str, numbers)], cwd=ROOT, pass_fds=numbers,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
        )  # fmt: skip
        for _, far in pairs:
            far.close()
        for end in self._ends:
            end.settimeout(JOB_TIMEOUT_S)
        self._files = [end.makefile("rw") for end in self._ends]

    def run(self, ranks: int, job: str, *, apart: bool = False, **arguments: Any) -> list[Any]:
        """Returns the results of the job of that name in tests/support/rank_jobs.py on each of `ranks` ranks, or raises
        its exception. `apart`: each rank is configured as if on a separate machine."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        for rank, file in enumerate(self._files[:ranks]):
            order = {"job": job, "arguments": arguments, "rank": rank, "ranks": ranks, "port": port, "apart": apart}
            file.write(json.dumps(order) + "\n")
            file.flush()
        answers = [json.loads(file.readline() or '{"error": "the process is gone"}') for file in self._files[:ranks]]
        errors = [f"rank {rank}: {a['error']}" for rank, a in enumerate(answers) if "error" in a]
        if errors:
            raise RuntimeError("\n".join(errors))
        return [answer["result"] for answer in answers]

    def close(self) -> None:
        for file, end in zip(self._files, self._ends, strict=True):
            file.close()
            end.close()
        try:
            self._process.wait(10)
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)


def _live(descriptor: int) -> None:
    """Executes jobs until the other end is closed."""
    from tests.support import rank_jobs

    with socket.socket(fileno=descriptor) as end, end.makefile("rw") as file:
        for line in file:
            order = json.loads(line)
            rank, ranks = order["rank"], order["ranks"]
            local = (0, 1) if order["apart"] else (rank, ranks)
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
            os.environ |= dict(zip(names, map(str, (rank, ranks, *local, "127.0.0.1", order["port"])), strict=True))
            try:
                answer = {"result": getattr(rank_jobs, order["job"])(**order["arguments"])}
            except Exception:
                answer = {"error": traceback.format_exc()}
            file.write(json.dumps(answer) + "\n")
            file.flush()


def main(descriptors: list[int]) -> None:
    import torch

    from tests.support import rank_jobs  # noqa: F401  (before the fork, so that it is paid once)

    torch.set_num_threads(1)
    for descriptor in descriptors:
        if os.fork() == 0:
            for other in descriptors:
                if other != descriptor:
                    os.close(other)
            _live(descriptor)
            os._exit(0)
    for descriptor in descriptors:
        os.close(descriptor)
    for _ in descriptors:
        os.wait()


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
