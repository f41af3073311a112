"""`python -m swiftspec.serve`: a chat in a terminal, else one answer. Imports as it goes, so that --help is fast."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Sequence

from swiftspec.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 2 for a call that makes no sense, 1 for what does not work out,
    130 after Ctrl-C. Whatever the user can mend is told in one line on stderr."""
    if _several_ranks():
        return 2
    from swiftspec.serve.settings import UsageError

    try:
        return _run(argv)
    except UserError as error:
        print(f"swiftspec: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader left; so do we, without a word when the interpreter closes the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(argv: Sequence[str] | None) -> int:
    from swiftspec.serve.cli import parse

    command = parse(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows ? for it
    from swiftspec.serve import oneshot

    prompt = oneshot.read_prompt(command)
    if prompt is not None:
        return oneshot.run(command, prompt)
    from swiftspec.serve import chat

    return chat.run(command.settings)


def _several_ranks() -> bool:
    """Under torchrun with more than one rank: rank 0 says why not. The others wait, since the first rank to leave makes
    torchrun end them all, perhaps before rank 0 has spoken."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return False
    if os.environ.get("RANK", "0") == "0":
        print("swiftspec: error: SwiftSpec decodes on one rank; start it with --nproc-per-node 1", file=sys.stderr)
    else:
        time.sleep(2)
    return True


if __name__ == "__main__":
    sys.exit(main())
