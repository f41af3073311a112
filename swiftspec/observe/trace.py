"""Traces of decoding: what draft and target did, and when. docs/reference/trace.md documents the lines of a trace.

Observers of the decoding loops and hooks of the models record events, only while there is a trace file or a listener.
Code between two forwards runs with cold CPU caches, several times slower than in a tight loop. Recording therefore only
takes the time of each event and copies state that will change; `RoundRecord` converts it to lines later.

Times are seconds of `time.perf_counter`, which all processes of one machine share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.observe.recorder import Recorder
from swiftspec.observe.rpc_latency import RpcRecord
from swiftspec.observe.trace_format import DraftSnapshot, ForwardSpan, Record, RoundRecord, draft_timeline

Observer = Callable[..., None]  # called with an event of the decoding loop and its objects, see swiftspec.decode
Probabilities = Callable[
    [Sequence[int], Sequence[int]], Sequence[float] | None
]  # (tokens, parents) of a proposal -> the target's probability of each node except the root, or None


class HasHooks(Protocol):
    """Protocol of a runner whose forwards can be recorded."""

    hooks: list[Callable[[float, int], None]]


class ForwardTimes:
    """Records begin, end and rows of each forward of a runner while recording is on."""

    def __init__(self, runner: HasHooks) -> None:
        self._runner, self._known = runner, list[ForwardSpan]()

    def watch(self, on: bool) -> None:
        """Starts or stops recording, and discards the recorded forwards. Idempotent."""
        hooks = self._runner.hooks
        if on and self._note not in hooks:
            hooks.append(self._note)  # after the hook that emulates step times
        elif not on and self._note in hooks:
            hooks.remove(self._note)
        self._known.clear()

    def take(self) -> list[ForwardSpan]:
        """Returns the forwards since the last call and removes them."""
        known, self._known = self._known, []
        return known

    def _note(self, began: float, rows: int) -> None:
        self._known.append((began, time.perf_counter(), rows))


class TraceWatcher(Protocol):
    """Protocol of a recorder of events of a decoding loop. `ObserverToggle` calls it.

    `handlers`: functions by event name, called with the objects of the event. An event may have no handler.
    `times`: receives the `perf_counter` time of every event, after its handler was called.
    """

    times: list[float]
    handlers: dict[str, Callable[..., None]]

    def watch(self, on: bool) -> None:
        """Installs or removes the hooks that record forwards."""
        ...


class ObserverToggle:
    """Observer that passes the events of a decoding loop to `watcher` while tracing is on.

    Tracing turns on or off only when a request opens, to the value that `enabled` returns then. `on_change` is called
    with the new value before any other event of that request.
    """

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
    """Protocol of a drafter with its model in this process, whose timeline can be recorded."""

    @property
    def runner(self) -> Any: ...
    @property
    def tree(self) -> Any: ...


class DraftTimeline:
    """Takes a snapshot of a drafter in each round, from which the draft's timeline is made."""

    def __init__(self, drafter: TracedDrafter) -> None:
        self._drafter, self._forwards = drafter, ForwardTimes(drafter.runner)
        self._last: DraftSnapshot = b"", 0, []

    def watch(self, on: bool) -> None:
        """Installs or removes the hooks that record forwards."""
        self._forwards.watch(on)

    def opened(self) -> None:
        """Takes the snapshot before round 0. Must be called after the prefill."""
        self.grown()

    def grown(self) -> tuple[DraftSnapshot, DraftSnapshot]:
        """Takes a snapshot after the expansions of a round. Returns it and that of the previous round."""
        drafter, before = self._drafter, self._last
        self._last = drafter.tree.state.tobytes(), next(iter(drafter.runner.cache.prefix_len), 0), self._forwards.take()
        return self._last, before


class TreeTrace:
    """Records the rounds of the decoding loop on rank 0, in all modes except smc.

    `busy`: returns the seconds that the target has spent in forwards.
    `drafter_active`: returns whether the drafter is in use; false in rounds that skip it.
    `probabilities`: returns the target's probabilities of the nodes of the last verified proposal.
    `lane`: timeline of the drafter, if its model is in this process.
    `rpcs`: returns the RPCs with workers since its last call.
    """

    def __init__(
        self,
        recorder: Recorder,
        busy: Callable[[], float],
        drafter_active: Callable[[], bool],
        probabilities: Probabilities,
        lane: DraftTimeline | None = None,
        rpcs: Callable[[], Sequence[RpcRecord]] = tuple,
    ) -> None:
        self._recorder = recorder
        self._busy = busy
        self._drafter_active = drafter_active
        self._probabilities = probabilities
        self._timeline = lane
        self._drain_rpcs = rpcs
        self._plain = False  # whether the request is autoregressive
        self._spent = 0.0  # `busy` at the end of the previous round
        self._drafted, self._grown = False, None  # in this round: whether the drafter was asked; its snapshots
        self.times = list[float]()
        self.handlers: dict[str, Callable[..., None]] = {
            "opening": self._opening,
            "opened": self._opened,
            "grown": self._on_expanded,
            "settled": self._settled,
            "closed": recorder.end,
        }

    def watch(self, on: bool) -> None:
        """Installs or removes the hooks that record forwards."""
        if self._timeline is not None:
            self._timeline.watch(on)

    def _opening(self, start: RequestStart) -> None:
        self._recorder.begin(start)
        self._drain_rpcs()  # discard RPCs of requests that were not recorded
        self._plain = start.sampling.verify_batch == 1
        self.times.clear()

    def _opened(self) -> None:
        self._spent = self._busy()
        if self._timeline is not None:
            self._timeline.opened()

    def _on_expanded(self) -> None:
        """Takes the draft's snapshot and delivers earlier rounds to the listener, while the target verifies."""
        self._drafted = not self._plain and self._drafter_active()
        self._grown = self._timeline.grown() if self._timeline is not None and self._drafted else None
        self._recorder.deliver()

    def _settled(self, proposal: Proposal, result: VerifyResult) -> None:
        """Adds the record of the round, off the critical path: the result has been sent to the draft."""
        known = self._probabilities(proposal.tokens, proposal.parents)
        busy, times = self._busy(), self.times
        record = RoundRecord(
            proposal=proposal,
            result=result,
            times=times,
            asked=self._drafted,
            forward=busy - self._spent,
            p=known,
            draft=self._grown,
            rpcs=self._drain_rpcs(),
        )
        self._recorder.add(record)
        self._spent, self.times = busy, times[-2:]


class DraftTrace:
    """Records the draft's timeline on the draft group's leader and sends that of each round after its expansions."""

    def __init__(self, drafter: TracedDrafter, send: Callable[[int, int, Record], None]) -> None:
        """`send`: called with request, round, and the draft's timeline of that round."""
        self._timeline, self._send = DraftTimeline(drafter), send
        self._request, self._round = 0, 0
        self.times = list[float]()
        self.handlers: dict[str, Callable[..., None]] = {
            "opening": self._opening,
            "drafter opened": self._timeline.opened,
            "proposed": self._proposed,
            "grown": self._grown,
        }
        self.watch = self._timeline.watch

    def _opening(self, start: RequestStart) -> None:
        self._request = start.request

    def _proposed(self, proposal: Proposal) -> None:
        self._round = proposal.round

    def _grown(self) -> None:
        *times, began, proposed = self.times[-3:]
        grown = began, proposed, time.perf_counter()
        lane = draft_timeline(*self._timeline.grown(), self._round == 0, (*times, began), grown)
        self._send(self._request, self._round, lane)
        self.times.clear()


class ParticleTrace:
    """Records the rounds of mode smc. Nothing overlaps there, so a round begins when the previous one ends."""

    def __init__(self, target: HasHooks, draft: HasHooks, recorder: Recorder) -> None:
        self._recorder, self._forwards = recorder, {"target": ForwardTimes(target), "draft": ForwardTimes(draft)}
        self._request, self._round = 0, 0
        self.times = list[float]()
        self.handlers: dict[str, Callable[..., None]] = {
            "opening": self._opening,
            "opened": self._opened,
            "collected": self._collected,
            "closed": recorder.end,
        }

    def watch(self, on: bool) -> None:
        """Installs or removes the hooks that record forwards."""
        for forwards in self._forwards.values():
            forwards.watch(on)

    def _opening(self, start: RequestStart) -> None:
        self._recorder.begin(start)
        self._request = start.request

    def _opened(self) -> None:
        self._round = 0
        for forwards in self._forwards.values():
            forwards.take()  # discard the forwards of the prefill

    def _collected(self, tokens: Sequence[int]) -> None:
        """Adds the record of a round. `tokens`: further tokens that all particles share after it."""
        span = self.times[-1], time.perf_counter()
        lanes = {side: {"forwards": forwards.take()} for side, forwards in self._forwards.items()}
        about = {"request": self._request, "round": self._round, "population": span, "tokens": tokens}
        self._recorder.add({**about, **lanes})
        self._recorder.deliver()
        self._round, self.times = self._round + 1, []
