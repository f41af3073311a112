"""`python -m swiftspec.serve`: with --port a server, in a terminal a chat, else one answer. A server and several
ranks are kept, and this process is their keeper then. Imports as it goes, so that --help is fast."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from swiftspec.distributed.launch.launcher import Launched, launched, own_rank
from swiftspec.distributed.launch.supervision import EXIT_PEER_LOST, JobEnded
from swiftspec.errors import RankLost, UserError
from swiftspec.serve.signals import SIGNAL_GRACE_S, TERMINATION_SIGNALS, TerminationGuard
from swiftspec.serve.stdio import command_streams, warn

if TYPE_CHECKING:
    from swiftspec.distributed.launch.supervision import SupervisorLink
    from swiftspec.distributed.launch.world import World
    from swiftspec.serve.cli.arguments import ParsedCommand
    from swiftspec.serve.supervisor.supervisor_client import SupervisorClient


FOLLOWER_ERROR_DELAY_S = (
    5.0  # seconds in which rank 0 says what is wrong; the first rank that leaves makes the launcher end all
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return run_guarded(lambda first: _dispatch(list(sys.argv[1:] if argv is None else argv), first))


def run_guarded(run: Callable[[bool], int], grace_s: float = SIGNAL_GRACE_S, *, supervised: bool = False) -> int:
    """Runs a command, which is told whether this is the first rank, and returns its exit code, or 2 for a call that
    makes no sense, 1 for what does not work out, 141 if the reader of its output left, 130, 143 or 129 after Ctrl-C,
    SIGTERM or SIGHUP (`grace`: see Ending). Whatever the user can mend is told in one line on stderr, by rank 0 where
    there are several. `kept`: a keeper has started this process, and starts it again where it has lost another rank."""
    rank = own_rank()
    first = rank == 0
    for name, level in (("TORCH_CPP_LOG_LEVEL", "ERROR"), ("GRPC_VERBOSITY", "NONE")):
        os.environ.setdefault(name, level)  # what they would say of a peer that left is told in a line of ours
    numbers = TERMINATION_SIGNALS if first else (signal.SIGINT,)
    with command_streams(first) as streams, TerminationGuard(grace_s, numbers) as ending:
        try:
            streams.check()
            if first and not supervised:  # else the keeper has
                _warn_of_unknown_variables()
            try:
                code = run(first)
            finally:  # also after --help; a full disk may show here only
                streams.flush()
        except JobEnded:
            code = 0
        except RankLost as error:
            if ending.exit_code is None:
                print(f"swiftspec: rank {rank} leaves: {error}", file=sys.stderr)
            code = EXIT_PEER_LOST if supervised else 1
        except UserError as error:
            code = _report_error(error, rank) if ending.exit_code is None else 1
        except KeyboardInterrupt:
            code = 130
        except BrokenPipeError:  # the reader left; so do we, without a word
            code = 141
        except BaseException:
            if ending.exit_code is None:
                raise
            code = 1
    return code if ending.exit_code is None else ending.exit_code


def exit_process(code: int) -> NoReturn:
    """Ends the process. A signal that comes now is too late to change how: the interpreter, which needs a while to go,
    would end by it."""
    for number in TERMINATION_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


def _warn_of_unknown_variables() -> None:
    if any(name.startswith("SWIFTSPEC_") for name in os.environ):  # which needs a good deal of imports to know
        from swiftspec.serve.settings.config_sources import unknown_variable_warnings

        for line in unknown_variable_warnings():
            warn(line)


def _report_error(error: UserError, rank: int) -> int:
    """One line for what the user can mend. Returns the exit code."""
    from swiftspec.serve.settings.settings import UsageError

    if rank == 0:
        print(f"swiftspec: error: {error}", file=sys.stderr)
    else:
        time.sleep(FOLLOWER_ERROR_DELAY_S)  # only a rank that is alone with its trouble is still here after that
        print(f"swiftspec: rank {rank}: error: {error}", file=sys.stderr)
    return 2 if isinstance(error, UsageError) else 1


def _dispatch(argv: Sequence[str], first: bool) -> int:
    """One rank alone, for a person, runs here; whatever else there is runs in processes that are kept."""
    here = launched()
    if argv[:1] in (["worker"], ["generate"]):
        return _run_with_workers(argv[0], argv[1:], here)
    if not first:
        assert here is not None
        from swiftspec.serve.supervisor.job import supervise_rank

        return supervise_rank(here, argv)
    if argv[:1] == ["replay"]:
        from swiftspec.serve.http import replay

        return replay.replay_main(argv[1:])
    from swiftspec.serve.cli.arguments import parse_command
    from swiftspec.serve.rank_plan import requested_ranks

    command = parse_command(argv)
    settings, ranks = command.settings, 1
    if here is None:
        has_draft, gpu = settings.model is None or settings.draft_model is not None, settings.device == "cuda"
        ranks = requested_ranks(settings.mode, settings.target_tp, settings.draft_tp, has_draft=has_draft, gpu=gpu)
    if settings.port is not None:
        return _supervise_server(command, here, ranks, argv)
    if here is None and ranks == 1:
        return run_rank(command, True)
    from swiftspec.serve.supervisor.job import supervise_command

    return supervise_command(here, ranks, argv)


def _run_with_workers(name: str, argv: Sequence[str], here: Launched | None) -> int:
    """A worker, or one answer that workers decode."""
    from swiftspec.serve.cli import generate, worker
    from swiftspec.serve.cli.arguments import parse_command
    from swiftspec.serve.settings.settings import UsageError

    if name == "worker":
        return worker.run_worker_command(argv, join_launched_world)
    if here is not None and here.size > 1:
        raise UsageError("`swiftspec generate` is one process: start it without torchrun")
    command = parse_command(argv)
    if command.settings.target_url is None:
        raise UsageError("`swiftspec generate` decodes on a worker: name the target's with --target-url")
    if command.settings.port is not None:
        raise UsageError("`swiftspec generate` gives one answer: leave out --port")
    prompt = generate.read_prompt(command)
    if prompt is None:
        raise UsageError("no prompt: give one with --prompt or --prompt-file, or pipe it in")
    return generate.run_generate(command, prompt)


def _supervise_server(command: ParsedCommand, here: Launched | None, ranks: int, argv: Sequence[str]) -> int:
    from swiftspec.serve.http.engine_link import frontend_process
    from swiftspec.serve.settings.settings import UsageError
    from swiftspec.serve.supervisor.job import supervise_server

    if command.json or command.prompt is not None or command.prompt_file is not None:
        raise UsageError("--port serves clients, who bring their prompts: leave out --prompt, --prompt-file and --json")
    settings = command.settings
    frontend_process.check_frontend_settings(settings)
    with frontend_process.open_listener(settings.host, settings.port or 0) as listening:
        url = frontend_process.listener_url(listening)
        return supervise_server(here, ranks, argv, frontend_process.frontend_program(settings, listening), url)


def run_rank(command: ParsedCommand, first: bool, supervisor: SupervisorClient | None = None) -> int:
    """One rank's part of the command. Returns its exit code. `kept`: by whom it was started."""
    serving = command.settings.port is not None
    if not first:
        from swiftspec.serve.session import run_follower_rank

        if serving:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 hears it, ends what runs, and says when to leave
        world = join_launched_world(None if supervisor is None else supervisor.supervision())
        assert world is not None
        run_follower_rank(command.settings, world)
        return 0
    if serving:
        from swiftspec.serve.http.engine_link import engine_server

        assert supervisor is not None
        return engine_server.run_engine_server(command.settings, supervisor, join_launched_world)
    from swiftspec.serve.cli import generate

    keeping = None if supervisor is None else supervisor.supervision()
    prompt = generate.read_prompt(command)
    if prompt is not None:
        return generate.run_generate(command, prompt, join_launched_world(keeping))
    from swiftspec.serve.cli import chat

    return chat.run_chat(command.settings, join_launched_world(keeping))


def join_launched_world(supervision: SupervisorLink | None = None) -> World | None:
    """The ranks that a launcher has started; None for one alone, which needs no torch to know that. `keeping`: who
    starts ranks again."""
    if launched() is None:
        return None
    from swiftspec.distributed.launch.world import join_world

    return join_world(lambda text: print(f"swiftspec: {text}", file=sys.stderr, flush=True), supervisor=supervision)


def command() -> NoReturn:
    """The process of this command, from its start to its end."""
    exit_process(main())


if __name__ == "__main__":
    command()
