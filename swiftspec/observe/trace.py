"""Rounds on record: what both lanes did and when. Made by observers of the loops and hooks of the models, which are
there only while somebody records; docs/reference/trace.md has the lines field by field.

Times are seconds of `time.perf_counter`, which all processes of one machine share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from swiftspec.messages import Proposal, VerifyResult
from swiftspec.observe.lines import DIGITS, Record, Tree
from swiftspec.observe.recorder import Recorder

Forward = tuple[float, float, int]  # begin, end, rows
Observer = Callable[..., None]  # as swiftspec.decode has it
Probabilities = Callable[
    [Sequence[int], Sequence[int]], Sequence[float] | None
]  # tokens, parents -> of all but the root


class Hooked(Protocol):
    """What of a runner forwards are noted by."""

    hooks: list[Callable[[float, int], None]]


class Forwards:
    """The forwards of a runner while they are watched; whoever takes them clears them."""

    def __init__(self, runner: Hooked) -> None:
        self._runner, self._known = runner, list[Forward]()

    def watch(self, on: bool) -> None:
        """Begins or ends it; twice is once."""
        hooks = self._runner.hooks
        if on and self._note not in hooks:
            hooks.append(self._note)  # behind what makes a step last longer
        elif not on and self._note in hooks:
            hooks.remove(self._note)
        self._known.clear()

    def take(self) -> list[Forward]:
        """Those since it was asked last."""
        known, self._known = self._known, []
        return known

    def _note(self, began: float, rows: int) -> None:
        self._known.append((began, time.perf_counter(), rows))


class Watcher(Protocol):
    """An observer that can be switched."""

    def watch(self, on: bool) -> None: ...
    def __call__(self, event: str, *about: Any) -> None: ...


class Switch:
    """Observers that cost nothing while nobody wants to know: `wanted` is asked when a request opens. `told` hears of a
    change, before anything of that request."""

    def __init__(
        self, wanted: Callable[[], bool], *watchers: Watcher, told: Callable[[bool], None] = lambda on: None
    ) -> None:
        self._wanted, self._watchers, self._told = wanted, watchers, told
        self._on = False

    def __call__(self, event: str, *about: Any) -> None:
        if event == "opening" and self._wanted() != self._on:
            self._on = not self._on
            for watcher in self._watchers:
                watcher.watch(self._on)
            self._told(self._on)
        if self._on:
            for watcher in self._watchers:
                watcher(event, *about)


class TreeTrace:
    """Observes the loop on rank 0: the target's lane, and how long a proposal is waited for.

    `busy`: seconds that the target has spent in forwards so far. `asked`: whether the last proposal was the drafter's,
    who is not asked in plain rounds, nor anywhere in a plain request. `probabilities`: the target's, of the tokens of
    the proposal verified last.
    """

    def __init__(
        self, log: Recorder, busy: Callable[[], float], asked: Callable[[], bool], probabilities: Probabilities
    ) -> None:
        self._log, self._busy, self._asked, self._probabilities = log, busy, asked, probabilities
        self._at, self._spent = 0.0, 0.0
        self._plain = False  # the request
        self._round: int | None = None  # the last one that the drafter was asked in
        self._opened: tuple[float, float] | None = None

    def watch(self, on: bool) -> None:
        """It has no hooks."""

    def __call__(self, event: str, *about: Any) -> None:
        began, self._at = self._at, time.perf_counter()
        match event:
            case "opening":
                self._log.begin(about[0])
                self._plain, self._round = about[0].sampling.verify_batch == 1, None
            case "opened":
                self._opened = began, self._at
            case "proposed":
                if not self._plain and self._asked():
                    self._round = about[0].round
                    self._log.add(about[0].round, wait=(began, self._at))
                self._log.release(about[0].round)
            case "grown":
                self._spent = self._busy()
            case "verified":
                self._note(about[0], about[1], (began, self._at))
            case "settled":
                self._know()
            case "closed":
                if self._round is not None and self._log.lacks(self._round):
                    self._log.drain(self._round)
                self._log.end(about[0])

    def _note(self, proposal: Proposal, result: VerifyResult, verify: tuple[float, float]) -> None:
        target: Record = {"verify": verify, "forward": self._busy() - self._spent}
        if self._opened is not None:
            target["open"], self._opened = self._opened, None
        self._proposal: Record = {"tokens": proposal.tokens, "parents": proposal.parents}
        self._log.add(proposal.round, target=target, proposal=self._proposal, path=result.path, tokens=result.tokens)

    def _know(self) -> None:
        """Once the result is on its way, so that nobody waits for it."""
        known = self._probabilities(self._proposal["tokens"], self._proposal["parents"])
        if known is not None:
            self._proposal["p"] = [None, *(round(value, DIGITS) for value in known)]


class Grown(Protocol):
    """What a draft's lane is read off: a drafter on a model in this process."""

    @property
    def runner(self) -> Any: ...
    @property
    def tree(self) -> Any: ...


class DraftTrace:
    """Observes the loop that a draft model works in: its lane, of which each round goes to `tell` once it is grown."""

    def __init__(self, drafter: Grown, tell: Callable[[int, int, Record], None]) -> None:
        """`tell` hears request, round, and what the lane says of it."""
        self._drafter, self._tell = drafter, tell
        self._forwards = Forwards(drafter.runner)
        self._spans: dict[str, tuple[float, float]] = {}
        self._request, self._round, self._at = 0, 0, 0.0
        self._plain = False  # the request: nobody drafts
        self._prefix, self._expanded = 0, 0  # KV before this round

    def watch(self, on: bool) -> None:
        """Sets or takes away its hooks."""
        self._forwards.watch(on)

    def __call__(self, event: str, *about: Any) -> None:
        began, self._at = self._at, time.perf_counter()
        match event:
            case "opening":
                self._request, self._plain = about[0].request, about[0].sampling.verify_batch == 1
            case "drafter opened":
                self._spans = {"open": (began, self._at)}
                self._round = 0
                self._prefix, self._expanded = self._books()
                self._forwards.take()  # the prompt's
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
        (prefix, expanded), tree = self._books(), self._drafter.tree
        forwards, self._spans, spans = self._forwards.take(), {}, self._spans
        computed = sum(rows for _, _, rows in forwards)
        wasted = max(self._prefix + self._expanded + computed - prefix - expanded, 0)
        lane: Record = {**spans, "forwards": forwards, "nodes": tree.count, "expanded": expanded}
        lane |= {"reused": self._expanded - wasted, "wasted": wasted, "tree": Tree.of(tree)}
        self._prefix, self._expanded = prefix, expanded
        self._tell(self._request, self._round, lane)

    def _books(self) -> tuple[int, int]:
        return self._drafter.runner.cache.prefix_len[0], self._drafter.tree.expanded


class ParticleTrace:
    """Observes mode smc: nothing overlaps in it, so a round lasts from the end of the one before."""

    def __init__(self, target: Hooked, draft: Hooked, log: Recorder) -> None:
        self._log, self._lanes = log, {"target": Forwards(target), "draft": Forwards(draft)}
        self._round, self._at = 0, 0.0

    def watch(self, on: bool) -> None:
        """Sets or takes away its hooks."""
        for forwards in self._lanes.values():
            forwards.watch(on)

    def __call__(self, event: str, *about: Any) -> None:
        began, self._at = self._at, time.perf_counter()
        match event:
            case "opening":
                self._log.begin(about[0])
            case "opened":
                self._round = 0
                for forwards in self._lanes.values():
                    forwards.take()  # the prompt's
            case "collected":
                self._note(about[0], (began, self._at))
            case "closed":
                self._log.end(about[0])

    def _note(self, tokens: Sequence[int], span: tuple[float, float]) -> None:
        """A round that ends now, and the tokens that all particles have come to share by it."""
        lanes = {side: {"forwards": forwards.take()} for side, forwards in self._lanes.items()}
        self._log.add(self._round, population=span, tokens=tokens, **lanes)
        self._round += 1
        self._log.release()
