"""Rounds on record: what both lanes did and when, one JSON line per round. Made by observers of the loops and hooks of
the models, which are there only when a trace is asked for.

Times are seconds of `time.perf_counter`, which all processes of one machine share. A line has the keys `request`,
`round`, and, as far as the mode has them:

    target     open and verify [begin, end], forward: seconds of `verify` inside the model
    population [begin, end], in mode smc; there target and draft have their forwards [begin, end, rows] only
    wait       [begin, end] of asking the drafter for this round's proposal
    proposal   tokens and parents; `path`: the accepted nodes; `tokens`: what the target sampled, the bonus token last
    draft      spans by name (open, observe, propose, grow), forwards [begin, end, rows], and the tree as it stands when
               the round's growing ends: nodes, expanded; reused, wasted: of the nodes that had KV a round before
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from swiftspec.errors import UserError
from swiftspec.messages import Proposal, VerifyResult

Record = dict[str, Any]
Forward = tuple[float, float, int]  # begin, end, rows
Observer = Callable[..., None]  # as swiftspec.decode has it
VERSION = 1


class Hooked(Protocol):
    """What of a runner forwards are noted by."""

    hooks: list[Callable[[float, int], None]]


def watch(runner: Hooked) -> list[Forward]:
    """The forwards of a runner from now on; whoever reads them clears them."""
    forwards: list[Forward] = []
    runner.hooks.append(lambda began, rows: forwards.append((began, time.perf_counter(), rows)))
    return forwards


class TraceLog:
    """Gathers the lines of a request on rank 0 and writes them when it ends. Raises UserError on a file that cannot be
    opened, and on a pipe without a reader. A file that takes no more later costs nobody an answer: what is still to be
    written is dropped, and `lost` says why.

    `drain` fetches what another process still has to say of a round that is over; whoever has such a process sets it.
    """

    def __init__(self, file: Path) -> None:
        self.drain: Callable[[int], None] = lambda round_: None
        self.file = file
        self.lost: str | None = None
        self._rounds: dict[int, Record] = {}
        self._request = 0
        try:
            self._file = os.fdopen(_opened(file), "w", encoding="utf-8")
        except OSError as error:
            alone = error.errno == errno.ENXIO and file.is_fifo()
            why = "nobody reads this pipe yet, start its reader first" if alone else error.strerror
            raise UserError(f"--trace {file} cannot be written: {why}") from None

    def head(self, facts: Record) -> None:
        """The first line: what runs here."""
        self._write({"swiftspec_trace": VERSION, **facts})

    def begin(self, request: int) -> None:
        """Another request."""
        self._request = request

    def add(self, round_: int, **parts: Any) -> None:
        """More about a round of this request."""
        self._rounds.setdefault(round_, {"request": self._request, "round": round_}).update(parts)

    def draft(self, record: Record) -> None:
        """What the draft's lane says of a round."""
        if record.pop("request") == self._request:
            self.add(record.pop("round"), draft=record)

    def lacks(self, round_: int) -> bool:
        """Whether the draft's lane has yet to speak of that round."""
        return "draft" not in self._rounds.get(round_, {})

    def end(self) -> None:
        """Writes the rounds that were verified."""
        for _, line in sorted(self._rounds.items()):
            if "tokens" in line:
                self._write(line)
        self._rounds = {}
        self._try(self._file.flush)

    def close(self) -> None:
        """Closes the file."""
        self._try(self._file.close)

    def _write(self, line: Record) -> None:
        self._try(lambda: self._file.write(json.dumps(line) + "\n"))

    def _try(self, act: Callable[[], object]) -> None:
        if self.lost is not None:
            return
        try:
            act()
        except OSError as error:
            self.lost = error.strerror or str(error)
            with suppress(OSError):  # it tries to write the rest once more
                self._file.close()


def _opened(file: Path) -> int:
    """Opens a file to write, without waiting for the reader of a pipe."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    os.set_blocking(descriptor, True)
    return descriptor


class TreeTrace:
    """Observes the loop on rank 0: the target's lane, and how long a proposal is waited for.

    `busy`: seconds that the target has spent in forwards so far. `asked`: whether the last proposal was the drafter's,
    who is not asked in plain rounds, nor anywhere in a plain request.
    """

    def __init__(self, log: TraceLog, busy: Callable[[], float], asked: Callable[[], bool] = lambda: True) -> None:
        self._log, self._busy, self._asked = log, busy, asked
        self._at, self._spent = 0.0, 0.0
        self._plain = False  # the request
        self._round: int | None = None  # the last one that the drafter was asked in
        self._opened: tuple[float, float] | None = None

    def __call__(self, event: str, *about: Any) -> None:
        began, self._at = self._at, time.perf_counter()
        match event:
            case "opening":
                self._log.begin(about[0].request)
                self._plain, self._round = about[0].sampling.verify_batch == 1, None
            case "opened":
                self._opened = began, self._at
            case "proposed":
                if not self._plain and self._asked():
                    self._round = about[0].round
                    self._log.add(about[0].round, wait=(began, self._at))
            case "grown":
                self._spent = self._busy()
            case "verified":
                self._note(about[0], about[1], (began, self._at))
            case "closed":
                if self._round is not None and self._log.lacks(self._round):
                    self._log.drain(self._round)
                self._log.end()

    def _note(self, proposal: Proposal, result: VerifyResult, verify: tuple[float, float]) -> None:
        target: Record = {"verify": verify, "forward": self._busy() - self._spent}
        if self._opened is not None:
            target["open"], self._opened = self._opened, None
        tree = {"tokens": proposal.tokens, "parents": proposal.parents}
        self._log.add(proposal.round, target=target, proposal=tree, path=result.path, tokens=result.tokens)


class Grown(Protocol):
    """What a draft's lane is read off: a drafter on a model in this process."""

    @property
    def runner(self) -> Any: ...
    @property
    def tree(self) -> Any: ...


class DraftTrace:
    """Observes the loop that a draft model works in: its lane, of which each round goes to `tell` once it is grown."""

    def __init__(self, drafter: Grown, tell: Callable[[Record], None]) -> None:
        self._drafter, self._tell = drafter, tell
        self._forwards = watch(drafter.runner)
        self._spans: dict[str, tuple[float, float]] = {}
        self._request, self._round, self._at = 0, 0, 0.0
        self._plain = False  # the request: nobody drafts
        self._prefix, self._expanded = 0, 0  # KV before this round

    def __call__(self, event: str, *about: Any) -> None:
        began, self._at = self._at, time.perf_counter()
        match event:
            case "opening":
                self._request, self._plain = about[0].request, about[0].sampling.verify_batch == 1
            case "drafter opened":
                self._spans = {"open": (began, self._at)}
                self._round = 0
                self._prefix, self._expanded = self._books()
                self._forwards.clear()  # the prompt's
            case "observed":
                self._spans["observe"] = began, self._at
            case "proposed":
                self._spans["propose"] = began, self._at
                self._round = about[0].round
            case "grown" if not self._plain:
                self._spans["grow"] = began, self._at
                self._end()

    def _end(self) -> None:
        """KV is kept or computed, nothing else: what is missing from the books was wasted."""
        prefix, expanded = self._books()
        computed = sum(rows for _, _, rows in self._forwards)
        wasted = max(self._prefix + self._expanded + computed - prefix - expanded, 0)
        record: Record = {"request": self._request, "round": self._round, **self._spans}
        record |= {"forwards": list(self._forwards), "nodes": self._drafter.tree.count, "expanded": expanded}
        self._tell(record | {"reused": self._expanded - wasted, "wasted": wasted})
        self._prefix, self._expanded = prefix, expanded
        self._spans = {}
        self._forwards.clear()

    def _books(self) -> tuple[int, int]:
        return self._drafter.runner.cache.prefix_len[0], self._drafter.tree.expanded


class ParticleTrace:
    """Observes mode smc: nothing overlaps in it, so a round lasts from the end of the one before."""

    def __init__(self, target: Hooked, draft: Hooked, log: TraceLog) -> None:
        self._log, self._lanes = log, {"target": watch(target), "draft": watch(draft)}
        self._round, self._at = 0, 0.0

    def __call__(self, event: str, *about: Any) -> None:
        began, self._at = self._at, time.perf_counter()
        match event:
            case "opened":
                self._log.begin(about[0].request)
                self._round = 0
                self._clear()
            case "collected":
                self._note(about[0], (began, self._at))
            case "closed":
                self._log.end()

    def _note(self, tokens: Sequence[int], span: tuple[float, float]) -> None:
        """A round that ends now, and the tokens that all particles have come to share by it."""
        lanes = {side: {"forwards": list(forwards)} for side, forwards in self._lanes.items()}
        self._log.add(self._round, population=span, tokens=tokens, **lanes)
        self._round += 1
        self._clear()

    def _clear(self) -> None:
        for forwards in self._lanes.values():
            forwards.clear()


def both(*observers: Observer) -> Observer:
    """Tells all of them."""

    def tell(event: str, *about: Any) -> None:
        for observer in observers:
            observer(event, *about)

    return tell
