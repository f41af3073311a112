"""Progress display of a sweep: a bar in a terminal, otherwise one line per measurement."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn


class SweepProgressBar:
    """A `SweepDisplay` on stderr."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._progress: Progress | None = None
        self._best = ""
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
            self._progress = Progress(*columns, console=self._console)
            self._task = self._progress.add_task("starting", total=None)
            self._progress.start()

    def begin(self, what: str, done: int, total: int, left: float) -> None:
        """Shows that the measurement `what` begins, see `SweepDisplay`."""
        line = f"{what} · about {_span(left)} left{self._best}"
        if self._progress is None:
            self._console.print(f"[{done + 1}/{total}] {line}", markup=False, soft_wrap=True)
        else:
            self._progress.update(self._task, description=line, completed=done, total=total)

    def best(self, what: str, speed: float) -> None:
        """Sets the fastest run so far, `what`, which later lines show. `speed`: tokens per second."""
        self._best = f" · best {what}, {speed:.0f} tok/s"

    def note(self, text: str) -> None:
        """Prints a message to the user on a line of its own."""
        self._console.print(f"swiftspec: {text}", markup=False, soft_wrap=True)

    def close(self) -> None:
        """Stops the progress bar and restores the terminal."""
        if self._progress is not None:
            self._progress.stop()


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
