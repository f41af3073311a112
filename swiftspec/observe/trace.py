"""Rounds on record: what both lanes did and when. Noted by observers of the loops and hooks of the models, which are
there only while somebody records; docs/reference/trace.md has the lines field by field.

Between two forwards all code runs cold, several times as slowly as in a tight loop. So what runs there is as little as
can be: the time of each event, and copies of what will not be there later. `rounds.Round` makes sense of them.

Times are seconds of `time.perf_counter`, which all processes of one machine share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.observe.recorder import Recorder
from swiftspec.observe.round_records import DraftSnapshot, ForwardSpan, RoundRecord, draft_timeline
from swiftspec.observe.rpc_latency import RpcRecord
from swiftspec.observe.trace_format import Record

Observer = Callable[..., None]  # as swiftspec.decode has it
Probabilities = Callable[
    [Sequence[int], Sequence[int]], Sequence[float] | None
]  # tokens, parents -> of all but the root


class HasHooks(Protocol):
    """What of a runner forwards are noted by."""

    hooks: list[Callable[[float, int], None]]


class ForwardTimes:
    """The forwards of a runner while they are watched; whoever takes them clears them."""

    def __init__(self, runner: HasHooks) -> None:
        self._runner, self._known = runner, list[ForwardSpan]()

    def watch(self, on: bool) -> None:
        """Begins or ends it; twice is once."""
        hooks = self._runner.hooks
        if on and self._note not in hooks:
            hooks.append(self._note)  # behind what makes a step last longer
        elif not on and self._note in hooks:
            hooks.remove(self._note)
        self._known.clear()

    def take(self) -> list[ForwardSpan]:
        """Those since it was asked last."""
        known, self._known = self._known, []
        return known

    def _note(self, began: float, rows: int) -> None:
        self._known.append((began, time.perf_counter(), rows))


class TraceWatcher(Protocol):
    """What is to be done at some of a loop's events, by their names, with what they are about; then their time goes to
    `times`."""

    times: list[float]
    handlers: dict[str, Callable[..., None]]

    def watch(self, on: bool) -> None:
        """Sets or takes away its hooks."""
        ...


class ObserverToggle:
    """Observes a loop for a watcher, and costs nothing while nobody wants to know: `enabled` is asked when a request
    opens. `on_change` hears of a change, before anything of that request."""

    def __init__(
        self, enabled: Callable[[], bool], watcher: TraceWatcher, on_change: Callable[[bool], None] = lambda on: None
    ) -> None:
        self._enabled, self._watcher, self._on_change = enabled, watcher, on_change
        self._on = False

    def __call__(self, event: str, *about: Any) -> None:
        if event == "opening" and self._enabled() != self._on:
            self._on = not self._on
            self._watcher.watch(self._on)
            self._on_change(self._on)
        if self._on:
            watcher = self._watcher
            act = watcher.handlers.get(event)
            if act is not None:
                act(*about)
            watcher.times.append(time.perf_counter())


class TracedDrafter(Protocol):
    """What a draft's lane is read off: a drafter on a model in this process."""

    @property
    def runner(self) -> Any: ...
    @property
    def tree(self) -> Any: ...


class DraftTimeline:
    """Notes the lane of a drafter round by round."""

    def __init__(self, drafter: TracedDrafter) -> None:
        self._drafter, self._forwards = drafter, ForwardTimes(drafter.runner)
        self._last: DraftSnapshot = b"", 0, []

    def watch(self, on: bool) -> None:
        """Sets or takes away its hooks."""
        self._forwards.watch(on)

    def opened(self) -> None:
        """It has read the prompt."""
        self.grown()

    def grown(self) -> tuple[DraftSnapshot, DraftSnapshot]:
        """A round, once its tree is grown, and the one before."""
        drafter, before = self._drafter, self._last
        self._last = drafter.tree.state.tobytes(), drafter.runner.cache.prefix_len[0], self._forwards.take()
        return self._last, before


class TreeTrace:
    """Watches the loop on rank 0.

    `busy`: seconds that the target has spent in forwards so far. `drafter_active`: whether the last proposal was the
    drafter's,
    who is not asked in plain rounds, nor anywhere in a plain request. `probabilities`: the target's, of the tokens of
    the proposal verified last. `lane`: of a drafter in this process. `hops`: exchanges with workers since it was asked
    last.
    """

    def __init__(
        self, recorder: Recorder, busy: Callable[[], float], drafter_active: Callable[[], bool], probabilities:
        Probabilities,
        lane: DraftTimeline | None = None, hops: Callable[[], Sequence[RpcRecord]] = tuple,
    ) -> None:  # fmt: skip
        self._hops = hops
        self._recorder, self._busy, self._drafter_active, self._probabilities, self._timeline = (
            recorder,
            busy,
            drafter_active,
            probabilities,
            lane,
        )
        self._plain = False  # the request
        self._spent = 0.0
        self._drafted, self._grown = False, None  # in this round: the drafter was asked; its lane
        self.times = list[float]()
        self.handlers: dict[str, Callable[..., None]] = {
            "opening": self._opening, "opened": self._opened, "grown": self._on_expanded, "settled": self._settled,
            "closed": recorder.end,
        }  # fmt: skip

    def watch(self, on: bool) -> None:
        """Sets or takes away its hooks."""
        if self._timeline is not None:
            self._timeline.watch(on)

    def _opening(self, opening: RequestStart) -> None:
        self._recorder.begin(opening)
        self._hops()  # of requests that nobody has recorded
        self._plain = opening.sampling.verify_batch == 1
        self.times.clear()

    def _opened(self) -> None:
        self._spent = self._busy()
        if self._timeline is not None:
            self._timeline.opened()

    def _on_expanded(self) -> None:
        """It has grown, and verifying begins: who listens works beside that."""
        self._drafted = not self._plain and self._drafter_active()
        self._grown = self._timeline.grown() if self._timeline is not None and self._drafted else None
        self._recorder.deliver()

    def _settled(self, proposal: Proposal, result: VerifyResult) -> None:
        """The result is on its way, so nobody waits for it."""
        known = self._probabilities(proposal.tokens, proposal.parents)
        busy, times = self._busy(), self.times
        self._recorder.add(
            RoundRecord(proposal, result, times, self._drafted, busy - self._spent, known, self._grown, self._hops())
        )
        self._spent, self.times = busy, times[-2:]


class DraftTrace:
    """Watches the loop that a draft's ranks work in: each round of its lane goes to `send` once it is grown."""

    def __init__(self, drafter: TracedDrafter, send: Callable[[int, int, Record], None]) -> None:
        """`send` hears request, round, and what the lane says of it."""
        self._timeline, self._send = DraftTimeline(drafter), send
        self._request, self._round = 0, 0
        self.times = list[float]()
        self.handlers: dict[str, Callable[..., None]] = {
            "opening": self._opening, "drafter opened": self._timeline.opened, "proposed": self._proposed,
            "grown": self._grown,
        }  # fmt: skip
        self.watch = self._timeline.watch

    def _opening(self, opening: RequestStart) -> None:
        self._request = opening.request

    def _proposed(self, proposal: Proposal) -> None:
        self._round = proposal.round

    def _grown(self) -> None:
        *times, began, proposed = self.times[-3:]
        grown = began, proposed, time.perf_counter()
        lane = draft_timeline(*self._timeline.grown(), self._round == 0, (*times, began), grown)
        self._send(self._request, self._round, lane)
        self.times.clear()


class ParticleTrace:
    """Watches mode smc: nothing overlaps in it, so a round lasts from the end of the one before."""

    def __init__(self, target: HasHooks, draft: HasHooks, recorder: Recorder) -> None:
        self._recorder, self._forwards = recorder, {"target": ForwardTimes(target), "draft": ForwardTimes(draft)}
        self._request, self._round = 0, 0
        self.times = list[float]()
        self.handlers: dict[str, Callable[..., None]] = {
            "opening": self._opening, "opened": self._opened, "collected": self._collected, "closed": recorder.end,
        }  # fmt: skip

    def watch(self, on: bool) -> None:
        """Sets or takes away its hooks."""
        for forwards in self._forwards.values():
            forwards.watch(on)

    def _opening(self, opening: RequestStart) -> None:
        self._recorder.begin(opening)
        self._request = opening.request

    def _opened(self) -> None:
        self._round = 0
        for forwards in self._forwards.values():
            forwards.take()  # the prompt's

    def _collected(self, tokens: Sequence[int]) -> None:
        """A round that ends now, and the tokens that all particles have come to share by it."""
        span = self.times[-1], time.perf_counter()
        lanes = {side: {"forwards": forwards.take()} for side, forwards in self._forwards.items()}
        about = {"request": self._request, "round": self._round, "population": span, "tokens": tokens}
        self._recorder.add({**about, **lanes})
        self._recorder.deliver()
        self._round, self.times = self._round + 1, []
