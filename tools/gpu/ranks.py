"""Runs a module on several ranks of this machine, as torchrun does, but in one process group.

    python -m tools.gpu.ranks 4 bench.gpu.all_reduce --rows 8

torchrun starts its ranks in sessions of their own, so that they would survive the end of a step of tools.gpu_queue. If
a rank fails, the others are killed. The exit code is 0 if all ranks succeed, else that of a failed one.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

PAUSE_S = 0.1  # between checks


def start(size: int, command: Sequence[str]) -> list[subprocess.Popen[bytes]]:
    """Starts a Python command on `size` ranks, with torchrun's environment variables."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        subprocess.Popen(
            [sys.executable, *command],
            env=os.environ | {name: str(value) for name, value in (world | {"RANK": rank, "LOCAL_RANK": rank}).items()},
        )
        for rank in range(size)
    ]


def wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Waits for all ranks. Returns the exit code of the first one that fails, after killing the others, or 0."""
    try:
        while True:
            codes = [rank.poll() for rank in ranks]
            failed = next((code for code in codes if code), None)
            if failed is not None or None not in codes:
                return failed or 0
            time.sleep(PAUSE_S)
    finally:
        for rank in ranks:
            rank.kill()


def main() -> int:
    if len(sys.argv) < 3 or not sys.argv[1].isdecimal():
        print("usage: python -m tools.gpu.ranks NUMBER MODULE [ARGUMENTS]", file=sys.stderr)
        return 2
    return wait(start(int(sys.argv[1]), ["-m", *sys.argv[2:]]))


if __name__ == "__main__":
    sys.exit(main())
