"""`python -m swiftspec.serve`: a chat in a terminal, else one answer. Imports as it goes, so that --help is fast."""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from swiftspec.distributed.launcher import launched, own_rank
from swiftspec.errors import RankLost, UserError

if TYPE_CHECKING:
    from swiftspec.distributed.world import World


PATIENCE = 5.0  # seconds in which rank 0 says what is wrong; the first rank that leaves makes the launcher end all


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return guarded(lambda first: _run(argv, first))


def guarded(run: Callable[[bool], int]) -> int:
    """Runs a command, which is told whether this is the first rank, and returns its exit code, or 2 for a call that
    makes no sense, 1 for what does not work out, 130 after Ctrl-C. Whatever the user can mend is told in one line on
    stderr, by rank 0 where there are several."""
    rank = own_rank()
    first = rank == 0
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a store whose keeper left is told in a line of ours
    if first:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # so that the terminal is put in order
    else:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    from swiftspec.serve.settings import UsageError

    try:
        return run(first)
    except UserError as error:
        if first:
            print(f"swiftspec: error: {error}", file=sys.stderr)
        else:
            time.sleep(PATIENCE)  # only a rank that is alone with its trouble is still here after that
            print(f"swiftspec: rank {rank}: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except RankLost as error:
        print(f"swiftspec: rank {rank} leaves: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader left; so do we, without a word when the interpreter closes the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(argv: Sequence[str] | None, first: bool) -> int:
    from swiftspec.serve.cli import parse

    command = parse(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows ? for it
    if not first:
        from swiftspec.serve.session import serve_rank

        world = own_world()
        assert world is not None
        serve_rank(command.settings, world)
        return 0
    from swiftspec.serve import oneshot

    prompt = oneshot.read_prompt(command)
    if prompt is not None:
        return oneshot.run(command, prompt, own_world())
    from swiftspec.serve import chat

    return chat.run(command.settings, own_world())


def own_world() -> World | None:
    """The ranks that a launcher has started; None for one alone, which needs no torch to know that."""
    if launched() is None:
        return None
    from swiftspec.distributed.world import join_world

    return join_world(lambda text: print(f"swiftspec: {text}", file=sys.stderr, flush=True))


if __name__ == "__main__":
    sys.exit(main())
