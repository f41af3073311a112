"""Codec of the messages between ranks, and between workers and their clients: flat lists of 32-bit words. Unpacking
invalid words raises ValueError."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, fields
from math import inf
from typing import Any

import numpy as np

from swiftspec.config import EngineConfig
from swiftspec.errors import UserError
from swiftspec.messages import DraftProbs, NodeSource, Proposal, RequestStart, SampledLogprob, VerifyResult
from swiftspec.params import SamplingParams
from swiftspec.tree.replica import TreeDelta

PROTOCOL_VERSION = 8  # a peer with another version is refused
Words = Sequence[int]  # flat; each is a 32-bit integer. A gRPC stream receives them as a memoryview
Frame = tuple[int, Words]  # opcode and words of a message
MAX_REASON_CHARS = 200  # longest quotation of a peer's data in an error message, in characters
MAX_ERROR_CHARS = 500  # of a peer's error message
Message = RequestStart | Proposal | VerifyResult | int | tuple[int, ...]
# Layout of proposals and results: a header, then columns of `count` words each. After a change run
# `python -m tools.message_layout`, which generates it for C++.
HEADER = ("request", "round", "prefix_len", "count")
PROPOSAL_COLUMNS = ("tokens", "parents", "weights", "sources")  # weights: the bits of float32 numbers
RESULT_COLUMNS = ("path", "tokens")
SOURCES_BY_VALUE = {int(source): source for source in NodeSource}  # a lookup costs a tenth of a call of the enum
SHAPE_FIELDS = (
    "mode", "verify_batch", "draft_leaves", "draft_steps", "verify", "proposal", "calibration", "catch_up",
    "adapt_steps", "synthetic_acceptance_length",
)  # fmt: skip


def pack_message(message: Message) -> Words:
    """Packs a message; `unpack_request_start`, `unpack_proposal` and `unpack_result` are the inverses.

    RequestStart: request, prompt_len, number of tokens, tokens, then the remaining fields as JSON text: its length in
    bytes, and the bytes, four per word.
    Proposal: HEADER and PROPOSAL_COLUMNS; then, for sampled children, the draft distributions: tokens, and the bits of
    the float32 probabilities.
    VerifyResult: HEADER and RESULT_COLUMNS.
    int, tuple: the numbers themselves.
    """
    match message:
        case RequestStart():
            values = {"executor": message.executor, "num_cached_tokens": message.num_cached_tokens}
            text = json.dumps({**values, "sampling": asdict(message.sampling)}).encode()
            head = [message.request, message.prompt_len, len(message.tokens)]
            return [*head, *message.tokens, len(text), *bytes_to_words(text)]
        case Proposal():
            count, drawn = len(message.tokens), message.draft_probs
            words = [message.request, message.round, message.prefix_len, count, *message.tokens, *message.parents]
            words += struct.unpack(f"{count}i", struct.pack(f"{count}f", *message.weights))
            words += message.sources
            if drawn is not None:
                words += [*drawn.tokens.ravel().tolist(), *drawn.probs.view(np.int32).ravel().tolist()]
            return words
        case VerifyResult():
            head = [message.request, message.round, message.prefix_len, len(message.path)]
            return [*head, *message.path, *message.tokens]
        case int():
            return [message]
        case tuple():
            return message


def unpack_proposal(flat: Words) -> Proposal:
    """Unpacks a proposal from the words that `pack_message` returned."""
    request, round_, prefix_len, count, *body = _at_least(len(HEADER), flat, "proposal")
    end = len(PROPOSAL_COLUMNS) * count
    if count < 1 or len(body) < end:
        raise ValueError(f"a proposal of {len(flat)} words does not match its {count} nodes")
    columns = _columns(PROPOSAL_COLUMNS, body, count)
    parents = tuple(columns["parents"])
    weights = struct.unpack(f"{count}f", struct.pack(f"{count}i", *columns["weights"]))
    sources = check_nodes(parents, weights, columns["sources"])
    drawn = None if len(body) == end else _read_drawn(body[end:], len({*parents[1:]}))
    return Proposal(
        request=request,
        round=round_,
        prefix_len=prefix_len,
        tokens=tuple(columns["tokens"]),
        parents=parents,
        weights=weights,
        sources=sources,
        draft_probs=drawn,
    )


def _columns(names: Sequence[str], words: Words, count: int) -> dict[str, Words]:
    """Returns the columns that follow the header of a message, of `count` words each, by name."""
    return {name: words[place * count : (place + 1) * count] for place, name in enumerate(names)}


def check_nodes(parents: Sequence[int], weights: Sequence[float], sources: Sequence[int]) -> tuple[NodeSource, ...]:
    """Validates the nodes of a received proposal by the rules of `Proposal`, and returns their sources. Raises
    ValueError if they break one."""
    nodes = zip(parents, weights, strict=True)
    if next(nodes) != (-1, 0):
        raise ValueError("a proposal's first node is not a root of weight 0")
    for node, (parent, weight) in enumerate(nodes, 1):
        if not 0 <= parent < node:
            raise ValueError("a proposal's nodes are not in topological order")
        if not -inf < weight <= weights[parent]:  # also refuses NaN
            raise ValueError("the weight of a proposal's node is not finite or exceeds that of its parent")
    try:
        root, *others = map(SOURCES_BY_VALUE.__getitem__, sources)
    except KeyError as error:
        raise ValueError(f"a proposal's node has the unknown source {error}") from None
    if root is not NodeSource.ROOT or NodeSource.ROOT in others:
        raise ValueError("a proposal's first node must be its only root")
    return (root, *others)


def _read_drawn(flat: Words, rows: int) -> DraftProbs:
    if rows == 0 or len(flat) % (2 * rows) != 0:
        raise ValueError(f"{len(flat)} words do not match {rows} distributions")
    tokens, bits = np.array(flat, np.int32).reshape(2, rows, -1)
    probs = bits.view(np.float32)
    if not (np.isfinite(probs).all() and (probs >= 0).all() and (probs > 0).any(-1).all() and (tokens >= 0).all()):
        raise ValueError("a proposal contains an invalid distribution")
    return DraftProbs(tokens, probs)


def unpack_result(flat: Words) -> VerifyResult:
    """Unpacks a result from the words that `pack_message` returned."""
    request, round_, prefix_len, count, *body = _at_least(len(HEADER), flat, "result")
    if count < 1 or len(body) != len(RESULT_COLUMNS) * count:
        raise ValueError(f"a result of {len(flat)} words does not match its {count} nodes")
    columns = _columns(RESULT_COLUMNS, body, count)
    return VerifyResult(request, round_, prefix_len, tuple(columns["path"]), tuple(columns["tokens"]))


def unpack_request_start(flat: Words) -> RequestStart:
    """Unpacks a request start from the words that `pack_message` returned."""
    request, prompt_len, count = _at_least(4, flat, "request start")[:3]
    tokens, rest = flat[3 : 3 + count], flat[3 + count :]
    if count < 1 or not 1 <= prompt_len <= count or not rest or 4 * len(rest) < 4 + rest[0] or rest[0] < 2:
        raise ValueError(f"a request start of {len(flat)} words does not match its {count} tokens")
    try:
        values = json.loads(words_to_bytes(rest[1:])[: rest[0]])
        executor, cached = str(values["executor"]), _num_cached_tokens(values["num_cached_tokens"])
        sampling = _sampling(values["sampling"])
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError, UserError) as error:
        raise ValueError(f"a request start has invalid sampling parameters ({str(error)[:MAX_REASON_CHARS]})") from None
    return RequestStart(request, tuple(tokens), sampling, prompt_len, executor, cached)


def _num_cached_tokens(counts: Any) -> tuple[int, ...] | None:
    """Returns the validated number of cached tokens per sequence; None if the sender has not chosen it."""
    if counts is None:
        return None
    if isinstance(counts, list) and len(counts) <= 2 and all(type(n) is int and 0 <= n < 2**31 for n in counts):
        return tuple(counts)
    raise ValueError("the number of cached tokens is invalid")


def _sampling(values: dict[str, Any]) -> SamplingParams:
    """Returns the sampling parameters for the decoded JSON of `dataclasses.asdict`, in which the integer keys of
    `logit_bias` are strings."""
    if len(values) != len(fields(SamplingParams)):
        raise ValueError("wrong number of fields")
    bias = {int(token): value for token, value in values["logit_bias"].items()}
    return SamplingParams(**{**values, "logit_bias": bias})


def pack_scored_result(result: VerifyResult) -> Words:
    """Packs a result with its overlaps and log-probabilities; `unpack_scored_result` is the inverse.

    The words are those of `pack_message`, the number of overlaps and the overlaps as doubles of two words each, then
    the log-probabilities of the tokens and those of the prompt, each as the number of positions (-1 for None), the
    number of top tokens per position, the log-probabilities, the ranks, the top tokens and their log-probabilities.
    """
    words = [*pack_message(result), len(result.overlaps), *doubles_to_words(result.overlaps)]
    for logprobs in (result.logprobs, result.prompt_logprobs):
        if logprobs is None:
            words += [-1, 0]
            continue
        top = [pair for each in logprobs for pair in each.top]
        words += [len(logprobs), len(logprobs[0].top) if logprobs else 0]
        words += doubles_to_words([each.logprob for each in logprobs])
        words += [each.rank for each in logprobs]
        words += [*(token for token, _ in top), *doubles_to_words([logprob for _, logprob in top])]
    return words


def unpack_scored_result(flat: Words) -> VerifyResult:
    """Unpacks a result from the words that `pack_scored_result` returned."""
    reader = WordReader(flat, "result")
    head = reader.take(len(HEADER))
    result = unpack_result([*head, *reader.take(len(RESULT_COLUMNS) * head[-1])])
    overlaps = tuple(reader.doubles(reader.count()))
    logprobs, prompt_logprobs = _read_logprobs(reader), _read_logprobs(reader)
    reader.finish()
    if logprobs is not None and len(logprobs) != len(result.tokens):
        raise ValueError(f"a result has {len(logprobs)} log-probabilities for {len(result.tokens)} tokens")
    place = result.request, result.round, result.prefix_len
    return VerifyResult(*place, result.path, result.tokens, overlaps, logprobs, prompt_logprobs)


def _read_logprobs(reader: WordReader) -> tuple[SampledLogprob, ...] | None:
    (count,), width = reader.take(1), reader.count()
    if count < 0:
        return None
    logprobs, ranks = reader.doubles(count), reader.take(count)
    top = [*zip(reader.take(count * width), reader.doubles(count * width), strict=True)]
    tops = [tuple(top[i * width : (i + 1) * width]) for i in range(count)]
    return tuple(map(SampledLogprob, logprobs, tops, ranks))


def pack_tree_delta(delta: TreeDelta, before: Sequence[int] = ()) -> Words:
    """Packs a tree delta after the words `before`; `unpack_tree_delta` is the inverse for the words after them. The
    words are request, round, prefix_len, number of expansions, first id, parents, tokens, then the weights as doubles
    of two words each.

    Returns a memoryview: a round may have thousands of nodes, whose conversion to Python integers would hold the GIL.
    """
    head = [*before, delta.request, delta.round, delta.prefix_len, delta.expansions, delta.first]
    nodes = delta.parents.astype(np.int32), delta.tokens.astype(np.int32)
    weights = np.ascontiguousarray(delta.weights, np.float64).view(np.int32)
    return np.concatenate((np.array(head, np.int32), *nodes, weights)).data


def unpack_tree_delta(flat: Words) -> TreeDelta:
    """Unpacks a tree delta from the words that `pack_tree_delta` returned. Whether it fits the tree is checked by the
    replica."""
    request, round_, prefix_len, expansions, first = _at_least(5, flat, "tree delta")[:5]
    nodes, rest = np.array(flat[5:], np.int32), divmod(len(flat) - 5, 4)
    if rest[1] != 0:
        raise ValueError(f"a tree delta of {len(flat)} words does not match its nodes")
    count = rest[0]
    parents, tokens = nodes[: 2 * count].astype(np.int64).reshape(2, count)
    weights = nodes[2 * count :].view(np.float64)
    return TreeDelta(
        request=request,
        round=round_,
        prefix_len=prefix_len,
        expansions=expansions,
        first=first,
        parents=parents,
        tokens=tokens,
        weights=weights,
    )


def shape_to_json(config: EngineConfig) -> dict[str, Any]:
    """Returns the fields of a config that determine a session's rounds, as values for JSON."""
    return {name: getattr(config, name) for name in SHAPE_FIELDS}


def shape_from_json(values: Any) -> EngineConfig:
    """Returns the config for the result of `shape_to_json`. Raises ValueError if it is invalid."""
    try:
        return EngineConfig(**values)
    except (ValueError, TypeError, ArithmeticError, UserError) as error:
        raise ValueError(f"a session's configuration is invalid ({str(error)[:MAX_REASON_CHARS]})") from None


def masked_from_json(values: Any) -> tuple[int, ...]:
    """Returns the masked tokens of a session from JSON. Raises ValueError if they are not a list of token ids."""
    if not isinstance(values, list) or not all(type(token) is int and 0 <= token < 2**31 for token in values):
        raise ValueError("a session's masked tokens are not a list of token ids")
    return tuple(values)


class WordReader:
    """Reads the parts of a message in order. Every call raises ValueError if the message is too short. `what`: name of
    the message in the error."""

    def __init__(self, flat: Words, what: str) -> None:
        self._flat, self._at, self._what = flat, 0, what

    def take(self, count: int) -> Words:
        """Returns the next `count` words."""
        end = self._at + count
        if count < 0 or end > len(self._flat):
            raise ValueError(f"a {self._what} of {len(self._flat)} words is too short")
        words, self._at = self._flat[self._at : end], end
        return words

    def count(self) -> int:
        """Returns the next word, which must not be negative."""
        (count,) = self.take(1)
        if count < 0:
            raise ValueError(f"a {self._what} contains a negative count")
        return count

    def doubles(self, count: int) -> list[float]:
        """Returns the next `count` doubles, of two words each."""
        return words_to_doubles(self.take(2 * count))

    def finish(self) -> None:
        """Raises ValueError if words are left."""
        if self._at < len(self._flat):
            raise ValueError(f"a {self._what} of {len(self._flat)} words is too long")


def single_word(flat: Words, what: str) -> int:
    """Returns the only word of a message. Raises ValueError, with `what` as the name of the message, if the message has
    more or fewer words."""
    if len(flat) != 1:
        raise ValueError(f"a {what} must be one word, not {len(flat)}")
    return flat[0]


def text_to_words(text: str) -> Words:
    """Encodes text as UTF-8, four bytes per word."""
    return bytes_to_words(text.encode())


def words_to_text(words: Words) -> str:
    """Decodes words of `text_to_words` into one line: unprintable characters become blanks, trailing blanks are
    removed."""
    text = words_to_bytes(words).decode(errors="replace")
    return "".join(character if character.isprintable() else " " for character in text).rstrip()


def words_to_error(words: Words) -> str:
    """Decodes a peer's error message, of which at most MAX_ERROR_CHARS characters are kept."""
    return words_to_text(words[:MAX_ERROR_CHARS])[:MAX_ERROR_CHARS]


def bytes_to_words(data: bytes) -> Words:
    """Packs four bytes per word; the last word is padded with blanks."""
    return np.frombuffer(data.ljust(-(-len(data) // 4) * 4), np.int32).tolist()


def words_to_bytes(words: Words) -> bytes:
    """Returns the bytes that `bytes_to_words` has packed, with the padding at their end."""
    return np.array(words, np.int32).tobytes()


def doubles_to_words(values: Sequence[float]) -> Words:
    """Encodes each value as a double of two words."""
    return np.array(values, np.float64).view(np.int32).tolist()


def words_to_doubles(words: Words) -> list[float]:
    """Decodes words of `doubles_to_words`."""
    return np.array(words, np.int32).view(np.float64).tolist()


def _at_least(count: int, flat: Words, what: str) -> Words:
    if len(flat) < count:
        raise ValueError(f"a {what} of {len(flat)} words is too short")
    return flat
