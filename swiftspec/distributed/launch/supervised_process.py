"""One supervised process across its restarts, on the supervisor's side."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from swiftspec.distributed.launch.control_socket import HEARTBEAT, decode_heartbeat, encode_first_message
from swiftspec.distributed.launch.supervisor_link import EXIT_PEER_LOST

STARTUP_HEARTBEAT_TIMEOUT_S = 30.0  # until the process is ready: imports of large libraries hold the interpreter lock
EXIT_HEARTBEAT_TIMEOUT_S = 15.0  # once it was asked to exit: the interpreter's shutdown sends no heartbeats
WORK_UNIT_TIMEOUT_S = 300.0  # limit of one operation; a prefill chunk may take a minute on a slow machine
RESTART_DELAYS_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)  # before consecutive restarts; the last value repeats
STABLE_AFTER_S = 60.0  # after a process was ready this long, its delays begin again at the first
MAX_RESTARTS, RESTART_WINDOW_S = 8, 600.0  # at most MAX_RESTARTS restarts per window
SHM_DIR = Path("/dev/shm")
FINAL_EXIT_CODES = {0, 2, 128 + signal.SIGHUP, 128 + signal.SIGINT, 141, 128 + signal.SIGTERM}  # of intended exits


def cpu_wait_s(process: int, thread: int) -> float:
    """Returns the seconds that a thread has been ready to run without a CPU; 0 where the system does not report it."""
    try:
        return int(Path(f"/proc/{process}/task/{thread}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def exit_code_of_job(code: int, first_signal: int | None) -> int:
    """Returns the exit code of a job that ends because a process has exited with `code`. `first_signal`: the first
    termination signal that the job has received; None: none."""
    if code == EXIT_PEER_LOST:
        return 1 if first_signal is None else 128 + first_signal
    return code if code >= 0 else 128 - code


@dataclass(frozen=True, slots=True)
class Program:
    """Command and supervision options of one process.

    `command`: returns the command line, given the control socket's file descriptor and the incarnation.
    `environment`: variables in addition to this process's environment.
    `inherited_fds`: file descriptors that the process inherits, in addition to the control socket.
    `first_message`: payload of the first message on the control socket.
    `new_session`: run it in its own session, so that a terminal's Ctrl-C reaches only the supervisor.
    `heartbeat_timeout_s`: seconds without a heartbeat before the process is killed; None disables the check.
    `restart`: restart it when it exits.
    `critical`: end the job once the restart limit is reached.
    `inherit_stdin`: it reads this process's standard input; otherwise its input is empty.
    """

    name: str
    command: Callable[[int, int], Sequence[str]]
    environment: Mapping[str, str] = field(default_factory=dict)
    inherited_fds: tuple[int, ...] = ()
    first_message: bytes = b""
    new_session: bool = True
    heartbeat_timeout_s: float | None = 3.0
    restart: bool = True
    critical: bool = True
    inherit_stdin: bool = False


class RestartPolicy:
    """Restart policy of one process, and the history of its restarts."""

    def __init__(self) -> None:
        self._consecutive = 0
        self._restart_times: deque[float] = deque()

    def next_delay(self, now: float, ready_s: float) -> float | None:
        """Returns the delay in seconds before the next restart, or None once the restart limit is reached.

        `now`: time of the exit; `ready_s`: how long the process was ready before it."""
        while self._restart_times and now - self._restart_times[0] > RESTART_WINDOW_S:
            self._restart_times.popleft()
        if len(self._restart_times) >= MAX_RESTARTS:
            return None
        self._restart_times.append(now)
        self._consecutive = 0 if ready_s >= STABLE_AFTER_S else self._consecutive
        self._consecutive += 1
        return RESTART_DELAYS_S[min(self._consecutive, len(RESTART_DELAYS_S)) - 1]


class SupervisedProcess:
    """A `Program` and its current process, if one is running."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.incarnation = -1
        self.restart_at: float | None = None  # time of the scheduled restart (monotonic clock)
        self.kill_reason = ""  # why this supervisor killed the process; empty if it did not
        self.process: subprocess.Popen[bytes] | None = None
        self.control: socket.socket | None = None
        self._restart_policy = RestartPolicy()
        self._receive_buffer = b""
        self._last_heartbeat = self._timers_reset_at = 0.0
        self._cpu_waits: dict[int, float] = {}  # seconds by thread, at the latest heartbeat or the start
        self._busy_since: float | None = None
        self._ready_at: float | None = None
        self._exit_requested = False

    def start(self, now: float) -> None:
        """Starts the next incarnation. Raises OSError if the process cannot be created."""
        program = self.program
        self.incarnation, self.restart_at, self.kill_reason, self._receive_buffer = self.incarnation + 1, None, "", b""
        self._last_heartbeat = self._timers_reset_at = now
        self._busy_since = self._ready_at = None
        self._exit_requested = False
        self.control, remote_end = socket.socketpair()
        with remote_end:
            try:
                self.process = subprocess.Popen(
                    program.command(remote_end.fileno(), self.incarnation),
                    env={**os.environ, **program.environment},
                    pass_fds=(remote_end.fileno(), *program.inherited_fds),
                    start_new_session=program.new_session,
                    stdin=None if program.inherit_stdin else subprocess.DEVNULL,
                )
            except OSError:
                self._close_control()
                raise
        self._cpu_waits = self._read_cpu_waits()
        with suppress(OSError):  # it may have exited already
            self.control.sendall(encode_first_message(program.first_message))
        self.control.setblocking(False)

    def read_heartbeats(self, now: float) -> None:
        """Reads all heartbeats that have arrived."""
        while self.control is not None:
            try:
                data = self.control.recv(1 << 12)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:  # it has exited, or is about to
                self._close_control()
                return
            self._receive_buffer += data
            complete = len(self._receive_buffer) // HEARTBEAT.size * HEARTBEAT.size
            for at in range(0, complete, HEARTBEAT.size):
                # `_ready_at` is never unset: a heartbeat encoded before `set_ready` may arrive after the ready one.
                ready, self._busy_since, thread = decode_heartbeat(self._receive_buffer[at : at + HEARTBEAT.size])
                self._last_heartbeat = now
                self._cpu_waits = self._read_cpu_waits(thread)
                if ready and self._ready_at is None:
                    self._ready_at = now
            self._receive_buffer = self._receive_buffer[complete:]

    def reset_timers(self, now: float) -> None:
        """Restarts the timeouts of the heartbeat and of the current operation. Called after the supervisor itself was
        suspended and could not read heartbeats."""
        self._last_heartbeat = self._timers_reset_at = now

    def kill_if_hung(self, now: float) -> None:
        """Kills the process if it has sent no heartbeat, or has been in the same operation, for longer than the
        timeout. Time in which it was ready to run, but other processes had the CPUs, does not count."""
        timeout = self.program.heartbeat_timeout_s
        if self.process is None or timeout is None or self.kill_reason:
            return
        limit = timeout if self._ready_at is not None else max(timeout, STARTUP_HEARTBEAT_TIMEOUT_S)
        limit = max(limit, EXIT_HEARTBEAT_TIMEOUT_S) if self._exit_requested else limit
        silent = now - self._last_heartbeat
        if silent > limit and silent - self._cpu_wait_since_heartbeat() > limit:
            self.kill_reason = f"sent no heartbeat for {limit:g} s"
        elif (
            self._ready_at is not None
            and self._busy_since is not None
            and now - max(self._busy_since, self._timers_reset_at) > WORK_UNIT_TIMEOUT_S
        ):
            self.kill_reason = f"did not finish an operation within {WORK_UNIT_TIMEOUT_S:g} s"
        if self.kill_reason:
            self.signal(signal.SIGKILL)

    def _read_cpu_waits(self, *threads: int) -> dict[int, float]:
        """Returns the seconds that the main thread and `threads` of the process have waited for a CPU, by thread."""
        if self.process is None:
            return {}
        return {thread: cpu_wait_s(self.process.pid, thread) for thread in (self.process.pid, *threads)}

    def _cpu_wait_since_heartbeat(self) -> float:
        """Returns the longest time that one of the threads has waited for a CPU since the latest heartbeat or the
        start."""
        waits = self._read_cpu_waits(*self._cpu_waits)
        return max((waits[thread] - before for thread, before in self._cpu_waits.items()), default=0.0)

    def poll_exit(self) -> int | None:
        """Returns the exit code on the first call after the process has exited, and removes its shared-memory files.
        Returns None on other calls."""
        if self.process is None or (code := self.process.poll()) is None:
            return None
        for file in SHM_DIR.glob(f"swiftspec-{self.process.pid}-*"):
            with suppress(OSError):
                file.unlink()
        self._close_control()
        self.process = None
        return code

    def is_final_exit(self, code: int) -> bool:
        """Returns whether the program is not restarted after this exit code: `restart` is off, the exit was intended,
        or the process failed in its first start."""
        started = self.incarnation > 0 or self._ready_at is not None
        return not self.program.restart or (code != EXIT_PEER_LOST and (not started or code in FINAL_EXIT_CODES))

    def describe_exit(self, code: int) -> str:
        """Returns a predicate that describes an exit in the log."""
        if self.kill_reason:
            return self.kill_reason
        if code == EXIT_PEER_LOST:
            return "lost another rank"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def schedule_restart(self, now: float) -> bool:
        """Schedules the next start. Returns False once the restart limit is reached."""
        delay = self._restart_policy.next_delay(now, 0.0 if self._ready_at is None else now - self._ready_at)
        self.restart_at = None if delay is None else now + delay
        return delay is not None

    def expect_exit(self) -> None:
        """Extends the heartbeat timeout of the process, because it was asked to exit."""
        self._exit_requested = True

    def signal(self, number: int) -> None:
        """Sends a signal to the process, if one is running."""
        if self.process is not None:
            self.process.send_signal(number)

    def send(self, message: bytes, file: socket.socket | None = None) -> None:
        """Sends a message, optionally with a file descriptor. If the process has just exited, the message is dropped;
        the next incarnation is sent a new one."""
        if self.control is not None:
            with suppress(OSError):
                socket.send_fds(self.control, [message], [] if file is None else [file.fileno()])

    def _close_control(self) -> None:
        if self.control is not None:
            self.control.close()
            self.control = None
