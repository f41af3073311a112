"""Reads a trace, and computes from it what each round costs: waiting times with their causes, and host overhead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from swiftspec.observe import trace_file
from swiftspec.profiles import schema

Json = dict[str, Any]
LARGEST = 1 << 30  # maximum bytes of a trace, about half a million rounds


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace file: its header line, its rounds in order, and the number of output tokens, or None if a request has not
    ended. Other lines are ignored."""

    head: Json
    rounds: list[Json]
    output_tokens: int | None = None

    @staticmethod
    def read(file: Path) -> Trace:
        """Reads a trace. Skips a truncated last line.

        Raises UserError if the file is larger than LARGEST, is not a trace, or has a damaged line.
        """
        head: Json = {}
        rounds: list[Json] = []
        output_tokens = running = 0
        for name, data in trace_file.read_trace(file, LARGEST):
            if not head:
                schema.validate(schema.TraceHeader, data, name)
                head = data
            elif "round" in data or not data.keys() & {"begin", "end"}:
                schema.validate(schema.TraceRound, data, name)
                rounds.append(data)
            elif "begin" in data:
                running += 1
            elif isinstance(end := data.get("end"), dict) and isinstance(end.get("tokens"), int):
                running -= 1
                output_tokens += end["tokens"]
        return Trace(head, rounds, None if running > 0 else output_tokens)

    def successive(self) -> Iterator[tuple[Json, Json]]:
        """Yields pairs of successive rounds of one request.

        The first round of each request is left out because it includes the prefill.
        """
        for this, after in pairwise(self.rounds):
            if this["request"] == after["request"] and this["round"] > 0 and after["round"] == this["round"] + 1:
                yield this, after


@dataclass(frozen=True, slots=True)
class RoundCost:
    """Durations in one round, in seconds. A round lasts from the start of one verification to the start of the next."""

    length: float  # the whole round
    verify: float  # the verification: the target's forward and sampling
    forward: float  # the target's forward alone
    wait: float  # the target's wait for the next proposal
    late: float  # part of the wait: the draft finishes the expansions that it began during the verification
    short: float  # part of the wait: expansions before the draft can propose (serial mode: all expansions)
    critical: int  # number of the expansions in `short`, which are on the critical path
    expansions: int  # number of expansions during the verification


def costs(trace: Trace) -> list[RoundCost]:
    """Returns the cost of each verified round that another verified round of its request follows, without the first
    round of each request."""
    return [
        _cost(this, after)
        for this, after in trace.successive()
        if "verify" in this["target"] and "verify" in after["target"]
    ]


def _cost(this: Json, after: Json) -> RoundCost:
    begin, end = this["target"]["verify"]
    length = after["target"]["verify"][0] - begin
    asked, given = after.get("wait", (0.0, 0.0))  # a round without the draft does not wait
    grown = this.get("draft", {})
    proposed = grown.get("propose", (0, 0))[1]
    late = max(grown.get("grow", (end, end))[1] - end, 0.0)
    short = expanded_first(after)
    return RoundCost(
        length=length,
        verify=end - begin,
        forward=this["target"]["forward"],
        wait=given - asked,
        late=min(late, given - asked),
        short=sum(forward[1] - forward[0] for forward in short),
        critical=len(short),
        expansions=sum(forward[0] >= proposed for forward in grown.get("forwards", ())),
    )


def expanded_first(line: Json) -> list[Sequence[float]]:
    """Returns the draft forwards of a round that its proposal had to wait for, as (begin, end, rows)."""
    draft = line.get("draft", {})
    begin, end = draft.get("propose", (0.0, 0.0))
    return [forward for forward in draft.get("forwards", ()) if begin <= forward[0] < end]


def host_overhead(rounds: Iterable[RoundCost], target: float, draft: float) -> list[float]:
    """Returns the seconds of each round outside the two models (host overhead).

    This is `length - max(target, expansions * draft) - critical * draft`. `target`, `draft`: step times in seconds.
    """
    return [r.length - max(target, r.expansions * draft) - r.critical * draft for r in rounds]
