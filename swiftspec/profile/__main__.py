"""`python -m swiftspec.profile`: the command."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from swiftspec.errors import UserError
from swiftspec.profile import timeline
from swiftspec.profile.timeline import Trace


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m swiftspec.profile", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    trace = commands.add_parser("trace", help="a trace of serve: a timeline for Perfetto, and who waited for whom")
    trace.add_argument("file", type=Path, help="what `serve --trace FILE` wrote")
    trace.add_argument("-o", "--output", type=Path, help="the timeline (default: FILE with the ending .trace.json)")
    args = parser.parse_args(argv)
    try:
        return show_trace(args.file, args.output)
    except UserError as error:
        print(f"swiftspec: error: {error}", file=sys.stderr)
        return 1


def show_trace(file: Path, output: Path | None) -> int:
    """Writes the timeline and prints the summary."""
    trace = Trace.read(file)
    output = output or file.with_suffix(".trace.json")
    output.write_text(json.dumps(timeline.chrome(trace)), encoding="utf-8")
    print(timeline.summary(trace))
    print(f"timeline: {output} (open it at ui.perfetto.dev or chrome://tracing)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
