"""Tokens to text as they come: exact, never half a character, never part of a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

REPLACEMENT_CHARACTER = "\ufffd"  # what a decoder writes for bytes that are no character, and for the start of one
MAX_PENDING_TOKENS = 8  # tokens that may hang on one unfinished character before the window is cut


class TokenCodec(Protocol):
    """What a Detokenizer needs of a TextCodec."""

    special: frozenset[int]
    byte_tokens: frozenset[int]

    def token_text(self, tokens: Sequence[int]) -> str: ...


class ChunkLike(Protocol):
    """The tokens of one round, whoever brings them."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def accepted(self) -> int:
        """The first so many were the draft's guess."""
        ...

    @property
    def finish_reason(self) -> str | None:
        """ "stop" or "length" on the last chunk."""
        ...


class Detokenizer:
    """Turns tokens into text piece by piece; all pieces together are the text of all tokens.

    Decodes a window: the last tokens already told (decoders look at what stands before), then those still to tell.
    `context`: tokens before the first, which are not told: with them a first word keeps its leading space.
    """

    def __init__(self, codec: TokenCodec, context: Sequence[int] = ()) -> None:
        self._codec = codec
        self._context_tokens = self._decoding_context([token for token in context if token not in codec.special])
        self._pending: list[int] = []
        self._num_stable = 0  # so many of them are no open run of byte tokens

    def push(self, tokens: Iterable[int]) -> str:
        """Adds tokens and returns the text that is certain by now."""
        for token in tokens:
            if token not in self._codec.special:
                self._pending.append(token)
                # Byte tokens (<0xE2>) are decoded as a run: until it has ended, any of them can still change.
                if token not in self._codec.byte_tokens:
                    self._num_stable = len(self._pending)
        ready = self._num_stable
        text = self._decode_pending(ready)
        if text.endswith(REPLACEMENT_CHARACTER):
            ready = self._boundary(ready, text) if ready > MAX_PENDING_TOKENS else 0
            text = self._decode_pending(ready)
        self._consume(ready)
        return text

    def finish(self) -> str:
        """The rest, whole characters or not."""
        text = self._decode_pending(len(self._pending))
        self._consume(len(self._pending))
        return text

    def _decode_pending(self, count: int) -> str:
        if not count:
            return ""
        before = self._codec.token_text(self._context_tokens) if self._context_tokens else ""
        return self._codec.token_text([*self._context_tokens, *self._pending[:count]])[len(before) :]

    def _consume(self, count: int) -> None:
        if count:
            self._context_tokens = self._decoding_context(self._pending[:count])
            self._pending = self._pending[count:]
            self._num_stable = max(self._num_stable - count, 0)

    def _decoding_context(self, tokens: Sequence[int]) -> list[int]:
        """The end of `tokens` that what follows is decoded after: the last token, and a run of byte tokens whole."""
        at = len(tokens) - 1
        while at > 0 and tokens[at] in self._codec.byte_tokens:
            at -= 1
        return list(tokens[max(at, 0) :])

    def _boundary(self, ready: int, text: str) -> int:
        """Bytes that never become characters end in BROKEN for ever. A character has four bytes at most, so one of the
        last tokens starts afresh: the latest place where text cut in two is the text."""
        for at in range(ready - 1, max(ready - 5, 0), -1):
            if self._decode_pending(at) + self._codec.token_text(self._pending[at:ready]) == text:
                return at
        return 0


class StopStrings:
    """Looks for stop strings in text that comes in pieces. Independent of where the pieces are cut: of several stop
    strings that one ends the text that is complete first, and of those the longest; it is `found` then."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.matched: str | None = None
        self._stops = tuple(stops)
        self._max_stop_chars = max(map(len, stops), default=0)
        self._buffer = ""

    def push(self, text: str) -> tuple[int, bool]:
        """How many characters of all text not yet released may go out now, and whether the text ends there."""
        self._buffer += text
        ends = [(at + len(stop), at) for stop in self._stops if (at := self._buffer.find(stop)) >= 0]
        if ends:
            end, at = min(ends)
            self.matched = self._buffer[at:end]
            return at, True
        hold = next(
            (n for n in range(min(self._max_stop_chars - 1, len(self._buffer)), 0, -1) if self._may_begin(n)), 0
        )
        release = len(self._buffer) - hold
        self._buffer = self._buffer[release:]
        return release, False

    def _may_begin(self, count: int) -> bool:
        tail = self._buffer[-count:]
        return any(stop.startswith(tail) for stop in self._stops)


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text to show; `accepted`: it was the draft's guess."""

    text: str
    accepted: bool


class TextBuilder:
    """The text of one answer, from chunks as they are pushed. `token_ids`, `text` and `finish_reason` say what came:
    finish_reason is None as long as the answer has not come to its own end, and after that nothing is to be pushed."""

    def __init__(self, codec: TokenCodec, stops: Sequence[str] = (), context: Sequence[int] = ()) -> None:
        self._detokenizer = Detokenizer(codec, context)
        self._stops = StopStrings(stops)
        self._held_pieces: list[TextPiece] = []
        self._text_length = 0
        self.token_ids: list[int] = []  # up to the token that completed a stop string
        self.text_offsets: list[int] = []  # where in the text each of them begins
        self.text = ""
        self.finish_reason: str | None = None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.matched

    def push(self, chunk: ChunkLike) -> list[TextPiece]:
        """Takes a round's tokens and returns what may be shown by now. Ends at the first stop string."""
        out: list[TextPiece] = []
        for index, token in enumerate(chunk.token_ids):
            self.token_ids.append(token)
            self.text_offsets.append(self._text_length)
            out += self._add(TextPiece(self._detokenizer.push((token,)), index < chunk.accepted))
            if self.finish_reason is not None:
                break
        else:
            if chunk.finish_reason is not None:
                out += self._add(TextPiece(self._detokenizer.finish(), False), last=True)
                self.finish_reason = self.finish_reason or chunk.finish_reason
        return self._merge(out)

    def flush(self) -> list[TextPiece]:
        """What is still held back of an answer that was broken off."""
        if self.finish_reason is not None:
            return []
        return self._merge(self._add(TextPiece(self._detokenizer.finish(), False), last=True))

    def _add(self, piece: TextPiece, last: bool = False) -> list[TextPiece]:
        """Takes new text, gives what may be shown of all that is held."""
        self._held_pieces.append(piece)
        self._text_length += len(piece.text)
        count, ended = self._stops.push(piece.text)
        if ended:
            self.finish_reason = "stop"
        elif last:
            count = sum(len(held.text) for held in self._held_pieces)
        out: list[TextPiece] = []
        while self._held_pieces and count:
            first = self._held_pieces.pop(0)
            if len(first.text) > count:
                self._held_pieces.insert(0, TextPiece(first.text[count:], first.accepted))
                first = TextPiece(first.text[:count], first.accepted)
            count -= len(first.text)
            out.append(first)
        return out

    def _merge(self, pieces: Iterable[TextPiece]) -> list[TextPiece]:
        """Joins neighbours of one kind, so that a round costs at most a few writes."""
        joined: list[TextPiece] = []
        for piece in pieces:
            if joined and joined[-1].accepted == piece.accepted:
                joined[-1] = TextPiece(joined[-1].text + piece.text, piece.accepted)
            elif piece.text:
                joined.append(piece)
        self.text += "".join(piece.text for piece in joined)
        return joined


class TextStream:
    """The pieces of one answer, read from an engine in this process."""

    def __init__(
        self, chunks: Iterator[ChunkLike], codec: TokenCodec, stops: Sequence[str] = (), context: Sequence[int] = ()
    ) -> None:
        self._chunks = chunks
        self._builder = TextBuilder(codec, stops, context)

    @property
    def token_ids(self) -> list[int]:
        """Up to the token that completed a stop string."""
        return self._builder.token_ids

    @property
    def text(self) -> str:
        return self._builder.text

    @property
    def finish_reason(self) -> str | None:
        """None as long as the answer has not come to its own end."""
        return self._builder.finish_reason

    def __iter__(self) -> Iterator[TextPiece]:
        """Ends at the first stop string. Closing it, or an exception, ends the request."""
        try:
            for chunk in self._chunks:
                yield from self._builder.push(chunk)
                if self.finish_reason is not None:
                    return
        finally:
            close = getattr(self._chunks, "close", None)
            if close is not None:
                close()

    def flush(self) -> Iterator[TextPiece]:
        """What is still held back of an answer that was broken off."""
        yield from self._builder.flush()
