"""Buffer of the target's hidden states at verified positions, which a draft head reads."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from swiftspec.model.spec import ModelSpec

MAX_UNPROJECTED_ROWS = 64  # states that wait for their projection, which costs less per row for several rows


class StateReadingHead(Protocol):
    """A draft head, whose inputs are projections of hidden states of the target."""

    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype

    def project(self, states: Tensor, /) -> Tensor:
        """Returns the inputs [rows, hidden] that follow from hidden states [rows, layers, hidden size of the
        target]."""
        ...


class TargetStates:
    """Hidden states of the target at consecutive verified positions, as inputs of a draft head.

    The verifier restarts it at the beginning of a request, and appends the states of each prefill chunk and of each
    accepted path. Tokens from the target's prefix cache have no states.
    """

    def __init__(self, head: StateReadingHead) -> None:
        self._head = head
        self.restart()

    def restart(self) -> None:
        """Forgets all states."""
        self.first = self.end = 0  # positions of the first state, and after the latest one
        self._projected: list[Tensor] = []  # [rows, hidden] each
        self._waiting: list[Tensor] = []

    def append(self, position: int, states: Tensor) -> None:
        """Appends hidden states [rows, hidden layers, hidden size] of the positions from `position` on. States before a
        gap are forgotten."""
        if position != self.end:
            self.restart()
            self.first = self.end = position
        self._waiting.append(states.clone())  # the next forward overwrites them
        self.end += len(states)
        if sum(map(len, self._waiting)) > MAX_UNPROJECTED_ROWS:
            self._project()

    def rows(self, start: int, stop: int) -> Tensor:
        """Returns the inputs [stop - start, hidden] that belong to the positions from `start` to `stop`: zeros where
        there is no state."""
        self._project()
        head = self._head
        found = torch.zeros(stop - start, head.spec.hidden_size, dtype=head.dtype, device=head.device)
        at = self.first
        for part in self._projected:
            low, high = max(start, at), min(stop, at + len(part))
            if low < high:
                found[low - start : high - start] = part[low - at : high - at]
            at += len(part)
        return found

    def drop(self, before: int) -> None:
        """Forgets the states of positions below `before`."""
        while self._projected and self.first + len(self._projected[0]) <= before:
            self.first += len(self._projected.pop(0))

    def _project(self) -> None:
        if self._waiting:
            self._projected.append(self._head.project(torch.cat(self._waiting)))
            self._waiting.clear()
