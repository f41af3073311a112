"""What rank 0 of a server says of itself, to one front end after the other."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from threading import Lock
from typing import overload

from swiftspec.distributed.launch.supervision import Member
from swiftspec.serve.http.engine_link import frames
from swiftspec.serve.http.engine_link.frame_socket import FrontEndLost, Wire
from swiftspec.serve.model_resolution import Found
from swiftspec.serve.supervisor.supervisor_client import Kept
from swiftspec.serve.terminal import Phases


class Teller:
    """What rank 0 says of itself and of the ranks goes to the front end, and is said again to the next one. `wire`: to
    the present one."""

    def __init__(self, kept: Kept) -> None:
        self._kept, self._lock = kept, Lock()
        self._said: dict[type[frames.Frame], frames.Frame] = {}
        self.wire = self._next(None)

    def tell(self, frame: frames.Frame) -> None:
        """A frame that stays true until another of its kind comes. From any thread."""
        with self._lock:
            self._said[type(frame)] = frame
            with suppress(FrontEndLost):
                self.wire.send(frame)

    def found(self, found: Found) -> None:
        """Where the models lie: the front end reads the tokenizer while the weights load."""
        self.tell(frames.Found(str(found.target)))

    def members(self, members: Sequence[Member]) -> None:
        """What the ranks are like. From any thread."""
        self.tell(frames.Ranks([frames.RankState(**asdict(member)) for member in members]))

    def renew(self, beside: int) -> bool:
        """Waits for the wire to the next front end, which hears what was said; False where the file `beside` has
        something to read before that."""
        wire = self._next(beside)
        if wire is None:
            return False
        with self._lock:
            self.wire.close(0)
            self.wire = wire
            if frames.Ready in self._said:
                self._said.pop(frames.Loading, None)
            for frame in self._said.values():
                with suppress(FrontEndLost):
                    wire.send(frame)
        return True

    @overload
    def _next(self, beside: None) -> Wire: ...
    @overload
    def _next(self, beside: int) -> Wire | None: ...
    def _next(self, beside: int | None) -> Wire | None:
        end = self._kept.wire(beside)
        return None if end is None else Wire(end)


class Telling(Phases):
    """Phases of the start, which clients hear of, too."""

    def __init__(self, teller: Teller) -> None:
        super().__init__()
        self._teller = teller

    def begin(self, phase: str, step: str = "") -> None:
        super().begin(phase, step)
        self._teller.tell(frames.Loading(f"{phase} {step}".rstrip()))
