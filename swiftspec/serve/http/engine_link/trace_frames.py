"""Lines of a trace on their way from rank 0's decode loop to the front end."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from swiftspec.observe.round_records import Noted, opened
from swiftspec.observe.trace_format import plain, tokens_in
from swiftspec.serve.http.engine_link import frames


def as_frame(noted: Sequence[Noted]) -> frames.Events:
    """What was noted, as it travels. Takes longer than the decode loop has: make it in the thread that sends it."""
    made: list[frames.Event] = []
    for line in map(opened, noted):
        kind = next(kind for kind in ("begin", "end", "round") if kind in line)
        made.append(frames.Event(kind, msgspec.json.encode(line, enc_hook=plain), sorted(tokens_in(line))))
    return frames.Events(made)
