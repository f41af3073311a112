"""The roll call: every rank says in the store how it was started, before anything is connected or loaded; rank 0 looks
through it and says whether they go on. Who waits says for whom."""

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

LogFn = Callable[[str], None]  # a line for whoever watches the start
Entry = Mapping[str, Any]  # what a rank says, as JSON has it
Validator = Callable[[dict[int, Entry]], str | None]  # what is wrong with those that have come so far
MAX_VALUE_CHARS = 60  # characters of a value in a message
MAX_LISTED_RANKS = 6  # ranks that a line names at most
MAX_POLL_S = 0.02  # seconds between two looks at most


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long a roll call waits, in seconds."""

    timeout_s: float = 300.0  # for the last rank
    first_log_s: float = 5.0  # before it says for whom
    log_interval_s: float = 30.0  # between two such lines
    grace_s: float = 5.0  # that rank 0 stays after a complaint, so that the others hear it


def no_log(text: str) -> None:
    """Where nobody watches."""


@dataclass(slots=True)
class StartupBarrier:
    """One roll call of these ranks, rank 0 among them, in a page of the store that is theirs alone."""

    store: Store
    rank: int
    ranks: Sequence[int]
    log: LogFn = no_log
    timeouts: Timeouts = field(default_factory=Timeouts)

    def wait_all(self, mine: Entry, judge: Validator) -> dict[int, Entry]:
        """What all ranks say, on rank 0; elsewhere what rank 0 and this rank do. Rank 0 asks `judge` whenever some have
        come. Raises UserError on all ranks with its complaint, or when one does not come; RankLost where rank 0 is
        gone."""
        try:
            self.store.set(_entry_key(self.rank), json.dumps(mine))
            return self._collect(judge) if self.rank == 0 else self._await_verdict(mine, judge)
        except RuntimeError:  # the store's
            raise RankLost("rank 0 is gone" if self.rank > 0 else "the launcher's store is gone") from None

    def abort(self, reason: str) -> None:
        """Says that this rank does not go on, and why; the others do not then either. Waits for nobody."""
        with contextlib.suppress(RuntimeError):  # nobody is there to hear it
            key, words = (
                ("verdict", reason) if self.rank == 0 else (_entry_key(self.rank), json.dumps({"refused": reason}))
            )
            self.store.set(key, words)

    def _collect(self, judge: Validator) -> dict[int, Entry]:
        """Rank 0's part."""
        said: dict[int, Entry] = {}
        clock = PollTimer(self.timeouts)
        complaint = None
        while complaint is None and len(said) < len(self.ranks):
            came = [rank for rank in self.ranks if rank not in said and self.store.check([_entry_key(rank)])]
            said |= {rank: _parse_entry(self.store.get(_entry_key(rank))) for rank in came}
            complaint = _first_refusal(said) or judge(said) if came else None
            missing = [rank for rank in self.ranks if rank not in said]
            if complaint is None and missing and not clock.sleep(partial(self._log_missing, missing)):
                late = f"{format_ranks(missing)} did not come within {self.timeouts.timeout_s:g} s"
                complaint = f"{late}: start all {len(self.ranks)}"
        self.store.set("verdict", complaint or "")
        self._linger()
        if complaint is not None:
            raise UserError(complaint)
        return said

    def _log_missing(self, missing: Sequence[int]) -> None:
        self.log(f"waiting for {format_ranks(missing)}")

    def _linger(self) -> None:
        """The store may end with rank 0: until all have heard, or do not come."""
        clock = PollTimer(Timeouts(self.timeouts.grace_s))
        others = [f"heard {rank}" for rank in self.ranks if rank > 0]
        while others and not self.store.check(others) and clock.sleep(lambda: None):
            pass

    def _await_verdict(self, mine: Entry, judge: Validator) -> dict[int, Entry]:
        """What any other rank does: rank 0's word holds. One that rank 0 does not know of judges by itself."""
        clock = PollTimer(self.timeouts, late=self.timeouts.grace_s)
        while not self.store.check(["verdict"]):
            if not clock.sleep(self._say_rank_0):
                raise RankLost(f"rank 0 did not say within {self.timeouts.timeout_s:g} s whether all ranks go on")
        complaint = self.store.get("verdict").decode(errors="replace")
        said = {self.rank: mine}
        if not complaint:
            said[0] = _parse_entry(self.store.get(_entry_key(0)))
        self.store.set(f"heard {self.rank}", "")
        complaint = complaint or judge(said)
        if complaint:
            raise UserError(complaint)
        return said

    def _say_rank_0(self) -> None:
        if not self.store.check([_entry_key(0)]):  # once it is there, it says itself for whom it waits
            self.log(f"rank {self.rank} is waiting for rank 0")


class PollTimer:
    """Sleeps between two looks, and knows when it is time to say something and when to give up."""

    def __init__(self, waiting: Timeouts, late: float = 0.0) -> None:
        self._waiting = waiting
        now = time.monotonic()
        self._end, self._next = now + waiting.timeout_s + late, now + waiting.first_log_s
        self._nap = MAX_POLL_S / 32

    def sleep(self, say: Callable[[], None]) -> bool:
        """Until the next look; False when the time is over."""
        now = time.monotonic()
        if now >= self._end:
            return False
        if now >= self._next:
            self._next = now + self._waiting.log_interval_s
            say()
        time.sleep(self._nap)
        self._nap = min(2 * self._nap, MAX_POLL_S)
        return True


def describe_difference(name: str, here: int, mine: Any, there: int, theirs: Any) -> str | None:
    """The line about a value that two ranks should have in common."""
    if mine == theirs:
        return None
    values = (
        f"rank {there} was started with {name} {_format_value(theirs)}, rank {here} with {name} {_format_value(mine)}"
    )
    return f"{values}: start all ranks with the same command"


def format_ranks(numbers: Collection[int]) -> str:
    """`rank 1`; `ranks 1, 2 and 3`; of many the first ones and how many more."""
    texts = [str(number) for number in list(numbers)[:MAX_LISTED_RANKS]]
    if len(numbers) > MAX_LISTED_RANKS:
        texts.append(f"{len(numbers) - MAX_LISTED_RANKS} more")
    return f"rank {texts[0]}" if len(texts) == 1 else f"ranks {', '.join(texts[:-1])} and {texts[-1]}"


def first_line(error: BaseException) -> str:
    """An error's first line that says something."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _format_value(value: Any) -> str:
    """A value as people write it, cut where it is long."""
    text = "unset" if value is None else str(value).lower() if isinstance(value, bool) else " ".join(str(value).split())
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}..."


def _entry_key(rank: int) -> str:
    return f"said {rank}"


def _parse_entry(data: bytes) -> Entry:
    """What a rank has said; something else than that is as good as nothing."""
    try:
        words = json.loads(data)
    except (ValueError, RecursionError):
        words = None
    return words if isinstance(words, dict) else {}


def _first_refusal(said: dict[int, Entry]) -> str | None:
    """The first reason why a rank does not go on."""
    return next((f"rank {rank}: {_reason(words)}" for rank, words in said.items() if "refused" in words), None)


def _reason(words: Entry) -> str:
    """A rank's reason, which is a line of ours."""
    return " ".join(str(words["refused"]).split())[:500]
