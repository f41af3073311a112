"""Analysis of a trace: timeline for Chrome or Perfetto, waiting times of draft and target with their causes, and host
overhead per round."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from swiftspec.observe import trace_file
from swiftspec.profiles import schema

Json = dict[str, Any]
LARGEST = 1 << 30  # maximum bytes of a trace, about half a million rounds
TARGET, DRAFT = 1, 2  # thread ids of the timeline


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
    grown, short = this.get("draft", {}), expanded_first(after)
    late = max(grown.get("grow", (end, end))[1] - end, 0.0)
    seconds = sum(f[1] - f[0] for f in short)
    expansions = len(grown.get("forwards", ())) - sum(
        1 for f in grown.get("forwards", ()) if f[0] < grown.get("propose", (0, 0))[1]
    )
    forward = this["target"]["forward"]
    return RoundCost(
        length, end - begin, forward, given - asked, min(late, given - asked), seconds, len(short), expansions
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


def to_chrome_trace(trace: Trace) -> Json:
    """Converts a trace to Chrome's trace format, which Perfetto reads. Times are microseconds since the first span."""
    events = [
        {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}}
        for tid, name in ((TARGET, "target"), (DRAFT, "draft"))
    ]
    spans = [span for line in trace.rounds for span in _spans(line)]
    if not spans:
        return {"traceEvents": []}
    zero = min(begin for _, _, begin, _, _ in spans)
    events += [
        {
            "ph": "X",
            "pid": 1,
            "tid": tid,
            "name": name,
            "args": args,
            "ts": round(1e6 * (begin - zero), 1),
            "dur": round(1e6 * (end - begin), 1),
        }
        for tid, name, begin, end, args in spans
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": trace.head}


def _spans(line: Json) -> Iterator[tuple[int, str, float, float, Json]]:
    """Yields (thread id, name, begin, end, details) of each span of a trace line; begin and end are in seconds."""
    about = {"request": line["request"], "round": line["round"]}
    target, draft = line.get("target", {}), line.get("draft", {})
    if "population" in line:
        yield TARGET, f"round, {len(line['tokens'])} tokens", *line["population"], about
    if "wait" in line:
        yield TARGET, "wait for a proposal", *line["wait"], about
    if "open" in target:
        yield TARGET, "prompt", *target["open"], about
    if "verify" in target:
        tree = {"proposal": line["proposal"], "path": line["path"], "tokens": line["tokens"]}
        name = f"verify {len(line['proposal']['tokens'])}, accept {len(line['path']) - 1}"
        yield TARGET, name, *target["verify"], about | tree
    tree = {key: draft[key] for key in ("nodes", "expanded", "reused", "wasted") if key in draft}
    for name in ("open", "observe", "propose", "grow"):
        if name in draft:
            yield DRAFT, name, *draft[name], about | tree
    for lane, side in ((TARGET, target), (DRAFT, draft)):
        for begin, end, rows in side.get("forwards", ()):
            yield lane, f"forward {rows}", begin, end, about


def summary(trace: Trace) -> str:
    """Formats a summary: mean times per round, and how long draft and target waited for each other and why."""
    rounds, head = costs(trace), trace.head
    split = f"{head['target_tp']}+{head['draft_tp']}" if head["mode"] == "async" else head["target_tp"]
    tree = f", bs {head['verify_batch']}, w {head['draft_leaves']}, d {head['draft_steps']}"
    if (length := head.get("synthetic_acceptance_length")) is not None:
        tree += f", synthetic acceptance length {length:g}"
    shape = tree if head["mode"] in ("serial", "async") else ""
    plain = sum("verify" in line.get("target", {}) and "wait" not in line for line in trace.rounds)
    count = f"{len(trace.rounds)} rounds{f' ({plain} of them without the draft)' if plain else ''}"
    lines = [f"mode {head['mode']}, split {split}{shape}: {count}, {_count_tokens(trace)}"]
    if not rounds:
        return "\n".join([*lines, "no statistics: the trace has no two successive rounds with a verification"])

    def ms(values: Iterable[float]) -> str:
        return f"{1e3 * statistics.fmean(values):.3f} ms"

    lengths = [r.length for r in rounds]
    share = sum(r.forward for r in rounds) / max(sum(lengths), 1e-9)  # a damaged trace may contain any values
    growing, expanded = sum(r.late > 0 for r in rounds), sum(r.critical > 0 for r in rounds)
    lines += [
        f"duration of a round {ms(lengths)} (median {1e3 * statistics.median(lengths):.3f})",
        f"  verification                     {ms(r.verify for r in rounds)}, {ms(r.forward for r in rounds)} of it in"
        f" the forward ({share:.0%} of the round)",
        f"  target waits for the draft       {ms(r.wait for r in rounds)}",
        f"    still expanding                {ms(r.late for r in rounds)}, in {growing} rounds",
        f"    expanding before proposing     {ms(r.short for r in rounds)}, in {expanded} rounds,"
        f" {sum(r.critical for r in rounds)} expansions",
        f"    re-rooting, choice, transfer   {ms(r.wait - r.late - r.short for r in rounds)}",
        f"  settling, engine, reader         {ms(r.length - r.verify - r.wait for r in rounds)}",
    ]
    idle = _draft_idle(trace)
    if idle:
        lines.append(f"  draft waits for the target       {ms(idle)}")
    lanes = [line["draft"] for line in trace.rounds if "draft" in line]
    if lanes:
        reused, wasted = (sum(lane.get(name, 0) for lane in lanes) for name in ("reused", "wasted"))
        lines.append(f"draft KV: {reused} nodes reused, {wasted} wasted ({wasted / max(reused + wasted, 1):.0%})")
    return "\n".join(lines)


def _count_tokens(trace: Trace) -> str:
    """Returns the number of tokens of all rounds, in total and per round, and of the output if that is less: a last
    round can have tokens after the end of the output."""
    tokens = sum(len(line["tokens"]) for line in trace.rounds)
    words = f"{tokens} tokens"
    if trace.head["mode"] != "smc" and trace.rounds:
        words += f" ({tokens / len(trace.rounds):.2f} per round)"
    output = trace.output_tokens
    return words + (f", {output} of them output" if output is not None and 0 < output < tokens else "")


def _draft_idle(trace: Trace) -> list[float]:
    """Returns the draft's waiting time in each round, in seconds: from the end of its expansions to the arrival of the
    result."""
    found = []
    for this, after in trace.successive():
        if "grow" in this.get("draft", {}) and "observe" in after.get("draft", {}):
            found.append(max(after["draft"]["observe"][0] - this["draft"]["grow"][1], 0.0))
    return found
