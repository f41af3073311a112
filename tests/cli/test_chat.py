"""The chat: its rules with a fake engine, the keys with prompt_toolkit, and the whole chat in a real terminal."""

import io
import json
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.cells import cell_len
from rich.console import Console

from swiftspec.cli.chat import Chat
from swiftspec.cli.chat_history import Turn
from swiftspec.cli.config_sources import load_settings
from swiftspec.cli.terminal import Painter, line_reader, visible
from swiftspec.cli.word_wrap import WordWrap
from swiftspec.config import EngineConfig
from swiftspec.engine import Stats, TokenChunk
from swiftspec.errors import UserError
from swiftspec.messages import VerifiedRound
from swiftspec.params import SamplingParams
from swiftspec.settings.settings import Settings, env_name
from swiftspec.smc.group_result import GroupResult
from swiftspec.startup.session import Session
from swiftspec.text.codec import TextCodec
from tests.support.harmony import harmony_folder
from tests.support.pty_terminal import Terminal
from tests.support.toy_pair import CONTEXT, byte_level_tokenizer, make_pair, write_tokenizer


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec(write_tokenizer(tmp_path_factory.mktemp("codec"), byte_level_tokenizer()))


class FakeEngine:
    """Answers with `reply`, three tokens per round, of which the first two are draft tokens; `during` is called after
    each round."""

    load_time = 0.5

    def __init__(self, codec: TextCodec) -> None:
        self.config, self.max_model_len = EngineConfig("serial"), 200
        self.reply = "return a + b, read"
        self.during: Callable[[], None] = lambda: None
        self.lost: str | None = None
        self.synthetic: float | None = None
        self.population: GroupResult | None = None
        self.requests: list[tuple[str, SamplingParams]] = []
        self.prompts: list[list[int]] = []
        self.tokenize: Callable[[str], list[int]] = codec.encode  # of the reply
        self.ending = "stop"
        self.stats = Stats()
        self._codec = codec

    def stream(self, prompt: Sequence[int], sampling: SamplingParams) -> Iterator[TokenChunk]:
        if len(prompt) >= self.max_model_len:
            raise UserError("the prompt does not fit")
        self.requests.append((self._codec.token_text(prompt), sampling))
        self.prompts.append(list(prompt))
        return self._stream()

    def _stream(self) -> Iterator[TokenChunk]:
        self.stats = Stats(decode_time=0.5, first_token_time=0.041, drafter_lost=self.lost, population=self.population)
        self.stats.synthetic_acceptance_length = self.synthetic
        tokens = self.tokenize(self.reply)
        for at in range(0, len(tokens), 3):
            chunk = tuple(tokens[at : at + 3])
            self.stats.tokens, self.stats.rounds = self.stats.tokens + len(chunk), self.stats.rounds + 1
            self.stats.accepted += len(chunk) - 1
            self.stats.verified.append(VerifiedRound((-1, 0, 1), tuple(range(len(chunk)))))
            yield TokenChunk(chunk, 2, self.ending if at + 3 >= len(tokens) else None)
            self.during()


class ChatRoom:
    """A chat with a fake engine that receives lines; `show()` returns the output since the last call."""

    def __init__(self, codec: TextCodec, **given: object) -> None:
        self.engine = FakeEngine(codec)
        self.settings, self.codec = load_settings(given), codec
        self.out = io.StringIO()
        session = Session(self.engine, codec, "m/target", "m/draft", None, "float32", 1, {"top_p": 0.9})  # type: ignore[arg-type]
        self.lines: list[str | type[BaseException]] = []
        self.chat = Chat(session, self.settings, Console(file=self.out, width=200, color_system=None), self.ask)

    def ask(self) -> str:
        line = self.lines.pop(0)
        if isinstance(line, str):
            return line
        raise line

    def run(self, *lines: str | type[BaseException]) -> str:
        """Runs the chat over these lines and returns what it printed."""
        self.lines = [*lines]
        self.out.seek(0)
        self.out.truncate()
        self.chat.run()
        return self.out.getvalue()


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(env_name(name), raising=False)


@pytest.fixture
def chat_room(codec: TextCodec) -> ChatRoom:
    return ChatRoom(codec)


def test_the_conversation_goes_through_the_template(chat_room: ChatRoom) -> None:
    output = chat_room.run("one", "two", EOFError)
    assert output.count("return a + b, read\n") == 2
    assert re.search(r"\d+ tok, \d+ tok/s, TTFT 41 ms, 3\.0 tok/round", output)
    last = "<|user|>one<|end|><|bot|>return a + b, read<|end|><|user|>two<|end|><|bot|>"
    assert [prompt for prompt, _ in chat_room.engine.requests] == ["<|user|>one<|end|><|bot|>", last]
    assert "conversation cleared" in chat_room.run("/clear", "three", EOFError)
    assert chat_room.engine.requests[-1][0] == "<|user|>three<|end|><|bot|>"


def test_the_banner_names_the_pair_and_shows_the_mark(chat_room: ChatRoom) -> None:
    output = chat_room.run(EOFError)
    assert "m/target, draft m/draft; mode serial, float32, 1 threads, context 200" in output
    assert "like this" in output


def test_leaving(chat_room: ChatRoom) -> None:
    for lines in ([EOFError], ["/quit"], [KeyboardInterrupt, KeyboardInterrupt]):
        chat_room.run(*lines)
        assert chat_room.lines == []
    assert "press Ctrl-C again" in chat_room.run(
        KeyboardInterrupt, "a", KeyboardInterrupt, "", KeyboardInterrupt, KeyboardInterrupt
    )
    assert chat_room.lines == []


def test_set(chat_room: ChatRoom) -> None:
    assert "temperature = 0.5" in chat_room.run(
        "/set temperature 0.5", "/set --top-k 7", '/set stop ["x", "y"]', "a", EOFError
    )
    sampling = chat_room.engine.requests[-1][1]
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.stop) == (0.5, 7, 0.9, ("x", "y"))
    assert "temperature = 1.0" in chat_room.run("/set temperature default", EOFError)
    listed = chat_room.run("/set", EOFError)
    assert re.search(r"top_p +0\.9\n", listed)
    assert re.search(r"top_k +7\n", listed)
    for line, words in (
        ("/set top-p 3", "error: top_p must be above 0 and at most 1, not 3.0"),
        ("/set seed x", "error: seed must be a whole number, not 'x'"),
        ("/set seed", "error: /set seed needs a value"),
        ("/set mode ar", "error: cannot set 'mode'; available settings"),
        ("/frobnicate", "error: unknown command /frobnicate"),
        ("/stats maybe", "error: /stats: expected on, off or last"),
    ):
        assert words in chat_room.run(line, EOFError)
    chat_room.run("a", EOFError)
    assert chat_room.engine.requests[-1][1].top_p == 0.9


def test_a_temperature_at_which_the_draft_samples_differently(chat_room: ChatRoom) -> None:
    assert "proposal" not in chat_room.run("/set temperature 1", EOFError)
    chat_room.engine.config = EngineConfig("serial", proposal="top")
    assert "proposal top does not use the target's noise" in chat_room.run("/set temperature 1", EOFError)
    assert "proposal" not in chat_room.run("/set temperature 0", EOFError)


def test_guidance(chat_room: ChatRoom) -> None:
    assert "guidance without a negative prompt uses an empty one" in chat_room.run(
        "/set guidance_scale 2", "a", EOFError
    )
    assert "uses an empty one" not in chat_room.run("/set negative-prompt be rude", "b", EOFError)
    empty, rude = (sampling for _, sampling in chat_room.engine.requests)
    assert (empty.guidance_scale, rude.guidance_scale) == (2.0, 2.0)
    spelled = [chat_room.codec.token_text(sampling.negative_prompt_ids) for sampling in (empty, rude)]
    assert spelled == ["<|user|><|end|><|bot|>", "<|user|>be rude<|end|><|bot|>"]
    assert re.search(r"negative_prompt +'be rude'\n", chat_room.run("/set", EOFError))
    assert "has no effect at --guidance-scale 1" in chat_room.run("/set guidance_scale default", EOFError)


def test_stats(chat_room: ChatRoom) -> None:
    assert "no answer yet" in chat_room.run("/stats", EOFError)
    output = chat_room.run("a", "/stats last", EOFError)
    stats = json.loads(output[output.index("{") : output.rindex("}") + 1])
    assert stats["metrics"]["speculative_decoding"]["mean_acceptance_length"] == 3
    assert stats["timings"]["predicted_n"] == stats["usage"]["completion_tokens"]
    assert "tok/round" not in chat_room.run("/stats off", "a", EOFError)
    assert "tok/round" in chat_room.run("/stats on", "a", EOFError)


def test_stats_of_a_population(chat_room: ChatRoom) -> None:
    chat_room.engine.config = EngineConfig("smc")
    chat_room.engine.population = GroupResult(
        tokens=[1], stopped=True, full=False, compactions=0, moved_slots=0,
        coalesced_prefix=1, ess_mean=2.5, resample_rate=0.25, log_z=-0.5,
    )  # fmt: skip
    output = chat_room.run("a", "/stats", EOFError)
    stats = json.loads(output[output.index("{") : output.rindex("}") + 1])
    assert (stats["exact"], stats["particles"], stats["ess_mean"], stats["log_z"]) == (False, 4, 2.5, -0.5)
    assert "text" not in stats


def test_a_lost_drafter_is_reported_without_stats_too(chat_room: ChatRoom) -> None:
    chat_room.engine.lost = "out of memory"
    for lines in (("a", EOFError), ("/stats off", "a", EOFError)):
        assert "the drafter was lost (out of memory); decoding continued without it" in chat_room.run(*lines)


def test_synthetic_acceptance_is_stated_without_stats_too(chat_room: ChatRoom) -> None:
    chat_room.engine.synthetic = 2.5
    for lines in (("a", EOFError), ("/stats off", "a", EOFError)):
        assert "synthetic acceptance length 2.5: the text is not the target's" in chat_room.run(*lines)


def test_the_oldest_turns_are_dropped_when_the_context_is_full(chat_room: ChatRoom) -> None:
    chat_room.engine.max_model_len = 130
    output = chat_room.run(*(f"{n} " + "x" * 20 for n in range(6)), EOFError)
    assert "the oldest turn was dropped: the context holds 130 tokens" in output
    last = chat_room.engine.requests[-1][0]
    assert last.startswith("<|user|>")
    assert f"5 {'x' * 20}" in last
    assert f"0 {'x' * 20}" not in last


def test_a_message_beyond_the_context_is_refused_and_dropped(chat_room: ChatRoom) -> None:
    assert "error: the prompt does not fit" in chat_room.run("x" * 300, EOFError)
    chat_room.run("a", EOFError)
    assert chat_room.engine.requests[-1][0] == "<|user|>a<|end|><|bot|>"


def test_ctrl_c_stops_an_answer_and_keeps_its_tokens(chat_room: ChatRoom) -> None:
    before = signal.getsignal(signal.SIGINT)
    chat_room.engine.during = lambda: os.kill(os.getpid(), signal.SIGINT)
    output = chat_room.run("one", EOFError)
    assert "stopped, 6 tok" in output
    assert signal.getsignal(signal.SIGINT) is before
    chat_room.engine.during = lambda: None
    chat_room.run("two", EOFError)
    tokens = re.fullmatch(
        r"<\|user\|>one<\|end\|><\|bot\|>(.+)<\|end\|><\|user\|>two<\|end\|><\|bot\|>", chat_room.engine.requests[-1][0]
    )
    assert tokens is not None
    assert chat_room.engine.reply.startswith(tokens.group(1))
    assert tokens.group(1) in output


def test_ctrl_c_before_the_first_token(chat_room: ChatRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Session.encode_chat

    def interrupted(session: Session, messages: Sequence[Any]) -> list[int]:
        os.kill(os.getpid(), signal.SIGINT)
        return encode(session, messages)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "encode_chat", interrupted)
        assert "stopped" in chat_room.run("one", EOFError)
    chat_room.run("two", EOFError)
    assert [prompt for prompt, _ in chat_room.engine.requests] == ["<|user|>two<|end|><|bot|>"]


def test_an_answer_without_text_leaves_no_trace(chat_room: ChatRoom) -> None:
    chat_room.engine.reply = ""
    chat_room.run("one", EOFError)
    chat_room.engine.reply = "a"
    chat_room.run("two", EOFError)
    assert chat_room.engine.requests[-1][0] == "<|user|>two<|end|><|bot|>"


def test_a_conversation_far_beyond_the_context_drops_turns(chat_room: ChatRoom) -> None:
    """Even if its text is refused before it is tokenized."""
    chat_room.chat._conversation.turns = [Turn("x" * 100, "x" * 100) for _ in range(20)]
    assert "turns were dropped" in chat_room.run("last", EOFError)
    assert chat_room.engine.requests[-1][0].endswith("<|user|>last<|end|><|bot|>")
    turns = list(chat_room.chat._conversation.turns)
    assert len(turns) < 20
    assert "error: the prompt of 9000 bytes does not fit the context of 200" in chat_room.run("y" * 9000, EOFError)
    assert chat_room.chat._conversation.turns == turns


def test_raw_continues_each_text_independently(codec: TextCodec) -> None:
    chat_room = ChatRoom(codec, raw=True)
    chat_room.run("def a", "class", EOFError)
    assert [prompt for prompt, _ in chat_room.engine.requests] == ["def a", "class"]


def test_slashes_in_pasted_code_are_not_commands(chat_room: ChatRoom) -> None:
    chat_room.run("/usr/bin\n/quit", EOFError)
    assert chat_room.engine.requests[-1][0] == "<|user|>/usr/bin\n/quit<|end|><|bot|>"
    assert chat_room.lines == []


def test_undo_and_retry(chat_room: ChatRoom) -> None:
    assert "/undo: there is no message yet" in chat_room.run("/undo", EOFError)
    assert "/retry: there is no message yet" in chat_room.run("/retry", EOFError)
    output = chat_room.run("one", "two", "/undo", "three", "/retry", "/retry", "four", EOFError)
    assert "removed: two\n" in output and "seed 1\n" in output and "seed 2\n" in output
    answered = "<|user|>one<|end|><|bot|>return a + b, read<|end|>"
    third = f"{answered}<|user|>three<|end|><|bot|>"
    assert [prompt for prompt, _ in chat_room.engine.requests[2:5]] == [third] * 3
    assert chat_room.engine.requests[5][0] == f"{third}return a + b, read<|end|><|user|>four<|end|><|bot|>"
    assert [sampling.seed for _, sampling in chat_room.engine.requests] == [0, 0, 0, 1, 2, 0]
    assert "the answer is the same again" in chat_room.run("/set temperature 0", "/retry", EOFError)


def test_a_message_without_an_answer_is_retried(chat_room: ChatRoom) -> None:
    chat_room.run("one", EOFError)
    reply, chat_room.engine.reply = chat_room.engine.reply, ""
    chat_room.run("two", EOFError)
    chat_room.engine.reply = reply
    turns = list(chat_room.chat._conversation.turns)
    chat_room.run("/retry", EOFError)
    assert chat_room.engine.requests[-1][0] == chat_room.engine.requests[-2][0]
    assert [turn.user for turn in chat_room.chat._conversation.turns] == [*(turn.user for turn in turns), "two"]
    assert "/retry has no argument" in chat_room.run("/retry now", EOFError)


def test_a_failed_retry_keeps_the_answer(chat_room: ChatRoom) -> None:
    chat_room.run("one", EOFError)
    turns = list(chat_room.chat._conversation.turns)
    chat_room.engine.reply = ""
    chat_room.run("/retry", EOFError)
    chat_room.engine.max_model_len = 3
    assert "error:" in chat_room.run("/retry", EOFError)
    assert chat_room.chat._conversation.turns == turns


def test_retry_of_raw_text(codec: TextCodec) -> None:
    chat_room = ChatRoom(codec, raw=True)
    chat_room.run("def a", "/retry", EOFError)
    assert [(prompt, sampling.seed) for prompt, sampling in chat_room.engine.requests] == [("def a", 0), ("def a", 1)]
    for line in ("/undo", "/system x", "/save x", "/load x"):
        assert f"error: {line.split()[0]} is not supported with --raw" in chat_room.run(line, EOFError)


def test_a_system_prompt(codec: TextCodec) -> None:
    chat_room = ChatRoom(codec, system_prompt="be brief")
    assert "system prompt: be long" in chat_room.run("one", "/system be long", "two", "/clear", "three", EOFError)
    chat_room.run("/system default", "four", EOFError)
    prompts = [prompt.partition("<|user|>")[0] for prompt, _ in chat_room.engine.requests]
    assert prompts == [f"<|bot|>be {word}<|end|>" for word in ("brief", "long", "long", "brief")]
    assert "system prompt: be brief" in chat_room.run("/system", EOFError)
    assert "system prompt: that of the chat template" in ChatRoom(codec).run("/system", EOFError)


def test_save_and_load(codec: TextCodec, tmp_path: Path) -> None:
    file, other = tmp_path / "saved.json", tmp_path / "other.json"
    chat_room = ChatRoom(codec, system_prompt="be brief")
    output = chat_room.run("one é", f"/save {file}", f"/save {file}", "/save", "/load", EOFError)
    assert output.count(f"3 messages saved to {file}") == 2
    assert "/save needs the name of a file" in output and "/load needs the name of a file" in output
    answer = chat_room.engine.reply
    messages = [("system", "be brief"), ("user", "one é"), ("assistant", answer)]
    assert [(one["role"], one["content"]) for one in json.loads(file.read_text())] == messages
    fresh = ChatRoom(codec)
    assert "3 messages loaded" in fresh.run(f"/load {file}", "two", EOFError)
    assert fresh.engine.requests[0][0].startswith(f"<|bot|>be brief<|end|><|user|>one é<|end|><|bot|>{answer}<|end|>")
    for content in ("{", "[1]", '{"messages": [{"role": "user", "content": "x"}]}', '[{"role": "user"}]'):
        other.write_text(content)
        output = fresh.run(f"/load {other}", f"/save {other}", f"/load {tmp_path / 'none'}", EOFError)
        assert output.count("error: ") == 3 and "exists and contains no messages" in output
    for name in ("x" * 5000, str(tmp_path), "~nosuchuser/x"):
        assert fresh.run(f"/load {name}", f"/save {name}", EOFError).count("error: ") == 2
    assert len(fresh.chat._conversation.turns) == 2
    other.write_text('{"messages": []}')
    assert "0 messages loaded" in fresh.run(f"/load {other}", EOFError)


def test_the_next_turn_reuses_the_tokens_of_an_answer(chat_room: ChatRoom) -> None:
    """They can differ from those of its text, and only the same tokens are in the KV cache."""
    codec, engine = chat_room.codec, chat_room.engine
    engine.tokenize = lambda text: [codec.encode(letter)[0] for letter in text]
    answer = engine.tokenize(engine.reply)
    assert answer != codec.encode(engine.reply)
    chat_room.run("one", "two", EOFError)
    first, second = engine.prompts
    assert second[: len(first) + len(answer)] == first + answer
    assert engine.requests[1][0].endswith("return a + b, read<|end|><|user|>two<|end|><|bot|>")
    chat_room.chat._conversation.system = "another"  # the text before the answer changes
    chat_room.run("three", EOFError)
    assert engine.prompts[2] == codec.encode(engine.requests[2][0], add_special_tokens=False)


def test_an_answer_that_was_cut_is_marked(chat_room: ChatRoom) -> None:
    chat_room.engine.ending = "length"
    assert re.search(r"cut because the context is full, \d+ tok", chat_room.run("one", EOFError))
    for lines in (("/set max_tokens 3", "two"), ("/stats off", "three")):
        output = chat_room.run(*lines, EOFError)
        assert re.search(r"\ncut at max_tokens 3[,\n]", output)


def wrapped(width: int, *pieces: str) -> str:
    """What a terminal of this width shows: the control sequences of `WordWrap` are executed."""
    wrap, lines = WordWrap(), [""]
    for piece in pieces:
        text = "".join(part for part, _ in wrap.push(piece, False, width))
        for token in re.findall(r"\x1b\[(\d+)G\x1b\[K|(.|\n)", text):
            if token[0]:
                lines[-1] = cells_before(lines[-1], int(token[0]) - 1)
            elif token[1] == "\n":
                lines.append("")
            else:
                lines[-1] += token[1]
                assert cell_len(lines[-1].expandtabs()) <= width
    return "\n".join(lines)


def cells_before(line: str, cells: int) -> str:
    return next(line[:at] for at in range(len(line) + 1) if cell_len(line[:at].expandtabs()) == cells)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("an integer without words", "an integer\nwithout \nwords"),
        ("a integerwithoutend b", "a \nintegerwit\nhoutend b"),
        ("x\n    four five six", "x\n    four \nfive six"),
        ("one 中文字中文字 two", "one 中文字\n中文字 two"),
        ("0123456789 x", "0123456789\nx"),
        ("0123456789\nx", "0123456789\nx"),
        ("a e\u0301clairs e\u0301te\u0301", "a e\u0301clairs \ne\u0301te\u0301"),
        ("a\tbcd", "a\t\nbcd"),
    ],
)
def test_words_are_wrapped_whole(text: str, shown: str) -> None:
    assert wrapped(10, text) == wrapped(10, *text) == shown


def test_a_resize_moves_no_text() -> None:
    wrap = WordWrap()
    wrap.push("one two", False, 10)
    assert wrap.push("three", False, 6) == [("\nthree", False)]


def paint(**console: Any) -> str:
    out = io.StringIO()
    painter = Painter(Console(file=out, force_terminal=True, **console))
    painter.write("a\nb", True)
    painter.write("c", False)
    return out.getvalue()


def test_colours_and_underlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert paint() == "\x1b[4;32ma\x1b[0m\n\x1b[4;32mb\x1b[0mc"
    monkeypatch.setenv("NO_COLOR", "1")
    assert paint() == "\x1b[4ma\x1b[0m\n\x1b[4mb\x1b[0mc"
    assert paint(color_system=None) == "a\nbc"
    out = io.StringIO()
    painter = Painter(Console(file=out, width=6))  # no terminal
    painter.write("words that are longer", True)
    assert out.getvalue() == "words that are longer"


def test_an_answer_cannot_steer_the_terminal() -> None:
    assert visible("a\tb\n\x1b[2J\x07\r\x9b\x7f") == "a\tb\n␛[2J␇␍\ufffd\ufffd"


def typed(keys: str) -> str:
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        pipe.send_text(keys)
        return line_reader()()


def test_keys() -> None:
    assert typed("def f():\r") == "def f():"
    assert typed("a\x1b\rb\r") == "a\nb"  # Alt-Enter
    assert typed("\x1b[200~def f():\n    return\n\x1b[201~\r") == "def f():\n    return\n"
    assert typed("abc\x03def\r") == "def"
    with pytest.raises(KeyboardInterrupt):
        typed("\x03")
    with pytest.raises(EOFError):
        typed("\x04")


@pytest.mark.slow
def test_in_a_real_terminal(tmp_path: Path) -> None:
    target, draft = make_pair(tmp_path)
    flags = ["--model", str(target), "--draft-model", str(draft), "--threads", "1", "--ignore-eos"]
    flags += ["--max-tokens", "20"]
    flags += ["--speculative-config.emulate", "target=10ms"]  # leaves time for a Ctrl-C before an answer ends
    terminal = Terminal(["-m", "swiftspec.serve", *flags], TERM="xterm", NO_COLOR="")
    terminal.until(r"ready in [\s\S]*target, draft .*draft; mode\s+serial")
    terminal.until(">>>")
    terminal.send("def f():\r")
    terminal.until(r"20 tok, [\d.e+]+ tok/s, TTFT \d+ ms, \d\.\d tok/round[\s\S]*>>>")
    terminal.send("/retry\r")
    terminal.until(r"seed 1\b[\s\S]*cut at max_tokens 20, 20 tok[\s\S]*>>>")
    terminal.send("/set top-p 3\r")
    terminal.until(r"error: top_p must be above 0[\s\S]*>>>")
    terminal.send("/set max-tokens 200\r")
    terminal.until(r"max_tokens = 200[\s\S]*>>>")
    terminal.send("/set temperature 1.5\r")
    terminal.until(r"temperature = 1.5[\s\S]*>>>")
    terminal.send("class A:\r")
    terminal.until(r"<sent>[\s\S]{8}")
    terminal.send("\x03")
    stopped = terminal.until(r"stopped, \d+ tok, [\s\S]*>>>")
    assert "^C" not in stopped
    assert int(re.search(r"stopped, (\d+)", stopped).group(1)) < min(200, CONTEXT - 40)  # type: ignore[union-attr]
    terminal.send("/stats\r")
    terminal.until(r'"finish_reason": "abort"[\s\S]*"mode": "serial"[\s\S]*>>>')
    terminal.send("\x03")
    terminal.until(r"again or Ctrl-D[\s\S]*>>>")
    terminal.send("/quit\r")
    assert terminal.leave() == 0
    assert "Traceback" not in terminal.output


def test_channels_of_harmony(tmp_path: Path) -> None:
    """The chat shows reasoning before the answer; only the answer is part of the conversation."""
    codec = TextCodec(harmony_folder(tmp_path / "harmony"))
    chat_room = ChatRoom(codec)
    chat_room.engine.reply = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>fine<|return|>"
    )
    output = chat_room.run("one", "two", EOFError)
    assert output.count("Reasoning: hm\n\nfine\n") == 2 and "<|" not in output
    assert "<|start|>assistant<|channel|>final<|message|>fine<|end|>" in chat_room.engine.requests[1][0]
    assert "hm" not in chat_room.engine.requests[1][0]
    chat_room.engine.reply = "<|channel|>analysis<|message|>hm"
    before = len(chat_room.engine.requests)
    assert "Reasoning: hm\n" in chat_room.run("three", EOFError)
    assert len(chat_room.engine.requests) == before + 1 and "three" not in str(chat_room.chat._conversation.messages())
    codec.close()
