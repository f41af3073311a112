"""Queue of answers between the thread that expands a tree and the thread that sends its tree deltas."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import reduce
from operator import add
from queue import Empty, Full, Queue
from threading import Thread

from swiftspec.distributed.remote.session_messages import Answer
from swiftspec.tree.replica import TreeDelta, merge_deltas

MAX_QUEUED_ANSWERS = 64  # unsent answers; beyond that, expansion blocks
POLL_S = 1.0  # seconds between two checks whether the queue was closed


class AnswerQueue:
    """Queue that a background thread fills with `answers`, until those end or `close` is called.

    Sending a message delays the expansions only while the message is serialized, because serialization holds the GIL.
    """

    def __init__(self, answers: Iterable[Answer]) -> None:
        self._ready: Queue[Answer | Exception | None] = Queue(MAX_QUEUED_ANSWERS)
        self._closed = False
        self._error: Exception | None = None  # the exception that `answers` has raised
        self._ended = False
        # Not a daemon: the interpreter's shutdown waits for its forward.
        Thread(target=self._run, args=(answers,), name="growth").start()

    def take(self) -> list[Answer]:
        """Blocks until there are new answers and returns them; tree deltas of one round are merged if they may be.
        Returns an empty list if the answers have ended, and raises their exception if they have failed."""
        found: list[Answer] = []
        while not self._ended:
            try:
                each = self._ready.get(block=not found)
            except Empty:
                break
            if isinstance(each, Answer):
                found.append(each)
            else:
                self._ended, self._error = True, each
        if not found and self._error is not None:
            raise self._error
        return _merge(found)

    def close(self) -> None:
        """Stops the thread at its next answer. Answers in the queue are discarded."""
        self._closed = True

    def _run(self, answers: Iterable[Answer]) -> None:
        try:
            for each in answers:
                if not self._put(each):
                    return
            self._put(None)
        except Exception as error:
            self._put(error)

    def _put(self, what: Answer | Exception | None) -> bool:
        while not self._closed:
            try:
                self._ready.put(what, timeout=POLL_S)
                return True
            except Full:
                continue
        return False


def _merge(answers: list[Answer]) -> list[Answer]:
    """Merges the tree deltas of each round and sums their times. Empty deltas, which end a round, stay separate."""
    groups: list[list[Answer]] = []
    for each in answers:
        if groups and _continues(groups[-1][-1], each):
            groups[-1].append(each)
        else:
            groups.append([each])
    return [group[0] if len(group) == 1 else _merge_group(group) for group in groups]


def _continues(before: Answer, after: Answer) -> bool:
    """Returns whether two answers are tree deltas that may be merged: of one round, and with consecutive ids, since a
    client may open the same request again."""
    one, other = before.words, after.words
    if not (before.mergeable and after.mergeable and isinstance(one, TreeDelta) and isinstance(other, TreeDelta)):
        return False
    same_round = (one.request, one.round, len(one) == 0) == (other.request, other.round, len(other) == 0)
    return same_round and other.first == one.first + len(one)


def _merge_group(group: list[Answer]) -> Answer:
    deltas = [each.words for each in group if isinstance(each.words, TreeDelta)]
    times = [each.times for each in group if each.times is not None]
    spent = sum(each.model_us or 0 for each in group)
    merged = replace(group[0], words=merge_deltas(deltas), model_us=spent)
    return replace(merged, times=reduce(add, times) if times else None)
