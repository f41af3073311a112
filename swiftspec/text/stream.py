"""Incremental detokenization and stop strings. The text that is emitted ends at a character and contains no part of a
stop string."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

REPLACEMENT_CHARACTER = "\ufffd"  # decoded from invalid or incomplete UTF-8
CONTEXT_TOKENS = 16  # last prompt tokens that precede the output in detokenization if it continues the prompt
MAX_PENDING_TOKENS = 8  # above this, the tokens before an incomplete character are emitted without it


class TokenCodec(Protocol):
    """The part of `TextCodec` that a Detokenizer uses."""

    special: frozenset[int]
    byte_tokens: frozenset[int]

    def token_text(self, tokens: Sequence[int]) -> str: ...


class MarkerCodec:
    """Codec that detokenizes the special tokens in `marker_tokens`, which delimit reasoning and tool calls; without
    `skip_special` all special tokens."""

    def __init__(
        self, codec: TokenCodec, marker_tokens: frozenset[int] = frozenset(), skip_special: bool = True
    ) -> None:
        self.codec = codec
        self.special = codec.special - marker_tokens if skip_special else frozenset[int]()
        self.byte_tokens = codec.byte_tokens

    def token_text(self, tokens: Sequence[int]) -> str:
        """Returns the text of `tokens`."""
        return self.codec.token_text(tokens)


class ChunkLike(Protocol):
    """The tokens of one round, from the engine or from a frame of the engine link."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def accepted(self) -> int:
        """Number of leading tokens that are accepted draft tokens."""
        ...

    @property
    def finish_reason(self) -> str | None:
        """On the last chunk "stop" or "length", on the others None."""
        ...


class Detokenizer:
    """Incremental detokenizer: the concatenation of all returned pieces is the text of all tokens, without a character
    that is incomplete at the end.

    It decodes the pending tokens together with the last emitted ones, because the text of a token depends on the tokens
    before it.

    `context`: tokens before the first one, such as the end of the prompt. Their text is not emitted; they preserve the
    leading space of the first word.
    """

    def __init__(self, codec: TokenCodec, context: Sequence[int] = ()) -> None:
        self._codec = codec
        self._context_tokens = self._decoding_context([token for token in context if token not in codec.special])
        self._pending: list[int] = []
        self._num_stable = 0  # pending tokens before an unfinished run of byte tokens

    def push(self, tokens: Iterable[int]) -> str:
        """Adds tokens and returns the text that further tokens cannot change."""
        for token in tokens:
            if token not in self._codec.special:
                self._pending.append(token)
                # Byte tokens (<0xE2>) are decoded as a run, whose text can change until the run has ended.
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
        """Returns the rest of the text, without an incomplete last character, as vLLM does."""
        text = self._decode_pending(len(self._pending))
        self._consume(len(self._pending))
        return text.rstrip(REPLACEMENT_CHARACTER)

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
        """Returns the end of `tokens` with which the following tokens are decoded: one token, and any byte tokens after
        it."""
        at = len(tokens) - 1
        while at > 0 and tokens[at] in self._codec.byte_tokens:
            at -= 1
        return list(tokens[max(at, 0) :])

    def _boundary(self, ready: int, text: str) -> int:
        """Returns how many of the first `ready` pending tokens to emit if their `text` ends in an incomplete character.

        This is the last position at which decoding the tokens in two parts gives the same text, that is, at which a
        character begins. A character has at most four bytes, so only the last four positions are tried. Returns 0 if
        there is none.
        """
        for at in range(ready - 1, max(ready - 5, 0), -1):
            if self._decode_pending(at) + self._codec.token_text(self._pending[at:ready]) == text:
                return at
        return 0


class StopStrings:
    """Search for stop strings in text that arrives in pieces. The text ends before the stop string that is complete
    first; if several are complete at the same character, before the longest. The result does not depend on how the text
    is split.

    `include`: the text ends after the stop string instead.
    `matched`: that stop string; None until one is complete.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self.matched: str | None = None
        self._include = include
        self._stops = tuple(stops)
        self.active = bool(self._stops)  # otherwise all text can be released immediately
        self._max_stop_chars = max(map(len, stops), default=0)
        self._buffer = ""

    def push(self, text: str, may_end: bool = True) -> tuple[int, bool]:
        """Adds text. Returns how many of the characters that are held back can be released now, and whether the text
        ends after them. Characters that may begin a stop string are held back. `may_end`: whether a stop string that is
        complete in this text ends it."""
        searched = len(self._buffer)
        self._buffer += text
        found = [(stop, self._buffer.find(stop, max(searched - len(stop) + 1, 0))) for stop in self._stops]
        ends = [(at + len(stop), at) for stop, at in found if at >= 0]
        if ends and may_end:
            end, at = min(ends)
            self.matched = self._buffer[at:end]
            return end if self._include else at, True
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
    """A piece of the answer. `accepted`: it comes from accepted draft tokens."""

    text: str
    accepted: bool


class TextBuilder:
    """Builder of one answer's text from chunks of tokens. `finish_reason` is None until the answer is complete; after
    that no chunk may be pushed.

    `min_tokens`: stop strings that are complete within this many tokens do not end the answer.
    `include_stop`: the text ends after the stop string, not before it.
    `hidden_ends`: tokens that have no text if they end the answer.
    """

    def __init__(
        self,
        codec: TokenCodec,
        stops: Sequence[str] = (),
        context: Sequence[int] = (),
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
        hidden_ends: Collection[int] = (),
    ) -> None:
        self._detokenizer = Detokenizer(codec, context)
        self._stops = StopStrings(stops, include=include_stop)
        self._min_tokens, self._hidden_ends = min_tokens, hidden_ends
        self._held_pieces: list[TextPiece] = []
        self._text_length = 0
        self.token_ids: list[int] = []  # up to the token that completed a stop string
        self.text_offsets: list[int] = []  # for each token, its first character's position in the text
        self.text = ""
        self.finish_reason: str | None = None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text; None if none did."""
        return self._stops.matched

    def stop_reason(self, stop_token_ids: Collection[int]) -> str | int | None:
        """Returns what ended the output: a stop string, a token of `stop_token_ids`, or neither (None)."""
        if self.stop_string is not None or self.finish_reason != "stop" or not self.token_ids:
            return self.stop_string
        return self.token_ids[-1] if self.token_ids[-1] in stop_token_ids else None

    def push(self, chunk: ChunkLike) -> list[TextPiece]:
        """Adds the tokens of a round and returns the text that can be shown, up to the first stop string."""
        return self._merge(piece for pieces in self._push_tokens(chunk) for piece in pieces)

    def push_by_token(self, chunk: ChunkLike) -> Iterator[str]:
        """Adds the tokens of a round and yields the text that can be shown after each of them. If the chunk is the last
        one, the rest of the text follows. A caller that sets `finish_reason` ends the text after the current token."""
        for pieces in self._push_tokens(chunk):
            yield "".join(piece.text for piece in self._merge(pieces))

    def _push_tokens(self, chunk: ChunkLike) -> Iterator[list[TextPiece]]:
        for index, token in enumerate(chunk.token_ids):
            self.token_ids.append(token)
            self.text_offsets.append(self._text_length)
            ends = chunk.finish_reason == "stop" and index + 1 == len(chunk.token_ids)
            shown = () if ends and token in self._hidden_ends else (token,)
            yield self._add(TextPiece(self._detokenizer.push(shown), index < chunk.accepted))
            if self.finish_reason is not None:
                return
        if chunk.finish_reason is not None:
            rest = self._add(TextPiece(self._detokenizer.finish(), False), last=True)
            self.finish_reason = self.finish_reason or chunk.finish_reason
            yield rest

    def flush(self) -> list[TextPiece]:
        """Ends an answer that was cancelled: returns the text that was held back. Returns nothing if the answer is
        complete."""
        if self.finish_reason is not None:
            return []
        return self._merge(self._add(TextPiece(self._detokenizer.finish(), False), last=True))

    def _add(self, piece: TextPiece, last: bool = False) -> list[TextPiece]:
        """Adds a piece and returns the pieces that can be shown. `last`: no further piece follows."""
        if not self._stops.active:
            self._text_length += len(piece.text)
            return [piece]
        self._held_pieces.append(piece)
        self._text_length += len(piece.text)
        count, ended = self._stops.push(piece.text, may_end=len(self.token_ids) > self._min_tokens)
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
        """Joins adjacent pieces of the same kind, so that a round takes few writes, and adds them to `text`."""
        joined: list[TextPiece] = []
        for piece in pieces:
            if joined and joined[-1].accepted == piece.accepted:
                joined[-1] = TextPiece(joined[-1].text + piece.text, piece.accepted)
            elif piece.text:
                joined.append(piece)
        self.text += "".join(piece.text for piece in joined)
        return joined


class TextView(Protocol):
    """Filter of the text of one answer, such as the one that shows the channels of harmony."""

    answer: str  # the answer proper so far, without reasoning

    def push(self, piece: TextPiece, last: bool = False) -> TextPiece:
        """Returns the text that is shown for a piece. `last`: no further piece follows."""
        ...


class TextStream:
    """Iterable over the text of one answer, given the token chunks of an engine in this process.

    `view`: filter of the text; None: all text is shown.
    """

    def __init__(
        self,
        chunks: Iterator[ChunkLike],
        codec: TokenCodec,
        stops: Sequence[str] = (),
        context: Sequence[int] = (),
        view: TextView | None = None,
    ) -> None:
        self._chunks, self._view = chunks, view
        self._builder = TextBuilder(codec, stops, context)
        self._shown = ""

    @property
    def token_ids(self) -> list[int]:
        """The tokens up to the one that completed a stop string."""
        return self._builder.token_ids

    @property
    def text(self) -> str:
        """The text that was shown."""
        return self._builder.text if self._view is None else self._shown

    @property
    def answer(self) -> str:
        """The text without reasoning."""
        return self._builder.text if self._view is None else self._view.answer

    @property
    def finish_reason(self) -> str | None:
        """ "stop" or "length"; None until the answer is complete."""
        return self._builder.finish_reason

    def __iter__(self) -> Iterator[TextPiece]:
        """Yields pieces up to the first stop string. Closing the iterator, or an exception, ends the request."""
        try:
            for chunk in self._chunks:
                yield from self._view_pieces(self._builder.push(chunk), self.finish_reason is not None)
                if self.finish_reason is not None:
                    return
        finally:
            close = getattr(self._chunks, "close", None)
            if close is not None:
                close()

    def flush(self) -> Iterator[TextPiece]:
        """Ends an answer that was cancelled: yields the text that was held back."""
        if self.finish_reason is None:
            yield from self._view_pieces(self._builder.flush(), last=True)

    def _view_pieces(self, pieces: list[TextPiece], last: bool) -> Iterator[TextPiece]:
        if self._view is None:
            yield from pieces
            return
        for index, piece in enumerate([*pieces, *[TextPiece("", False)] * last]):
            shown = self._view.push(piece, last and index == len(pieces))
            self._shown += shown.text
            if shown.text:
                yield shown
