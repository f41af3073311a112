"""Command `swiftspec generate`: one answer to one prompt."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from swiftspec import answer_stats, file_io
from swiftspec.cli.arguments import ParsedCommand
from swiftspec.cli.terminal import Interrupt, StartupProgress, visible
from swiftspec.contrib.otel.spans import traced_session
from swiftspec.errors import UserError
from swiftspec.settings.settings import UsageError
from swiftspec.startup.remote_session import open_local_or_remote
from swiftspec.startup.session import Session
from swiftspec.stdio import OutputLost
from swiftspec.text.codec import MAX_TEXT_BYTES

if TYPE_CHECKING:
    from swiftspec.distributed.launch.world import World

EXIT_INTERRUPTED = 130


def read_prompt(command: ParsedCommand) -> str | None:
    """Reads the prompt of --prompt, --prompt-file or standard input. Returns None if there is none and the command can
    open a chat: it runs in a terminal without --json. Raises UsageError if the prompt is missing, empty or cannot be
    read."""
    if command.prompt is not None:
        text, source = command.prompt, "--prompt"
    elif command.prompt_file is not None:
        text, source = _read_file(command.prompt_file), "--prompt-file"
    elif sys.stdin is None or sys.stdin.isatty():
        if not command.json and sys.stdin is not None and sys.stdout.isatty():
            return None
        raise UsageError("no prompt: pass it with --prompt, --prompt-file or standard input")
    else:
        text, source = _read_bounded(sys.stdin.buffer, "standard input"), "standard input"
    if (
        source != "--prompt" and not command.settings.raw
    ):  # the final newline of a file or pipe is not part of the prompt
        text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise UsageError(f"the prompt is empty ({source}): pass text with --prompt, --prompt-file or standard input")
    return text


def _read_file(file: Path) -> str:
    """Reads --prompt-file, which may be a pipe: `--prompt-file <(...)`."""
    name = f"--prompt-file {file}"
    try:
        with file.open("rb") as stream:
            return _read_bounded(stream, name)
    except (OSError, ValueError) as error:
        raise UsageError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _read_bounded(stream: BinaryIO, name: str) -> str:
    try:
        return file_io.decode_utf8(file_io.read_stream(stream, name, MAX_TEXT_BYTES), name)
    except UserError as error:
        raise UsageError(str(error)) from None


def run_generate(command: ParsedCommand, prompt: str, world: World | None = None) -> int:
    """Loads the models and prints the answer while it is decoded, or with --json one object at the end. Returns the
    exit code."""
    phases = StartupProgress(quiet=command.json)
    try:
        session = open_local_or_remote(command.settings, phases, world)
    finally:
        phases.close()
    try:
        with traced_session(session, command.settings) as observed:
            return _answer(command, prompt, observed)
    finally:
        session.close()


def _answer(command: ParsedCommand, prompt: str, session: Session) -> int:
    tokens = session.encode(prompt, command.settings, command.settings.system_prompt)
    show = visible if sys.stdout.isatty() else str
    lost: OutputLost | None = None
    with Interrupt() as interrupt:
        stream = session.answer(tokens, command.settings, interrupt.until_pressed)
        try:
            for piece in stream:
                if not command.json:
                    print(show(piece.text), end="", flush=True)
        except KeyboardInterrupt:
            interrupt.pressed = True
        except OutputLost as error:
            lost = error  # the statistics are still printed
        for piece in stream.flush():
            if not command.json:
                print(show(piece.text), end="", flush=True)
    stats, sampling = session.llm.stats, session.sampling_params(command.settings)
    stats.keep_tokens(len(stream.token_ids))
    if command.json:
        result = answer_stats.answer_summary(
            model=session.model,
            draft_model=session.draft_model,
            plan=session.llm.config,
            stats=stats,
            text=stream.text,
            token_ids=stream.token_ids,
            prompt_token_ids=tokens,
            finish_reason=stream.finish_reason or "abort",
            sampling=sampling,
            load_time=session.llm.load_time,
        )
        print(json.dumps(result, ensure_ascii=False, allow_nan=False), flush=True)
    else:
        print(end="" if stream.text.endswith("\n") else "\n", flush=True)
        notes = answer_stats.ending_notes(stats, stream.finish_reason, len(stream.token_ids), sampling.max_tokens)
        notes.append(answer_stats.summary_line(stats, len(stream.token_ids)))
        print(f"swiftspec: {', '.join(notes)}", file=sys.stderr, flush=True)
    if lost is not None:
        raise lost
    return 0 if stream.finish_reason is not None else EXIT_INTERRUPTED
