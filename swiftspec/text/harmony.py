"""Harmony format of gpt-oss: reads the messages of a text, each with a header (role, channel, recipient) and a body.

The markers between headers and bodies are special tokens. `HarmonyCodec` detokenizes each of them to one character that
no other token has, so that text that only looks like a marker remains text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from swiftspec.text.stream import TextPiece, TokenCodec

if TYPE_CHECKING:
    from swiftspec.text.codec import TextCodec

# Unpaired surrogates, which valid UTF-8 does not contain, so that the text of no other token has them.
START, CHANNEL, MESSAGE, END, CONSTRAIN, CALL, RETURN = MARKERS = tuple(map(chr, range(0xD800, 0xD807)))
MARKER_TOKENS = {
    "<|start|>": START, "<|channel|>": CHANNEL, "<|message|>": MESSAGE, "<|end|>": END,
    "<|constrain|>": CONSTRAIN, "<|call|>": CALL, "<|return|>": RETURN,
}  # fmt: skip
REQUIRED_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
MARKER_CLASS = f"[{MARKERS[0]}-{MARKERS[-1]}]"
PIECES = re.compile(f"({MARKER_CLASS})")
RECIPIENT = re.compile(rf"(?:(?<=\s)|(?<={MARKER_CLASS})|^)to=([^\s{MARKERS[0]}-{MARKERS[-1]}]+)")
ANALYSIS, CHANNELS = "analysis", ("analysis", "commentary", "final")
MAX_TYPE_CHARS = 32  # of the type of a body, one word such as json or code
MAX_HEADER_CHARS = 512  # longer text without a marker is the body of a message whose header is incomplete


def harmony_markers(codec: TextCodec, template: str) -> dict[int, str]:
    """Returns the character of each marker by its token id, if the model writes harmony: the markers are special tokens
    and its chat template contains them. Otherwise returns an empty dict."""
    ids = {name: codec.vocab[name] for name in MARKER_TOKENS if codec.vocab.get(name) in codec.special}
    if not all(name in ids and name in template for name in REQUIRED_TOKENS):
        return {}
    return {token: MARKER_TOKENS[name] for name, token in ids.items()}


class HarmonyCodec:
    """Codec that detokenizes markers to their characters. `skip_special`: whether other special tokens are left out."""

    def __init__(self, codec: TokenCodec, markers: Mapping[int, str], skip_special: bool = True) -> None:
        self._codec, self._markers = codec, markers
        self.special = codec.special - markers.keys() if skip_special else frozenset[int]()
        self.byte_tokens = codec.byte_tokens

    def token_text(self, tokens: Sequence[int]) -> str:
        """Returns the text of `tokens`, in which each marker is one character."""
        text = ""
        for is_marker, group in groupby(tokens, key=self._markers.__contains__):
            run = list(group)
            text += "".join(self._markers[token] for token in run) if is_marker else self._codec.token_text(run)
        return text

    def prompt_end(self, prompt: Sequence[int]) -> str:
        """Returns the text of a prompt from its last start marker on; empty if it has none."""
        start = next((at for at in range(len(prompt) - 1, -1, -1) if self._markers.get(prompt[at]) == START), None)
        return "" if start is None else self.token_text(prompt[start:])


@dataclass(frozen=True, slots=True)
class MessageHeader:
    """Header of a message. Fields that the header does not contain are empty."""

    role: str = ""
    channel: str = ""
    recipient: str = ""

    @property
    def kind(self) -> Literal["reasoning", "content"]:
        """What the body is for the client. All channels except analysis, also unknown ones, are content."""
        return "reasoning" if self.channel == ANALYSIS else "content"


@dataclass(frozen=True, slots=True)
class MessageText:
    """Text of a message's body. Texts of one message have the same header object.

    `ended`: a marker ended the message; the text is then empty.
    """

    header: MessageHeader
    text: str
    ended: bool = False


class ChannelParser:
    """Parser of the messages in streamed text. The result does not depend on how the text is split into pieces.

    Every text is accepted. Text outside of messages, and what an incomplete header contains in addition to role,
    channel and recipient, is content.

    `prompt_end`: end of the prompt from its last start marker on, which the text continues.
    """

    def __init__(self, prompt_end: str = "") -> None:
        self._message: MessageHeader | None = None  # the open one
        self._header: str | None = None  # text of the header that is being read
        self._position = self._header_start = 0  # in characters
        self._reasoning: list[list[float]] = []
        self.push(prompt_end)
        if self._header is not None and CHANNEL not in self._header:
            self._header += " "  # separates the role from text without a marker
        self._position = self._header_start = 0
        self._reasoning = [[0, float("inf")]] if self._message is not None and self._message.kind == "reasoning" else []

    @property
    def state(self) -> Literal["between", "header", "body"]:
        """Whether the text is between messages, in a header or in a body."""
        return "header" if self._header is not None else "between" if self._message is None else "body"

    @property
    def reasoning_ranges(self) -> list[tuple[float, float]]:
        """The characters [begin, end) of messages with reasoning, headers included; the end of an open one is
        infinite."""
        return [(begin, end) for begin, end in self._reasoning]

    def push(self, text: str, last: bool = False) -> list[MessageText]:
        """Adds text. Returns the texts of bodies that later text cannot change. `last`: no text follows."""
        out: list[MessageText] = []
        for piece in filter(None, PIECES.split(text)):
            self._position += len(piece)
            if piece in MARKERS:
                self._read_marker(piece, out)
            else:
                self._read_text(piece, out)
        if last and self._header is not None:
            self._end_header(out, cut=True)
        return out

    def _read_text(self, text: str, out: list[MessageText]) -> None:
        if self._header is not None:
            self._header += text
            if len(self._header) > MAX_HEADER_CHARS:
                self._end_header(out)
            return
        if self._message is None:
            text = text.lstrip()
            if not text:
                return
            self._message = MessageHeader()
        out.append(MessageText(self._message, text))

    def _read_marker(self, marker: str, out: list[MessageText]) -> None:
        if marker in (CHANNEL, CONSTRAIN) and self._header is not None:
            self._header += marker
        elif marker == MESSAGE:
            self._open_message(out)
        elif marker != CONSTRAIN:
            if self._header is not None:
                self._end_header(out)
            self._close_message(out)
            if marker in (START, CHANNEL):
                self._header, self._header_start = marker.strip(START), self._position - 1

    def _open_message(self, out: list[MessageText]) -> None:
        if self._header is None:
            self._message = self._message or MessageHeader()
            return
        header, unread, _ = parse_header(self._header)
        if unread:
            out.append(MessageText(MessageHeader(header.role), unread))
        self._message, self._header = header, None
        if header.kind == "reasoning":
            self._reasoning.append([self._header_start, float("inf")])

    def _end_header(self, out: list[MessageText], *, cut: bool = False) -> None:
        """Ends a header without the marker that a body follows. What is more than names becomes the body. `cut`: the
        text ends here, so that the last name can be incomplete."""
        assert self._header is not None
        header, unread, more = parse_header(self._header)
        self._header = None
        if cut and "to=".startswith(unread):
            unread = ""
        if header.channel in CHANNELS:
            is_type = len(more) <= MAX_TYPE_CHARS and len(more.split()) < 2
            rest = "" if is_type else more
        else:
            is_cut_name = not more and any(name.startswith(header.channel) for name in CHANNELS)
            rest = "" if is_cut_name else f"{header.channel} {more}"
        text = f"{unread} {rest}".strip()
        if text:
            self._message = MessageHeader(header.role, header.channel if header.channel in CHANNELS else "")
            out.append(MessageText(self._message, text))
            if self._message.kind == "reasoning":
                self._reasoning.append([self._header_start, float("inf")])

    def _close_message(self, out: list[MessageText]) -> None:
        if self._message is None:
            return
        out.append(MessageText(self._message, "", ended=True))
        if self._message.kind == "reasoning":
            self._reasoning[-1][1] = self._position
        self._message = None


def parse_header(text: str) -> tuple[MessageHeader, str, str]:
    """Parses the text of a header. Returns it, other text before the channel, and the text after the channel, such as
    the type of the body. The recipient may follow the role or the channel."""
    found = RECIPIENT.search(text)
    before, _, after = RECIPIENT.sub(" ", text, count=1).partition(CHANNEL)
    role, unread = _first_word(before)
    channel, more = _first_word(after)
    return MessageHeader(role, channel, found[1] if found else ""), unread, more


def _first_word(text: str) -> tuple[str, str]:
    """Returns the first word of a text without its markers, and the rest."""
    first, *rest = re.sub(MARKER_CLASS, " ", text).strip().split(None, 1) or [""]
    return first, "".join(rest)


class ShownText:
    """Text of an answer as a terminal shows it: reasoning follows a label, and a blank line separates it from content.

    `answer`: the content alone.
    """

    def __init__(self, prompt_end: str) -> None:
        self._channels = ChannelParser(prompt_end)
        self._shown: MessageHeader | None = None
        self.answer = ""

    def push(self, piece: TextPiece, last: bool = False) -> TextPiece:
        """Returns a piece of text without markers."""
        text = ""
        for part in self._channels.push(piece.text, last):
            if not part.text:
                continue
            if part.header is not self._shown:
                label = "Reasoning: " if part.header.kind == "reasoning" else ""
                if part.header.recipient:
                    label = f"[to {part.header.recipient}] "
                separator = "" if self._shown is None else "\n\n"
                if part.header.kind == "content" and self.answer:
                    self.answer += "\n"
                text, self._shown = text + separator + label, part.header
            text += part.text
            self.answer += part.text if part.header.kind == "content" else ""
        return TextPiece(text, piece.accepted)
