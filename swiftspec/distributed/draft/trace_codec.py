"""A round of the draft's lane as flat words: on its way to the target it costs the draft next to nothing."""

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
)  # request and round; these; then which spans there are, a bit each, and how many forwards


def pack_record(request: int, round_: int, record: Record) -> Words:
    """What the lane says of a round, as observe/trace.py makes it; `read_record` makes it again.

    Request, round, its counts, its spans and forwards as doubles of two words each, rows of the forwards, and of the
    tree's nodes the tokens, twice the parents plus whether they are expanded, and the logarithms by their bits.
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
        tree["tokens"], 2 * tree["parents"] + tree["expanded"], tree["logprobs"].view(np.int32),
    )  # fmt: skip
    return np.concatenate(parts).tolist()


def unpack_record(flat: Words, vocab: int) -> Record:
    """What these words were made of. Raises ValueError on words that make nothing, and on tokens outside a vocabulary
    of so many."""
    record = _unpack(flat)
    if record is None or record["tree"]["tokens"].max() >= vocab:
        raise ValueError("a record of a round is none")
    return record


def _unpack(flat: Words) -> Record | None:
    words = np.array(flat, np.int32)
    if len(words) < HEADER_WORDS:
        return None
    *counts, known, forwards = words[2:HEADER_WORDS].tolist()
    if min(*counts[:2], known, forwards) < 0:  # the books of the cache may be
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
    """Whether it is a tree: parents before their children, and what they weigh."""
    parents, logprobs = tree["parents"], tree["logprobs"]
    above = (parents[1:] >= 0).all() and (parents < np.arange(len(parents))).all() and parents[0] == -1
    return bool(above and tree["tokens"].min() >= 0 and np.isfinite(logprobs).all() and (logprobs <= 0).all())
