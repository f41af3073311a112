"""Rounds on record: what both lanes did and when. Made by observers of the loops and hooks of the models, which are
there only while somebody records; docs/reference/trace.md has the lines field by field.

Times are seconds of `time.perf_counter`, which all processes of one machine share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from swiftspec.engine import Stats
from swiftspec.messages import Opening, Proposal, VerifyResult
from swiftspec.observe.lines import DIGITS, Record, Tree
from swiftspec.observe.recorder import Note, Recorder, at_once, reason_of

Forward = tuple[float, float, int]  # begin, end, rows
Looks = Mapping[str, Callable[..., Any]]
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
    """What is told of a loop's events, in two steps. `looks` has by event what asks at once for that which will not be
    there later. The call notes the event, which happened at that time, with what its look has `seen`, None where there
    is none: later, perhaps in another thread, but in order."""

    looks: Looks

    def watch(self, on: bool) -> None: ...
    def __call__(self, event: str, at: float, seen: Any, *about: Any) -> None: ...


class Switch:
    """Observes a loop for watchers, at no cost while nobody wants to know: `wanted` is asked when a request opens.
    `told` hears of a change, before anything of that request. `put` has events noted, as `Recorder.put`."""

    def __init__(
        self, wanted: Callable[[], bool], *watchers: Watcher, put: Callable[[Note, bool], None] = at_once,
        told: Callable[[bool], None] = lambda on: None,
    ) -> None:  # fmt: skip
        self._wanted, self._watchers, self._put, self._told = wanted, watchers, put, told
        self._on = False

    def __call__(self, event: str, *about: Any) -> None:
        if event == "opening" and self._wanted() != self._on:
            self._on = not self._on
            for watcher in self._watchers:
                watcher.watch(self._on)
            self._told(self._on)
        if self._on:
            now, looks = time.perf_counter(), [watcher.looks.get(event) for watcher in self._watchers]
            seen = [None if look is None else look(*about) for look in looks]
            self._put(partial(self._note, event, now, seen, about), event == "closed")

    def _note(self, event: str, at: float, seen: Sequence[Any], about: Sequence[Any]) -> None:
        for watcher, one in zip(self._watchers, seen, strict=True):
            watcher(event, at, one, *about)


class TreeTrace:
    """The target's lane, on rank 0, and how long a proposal is waited for.

    `busy`: seconds that the target has spent in forwards so far. `asked`: whether the last proposal was the drafter's,
    who is not asked in plain rounds, nor anywhere in a plain request. `probabilities`: the target's, of the tokens of
    the proposal verified last.
    """

    def __init__(
        self, log: Recorder, busy: Callable[[], float], asked: Callable[[], bool], probabilities: Probabilities
    ) -> None:
        self._log, self._asked, self._probabilities = log, asked, probabilities
        self._plain = False  # the request
        self._round: int | None = None  # the last one that the drafter was asked in
        self.looks: Looks = {
            "opening": self._opens, "proposed": self._proposes, "grown": busy, "verified": lambda *about: busy(),
            "settled": self._knows, "closed": self._closes,
        }  # fmt: skip
        self._at, self._spent = 0.0, 0.0
        self._opened: tuple[float, float] | None = None

    def watch(self, on: bool) -> None:
        """It has no hooks."""

    def _opens(self, opening: Opening) -> Any:
        self._plain, self._round = opening.sampling.verify_batch == 1, None
        return self._log.opens(opening)

    def _proposes(self, proposal: Proposal) -> bool:
        self._proposal, asked = proposal, not self._plain and self._asked()
        if asked:
            self._round = proposal.round
        return asked

    def _knows(self) -> Sequence[float] | None:
        """Once the result is on its way, so that nobody waits for it."""
        return self._probabilities(self._proposal.tokens, self._proposal.parents)

    def _closes(self, stats: Stats) -> tuple[str, int]:
        if self._round is not None and self._log.lacks(self._round):
            self._log.drain(self._round)
        return reason_of(stats), stats.tokens

    def __call__(self, event: str, at: float, seen: Any, *about: Any) -> None:
        began, self._at = self._at, at
        match event:
            case "opening":
                self._log.begin(at, about[0], seen)
            case "opened":
                self._opened = began, at
            case "proposed":
                if seen:
                    self._log.add(about[0].round, wait=(began, at))
                self._log.release(about[0].round)
            case "grown":
                self._spent = seen
            case "verified":
                self._note(about[0], about[1], (began, at), seen)
            case "settled":
                self._noted |= {} if seen is None else {"p": [None, *(round(value, DIGITS) for value in seen)]}
            case "closed":
                reason, tokens = seen
                self._log.end(at, reason, tokens)

    def _note(self, proposal: Proposal, result: VerifyResult, verify: tuple[float, float], busy: float) -> None:
        target: Record = {"verify": verify, "forward": busy - self._spent}
        if self._opened is not None:
            target["open"], self._opened = self._opened, None
        self._noted: Record = {"tokens": proposal.tokens, "parents": proposal.parents}
        self._log.add(proposal.round, target=target, proposal=self._noted, path=result.path, tokens=result.tokens)


class Grown(Protocol):
    """What a draft's lane is read off: a drafter on a model in this process."""

    @property
    def runner(self) -> Any: ...
    @property
    def tree(self) -> Any: ...


class DraftTrace:
    """The lane of the loop that a draft model works in, of which each round goes to `tell` once it is grown."""

    def __init__(self, drafter: Grown, tell: Callable[[int, int, Record], None]) -> None:
        """`tell` hears request, round, and what the lane says of it."""
        self._drafter, self._tell = drafter, tell
        self._forwards = Forwards(drafter.runner)
        self._plain = False  # the request: nobody drafts
        self.looks: Looks = {"opening": self._opens, "drafter opened": self._begins, "grown": self._grows}
        self._spans: dict[str, tuple[float, float]] = {}
        self._request, self._round, self._at = 0, 0, 0.0
        self._prefix, self._expanded = 0, 0  # KV before this round

    def watch(self, on: bool) -> None:
        """Sets or takes away its hooks."""
        self._forwards.watch(on)

    def _opens(self, opening: Opening) -> None:
        self._plain = opening.sampling.verify_batch == 1

    def _begins(self) -> tuple[int, int]:
        self._forwards.take()  # the prompt's
        return self._books()

    def _grows(self) -> tuple[tuple[int, int], list[Forward], Tree] | None:
        return None if self._plain else (self._books(), self._forwards.take(), Tree.of(self._drafter.tree))

    def _books(self) -> tuple[int, int]:
        return self._drafter.runner.cache.prefix_len[0], self._drafter.tree.expanded

    def __call__(self, event: str, at: float, seen: Any, *about: Any) -> None:
        began, self._at = self._at, at
        match event:
            case "opening":
                self._request = about[0].request
            case "drafter opened":
                self._spans = {"open": (began, at)}
                self._round = 0
                self._prefix, self._expanded = seen
            case "observed":
                self._spans["observe"] = began, at
            case "proposed":
                self._spans["propose"] = began, at
                self._round = about[0].round
            case "grown" if seen is not None:
                self._spans["grow"] = began, at
                self._end(*seen)

    def _end(self, books: tuple[int, int], forwards: list[Forward], tree: Tree) -> None:
        """KV is kept or computed, nothing else: what is missing from the books was wasted."""
        (prefix, expanded), self._spans, spans = books, {}, self._spans
        computed = sum(rows for _, _, rows in forwards)
        wasted = max(self._prefix + self._expanded + computed - prefix - expanded, 0)
        lane: Record = {**spans, "forwards": forwards, "nodes": len(tree.token), "expanded": expanded}
        lane |= {"reused": self._expanded - wasted, "wasted": wasted, "tree": tree}
        self._prefix, self._expanded = prefix, expanded
        self._tell(self._request, self._round, lane)


class ParticleTrace:
    """Mode smc: nothing overlaps in it, so a round lasts from the end of the one before."""

    def __init__(self, target: Hooked, draft: Hooked, log: Recorder) -> None:
        self._log, self._lanes = log, {"target": Forwards(target), "draft": Forwards(draft)}
        self.looks: Looks = {
            "opening": log.opens, "opened": self._takes, "collected": lambda tokens: self._takes(),
            "closed": lambda stats: (reason_of(stats), stats.tokens),
        }  # fmt: skip
        self._round, self._at = 0, 0.0

    def watch(self, on: bool) -> None:
        """Sets or takes away its hooks."""
        for forwards in self._lanes.values():
            forwards.watch(on)

    def _takes(self) -> dict[str, list[Forward]]:
        return {side: forwards.take() for side, forwards in self._lanes.items()}

    def __call__(self, event: str, at: float, seen: Any, *about: Any) -> None:
        began, self._at = self._at, at
        match event:
            case "opening":
                self._log.begin(at, about[0], seen)
            case "opened":
                self._round = 0
            case "collected":
                self._note(about[0], (began, at), seen)
            case "closed":
                reason, tokens = seen
                self._log.end(at, reason, tokens)

    def _note(self, tokens: Sequence[int], span: tuple[float, float], lanes: dict[str, list[Forward]]) -> None:
        """A round that ends now, and the tokens that all particles have come to share by it."""
        told = {side: {"forwards": forwards} for side, forwards in lanes.items()}
        self._log.add(self._round, population=span, tokens=tokens, **told)
        self._round += 1
        self._log.release()
