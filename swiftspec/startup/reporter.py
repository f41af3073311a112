"""What loading reports to its caller: phases, warnings and notes."""

from __future__ import annotations

import logging
from typing import Protocol

LOG = logging.getLogger("swiftspec")

DOWNLOAD = "download"  # the phase in which the hub's client shows its own progress


class StartupReporter(Protocol):
    """Receives the progress of a start."""

    def begin(self, phase: str, step: str = "") -> None:
        """Begins `phase` if it is not the current one. `step`: progress within the phase."""
        ...

    def warn(self, text: str) -> None:
        """Receives a warning."""
        ...

    def note(self, text: str) -> None:
        """Receives a note."""
        ...

    def ready(self) -> None:
        """Ends the last phase: the models are loaded."""
        ...


class LogReporter:
    """A `StartupReporter` that logs to the logger "swiftspec": warnings as such, notes and phases as information."""

    def begin(self, phase: str, step: str = "") -> None:
        """Logs the phase, without its steps."""
        if not step:
            LOG.info("loading: %s", phase)

    def warn(self, text: str) -> None:
        """Logs a warning."""
        LOG.warning(text)

    def note(self, text: str) -> None:
        """Logs a note."""
        LOG.info(text)

    def ready(self) -> None:
        """Logs nothing more: the phases are complete."""
