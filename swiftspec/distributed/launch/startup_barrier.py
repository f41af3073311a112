"""Startup barrier: every rank publishes its configuration in the store before it connects or loads anything.

Rank 0 validates all entries and either releases the barrier or aborts the job. While waiting, each rank logs which
ranks it is waiting for.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch.distributed.distributed_c10d import Store

from swiftspec.errors import RankLost, UserError

LogFn = Callable[[str], None]  # writes one line of progress
Entry = Mapping[str, Any]  # what a rank publishes, as a JSON object
Validator = Callable[[dict[int, Entry]], str | None]  # returns the error in the entries so far, or None
MAX_VALUE_CHARS = 60  # characters of a value in an error message
MAX_LISTED_RANKS = 6  # ranks that one line lists
MAX_POLL_S = 0.02  # seconds; the longest interval between two polls


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts of a startup barrier, in seconds, and the clock that measures them."""

    timeout_s: float = 300.0  # longest wait for all ranks to arrive
    first_log_s: float = 5.0  # time after which the missing ranks are logged for the first time
    log_interval_s: float = 30.0  # time between two log lines
    grace_s: float = 5.0  # longest time that rank 0 stays after its verdict, so that the other ranks can read it
    clock: Callable[[], float] = time.monotonic


def no_log(text: str) -> None:
    """Discards a line. The `LogFn` of a rank that logs nothing."""


@dataclass(slots=True)
class StartupBarrier:
    """A startup barrier as one of its ranks, `rank`, sees it.

    `store`: must have a prefix that no other barrier uses.
    `ranks`: all ranks of the barrier, including rank 0.
    """

    store: Store
    rank: int
    ranks: Sequence[int]
    log: LogFn = no_log
    timeouts: Timeouts = field(default_factory=Timeouts)

    def wait_all(self, mine: Entry, validate: Validator) -> dict[int, Entry]:
        """Publishes this rank's entry and blocks until rank 0 releases the barrier.

        Returns the entries of all ranks on rank 0, and only the entries of rank 0 and of this rank on the other ranks.
        Rank 0 calls `validate` whenever entries have arrived. Raises UserError on all ranks if `validate` returns an
        error or a rank does not arrive in time, and RankLost if rank 0 is gone.
        """
        try:
            self.store.set(_entry_key(self.rank), json.dumps(mine))
            return self._collect(validate) if self.rank == 0 else self._await_verdict(mine, validate)
        except RuntimeError:  # raised by the store
            raise RankLost(
                "rank 0 disconnected" if self.rank > 0 else "lost the connection to the launcher's store"
            ) from None

    def abort(self, reason: str) -> None:
        """Publishes the reason why this rank cannot start, which aborts the job on all ranks. On rank 0, blocks until
        the other ranks have read it or have aborted, too, for at most `grace_s` seconds; it does not block on others.
        """
        with contextlib.suppress(RuntimeError):  # the store is gone, and so are the other ranks
            if self.rank == 0:
                self.store.set("verdict", reason)
                self._linger()
            else:
                self.store.set(_entry_key(self.rank), json.dumps({"refused": reason}))
                self.store.set(_heard_key(self.rank), "")

    def _collect(self, validate: Validator) -> dict[int, Entry]:
        """On rank 0: collects the entries, publishes the verdict and returns the entries or raises UserError."""
        said: dict[int, Entry] = {}
        clock = PollTimer(self.timeouts)
        complaint = None
        while complaint is None and len(said) < len(self.ranks):
            came = [rank for rank in self.ranks if rank not in said and self.store.check([_entry_key(rank)])]
            said |= {rank: _parse_entry(self.store.get(_entry_key(rank))) for rank in came}
            complaint = _first_refusal(said) or validate(said) if came else None
            missing = [rank for rank in self.ranks if rank not in said]
            if complaint is None and missing and not clock.sleep(partial(self._log_missing, missing)):
                late = f"{format_ranks(missing)} did not join within {self.timeouts.timeout_s:g} s"
                complaint = f"{late}: start all {len(self.ranks)} ranks"
        self.store.set("verdict", complaint or "")
        self._linger()
        if complaint is not None:
            raise UserError(complaint)
        return said

    def _log_missing(self, missing: Sequence[int]) -> None:
        self.log(f"waiting for {format_ranks(missing)}")

    def _linger(self) -> None:
        """Blocks until all ranks have read the verdict, for at most `grace_s` seconds, because a store served by rank 0
        ends with it."""
        clock = PollTimer(Timeouts(self.timeouts.grace_s, clock=self.timeouts.clock))
        others = [_heard_key(rank) for rank in self.ranks if rank > 0]
        while others and not self.store.check(others) and clock.sleep(lambda: None):
            pass

    def _await_verdict(self, mine: Entry, validate: Validator) -> dict[int, Entry]:
        """On all ranks except rank 0: blocks until rank 0 has published its verdict, and returns the entries of rank 0
        and of this rank or raises UserError.

        Calls `validate` as well, because rank 0 may expect fewer ranks and not know of this rank.
        """
        clock = PollTimer(self.timeouts, late=self.timeouts.grace_s)
        while not self.store.check(["verdict"]):
            if not clock.sleep(self._say_rank_0):
                raise RankLost(f"rank 0 did not release the startup barrier within {self.timeouts.timeout_s:g} s")
        complaint = self.store.get("verdict").decode(errors="replace")
        said = {self.rank: mine}
        if not complaint:
            said[0] = _parse_entry(self.store.get(_entry_key(0)))
        self.store.set(_heard_key(self.rank), "")
        complaint = complaint or validate(said)
        if complaint:
            raise UserError(complaint)
        return said

    def _say_rank_0(self) -> None:
        if not self.store.check([_entry_key(0)]):  # once rank 0 has arrived, it logs the missing ranks itself
            self.log(f"rank {self.rank} is waiting for rank 0")


class PollTimer:
    """Timer of a polling loop, with exponential backoff, a log interval and a deadline. `late`: seconds added to the
    deadline."""

    def __init__(self, waiting: Timeouts, late: float = 0.0) -> None:
        self._waiting = waiting
        now = waiting.clock()
        self._end, self._next = now + waiting.timeout_s + late, now + waiting.first_log_s
        self._nap = MAX_POLL_S / 32

    def sleep(self, on_log_due: Callable[[], None]) -> bool:
        """Sleeps until the next poll and returns True, or returns False after the deadline. Calls the callback if a log
        line is due."""
        now = self._waiting.clock()
        if now >= self._end:
            return False
        if now >= self._next:
            self._next = now + self._waiting.log_interval_s
            on_log_due()
        time.sleep(self._nap)
        self._nap = min(2 * self._nap, MAX_POLL_S)
        return True


def describe_difference(name: str, here: int, mine: Any, there: int, theirs: Any) -> str | None:
    """Returns an error message if setting `name` has value `mine` on rank `here` and another value, `theirs`, on rank
    `there`; else None."""
    if mine == theirs:
        return None
    values = (
        f"rank {there} was started with {name} {_format_value(theirs)}, rank {here} with {name} {_format_value(mine)}"
    )
    return f"{values}: start all ranks with the same command"


def format_ranks(numbers: Collection[int]) -> str:
    """Formats rank numbers: `rank 1`, `ranks 1, 2 and 3`. Of a long list, the first MAX_LISTED_RANKS numbers and the
    number of remaining ranks are printed."""
    texts = [str(number) for number in list(numbers)[:MAX_LISTED_RANKS]]
    if len(numbers) > MAX_LISTED_RANKS:
        texts.append(f"{len(numbers) - MAX_LISTED_RANKS} more")
    return f"rank {texts[0]}" if len(texts) == 1 else f"ranks {', '.join(texts[:-1])} and {texts[-1]}"


def first_line(error: BaseException) -> str:
    """Returns the first non-blank line of an error message; if the message is blank, the name of its type."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _format_value(value: Any) -> str:
    """Returns a value as it is written in a configuration, truncated to MAX_VALUE_CHARS."""
    text = "unset" if value is None else str(value).lower() if isinstance(value, bool) else " ".join(str(value).split())
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}..."


def _entry_key(rank: int) -> str:
    return f"said {rank}"


def _heard_key(rank: int) -> str:
    """Returns the key that a rank sets once it no longer needs the store."""
    return f"heard {rank}"


def _parse_entry(data: bytes) -> Entry:
    """Parses a rank's entry. Returns an empty entry if `data` is not a JSON object."""
    try:
        words = json.loads(data)
    except (ValueError, RecursionError):
        words = None
    return words if isinstance(words, dict) else {}


def _first_refusal(said: dict[int, Entry]) -> str | None:
    """Returns the error of the first rank that has called `abort`, or None."""
    return next((f"rank {rank}: {_reason(words)}" for rank, words in said.items() if "refused" in words), None)


def _reason(words: Entry) -> str:
    """Returns the reason with which a rank has aborted, as one line of at most 500 characters."""
    return " ".join(str(words["refused"]).split())[:500]
