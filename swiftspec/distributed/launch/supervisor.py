"""Supervisor of a job, or of one rank of it: starts the processes, checks their heartbeats and restarts them. It
imports only light modules, so that hardly anything but a signal can end it."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence

from swiftspec.distributed.launch import control_socket
from swiftspec.distributed.launch.job_link import JobLink
from swiftspec.distributed.launch.supervised_process import Program, SupervisedProcess, exit_code_of_job
from swiftspec.signals import TERMINATION_SIGNALS, SignalHandlers

POLL_INTERVAL_S = 0.25  # longest wait between two checks
MAX_POLL_DELAY_S = 1.0  # a check that is later than this means that the supervisor itself was stopped
SHUTDOWN_GRACE_S = 5.0  # for processes that were asked to exit
SIGTERM_GRACE_S = 2.0  # after SIGTERM, before SIGKILL


class Supervisor:
    """Supervisor of ranks and, for a server, of the front end.

    `ranks`: programs of the ranks. The first is that of the leader, with which the job ends.
    `frontend`: program of the front end, which is connected to the leader by the engine link and shut down with the
    job.
    `log`: called with a line when a process ends unexpectedly or is restarted.
    `link`: connection to the supervisors of the other ranks on this machine.
    `shares_terminal`: the leader receives Ctrl-C from the terminal itself, so SIGINT is not forwarded to it.
    """

    def __init__(
        self,
        ranks: Sequence[Program],
        frontend: Program | None = None,
        *,
        log: Callable[[str], None],
        link: JobLink | None = None,
        shares_terminal: bool = False,
    ) -> None:
        self._ranks = [SupervisedProcess(program) for program in ranks]
        self._leader = self._ranks[0]
        self._frontend = None if frontend is None else SupervisedProcess(frontend)
        self._children = [*([] if self._frontend is None else [self._frontend]), *self._ranks]
        self._log, self._link, self._shares_terminal = log, link, shares_terminal
        self._received_signals: list[int] = []  # signals that are not forwarded yet
        self._first_signal: int | None = None  # the first termination signal
        self._exit_code: int | None = None  # exit code of the job; None while it runs
        self._ranks_shut_down = False  # whether rank 0 has shut down the other ranks
        self._last_poll = 0.0  # time of the last check

    def run(self) -> int:
        """Runs until the leader has exited and is not restarted, then ends the other processes. Returns the exit code
        of the job."""
        handlers = SignalHandlers(self._receive_signal, (*TERMINATION_SIGNALS, signal.SIGCHLD), wakeup=True)
        with handlers:
            wakeup = handlers.wakeup_fd
            try:
                self._last_poll = time.monotonic()
                for child in self._children:
                    self._start(child, self._last_poll)
                while self._exit_code is None:
                    self._handle_events(wakeup)
                self._shut_down(wakeup)
                return self._exit_code
            finally:
                for child in self._children:
                    child.signal(signal.SIGKILL)
                if self._link is not None:
                    self._link.close(1 if self._exit_code is None else self._exit_code)

    def _handle_events(self, wakeup: int) -> None:
        """Waits for the next event and handles signals, exits, timeouts and due restarts."""
        now = self._poll(wakeup)
        self._forward_signals()
        over = None if self._link is None else self._link.poll_exit_code()
        if over is not None and self._exit_code is None:
            self._exit_code, self._ranks_shut_down = over, True
        for child in self._children:
            code = child.poll_exit()
            if code is not None:
                self._handle_exit(child, code, now)
            child.kill_if_hung(now)
            if child.restart_at is not None and now >= child.restart_at and self._exit_code is None:
                self._start(child, now)

    def _poll(self, wakeup: int) -> float:
        """Waits for an event or the next due restart, then reads heartbeats. `wakeup`: file descriptor of the
        signal handlers. Returns the time (monotonic clock)."""
        poll = select.poll()
        poll.register(wakeup, select.POLLIN)
        for child in self._children:
            if child.control is not None:
                poll.register(child.control, select.POLLIN)
        dues = [child.restart_at - time.monotonic() for child in self._children if child.restart_at is not None]
        seconds = max(min([POLL_INTERVAL_S, *dues]), 0.0)
        if any(file == wakeup for file, _ in poll.poll(seconds * 1000 + 1)):
            os.read(wakeup, 1 << 10)
        now = time.monotonic()
        for child in self._children:
            child.read_heartbeats(now)
            if now - self._last_poll > POLL_INTERVAL_S + MAX_POLL_DELAY_S:
                child.reset_timers(now)
        self._last_poll = now
        return now

    def _start(self, child: SupervisedProcess, now: float) -> None:
        """Starts the next incarnation of a process. If it is the front end or rank 0, connects these two by a new
        engine link."""
        try:
            child.start(now)
        except OSError as error:
            child.kill_reason = f"could not be started ({error.strerror})"
            if child.incarnation == 0:
                self._log(f"{child.program.name} {child.kill_reason}")
            self._handle_exit(child, 1, now)
            return
        frontend = self._frontend
        if frontend is not None and child in (frontend, self._leader) and frontend.control and self._leader.control:
            frontend_end, leader_end = socket.socketpair()
            with frontend_end, leader_end:
                frontend.send(control_socket.LINK, frontend_end)
                self._leader.send(control_socket.LINK, leader_end)

    def _handle_exit(self, child: SupervisedProcess, code: int, now: float) -> None:
        """Handles the exit of a process: schedules its restart, or ends the job."""
        if self._exit_code is not None or (child is self._frontend and code == 0):
            return
        if self._first_signal is not None or child.is_final_exit(code):
            if code < 0 and self._first_signal is None:  # otherwise the process has printed the reason
                self._log(f"{child.program.name} {child.describe_exit(code)}")
            if child is self._leader or (code != 0 and self._first_signal is None):
                self._exit_code = exit_code_of_job(code, self._first_signal)
                self._ranks_shut_down = self._exit_code == 0
        elif child.schedule_restart(now):
            self._log(f"{child.program.name} {child.describe_exit(code)}; restarting")
        else:
            self._log(f"{child.program.name} {child.describe_exit(code)}; not restarting: too many restarts")
            if child.program.critical or child is self._leader:
                self._exit_code = int(child.program.critical)

    def _receive_signal(self, number: int) -> None:
        if number != signal.SIGCHLD:
            self._received_signals.append(number)

    def _forward_signals(self) -> None:
        """Forwards each signal to the leader. If the leader is not running, the signal ends the job."""
        while self._received_signals:
            number = self._received_signals.pop(0)
            if number == signal.SIGINT and self._shares_terminal:  # it may only stop an answer of the chat
                continue
            self._leader.expect_exit()
            self._first_signal = self._first_signal or number
            for child in self._children:
                child.restart_at = None
            if self._leader.process is not None:
                self._leader.signal(number)
            elif self._exit_code is None:
                self._exit_code = 128 + number

    def _shut_down(self, wakeup: int) -> None:
        """Waits for all processes to exit. Ranks that do not exit get SIGTERM, then SIGKILL."""
        for child in self._children:
            child.expect_exit()
        if self._frontend is not None:
            self._frontend.send(control_socket.SHUTDOWN)
        ranks = [child for child in self._children if child is not self._frontend]
        if self._ranks_shut_down:
            self._wait_for_exit(wakeup, self._children, SHUTDOWN_GRACE_S)
        for rank in ranks:
            rank.signal(signal.SIGTERM)
        self._wait_for_exit(wakeup, ranks, SIGTERM_GRACE_S)
        for rank in ranks:
            rank.signal(signal.SIGKILL)
        self._wait_for_exit(wakeup, self._children, SHUTDOWN_GRACE_S)

    def _wait_for_exit(self, wakeup: int, children: Sequence[SupervisedProcess], seconds: float) -> None:
        """Waits up to `seconds` for the processes to exit; another signal ends the wait."""
        end = time.monotonic() + seconds
        while (
            any(child.process is not None for child in children)
            and time.monotonic() < end
            and not self._received_signals
        ):
            now = self._poll(wakeup)
            for child in self._children:
                child.poll_exit()
                child.kill_if_hung(now)
