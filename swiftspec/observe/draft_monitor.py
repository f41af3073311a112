"""Monitor of a draft whose tokens are hardly ever accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from swiftspec.drafter_kinds import DRAFTER_KINDS
from swiftspec.messages import VerifiedRound

MIN_ROUNDS = 64  # with proposed tokens, before a draft is judged; one looping answer can have dozens without a hit
MODEL_FREE_SOURCES = {kind.model_free_source for kind in DRAFTER_KINDS.values()} - {None}
LOW_SHARE = 0.05  # share of these rounds that accept a token, below which acceptance is low


class DraftMonitor:
    """Counts the rounds of all requests in which the draft proposed tokens, and those in which one was accepted.

    `on_low`: called once, with a line for the user, when acceptance is low.
    """

    def __init__(self, on_low: Callable[[str], object] = lambda line: None) -> None:
        self._on_low, self._reported = on_low, False
        self.rounds = self.hits = 0

    @property
    def is_low(self) -> bool:
        """Whether hardly any round accepts a token of the draft."""
        return self.rounds >= MIN_ROUNDS and self.hits < LOW_SHARE * self.rounds

    def add_rounds(self, rounds: Iterable[VerifiedRound]) -> None:
        """Adds the rounds of a request whose nodes are all from the draft model. A round in which the output ended is
        left out: its path does not show how good the proposal was."""
        own = [each for each in rounds if len(each.parents) > 1 and MODEL_FREE_SOURCES.isdisjoint(each.sources)]
        paths = [each.path for each in own if not each.is_cut]
        self.add(len(paths), sum(len(path) > 1 for path in paths))

    def add(self, rounds: int, hits: int) -> None:
        """Adds `rounds` rounds with proposed tokens; `hits` of them accepted one."""
        self.rounds, self.hits = self.rounds + rounds, self.hits + hits
        if self.is_low and not self._reported:
            self._reported = True
            self._on_low(
                f"the draft is hardly ever right: {self.hits} of {self.rounds} rounds accepted one of its tokens; check"
                " that it is a draft of this target and that its weights are intact (not zero, NaN or permuted)"
            )
