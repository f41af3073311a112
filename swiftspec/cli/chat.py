"""Command `swiftspec chat`: the chat in a terminal."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from rich.console import Console
from rich.text import Text

from swiftspec import answer_stats
from swiftspec.cli.banner import show_banner
from swiftspec.cli.chat_history import ChatHistory, Turn
from swiftspec.cli.terminal import (
    EchoOffInterrupt,
    Interrupt,
    KeyInterrupt,
    Painter,
    StartupProgress,
    line_reader,
    print_note,
)
from swiftspec.cli.tree_view import RoundHistory
from swiftspec.contrib.otel.spans import traced_session
from swiftspec.errors import UserError
from swiftspec.params import SAMPLING, STOPPING
from swiftspec.settings.flags import SETTINGS
from swiftspec.settings.rank_plan import acceptance_advice
from swiftspec.settings.settings import Settings, describe_validation_error
from swiftspec.signals import SignalHandlers
from swiftspec.startup.remote_session import open_local_or_remote
from swiftspec.startup.session import Session
from swiftspec.stdio import OutputLost
from swiftspec.text.template import PromptTooLong

if TYPE_CHECKING:
    from swiftspec.distributed.launch.world import World
    from swiftspec.text.stream import TextStream

HELP = """\
/set NAME VALUE   change a sampling value, the seed or a limit: /set temperature 0.7; VALUE `default` resets it
/set              show the current values
/system [TEXT]    show or change the system prompt; TEXT `default` resets it to --system-prompt
/retry            decode the last answer again, with the next seed
/undo             remove the last message and its answer
/clear            clear the conversation; the system prompt stays
/save FILE        write the messages to a JSON file; /load FILE continues the conversation of one
/stats [on|off]   show a line of statistics after each answer; /stats last: all statistics of the last one as JSON
/tree on, /tree   record rounds; show the draft tree of the last round, or with /tree N of the Nth before it
/help             show this page
/quit             exit (also Ctrl-D, or Ctrl-C twice)
Enter sends, Alt-Enter begins a new line, pasted lines stay together. Ctrl-C stops an answer and keeps its text."""
EXIT_COMMANDS = ("/quit", "/exit", "/bye")
MAX_NOTE_CHARS = 60  # of a message that a note repeats
NUM_SEEDS = 2**64
ANSWER_RESERVE_TOKENS = 256  # reserved for an answer without a token limit; at most a quarter of the context


def run_chat(settings: Settings, world: World | None = None) -> int:
    """Loads the models and chats until the user exits. Returns the exit code."""
    phases = StartupProgress()
    try:
        session = open_local_or_remote(settings, phases, world, warm_up=True)
    finally:
        phases.close()
    ignore_late_press = SignalHandlers(lambda number: None, (signal.SIGINT,))  # a Ctrl-C just after an answer
    with closing(session), ignore_late_press:
        if not settings.raw and not session.codec.has_template:
            raise UserError(f"{session.model} has no chat template: use --raw for plain text, or --chat-template")
        interrupt = EchoOffInterrupt if world is None else KeyInterrupt
        with traced_session(session, settings) as observed:
            Chat(observed, settings, Console(highlight=False), line_reader(), interrupt).run()
    return 0


class Chat:
    """A chat in the terminal: the conversation and its settings.

    `read_line`: reads the next message, see `line_reader`. `interrupt`: creates the Ctrl-C handler of each answer.
    """

    def __init__(
        self,
        session: Session,
        settings: Settings,
        console: Console,
        read_line: Callable[[], str],
        interrupt: Callable[[], Interrupt] = Interrupt,
    ) -> None:
        self._interrupt = interrupt
        self._session = session
        self._settings = settings
        self._initial_settings = settings.model_copy(deep=True)
        self._console = console
        self._read_line = read_line
        self._conversation = ChatHistory(settings.system_prompt)
        self._last_text: str | None = None  # the last message; None if it was removed from the conversation
        self._retries = 0  # of the last answer
        self._rounds = RoundHistory(
            lambda listener: session.llm.listen(listener), lambda token: session.codec.token_text([token])
        )
        self._show_stats = True
        self._last_summary: dict[str, Any] | None = None
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda rest: console.print(Text(HELP)),
            "/?": lambda rest: console.print(Text(HELP)),
            "/set": self._set,
            "/system": self._set_system_prompt,
            "/retry": self._retry,
            "/undo": self._undo,
            "/clear": self._clear,
            "/save": self._save,
            "/load": self._load,
            "/stats": self._stats,
            "/tree": lambda rest: self._rounds.command(rest, console),
        }

    def run(self) -> None:
        """Reads and answers messages until the user exits."""
        show_banner(self._session, self._console, raw=self._settings.raw)
        leaving = False
        while True:
            try:
                text = self._read_line()
            except EOFError:
                return
            except KeyboardInterrupt:
                if leaving:
                    return
                leaving = True
                self._note("press Ctrl-C again or Ctrl-D to exit")
                continue
            leaving = False
            try:
                if not self.handle(text):
                    return
            except OutputLost:
                raise
            except UserError as error:
                self._note(f"error: {error}", "red")
            except KeyboardInterrupt:  # before the first token
                self._note("stopped")

    def handle(self, text: str) -> bool:
        """Handles one message or command. Returns False on the command to exit. Raises UserError on an invalid
        command."""
        if not text.strip():
            return True
        if not text.startswith("/") or "\n" in text.strip():
            self._answer(text)
            return True
        command, _, rest = text.strip().partition(" ")
        if command in EXIT_COMMANDS:
            return False
        if command not in self._commands:
            raise UserError(f"unknown command {command}; /help lists the commands")
        self._commands[command](rest.strip())
        return True

    def _answer(self, text: str, retries: int = 0) -> bool:
        """Decodes and shows the answer to a message. Returns whether it has text. `retries`: number of earlier answers
        to the message, added to the seed."""
        sampling = self._session.sampling_params(self._settings)
        before = list(self._conversation.turns)
        with self._interrupt() as interrupt:
            try:
                prompt = self._encode_message(text)
                seed = (sampling.seed + retries) % NUM_SEEDS
                stream = self._stream(prompt, interrupt, seed)
            except BaseException:
                self._conversation.turns = before
                raise
        self._last_text, self._retries = text, retries
        if stream.answer and not self._settings.raw:
            tokens = self._session.codec.without_final_special(stream.token_ids)
            self._conversation.turns.append(Turn(text, stream.answer, (*prompt, *tokens)))
        self._finish_answer(stream, prompt)
        return bool(stream.answer)

    def _encode_message(self, text: str) -> list[int]:
        """Returns the tokens of the conversation with the message `text`; with --raw, those of the message alone."""
        if self._settings.raw:
            return self._session.encode(text, self._settings)
        return self._encode_conversation(text)

    def _retry(self, rest: str) -> None:
        """Runs `/retry`: decodes the last message again. Its answer stays if the new one has no text."""
        _refuse_argument("/retry", rest)
        before = list(self._conversation.turns)
        last = before[-1].user if before else None
        text = last if self._last_text is None else self._last_text
        if text is None:
            raise UserError("/retry: there is no message yet")
        sampling = self._session.sampling_params(self._settings)
        if sampling.greedy:
            self._note("temperature 0: the answer is the same again; use /set temperature")
        else:
            self._note(f"seed {(sampling.seed + self._retries + 1) % NUM_SEEDS}")
        if text == last:  # otherwise the last message has no answer
            self._conversation.turns = before[:-1]
        replaced = False
        try:
            replaced = self._answer(text, self._retries + 1)
        finally:
            if not replaced:
                self._conversation.turns = before

    def _undo(self, rest: str) -> None:
        _refuse_argument("/undo", rest)
        self._require_conversation("/undo")
        if not self._conversation.turns:
            raise UserError("/undo: there is no message yet")
        removed = " ".join(self._conversation.turns.pop().user.split())
        self._forget_last()
        cut = removed if len(removed) <= MAX_NOTE_CHARS else removed[: MAX_NOTE_CHARS - 1] + "…"
        self._note(f"removed: {cut}")

    def _clear(self, rest: str) -> None:
        _refuse_argument("/clear", rest)
        self._conversation.turns.clear()
        self._forget_last()
        self._note("conversation cleared")

    def _set_system_prompt(self, text: str) -> None:
        self._require_conversation("/system")
        if text:
            self._conversation.system = self._initial_settings.system_prompt if text == "default" else text
        self._note(f"system prompt: {self._conversation.system or 'that of the chat template'}")

    def _save(self, name: str) -> None:
        self._require_conversation("/save")
        if not name:
            raise UserError("/save needs the name of a file")
        file = self._conversation.save(name)
        self._note(f"{len(self._conversation.messages())} messages saved to {file}")

    def _load(self, name: str) -> None:
        self._require_conversation("/load")
        if not name:
            raise UserError("/load needs the name of a file")
        file = self._conversation.load(name)
        self._forget_last()
        self._note(f"{len(self._conversation.messages())} messages loaded from {file}")

    def _forget_last(self) -> None:
        """Forgets the last message, which is no longer part of the conversation."""
        self._last_text = None
        self._retries = 0

    def _require_conversation(self, command: str) -> None:
        if self._settings.raw:
            raise UserError(f"{command} is not supported with --raw, which has no conversation")

    def _stream(self, prompt: list[int], interrupt: Interrupt, seed: int) -> TextStream:
        stream = self._session.answer(prompt, self._settings, interrupt.until_pressed, seed=seed)
        painter = Painter(self._console)
        try:
            for piece in stream:
                painter.write(piece.text, piece.accepted)
        except KeyboardInterrupt:
            pass  # during the prefill, or pressed twice
        for piece in stream.flush():
            painter.write(piece.text, piece.accepted)
        return stream

    def _finish_answer(self, stream: TextStream, prompt: list[int]) -> None:
        if stream.text and not stream.text.endswith("\n"):
            self._console.print()
        stats, llm = self._session.llm.stats, self._session.llm
        stats.keep_tokens(len(stream.token_ids))
        sampling = self._session.sampling_params(self._settings)
        self._last_summary = answer_stats.answer_summary(
            model=self._session.model,
            draft_model=self._session.draft_model,
            plan=llm.config,
            stats=stats,
            text=stream.text,
            token_ids=stream.token_ids,
            prompt_token_ids=prompt,
            finish_reason=stream.finish_reason or "abort",
            sampling=sampling,
            load_time=llm.load_time,
        )
        notes = answer_stats.ending_notes(stats, stream.finish_reason, len(stream.token_ids), sampling.max_tokens)
        if self._show_stats:
            notes.append(answer_stats.summary_line(stats, len(stream.token_ids)))
        else:
            if (note := answer_stats.synthetic_note(stats)) is not None:
                notes.append(note)
            if stats.drafter_lost is not None:
                notes.append(f"the drafter was lost ({stats.drafter_lost}); decoding continued without it")
        if notes:
            self._note(", ".join(notes))
        self._console.print()

    def _encode_conversation(self, text: str) -> list[int]:
        """Encodes the conversation with the message `text`; drops the oldest turns until there is room for an
        answer."""
        limit, turns = self._session.llm.max_model_len, self._conversation.turns
        room = min(self._settings.max_tokens or ANSWER_RESERVE_TOKENS, limit // 4)
        dropped = 0
        while True:
            try:
                prompt = self._conversation.encode(text, self._session.encode_chat, self._session.codec)
                if len(prompt) + room <= limit or not turns:
                    break
            except PromptTooLong:
                if not turns:
                    raise
            del turns[0]
            dropped += 1
        if dropped:
            words = "turn was" if dropped == 1 else f"{dropped} turns were"
            self._note(f"the oldest {words} dropped: the context holds {limit} tokens")
        return prompt

    def _set(self, rest: str) -> None:
        if not rest:
            self._show_settings()
            return
        name, _, value = rest.partition(" ")
        name, value = name.lstrip("-").replace("-", "_"), value.strip()
        if name not in _settable():
            raise UserError(f"cannot set {name!r}; available settings: {', '.join(_settable())}")
        if not value:
            raise UserError(f"/set {name} needs a value, or `default`")
        try:
            setattr(self._settings, name, getattr(self._initial_settings, name) if value == "default" else value)
        except ValidationError as error:
            raise UserError(describe_validation_error(error)) from None
        self._note(f"{name} = {self._effective(name)!r}")
        advice = None
        if name in ("guidance_scale", "negative_prompt"):
            advice = self._settings.guidance_note()
        elif name == "temperature":
            advice = acceptance_advice(
                self._session.llm.config, self._settings.sampling_params(self._session.model_defaults)
            )
        if advice is not None:
            self._note(advice)

    def _show_settings(self) -> None:
        for name in _settable():
            self._console.print(Text(f"{name:20} {self._effective(name)!r}"))

    def _effective(self, name: str) -> object:
        sampling = self._settings.sampling_params(self._session.model_defaults)
        value = getattr(sampling if hasattr(sampling, name) else self._settings, name)
        return list(value) if isinstance(value, tuple) else value

    def _stats(self, rest: str) -> None:
        if rest in ("on", "off"):
            self._show_stats = rest == "on"
            self._note(f"stats are {rest}")
        elif rest not in ("", "last"):
            raise UserError(f"/stats: expected on, off or last, not {rest!r}")
        elif self._last_summary is None:
            self._note("no answer yet")
        else:
            long = ("model", "draft_model", "text", "token_ids", "prompt_token_ids")
            shown = {name: value for name, value in self._last_summary.items() if name not in long}
            self._console.print(Text(_format_json(shown)))

    def _note(self, text: str, style: str = "dim") -> None:
        print_note(self._console, text, style)


def _refuse_argument(command: str, rest: str) -> None:
    if rest:
        raise UserError(f"{command} has no argument")


def _settable() -> Iterator[str]:
    return (name for name, flag in SETTINGS.items() if flag.setting.group in (SAMPLING, STOPPING))


def _format_json(value: Any, indent: str = "") -> str:
    """Formats JSON with one line per value; lists stay on one line."""
    if isinstance(value, dict):
        deeper = indent + "  "
        lines = ",\n".join(f"{deeper}{json.dumps(key)}: {_format_json(item, deeper)}" for key, item in value.items())
        return f"{{\n{lines}\n{indent}}}"
    return json.dumps(value)
