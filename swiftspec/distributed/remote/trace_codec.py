"""Codec of the draft's trace records: flat lists of 32-bit words, which the draft can send at low cost."""

from __future__ import annotations

from itertools import islice

import numpy as np
from numpy.typing import NDArray

from swiftspec.distributed.transport.codec import Words
from swiftspec.observe.trace_format import Record

SPANS = ("open", "observe", "propose", "grow")
COUNTS = ("nodes", "expanded", "reused", "wasted")
HEADER_WORDS = (
    2 + len(COUNTS) + 2
)  # request and round; the counts; a bit mask of the spans that the record has, and the number of forwards


def pack_record(request: int, round_: int, record: Record) -> Words:
    """Packs a record of the draft's timeline in one round (observe/trace.py); `unpack_record` is the inverse.

    The words are, in this order:
    - request, round, the counts, the bit mask of spans, the number of forwards;
    - start and end of each span, then of each forward, as doubles of two words;
    - the number of rows of each forward;
    - the tokens of all tree nodes, then 2 * parent + expanded of all nodes, then the bits of their float32
      log-probabilities.
    """
    forwards, tree = record["forwards"], record["tree"]
    there = [name for name in SPANS if name in record]
    times = [moment for name in there for moment in record[name]]
    times += [moment for began, ended, _ in forwards for moment in (began, ended)]
    known = sum(1 << SPANS.index(name) for name in there)
    parts = (
        np.array([request, round_, *(record[name] for name in COUNTS), known, len(forwards)], np.int32),
        np.array(times, np.float64).view(np.int32),
        np.array([rows for _, _, rows in forwards], np.int32),
        tree["tokens"],
        2 * tree["parents"] + tree["expanded"],
        tree["logprobs"].view(np.int32),
    )
    return np.concatenate(parts).tolist()


def unpack_record(flat: Words, vocab: int) -> Record:
    """Unpacks a record. Raises ValueError on invalid words and on tokens outside a vocabulary of `vocab` tokens."""
    record = _unpack(flat)
    if record is None or record["tree"]["tokens"].max() >= vocab:
        raise ValueError("the trace record of a round is invalid")
    return record


def _unpack(flat: Words) -> Record | None:
    words = np.array(flat, np.int32)
    if len(words) < HEADER_WORDS:
        return None
    *counts, known, forwards = words[2:HEADER_WORDS].tolist()
    if min(*counts[:2], known, forwards) < 0:  # `reused` and `wasted` may be negative
        return None
    there = [name for bit, name in enumerate(SPANS) if known >> bit & 1]
    times, rows = HEADER_WORDS + 4 * (len(there) + forwards), HEADER_WORDS + 4 * (len(there) + forwards) + forwards
    if known >> len(SPANS) or len(words) <= rows or (len(words) - rows) % 3:
        return None
    moments = iter(words[HEADER_WORDS:times].view(np.float64).tolist())
    spans = {name: tuple(islice(moments, 2)) for name in there}
    lane = [(*islice(moments, 2), count) for count in words[times:rows].tolist()]
    tokens, links, bits = words[rows:].reshape(3, -1)
    tree = {"tokens": tokens, "parents": links >> 1, "logprobs": bits.view(np.float32), "expanded": (links & 1) > 0}
    if not (np.isfinite(words[HEADER_WORDS:times].view(np.float64)).all() and words[times:rows].min(initial=0) >= 0):
        return None
    return dict(zip(COUNTS, counts)) | spans | {"forwards": lane, "tree": tree} if _is_valid_tree(tree) else None


def _is_valid_tree(tree: dict[str, NDArray]) -> bool:
    """Returns whether node 0 is the root, parents precede their children, tokens are not negative, and all
    log-probabilities are finite and at most 0."""
    parents, logprobs = tree["parents"], tree["logprobs"]
    above = (parents[1:] >= 0).all() and (parents < np.arange(len(parents))).all() and parents[0] == -1
    return bool(above and tree["tokens"].min() >= 0 and np.isfinite(logprobs).all() and (logprobs <= 0).all())
