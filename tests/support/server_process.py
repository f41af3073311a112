"""A server as people start it, in processes of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
START = 60.0  # seconds


class Served:
    """`python -m swiftspec.serve --port 0 FLAGS`, under torchrun where there are several ranks. Entered once it
    listens; `url` says where. On leaving it is stopped, as Ctrl-C does, and must leave with 0."""

    def __init__(self, flags: Sequence[str] = (), ranks: int = 1, variables: dict[str, str] | None = None) -> None:
        self._ranks = ranks
        launcher = [] if ranks == 1 else [*TORCHRUN, str(ranks)]
        self.process = subprocess.Popen(
            [sys.executable, *launcher, "-m", "swiftspec.serve", "--port", "0", "--plan", "none", *flags],
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}, start_new_session=True,
            preexec_fn=hear,
        )  # fmt: skip
        self.said: list[str] = []
        self.url = ""
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if found := re.search(r"listening on (http://\S+)", line):
                self.url = found[1]
                self._listening.set()
        self._listening.set()

    def __enter__(self) -> Served:
        assert self._listening.wait(START) and self.url, "".join(self.said)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            code = self.stop()
        finally:
            self.kill()
        # torchrun itself ends with an error where a signal ended it
        assert error is not None or code == 0 or self._ranks > 1, "".join(self.said)

    def stop(self, number: int = signal.SIGTERM, seconds: float = 60.0) -> int:
        """Asks it to end, and says how it did."""
        self.process.send_signal(number)
        return self.process.wait(seconds)

    def kill(self) -> None:
        """Leaves nothing of it, whatever became of it."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(10)

    def processes(self) -> list[int]:
        """Its own and all that come of it."""
        found, wanted = [self.process.pid], {self.process.pid}
        for _ in range(4):
            for entry in Path("/proc").iterdir():
                if entry.name.isdigit() and int(entry.name) not in wanted and _parent(int(entry.name)) in wanted:
                    wanted.add(int(entry.name))
                    found.append(int(entry.name))
        return found

    def cost(self) -> dict[int, tuple[int, int]]:
        """Resident memory in bytes and open files of each process."""
        costs = {}
        for process in self.processes():
            pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
            costs[process] = pages * 4096, len(list(Path(f"/proc/{process}/fd").iterdir()))
        return costs


def hear() -> None:
    """Whoever runs the tests in the background has them ignore Ctrl-C, or with nohup the terminal's end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _parent(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0
