"""Command `python -m swiftspec.serve`: a server with --port, one answer if there is a prompt, else a chat in the
terminal.

A server, and a chat or an answer on several ranks, run in child processes that this process supervises. Modules are
imported where they are needed, so that --help is fast.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from swiftspec.distributed.launch.launched_rank import LaunchedRank, launched, own_rank
from swiftspec.distributed.launch.supervisor_link import EXIT_PEER_LOST, JobEnded
from swiftspec.errors import RankLost, UserError
from swiftspec.signals import SIGNAL_GRACE_S, TERMINATION_SIGNALS, TerminationGuard, ignore_signals
from swiftspec.stdio import command_streams, warn

if TYPE_CHECKING:
    from swiftspec.cli.arguments import ParsedCommand
    from swiftspec.distributed.launch.control_socket import SupervisorClient
    from swiftspec.distributed.launch.supervisor_link import SupervisorLink
    from swiftspec.distributed.launch.world import World


# Delay before a rank other than 0 reports an error and exits. Rank 0 must report first: the launcher ends all ranks as
# soon as one exits.
FOLLOWER_ERROR_DELAY_S = 5.0
DEFAULT_PORT = 8000  # of `swiftspec serve`


def main(argv: Sequence[str] | None = None, subcommand: str | None = None) -> int:
    """Runs the command and returns its exit code (see `run_guarded`).

    `subcommand`: "chat", "serve" or "generate"; None selects one of them by the flags and by whether there is a
    terminal.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if subcommand is None:
        return run_guarded(lambda first: _dispatch(arguments, first))
    return run_guarded(lambda first: _run_subcommand(subcommand, arguments, first))


def run_guarded(run: Callable[[bool], int], grace_s: float = SIGNAL_GRACE_S, *, supervised: bool = False) -> int:
    """Runs a command with handling of signals, output streams and errors. Returns its exit code.

    Exit codes: 2 usage error, 1 runtime error, 141 broken pipe, 128 + n for signal n. Errors that the user can fix are
    printed as one line on stderr, by rank 0 if there are several ranks.

    `run`: the command; its argument is whether this process is rank 0.
    `grace_s`: seconds after a signal before the process is ended, see `TerminationGuard`.
    `supervised`: a supervisor has started this process. After the loss of another rank, the exit code is
    EXIT_PEER_LOST, on which the supervisor restarts the process.
    """
    rank = own_rank()
    first = rank == 0
    for name, level in (("TORCH_CPP_LOG_LEVEL", "ERROR"), ("GRPC_VERBOSITY", "NONE")):
        os.environ.setdefault(name, level)  # this command reports a lost peer in one line; torch and gRPC take many
    numbers = TERMINATION_SIGNALS if first else (signal.SIGINT,)
    with command_streams(first) as streams, TerminationGuard(grace_s, numbers) as ending:
        try:
            streams.check()
            if first and not supervised:  # if supervised, the supervisor has printed these warnings
                _warn_of_unknown_variables()
            try:
                code = run(first)
            finally:  # also after --help; buffered output to a full disk fails only here
                streams.flush()
        except JobEnded:
            code = 0
        except RankLost as error:
            if ending.exit_code is None:
                print(f"swiftspec: rank {rank} exits: {error}", file=sys.stderr)
            code = EXIT_PEER_LOST if supervised else 1
        except UserError as error:
            code = _report_error(error, rank) if ending.exit_code is None else 1
        except KeyboardInterrupt:
            code = 130
        except BrokenPipeError:  # the reader of the output has exited: exit silently
            code = 141
        except BaseException:
            if ending.exit_code is None:
                raise
            code = 1
    return code if ending.exit_code is None else ending.exit_code


def exit_process(code: int) -> NoReturn:
    """Exits the process with `code`. Ignores termination signals from here on: one that arrives during the
    interpreter's shutdown would change the exit code.

    After a failure of a process that uses a GPU, or if this process could not leave its process group, it exits without
    the interpreter's shutdown, which would wait for GPU kernels and communicators that may never end after the loss of
    another rank. Other processes shut down, so that the ranks that still read rank 0's store learn its reason to exit.
    """
    ignore_signals()
    if (code != 0 and _uses_gpu()) or _in_process_group():
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):  # no stream, or closed, or its reader has exited
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _uses_gpu() -> bool:
    """Returns whether this process has a CUDA context. Does not import torch."""
    cuda: Any = sys.modules.get("torch.cuda")
    return cuda is not None and cuda.is_initialized()


def _in_process_group() -> bool:
    """Returns whether this process is in a process group of torch. Does not import torch."""
    distributed: Any = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _warn_of_unknown_variables() -> None:
    if any(name.startswith("SWIFTSPEC_") for name in os.environ):  # checking them takes slow imports
        from swiftspec.cli.config_sources import unknown_variable_warnings

        for line in unknown_variable_warnings():
            warn(line)


def _report_error(error: UserError, rank: int) -> int:
    """Prints an error that the user can fix as one line. Returns the exit code."""
    from swiftspec.capabilities import NotSupported
    from swiftspec.settings.flags import flag_name
    from swiftspec.settings.settings import UsageError

    message = error.shown(flag_name) if isinstance(error, NotSupported) else str(error)
    if rank == 0:
        print(f"swiftspec: error: {message}", file=sys.stderr)
    else:
        time.sleep(FOLLOWER_ERROR_DELAY_S)  # if rank 0 has failed too, the launcher ends this process meanwhile
        print(f"swiftspec: rank {rank}: error: {message}", file=sys.stderr)
    return 2 if isinstance(error, UsageError) else 1


def _dispatch(argv: Sequence[str], first: bool) -> int:
    """Runs a command: on a single rank in this process; as a server or on several ranks in supervised processes.
    `first`: whether this process is rank 0."""
    here = launched()
    if argv[:1] == ["worker"]:
        from swiftspec.cli import worker

        return worker.run_worker_command(argv[1:], join_launched_world)
    if argv[:1] == ["generate"]:
        return _run_subcommand("generate", argv[1:], first)
    if not first:
        assert here is not None
        from swiftspec.serve.job import supervise_rank

        return supervise_rank(here, argv)
    if argv[:1] == ["replay"]:
        from swiftspec.serve import replay

        return replay.replay_main(argv[1:])
    from swiftspec.cli.arguments import parse_command
    from swiftspec.startup.built_in_models import requested_ranks_of

    command = parse_command(argv)
    settings, ranks = command.settings, 1
    if here is None:
        ranks = requested_ranks_of(settings)
    if settings.port is not None:
        return _supervise_server(command, here, ranks, argv)
    if here is None and ranks == 1:
        return run_rank(command, True)
    from swiftspec.serve.job import supervise_command

    return supervise_command(here, ranks, argv)


def _run_subcommand(name: str, argv: Sequence[str], first: bool) -> int:
    """Runs `swiftspec chat|serve|generate` like `python -m swiftspec.serve` with the same flags. Raises UsageError if
    the flags or the terminal do not fit the sub-command."""
    from swiftspec.cli.arguments import HELP_PAGES, parse_command
    from swiftspec.settings.settings import UsageError, check_usage

    command = parse_command(argv, page=HELP_PAGES[name])
    has_prompt = command.prompt is not None or command.prompt_file is not None
    if name == "serve":
        return _dispatch(argv if command.settings.port is not None else [*argv, "--port", str(DEFAULT_PORT)], first)
    found = {f"command {name}"} | ({"server"} if command.settings.port is not None else set())
    check_usage(found | ({"prompt flags"} if command.has_prompt_flags else set()))
    terminal = sys.stdin is not None and sys.stdin.isatty()
    if name == "chat" and first and not (terminal and sys.stdout.isatty()):
        raise UsageError("`swiftspec chat` needs a terminal: use `swiftspec generate` for a prompt from a pipe")
    if name == "generate" and first and not has_prompt and (terminal or sys.stdin is None):
        raise UsageError("no prompt: pass it with --prompt, --prompt-file or standard input")
    return _dispatch(argv, first)


def _supervise_server(command: ParsedCommand, here: LaunchedRank | None, ranks: int, argv: Sequence[str]) -> int:
    from swiftspec.serve.job import supervise_server
    from swiftspec.serve.link import frontend_process
    from swiftspec.settings.settings import check_usage

    if command.has_prompt_flags:
        check_usage({"prompt flags", "server"})
    settings = command.settings
    frontend_process.check_frontend_settings(settings)
    with frontend_process.open_listener(settings.host, settings.port or 0) as listening:
        url = frontend_process.listener_url(listening)
        return supervise_server(here, ranks, argv, frontend_process.frontend_program(settings, listening), url)


def run_rank(command: ParsedCommand, first: bool, supervisor: SupervisorClient | None = None) -> int:
    """Runs one rank of the command in this process. Returns its exit code.

    `first`: whether this process is rank 0.
    `supervisor`: connection to the supervisor that has started this process; None without one.
    """
    serving = command.settings.port is not None
    if not first:
        from swiftspec.startup.session import run_follower_rank

        if serving:
            ignore_signals([signal.SIGTERM])  # rank 0 handles it, drains the requests and shuts this rank down
        world = join_launched_world(None if supervisor is None else supervisor.supervision())
        assert world is not None
        run_follower_rank(command.settings, world)
        return 0
    if serving:
        from swiftspec.serve.link import engine_server

        assert supervisor is not None
        return engine_server.run_engine_server(command.settings, supervisor, join_launched_world)
    from swiftspec.cli import generate

    keeping = None if supervisor is None else supervisor.supervision()
    prompt = generate.read_prompt(command)
    if prompt is not None:
        return generate.run_generate(command, prompt, join_launched_world(keeping))
    from swiftspec.cli import chat

    return chat.run_chat(command.settings, join_launched_world(keeping))


def join_launched_world(supervision: SupervisorLink | None = None) -> World | None:
    """Joins the job that a launcher has started. Returns None for a single process, without importing torch.

    `supervision`: connection to the supervisor of this rank; None without one.
    """
    if launched() is None:
        return None
    from swiftspec.distributed.launch.world import join_world

    return join_world(lambda text: print(f"swiftspec: {text}", file=sys.stderr, flush=True), supervisor=supervision)


def run_command() -> NoReturn:
    """Runs the command in this process and exits with its exit code."""
    exit_process(main())


if __name__ == "__main__":
    run_command()
