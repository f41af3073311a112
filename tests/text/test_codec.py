"""Tokens to text and back: exact for any split into pieces."""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from swiftspec.engine import TokenChunk
from swiftspec.errors import UserError
from swiftspec.observe.trace_format import TokenText, text_fields
from swiftspec.text.codec import TextCodec
from swiftspec.text.stream import (
    MAX_PENDING_TOKENS,
    REPLACEMENT_CHARACTER,
    Detokenizer,
    StopStrings,
    TextPiece,
    TextStream,
)
from tests.support.toy_pair import BOT, END, USER, byte_fallback_tokenizer, byte_level_tokenizer, write_tokenizer


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec(write_tokenizer(tmp_path_factory.mktemp("byte-level"), byte_level_tokenizer()))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec(write_tokenizer(tmp_path_factory.mktemp("byte-fallback"), byte_fallback_tokenizer(), None))


@pytest.fixture(params=["byte_level", "byte_fallback"])
def codec(request: pytest.FixtureRequest) -> TextCodec:
    return request.getfixturevalue(request.param)


def pieces(codec: TextCodec, tokens: Sequence[int], context: Sequence[int] = ()) -> list[str]:
    detokenizer = Detokenizer(codec, context)
    return [*(detokenizer.push((token,)) for token in tokens), detokenizer.finish()]


def reference(codec: TextCodec, tokens: Sequence[int]) -> str:
    """Without an incomplete character at the end."""
    text = str(codec.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))
    return text.rstrip(REPLACEMENT_CHARACTER)


def nasty(codec: TextCodec, rng: random.Random, length: int) -> list[int]:
    """Random tokens with real characters, parts of them, stray bytes and special tokens in between."""
    tokens: list[int] = []
    while len(tokens) < length:
        if rng.random() < 0.5:
            some = codec.encode(rng.choice(["é", "中文", "😀", " def a", "\ufffd", "a b", "👩‍💻"]))
            tokens += some[: rng.randint(1, len(some))] if rng.random() < 0.4 else some
        else:
            tokens += [rng.randrange(codec.size) for _ in range(rng.randint(1, 3))]
    return tokens


def test_pieces_form_the_whole_text(codec: TextCodec) -> None:
    rng = random.Random(0)
    for trial in range(400):
        tokens = nasty(codec, rng, trial % 40 + 1)
        text = "".join(pieces(codec, tokens)).rstrip(REPLACEMENT_CHARACTER)  # of a long run of stray bytes
        assert text == reference(codec, tokens) == codec.decode(tokens).rstrip(REPLACEMENT_CHARACTER), tokens


def test_pieces_of_any_size(codec: TextCodec) -> None:
    rng = random.Random(1)
    for _ in range(100):
        tokens, detokenizer, text = nasty(codec, rng, 30), Detokenizer(codec), ""
        left = list(tokens)
        while left:
            count = rng.randint(1, 6)
            text += detokenizer.push(left[:count])
            left = left[count:]
        assert (text + detokenizer.finish()).rstrip(REPLACEMENT_CHARACTER) == reference(codec, tokens)


def test_no_partial_characters(codec: TextCodec) -> None:
    text = "a 😀é 中文 👩‍💻 b"
    texts = pieces(codec, codec.encode(text))
    assert "".join(texts).strip() == text
    assert not any(REPLACEMENT_CHARACTER in piece for piece in texts)
    assert sum(bool(piece) for piece in texts) > 3  # but it still streams
    tokens = codec.encode(text)
    for count in range(len(tokens)):  # also where a limit ends the text within a character
        assert text.startswith("".join(pieces(codec, tokens[:count])).strip())


def test_stray_bytes_neither_stop_the_stream_nor_slow_it(byte_level: TextCodec) -> None:
    stray = byte_level.vocab["Ģ"]  # the byte 0x80, a continuation byte without a start
    detokenizer = Detokenizer(byte_level)
    length = 0
    for count in range(200):
        length += len(detokenizer.push((stray,)))
        assert length >= count - MAX_PENDING_TOKENS - 4
        assert len(detokenizer._pending) <= MAX_PENDING_TOKENS + 1
    assert detokenizer.finish() == ""


def test_a_first_word_keeps_its_space_after_a_prompt(byte_fallback: TextCodec) -> None:
    prompt, word = byte_fallback.encode("def"), byte_fallback.vocab["▁a"]
    assert "".join(pieces(byte_fallback, [word])) == "a"
    assert "".join(pieces(byte_fallback, [word, word], prompt)) == " a a"
    end_of_bytes = byte_fallback.encode("def 😀")
    assert "".join(pieces(byte_fallback, [word], end_of_bytes)) == " a"


def by_character(stops: Sequence[str], text: str) -> tuple[str, bool]:
    for end in range(1, len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: min(begins)], True
    return text, False


def test_stop_strings_do_not_depend_on_the_pieces() -> None:
    rng = random.Random(2)
    for _ in range(1500):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(rng.randint(0, 3))]
        text = "".join(rng.choices("abc", k=rng.randint(0, 12)))
        machine, emitted, at, ended = StopStrings(stops), 0, 0, False
        while at < len(text) and not ended:
            count = rng.randint(0, 4)
            out, ended = machine.push(text[at : at + count])
            emitted, at = emitted + out, at + count
            expected = by_character(stops, text[:at])
            assert ended == expected[1]
            if ended:
                assert text[:emitted] == expected[0]
            else:  # exactly the text that may begin a stop string is held back
                held = text[emitted:at]
                assert held == "" or any(stop.startswith(held) for stop in stops)
                assert not any(
                    len(stop) > n > at - emitted and stop.startswith(text[at - n : at])
                    for stop in stops
                    for n in range(at + 1)
                )


class Chunks:
    """An engine's answer; records whether it was closed."""

    def __init__(self, *chunks: TokenChunk) -> None:
        self._chunks = iter(chunks)
        self.closed = False

    def __iter__(self) -> Iterator[TokenChunk]:
        return self

    def __next__(self) -> TokenChunk:
        return next(self._chunks)

    def close(self) -> None:
        self.closed = True


def chunk(codec: TextCodec, accepted: str, target: str, reason: str | None = None) -> TokenChunk:
    guessed = codec.encode(accepted) if accepted else []
    return TokenChunk((*guessed, *codec.encode(target)), len(guessed), reason)


def test_a_stream_separates_draft_text_from_target_text(byte_level: TextCodec) -> None:
    chunks = Chunks(
        chunk(byte_level, "def add", "("), chunk(byte_level, "", "a"), chunk(byte_level, ", b", ")", "length")
    )
    stream = TextStream(chunks, byte_level)
    expected = [("def add", True), ("(", False), ("a", False), (", b", True), (")", False)]
    assert list(stream) == [TextPiece(*one) for one in expected]
    assert (stream.text, stream.finish_reason) == ("def add(a, b)", "length")
    assert byte_level.decode(stream.token_ids) == stream.text
    assert chunks.closed


def test_a_stop_string_cuts_text_and_tokens(byte_level: TextCodec) -> None:
    chunks = Chunks(
        chunk(byte_level, "a + b", "\n"), chunk(byte_level, "\nclass R", "e"), chunk(byte_level, "", "x", "length")
    )
    stream = TextStream(chunks, byte_level, ["\n\nclass"])
    streamed = "".join(piece.text for piece in stream)
    assert streamed == stream.text == "a + b"
    assert stream.finish_reason == "stop"
    assert byte_level.decode(stream.token_ids).startswith("a + b\n\nclass")
    assert not byte_level.decode(stream.token_ids[:-1]).startswith("a + b\n\nclass")
    assert chunks.closed


def test_a_partial_stop_string_is_sent_at_the_end(byte_level: TextCodec) -> None:
    stream = TextStream(Chunks(chunk(byte_level, "a", "EN", "length")), byte_level, ["END"])
    assert "".join(piece.text for piece in stream) == "aEN"
    assert stream.finish_reason == "length"
    stream = TextStream(Chunks(chunk(byte_level, "a", "EN")), byte_level, ["END"])  # interrupted
    assert "".join(piece.text for piece in stream) == "a"
    assert "".join(piece.text for piece in stream.flush()) == "EN"
    assert (stream.text, stream.finish_reason) == ("aEN", None)


def test_closing_a_stream_ends_the_request(byte_level: TextCodec) -> None:
    chunks = Chunks(chunk(byte_level, "a", "b"), chunk(byte_level, "a", "b"))
    iterator = iter(TextStream(chunks, byte_level))
    next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    assert chunks.closed


def test_chat_template_and_special_tokens(byte_level: TextCodec) -> None:
    tokens = byte_level.encode_chat([{"role": "user", "content": "def"}])
    assert [byte_level.token_text([token]) for token in (tokens[0], tokens[-2], tokens[-1])] == [USER, END, BOT]
    assert byte_level.decode(tokens) == "def"
    assert byte_level.encode("") == []


def test_bos_once_only(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.post_processor = TemplateProcessing(single=f"{BOT} $A", special_tokens=[(BOT, 2)])
    codec = TextCodec(write_tokenizer(tmp_path, tokenizer, BOT + "{{ messages[0].content }}", bos_token=BOT))
    assert codec.encode("a")[0] == 2
    assert codec.encode_chat([{"role": "user", "content": "a"}]) == codec.encode("a")


def test_the_tokenizer_equals_that_of_transformers(byte_level: TextCodec) -> None:
    (byte_level.path / "config.json").write_text('{"model_type": "llama"}')
    theirs = AutoTokenizer.from_pretrained(byte_level.path)
    assert type(theirs) is type(byte_level.tokenizer)
    assert theirs.get_vocab() == byte_level.vocab
    text = "def für(x):\n\treturn 中 😀 <|end|>"
    assert theirs.encode(text) == byte_level.encode(text)


def test_no_template_and_bad_templates(tmp_path: Path, byte_fallback: TextCodec) -> None:
    with pytest.raises(UserError, match="no chat template: use --raw to continue plain text"):
        byte_fallback.encode_chat([{"role": "user", "content": "a"}])
    for name, template in (
        ("syntax", "{% if %}"),
        ("refuses", "{{ raise_exception('no\nway') }}"),
        ("missing", "{{ a.b.c }}"),
    ):
        codec = TextCodec(write_tokenizer(tmp_path / name, byte_level_tokenizer(), template))
        with pytest.raises(UserError, match="the chat template failed") as caught:
            codec.encode_chat([{"role": "user", "content": "a"}])
        assert "\n" not in str(caught.value)


def test_a_template_from_a_file(tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path / "model", byte_level_tokenizer(), None)
    (tmp_path / "t.jinja").write_text(f"{USER}{{{{ messages[0].content }}}}")
    codec = TextCodec(model, chat_template=tmp_path / "t.jinja")
    assert codec.token_text(codec.encode_chat([{"role": "user", "content": "a"}])) == f"{USER}a"
    (tmp_path / "t.jinja").write_text("{% if %}")
    with pytest.raises(UserError, match=r"t\.jinja: the chat template failed"):
        TextCodec(model, chat_template=tmp_path / "t.jinja").encode_chat([{"role": "user", "content": "a"}])
    (tmp_path / "t.jinja").write_text(" \n")
    for file, reason in ((tmp_path / "t.jinja", "is empty"), (tmp_path / "none", "No such file")):
        with pytest.raises(UserError, match=f"^--chat-template {file}.*{reason}"):
            TextCodec(model, chat_template=file)


def test_what_a_trace_contains_about_a_token(byte_level: TextCodec, byte_fallback: TextCodec) -> None:
    for codec in (byte_level, byte_fallback):
        tokens = [token for token in codec.encode("😀") if codec.token_bytes(token)]
        texts = [codec.trace_text(token) for token in tokens]
        assert len(texts) > 1 and b"".join(one.data or b"" for one in texts).decode() == "😀"
        assert codec.trace_text(codec.encode("def")[-1]).data is None
    assert byte_fallback.trace_text(byte_fallback.vocab["▁"]).text == " ", "as within a text"
    end = byte_level.trace_text(byte_level.vocab[END])
    assert end == TokenText(END, None, True)
    assert text_fields({7: end, 8: TokenText("�", b"\xe2")}) == {
        "texts": {"7": END, "8": "�"}, "bytes": {"8": "e2"}, "special": [7],
    }  # fmt: skip
    assert text_fields({7: TokenText("a")}) == {"texts": {"7": "a"}} and text_fields({}) == {}


def test_a_prompt_that_is_not_unicode(byte_level: TextCodec) -> None:
    with pytest.raises(UserError, match="not valid UTF-8"):
        byte_level.encode("a\udcff")


def damage(folder: Path, name: str, content: str) -> Path:
    write_tokenizer(folder, byte_level_tokenizer())
    (folder / name).write_text(content)
    return folder


def test_broken_tokenizers(tmp_path: Path) -> None:
    whole = Tokenizer.to_str(byte_level_tokenizer())
    folders = [
        *(
            damage(
                tmp_path / f"map{at}",
                "tokenizer.json",
                json.dumps({**json.loads(whole), "normalizer": {"type": "Precompiled", "precompiled_charsmap": table}}),
            )
            for at, table in enumerate(("AAAA", "/////w==", ""))  # too short, of 4 GiB, none
        ),
        damage(tmp_path / "cut", "tokenizer.json", whole[:500]),
        damage(tmp_path / "empty", "tokenizer.json", ""),
        damage(tmp_path / "config", "tokenizer_config.json", "{"),
        damage(tmp_path / "list", "tokenizer_config.json", "[]"),
    ]
    for folder in (*folders, tmp_path):
        reason = "no tokenizer; expected tokenizer.json" if folder is tmp_path else "the tokenizer cannot be read"
        with pytest.raises(UserError, match=reason) as caught:
            TextCodec(folder)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["x", [], {"a": 1}])
def test_a_length_that_is_no_number(tmp_path: Path, value: object) -> None:
    folder = write_tokenizer(tmp_path, byte_level_tokenizer(), model_max_length=value)
    with pytest.raises(UserError) as caught:
        TextCodec(folder).encode("def f")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "GPT2TokenizerFast", "PreTrainedTokenizerFast"])
def test_the_pre_tokenizer_is_that_of_the_file(tmp_path: Path, kind: str) -> None:
    """Whatever the class that tokenizer_config.json names, which can have a pre-tokenizer of its own."""
    made = byte_level_tokenizer()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("e", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    folder = write_tokenizer(tmp_path, made, tokenizer_class=kind)
    (folder / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    codec = TextCodec(folder)
    for text in ("def read", "\u0633\u0646\u0629 \u0662\u0660\u0662\u0664 e", "eee"):
        assert codec.encode(text, add_special_tokens=False) == made.encode(text).ids
