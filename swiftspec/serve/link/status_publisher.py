"""Status of rank 0, sent to the front end and repeated for each restarted front end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import overload

from swiftspec.cli.terminal import StartupProgress
from swiftspec.distributed.launch.control_socket import SupervisorClient
from swiftspec.distributed.launch.supervisor_link import RankInfo
from swiftspec.serve.link import frames
from swiftspec.serve.link.frame_socket import FrameSocket
from swiftspec.serve.link.frames import FrontEndLost


class StatusPublisher:
    """Publisher of rank 0's status (loading progress, engine properties, rank states) to the front end. A restarted
    front end gets the last frame of each type again.

    `socket`: engine link to the current front end.
    """

    def __init__(self, supervisor: SupervisorClient) -> None:
        self._supervisor, self._lock = supervisor, Lock()
        self._published: dict[type[frames.Frame], frames.Frame] = {}
        self.socket = self._next_socket(None)

    def publish(self, frame: frames.Frame) -> None:
        """Sends a status frame, and stores it for restarted front ends until the next frame of its type. Does not raise
        if the front end is lost. Thread-safe."""
        with self._lock:
            self._published[type(frame)] = frame
            with suppress(FrontEndLost):
                self.socket.send(frame)

    def publish_target(self, path: Path) -> None:
        """Publishes the target's path, so that the front end loads the tokenizer while rank 0 loads the weights."""
        self.publish(frames.ModelPathFrame(str(path)))

    def publish_ranks(self, ranks: Sequence[RankInfo]) -> None:
        """Publishes the states of the ranks. Thread-safe."""
        self.publish(frames.RankStatesFrame([frames.RankState(**asdict(rank)) for rank in ranks]))

    def reconnect(self, wakeup_fd: int) -> bool:
        """Blocks until the restarted front end is connected and sends the status to it. Returns False if `wakeup_fd`
        becomes readable first or the supervisor requests the shutdown."""
        socket = self._next_socket(wakeup_fd)
        if socket is None:
            return False
        with self._lock:
            self.socket.close(0)
            self.socket = socket
            if frames.EngineInfo in self._published:
                self._published.pop(frames.LoadingFrame, None)
            for frame in self._published.values():
                with suppress(FrontEndLost):
                    socket.send(frame)
        return True

    @overload
    def _next_socket(self, wakeup_fd: None) -> FrameSocket: ...
    @overload
    def _next_socket(self, wakeup_fd: int) -> FrameSocket | None: ...
    def _next_socket(self, wakeup_fd: int | None) -> FrameSocket | None:
        link = self._supervisor.wait_for_link(wakeup_fd)
        return None if link is None else FrameSocket(link)


class LoadingPhases(StartupProgress):
    """Startup progress that is shown in the terminal and also published to the front end."""

    def __init__(self, publisher: StatusPublisher) -> None:
        super().__init__()
        self._publisher = publisher

    def begin(self, phase: str, step: str = "") -> None:
        super().begin(phase, step)
        self._publisher.publish(frames.LoadingFrame(f"{phase} {step}".rstrip()))
