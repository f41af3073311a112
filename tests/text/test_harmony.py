"""Messages of harmony: headers and bodies, independent of how the text is split; every text is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftspec.text.codec import TextCodec
from swiftspec.text.harmony import (
    MARKER_TOKENS,
    MAX_HEADER_CHARS,
    ChannelParser,
    HarmonyCodec,
    MessageHeader,
    ShownText,
    harmony_markers,
    parse_header,
)
from swiftspec.text.stream import TextPiece
from swiftspec.text.template import TemplateRenderer
from tests.support.harmony import HARMONY_TEMPLATE, SPECIAL, harmony_folder, marked
from tests.support.toy_pair import byte_level_tokenizer, write_tokenizer

PROMPT = marked("<|start|>assistant")
WORDS = [
    *MARKER_TOKENS,
    "assistant",
    "analysis",
    "final",
    "commentary",
    " to=functions.f",
    "json",
    " ",
    "\n",
    "a",
    "{}",
]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=16).map(lambda words: marked("".join(words)))


def read(text: str, cuts: list[int] | None = None, prompt_end: str = PROMPT) -> list[tuple[str, str, str, bool]]:
    """Channel, recipient, body and whether it ended, of each message."""
    parser, at = ChannelParser(prompt_end), 0
    parts = []
    for end in sorted({min(cut, len(text)) for cut in cuts or ()}):
        parts += parser.push(text[at:end])
        at = end
    parts += parser.push(text[at:], last=True)
    messages: list[tuple[MessageHeader, str, bool]] = []
    for part in parts:
        if messages and messages[-1][0] is part.header:
            messages[-1] = part.header, messages[-1][1] + part.text, part.ended
        else:
            messages.append((part.header, part.text, part.ended))
    return [(header.channel, header.recipient, text, ended) for header, text, ended in messages]


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (
            "<|channel|>analysis<|message|>hm\n<|end|><|start|>assistant<|channel|>final<|message|>fine<|return|>",
            [("analysis", "", "hm\n", True), ("final", "", "fine", True)],
        ),
        (
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
            [("commentary", "functions.f", "{}", True)],
        ),
        (
            " to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
            [("commentary", "functions.f", "{}", True)],
        ),
        ("<|channel|>commentary<|message|>I ask.<|en", [("commentary", "", "I ask.<|en", False)]),
        ("<|channel|>secret<|message|>a", [("secret", "", "a", False)]),
        ("<|message|>a<|end|>b", [("", "", "a", True), ("", "", "b", False)]),
        ("Hello, <b>", [("", "", "Hello, <b>", False)]),
        ("Hello<|return|>", [("", "", "Hello", True)]),
        ("Hello <|channel|>final<|message|>a", [("", "", "Hello", False), ("final", "", "a", False)]),
        ("<|channel|>fin", []),
        (f"<|channel|>final {'b' * 40}", [("final", "", "b" * 40, False)]),
        ("<|channel|>final\n<|message|>a", [("final", "", "a", False)]),
        (" to", []),
        ("to<|return|>", [("", "", "to", True)]),
        ("<|channel|>commentary to", []),
        ("<|channel|>Hello", [("", "", "Hello", False)]),
        ("<|channel|>", []),
        ("<|channel|>commentary to=functions.f <|constrain|>json", []),
        ("<|channel|>analysis I think<|end|>", [("analysis", "", "I think", True)]),
        ("<|channel|>Well, so<|return|>", [("", "", "Well, so", True)]),
        (
            "<|channel|>analysis<|message|>a<|channel|>final<|message|>b",
            [("analysis", "", "a", True), ("final", "", "b", False)],
        ),
        ("<|channel|>final<|message|>a<|message|>b<|constrain|>c", [("final", "", "abc", False)]),
        ("<|end|>\n<|start|>user<|message|>a", [("", "", "a", False)]),
        ("", []),
    ],
)
def test_messages(text: str, messages: list[tuple[str, str, str, bool]]) -> None:
    assert read(marked(text)) == messages


@pytest.mark.parametrize("prompt_end", ["", "<|start|>assistant", "<|start|>assistant<|channel|>final<|message|>so"])
@given(text=TEXTS, cuts=st.lists(st.integers(0, 100), max_size=40))
def test_the_result_does_not_depend_on_the_split(prompt_end: str, text: str, cuts: list[int]) -> None:
    assert read(text, cuts, marked(prompt_end)) == read(text, [], marked(prompt_end))


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), st.integers(0, 9))
def test_text_without_markers_is_content(text: str, cut: int) -> None:
    assert "".join(body for _, _, body, _ in read(text, [cut], "")) == text.lstrip()
    words = "".join(body for _, _, body, _ in read(text, [cut]))
    assert words.split() == text.split() or "to=" in text or text.strip() in ("t", "to")


def test_a_header_without_an_end_does_not_delay_the_text() -> None:
    parser = ChannelParser(PROMPT)
    assert parser.push("a" * (MAX_HEADER_CHARS // 2)) == []
    assert sum(len(part.text) for part in parser.push("a" * MAX_HEADER_CHARS)) == 1.5 * MAX_HEADER_CHARS
    assert [part.text for part in parser.push("b")] == ["b"]


def test_the_prompt_can_have_opened_a_message() -> None:
    assert ChannelParser("").state == "between"
    assert ChannelParser(PROMPT).state == "header"
    opened = marked("<|start|>assistant<|channel|>analysis<|message|>so")
    parser = ChannelParser(opened)
    assert parser.state == "body" and parser.reasoning_ranges == [(0, float("inf"))]
    assert [part.header.channel for part in parser.push(" far")] == ["analysis"]
    assert read(marked("final<|message|>a"), [], marked("<|start|>assistant<|channel|>")) == [("final", "", "a", False)]


def test_the_characters_of_reasoning() -> None:
    analysis = marked("<|channel|>analysis<|message|>hm<|end|>")
    answer = marked("<|start|>assistant<|channel|>final<|message|>a<|end|>")
    parser = ChannelParser(PROMPT)
    parser.push(analysis + answer + marked("<|start|>assistant") + analysis[:-1])
    begin = len(analysis + answer)
    assert parser.reasoning_ranges == [(0, len(analysis)), (begin, float("inf"))]


def test_the_fields_of_a_header() -> None:
    header, unread, more = parse_header(marked("assistant to=functions.f<|channel|>commentary<|constrain|>json"))
    assert header == MessageHeader("assistant", "commentary", "functions.f") and (unread, more) == ("", "json")
    header, _, more = parse_header(marked("<|channel|>analysis to=browser.open code"))
    assert header == MessageHeader("", "analysis", "browser.open") and more == "code"


def test_the_format_is_that_of_vocabulary_and_template(tmp_path: Path) -> None:
    renderer = TemplateRenderer(tmp_path)  # its process is not started
    codec = TextCodec(harmony_folder(tmp_path / "m"), renderer)
    markers = harmony_markers(codec, codec.template_source())
    assert {codec.token_text([token]): character for token, character in markers.items()} == MARKER_TOKENS
    assert harmony_markers(codec, "{{ messages }}") == {}
    plain = TextCodec(write_tokenizer(tmp_path / "p", byte_level_tokenizer(), HARMONY_TEMPLATE), renderer)
    assert harmony_markers(plain, plain.template_source()) == {}


def test_text_that_looks_like_a_marker_remains_text(tmp_path: Path) -> None:
    codec = TextCodec(harmony_folder(tmp_path / "m"), TemplateRenderer(tmp_path))
    harmony = HarmonyCodec(codec, harmony_markers(codec, codec.template_source()))
    spelled = [token for part in ("<|e", "nd|>") for token in codec.encode(part)]
    tokens = [*codec.encode("<|start|>assistant<|message|>"), *spelled, *codec.encode("<|end|>")]
    assert harmony.token_text(tokens) == marked("<|start|>assistant<|message|>") + "<|end|>" + marked("<|end|>")
    assert harmony.prompt_end([*tokens, *codec.encode("<|start|>a")]) == marked("<|start|>a")
    assert harmony.prompt_end(spelled) == ""
    assert codec.vocab[SPECIAL[0]] in harmony.special


@given(st.lists(st.integers(0, 100), max_size=30))
def test_shown_text(cuts: list[int]) -> None:
    text = marked(
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{}"
        "<|end|><|start|>assistant<|channel|>final<|message|>fine<|return|>"
    )
    shown, view, at = "", ShownText(PROMPT), 0
    for end in [*sorted({min(cut, len(text)) for cut in cuts}), len(text)]:
        shown, at = shown + view.push(TextPiece(text[at:end], False)).text, end
    shown += view.push(TextPiece("", False), last=True).text
    assert shown == "Reasoning: hm\n\n[to functions.f] {}\n\nfine"
    assert view.answer == "{}\nfine"
