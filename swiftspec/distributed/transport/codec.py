"""Codec of the messages between ranks: flat lists of 32-bit words. Unpacking invalid words raises ValueError."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict, fields
from math import inf
from typing import Any

import numpy as np

from swiftspec.errors import UserError
from swiftspec.messages import DraftProbs, NodeSource, Proposal, RequestStart, VerifyResult
from swiftspec.params import SamplingParams

Words = list[int]  # flat; each is a 32-bit integer
MAX_REASON_CHARS = 200  # longest quotation of a peer's data in an error message, in characters
Message = RequestStart | Proposal | VerifyResult | int
SOURCES_BY_VALUE = {int(source): source for source in NodeSource}  # a lookup costs a tenth of a call of the enum


def pack_message(message: Message) -> Words:
    """Packs a message; `unpack_request_start`, `unpack_proposal` and `unpack_result` are the inverses.

    RequestStart: request, prompt_len, number of tokens, tokens, then the remaining fields as JSON text: its length in
    bytes, and the bytes, four per word.
    Proposal: request, round, prefix_len, number of nodes, tokens, parents, the bits of the float32 weights, sources;
    then, for sampled children, the draft distributions: tokens, and the bits of the float32 probabilities.
    VerifyResult: request, round, prefix_len, number of nodes, path, tokens.
    int: the number itself.
    """
    match message:
        case RequestStart():
            told = {"steps": message.executor, "kept": message.num_cached_tokens, "sampling": asdict(message.sampling)}
            text = json.dumps(told).encode()
            head = [message.request, message.prompt_len, len(message.tokens)]
            return [*head, *message.tokens, len(text), *bytes_to_words(text)]
        case Proposal():
            head = [message.request, message.round, message.prefix_len, len(message.tokens)]
            words, drawn = [*head, *message.tokens, *message.parents], message.draft_probs
            words += [*memoryview(array("f", message.weights)).cast("B").cast("i"), *message.sources]
            if drawn is not None:
                words += [*drawn.tokens.ravel().tolist(), *drawn.probs.view(np.int32).ravel().tolist()]
            return words
        case VerifyResult():
            head = [message.request, message.round, message.prefix_len, len(message.path)]
            return [*head, *message.path, *message.tokens]
        case int():
            return [message]


def unpack_proposal(flat: Words) -> Proposal:
    """Unpacks a proposal from the words that `pack_message` returned."""
    request, round_, prefix_len, count, *body = _at_least(4, flat, "proposal")
    if count < 1 or len(body) < 4 * count:
        raise ValueError(f"a proposal of {len(flat)} words does not match its {count} nodes")
    parents = tuple(body[count : 2 * count])
    weights = tuple(memoryview(array("i", body[2 * count : 3 * count])).cast("B").cast("f"))
    sources = check_nodes(parents, weights, body[3 * count : 4 * count])
    drawn = None if len(body) == 4 * count else _read_drawn(body[4 * count :], len({*parents[1:]}))
    return Proposal(request, round_, prefix_len, tuple(body[:count]), parents, weights, sources, drawn)


def check_nodes(parents: Sequence[int], weights: Sequence[float], sources: Sequence[int]) -> tuple[NodeSource, ...]:
    """Validates the nodes of a received proposal by the rules of `Proposal`, and returns their sources. Raises
    ValueError if they break one."""
    if parents[0] != -1 or any(not 0 <= parent < node for node, parent in enumerate(parents[1:], 1)):
        raise ValueError("a proposal's nodes are not in topological order")
    if weights[0] != 0 or not all(-inf < weight <= weights[parent] for weight, parent in zip(weights[1:], parents[1:])):
        raise ValueError("the weight of a proposal's node is not finite or exceeds that of its parent")
    found = tuple(SOURCES_BY_VALUE[source] for source in sources if source in SOURCES_BY_VALUE)
    if len(found) < len(sources) or found[0] != NodeSource.ROOT or NodeSource.ROOT in found[1:]:
        raise ValueError("the source of a proposal's node is unknown, or a node other than the first is a root")
    return found


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
    request, round_, prefix_len, count, *body = _at_least(4, flat, "result")
    if count < 1 or len(body) != 2 * count:
        raise ValueError(f"a result of {len(flat)} words does not match its {count} nodes")
    return VerifyResult(request, round_, prefix_len, tuple(body[:count]), tuple(body[count:]))


def unpack_request_start(flat: Words) -> RequestStart:
    """Unpacks a request start from the words that `pack_message` returned."""
    request, prompt_len, count = _at_least(4, flat, "request start")[:3]
    tokens, rest = flat[3 : 3 + count], flat[3 + count :]
    if count < 1 or not 1 <= prompt_len <= count or not rest or 4 * len(rest) < 4 + rest[0] or rest[0] < 2:
        raise ValueError(f"a request start of {len(flat)} words does not match its {count} tokens")
    try:
        told = json.loads(words_to_bytes(rest[1:])[: rest[0]])
        steps, kept, sampling = str(told["steps"]), _kept(told["kept"]), _sampling(told["sampling"])
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError, UserError) as error:
        raise ValueError(f"a request start has invalid sampling parameters ({str(error)[:MAX_REASON_CHARS]})") from None
    return RequestStart(request, tuple(tokens), sampling, prompt_len, steps, kept)


def _kept(counts: Any) -> tuple[int, ...] | None:
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


def bytes_to_words(data: bytes) -> Words:
    """Packs four bytes per word; the last word is padded with blanks."""
    return np.frombuffer(data.ljust(-(-len(data) // 4) * 4), np.int32).tolist()


def words_to_bytes(words: Words) -> bytes:
    """Returns the bytes that `bytes_to_words` has packed, with the padding at their end."""
    return np.array(words, np.int32).tobytes()


def _at_least(count: int, flat: Words, what: str) -> Words:
    if len(flat) < count:
        raise ValueError(f"a {what} of {len(flat)} words is too short")
    return flat
