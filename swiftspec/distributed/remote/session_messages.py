"""Messages between a client and its server that are not about tokens: model info, session start, times and errors.

Unpacking invalid words raises ValueError.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum
from pathlib import Path
from typing import Any

from swiftspec import __version__, file_io
from swiftspec.config import EngineConfig
from swiftspec.distributed.transport.codec import (
    PROTOCOL_VERSION,
    Frame,
    WordReader,
    Words,
    bytes_to_words,
    masked_from_json,
    pack_tree_delta,
    shape_from_json,
    shape_to_json,
    text_to_words,
    words_to_bytes,
    words_to_error,
    words_to_text,
)
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.errors import UserError
from swiftspec.model.fingerprint import LARGEST
from swiftspec.model.vocabulary import VocabularyIdentity
from swiftspec.tree.replica import TreeDelta

TIMES_WORDS = 8  # words of AnswerTimes: four integers of 64 bits
FILE_CHUNK_BYTES = 1 << 20  # bytes of a tokenizer file per message
MAX_TOKENIZER_BYTES = 512 << 20  # bytes; larger tokenizers are rejected


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Hashes of a worker's model and of its tokenizer's ordinary tokens, in hexadecimal."""

    model: str
    tokenizer: str


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Description of a worker's model, which a ping returns as JSON.

    `tokenizer`: hash of the tokenizer's ordinary tokens. `added_tokens`: its added tokens by id.
    `vocab_size`: of a target, the size of its vocabulary; of a draft, the rows of its LM head.
    """

    model: str
    tokenizer: str
    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    added_tokens: Mapping[int, str] = field(default_factory=dict[int, str])
    version: str = __version__

    @property
    def identity(self) -> ModelIdentity:
        return ModelIdentity(self.model, self.tokenizer)

    @property
    def vocabulary(self) -> VocabularyIdentity:
        return VocabularyIdentity(self.tokenizer, self.added_tokens, self.vocab_size)

    def to_json(self) -> str:
        return json.dumps({each.name: getattr(self, each.name) for each in fields(self)})

    @staticmethod
    def from_json(text: str) -> ModelInfo:
        """Returns the model info for the result of `to_json`. Raises ValueError if it is invalid."""
        try:
            values = json.loads(text)
            values["eos_token_ids"] = tuple(values["eos_token_ids"])
            values["added_tokens"] = {int(number): token for number, token in dict(values["added_tokens"]).items()}
            info = ModelInfo(**values)
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ValueError("the model info is invalid") from None
        sizes = (info.vocab_size, info.max_model_len, *info.eos_token_ids, *info.added_tokens)
        texts = (info.model, info.tokenizer, info.name, info.dtype, info.version, *info.added_tokens.values())
        if all(type(size) is int and 0 <= size < 2**31 for size in sizes) and all(type(each) is str for each in texts):
            return info
        raise ValueError("the model info is invalid")


@dataclass(slots=True)
class SessionStart:
    """Message that opens a session on a worker, or resumes it on another connection.

    `identity`: identity that the worker must have.
    `shape`: config of the session's rounds.
    `masked_tokens`: tokens that a draft never proposes in the session.
    `session`: id of the session in hexadecimal; empty to open another one.
    """

    identity: ModelIdentity
    shape: EngineConfig
    session: str = ""
    masked_tokens: tuple[int, ...] = ()

    def pack(self) -> Words:
        """Packs the message; `unpack` is the inverse."""
        names = {"model": self.identity.model, "tokenizer": self.identity.tokenizer}
        values = {"protocol": PROTOCOL_VERSION, "session": self.session, "shape": shape_to_json(self.shape)}
        values["masked_tokens"] = self.masked_tokens
        return text_to_words(json.dumps(names | values))

    @staticmethod
    def unpack(words: Words, own: ModelIdentity) -> SessionStart:
        """Returns the session start. `own`: identity of this worker. Raises UserError if the client expects another
        protocol version, model or tokenizer, and ValueError if the message is invalid."""
        try:
            values: dict[str, Any] = dict(json.loads(words_to_text(words)))
        except (ValueError, TypeError, RecursionError):
            raise ValueError("a session start is not valid JSON") from None
        if values.get("protocol") != PROTOCOL_VERSION:
            raise UserError(
                f"the worker uses protocol version {PROTOCOL_VERSION}, the client version"
                f" {str(values.get('protocol'))[:20]}: install the same SwiftSpec version on both"
            )
        if values.get("tokenizer") != own.tokenizer:
            raise UserError("the tokenizers differ: use a worker whose model has the same tokenizer")
        if values.get("model") != own.model:
            raise UserError("the worker's model has changed since the client connected: restart the client")
        if not isinstance(session := values.get("session"), str):
            raise ValueError("the session id of a session start is not text")
        masked = masked_from_json(values.get("masked_tokens"))
        return SessionStart(own, shape_from_json(values.get("shape")), session, masked)


@dataclass(frozen=True, slots=True)
class AnswerTimes:
    """Times of a worker's answer, in nanoseconds on the worker's clocks.

    `span`: random id. `began`: start since the Unix epoch.
    `wall`: from the arrival of the message to its answer. `queue`: part of `wall`: waiting for other sessions.
    """

    span: int
    began: int
    wall: int
    queue: int

    def __add__(self, other: AnswerTimes) -> AnswerTimes:
        """Returns the times of two expansions that are sent as one."""
        return AnswerTimes(self.span, self.began, self.wall + other.wall, self.queue + other.queue)

    def pack(self) -> Words:
        return struct.unpack("8i", struct.pack("Q3q", self.span, self.began, self.wall, self.queue))

    @staticmethod
    def unpack(words: Words) -> AnswerTimes:
        """Returns the times that `pack` has packed. Raises ValueError if one is negative."""
        times = AnswerTimes(*struct.unpack("Q3q", struct.pack("8i", *words)))
        if min(times.began, times.wall, times.queue) < 0:
            raise ValueError("a timed answer contains a negative time")
        return times


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of a server.

    `words`: the words, or a tree delta that is packed when it is sent.
    `model_us`: microseconds of forwards since the previous answer, which precede the words; None for answers without.
    `times`: times of the answer, if the server is a worker.
    `mergeable`: whether a tree delta may be merged with the next one.
    """

    kind: Opcode
    words: Words | TreeDelta
    model_us: int | None = None
    times: AnswerTimes | None = None
    mergeable: bool = False

    def frame(self) -> Frame:
        """Returns opcode and words of the message."""
        kind, before = self.kind, list[int]()
        if self.times is not None:
            kind = Opcode.TIMED_ANSWER
            before += [*self.times.pack(), self.kind]
        if self.model_us is not None:
            before.append(self.model_us)
        if isinstance(self.words, TreeDelta):
            return kind, pack_tree_delta(self.words, before)
        return kind, [*before, *self.words]


def unpack_timed(words: Words) -> tuple[AnswerTimes, int, Words]:
    """Returns times, opcode and words of a TIMED_ANSWER."""
    if len(words) <= TIMES_WORDS:
        raise ValueError(f"a timed answer of {len(words)} words is too short")
    return AnswerTimes.unpack(words[:TIMES_WORDS]), words[TIMES_WORDS], words[TIMES_WORDS + 1 :]


class ErrorCode(IntEnum):
    """Effect of an error."""

    FAILED = 0  # the request or the session start has failed
    SESSION_GONE = 1  # the client has to open the session again
    STALE = 2  # the message was of an earlier round; the request continues


def pack_error(place: tuple[int, int, int], code: ErrorCode, reason: str) -> Words:
    """Packs an error. `place`: request, round and prefix_len of the answer that it replaces; request 0: the client's
    current request."""
    return [*place, code, *text_to_words(reason)]


def unpack_error(words: Words) -> tuple[int, int, int, str]:
    """Returns request, round, code and reason of an error."""
    request, round_, _, code = WordReader(words, "error").take(4)
    return request, round_, code, words_to_error(words[4:])


def pack_files(files: tuple[Path, ...]) -> Iterator[Answer]:
    """Yields the pieces of files, and an empty piece at the end. Raises UserError if a file cannot be read."""
    for file in files:
        data, name = file_io.read_bytes(file, max_bytes=LARGEST), file.name.encode()
        for start in range(0, max(len(data), 1), FILE_CHUNK_BYTES):
            piece = data[start : start + FILE_CHUNK_BYTES]
            yield Answer(Opcode.FILE_PIECE, [len(name), len(piece), *bytes_to_words(name + piece)])
            name = b""
    yield Answer(Opcode.FILE_PIECE, [0, 0])


def unpack_file_piece(words: Words) -> tuple[str, bytes]:
    """Returns name and content of a file's piece. The name is empty in all pieces of a file except the first."""
    reader = WordReader(words, "piece of a file")
    name, size = reader.count(), reader.count()
    data = words_to_bytes(words[2:])
    if not name + size <= len(data) < name + size + 4:
        raise ValueError(f"a piece of a file has {len(data)} bytes instead of {name + size}")
    return data[:name].decode(errors="replace"), data[name : name + size]
