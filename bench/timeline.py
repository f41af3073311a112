"""Timeline of a trace for Perfetto or Chrome, and a summary of the waiting times of draft and target.

swiftspec serve --trace rounds.jsonl ...
python -m bench.timeline rounds.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from swiftspec import file_io
from swiftspec.lab.round_costs import Json, Trace, costs
from swiftspec.serve.__main__ import run_guarded

TARGET, DRAFT = 1, 2  # thread ids of the timeline


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


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the timeline of a trace, prints the summary, and returns the exit code."""
    return run_guarded(lambda first: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="trace written by `serve --trace FILE`")
    parser.add_argument("-o", "--output", type=Path, help="timeline to write (default: FILE with suffix .trace.json)")
    args = parser.parse_args(argv)
    trace = Trace.read(args.file)
    output = args.output or args.file.with_suffix(".trace.json")
    file_io.write_text(output, json.dumps(to_chrome_trace(trace)))
    print(summary(trace))
    print(f"timeline: {output} (open it at ui.perfetto.dev or chrome://tracing)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
