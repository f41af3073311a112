"""A runner that keeps the texts it has read, so that a request reads only what is new.

The text of the last request lies in the cache anyway and stays there, which costs nothing. When another request is
about to overwrite much of it, it is copied into a store. That has a budget of tokens, and the text that rested longest
goes first. A text is known by its tokens. What is kept follows from the openings and their results alone, so the ranks
of a group keep the same, and the leader says in each opening how much of it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from swiftspec.messages import Opening
from swiftspec.model.batch import HostBatch
from swiftspec.runtime.runner import Runner
from swiftspec.sampling.guidance import Guidance

LEAST = 32  # tokens: fewer are read again sooner than kept
Tokens = NDArray[np.int64]
Texts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """One text and its keys and values."""

    tokens: Tokens
    k: Tensor  # [layers, kv_heads, tokens, head_dim]
    v: Tensor


class Store:
    """Copies of texts, at most `budget` tokens in all; the one that was used last at the end."""

    def __init__(self, budget: int, least: int) -> None:
        self.budget, self.least = budget, least
        self.texts: list[Kept] = []

    @property
    def size(self) -> int:
        """Tokens of all copies."""
        return sum(len(kept.tokens) for kept in self.texts)

    def fits(self, text: Tokens) -> bool:
        """Whether a text is worth a copy and has room."""
        return self.least <= len(text) <= self.budget

    def covers(self, text: Tokens) -> bool:
        """Whether a copy begins with this text."""
        return any(common(kept.tokens, text) == len(text) for kept in self.texts)

    def change(self, new: Sequence[Kept], used: Sequence[tuple[Kept, int]]) -> None:
        """Takes in new copies. `used`: copies, new ones too, of which so many tokens go into the cache: where that is
        as good as all the copy goes. So does an old copy that a new one begins with, and what is too much."""
        sources = [kept for kept, _ in used]
        gone = [kept for kept, count in used if len(kept.tokens) - count < self.least]
        rest = [old for old in self.texts if not any(common(n.tokens, old.tokens) == len(old.tokens) for n in new)]
        order = [kept for kept in (*rest, *new) if kept not in sources] + list(dict.fromkeys(sources))
        self.texts = [kept for kept in order if kept not in gone]
        while self.size > self.budget:
            del self.texts[0]


class KeepingRunner(Runner):
    """A runner whose requests begin with the longest prefix that the cache or its store has. The two texts of a guided
    request are kept each by itself."""

    def __init__(self, *args: Any, budget: int, least: int = LEAST, **kwargs: Any) -> None:
        """As `Runner`. `budget`: tokens of all copies together; while texts change places there may be one text more.
        `least`: what is shorter is not copied."""
        super().__init__(*args, **kwargs)
        self.store = Store(budget, least)
        self._texts: list[list[int]] = []  # the verified tokens of each sequence
        self._torn = False  # a step has prefix slots that it has not filled yet

    def find(self, texts: Texts, most: Sequence[int] | None = None) -> list[int]:
        """How many leading tokens of each text `begin` will keep: never the last one, and no more than `most` says."""
        held, counts = self._held(), []
        for s, text in enumerate(texts):
            stored = [kept.tokens for kept in self.store.texts]
            known = held[s : s + 1] if len(held) == len(texts) else [each for each in held if self.store.fits(each)]
            wanted = np.array(text[:-1], np.int64)
            limit = len(wanted) if most is None else most[s] if s < len(most) else 0
            counts.append(min(limit, max((common(each, wanted) for each in (*stored, *known)), default=0)))
        return counts

    def begin(self, texts: Texts, most: Sequence[int] | None) -> list[int]:
        held, counts = self._held(), self.find(texts, most)
        wanted = [np.array(text[:count], np.int64) for text, count in zip(texts, counts, strict=True)]
        same = len(held) == len(texts)  # else the cache gets another buffer
        stays = [same and common(held[s], each) == len(each) for s, each in enumerate(wanted)]
        lost = [len(each) - (len(wanted[s]) if same and stays[s] else 0) for s, each in enumerate(held)]
        new = self._copies({s: each for s, each in enumerate(held) if lost[s] >= self.store.least})
        sources = [None if stays[s] else self._source(each, new) for s, each in enumerate(wanted)]
        self._texts = []  # should anything fail from here on, nothing in the cache is sure
        self.store.change(new, [(kept, len(wanted[s])) for s, kept in enumerate(sources) if kept is not None])
        self.cache.reset(len(texts))
        for s, kept in enumerate(sources):
            if kept is not None:
                self.cache.k[:, s, :, : counts[s]] = kept.k[:, :, : counts[s]]
                self.cache.v[:, s, :, : counts[s]] = kept.v[:, :, : counts[s]]
            elif not stays[s]:
                counts[s] = 0
            self.cache.append_prefix(counts[s], s)
        self._texts, self._torn = [list(text) for text in texts], False
        return counts

    def observe(self, tokens: Sequence[int]) -> None:
        for text in self._texts:
            text += tokens

    def chain_batch(self, tokens: Sequence[int]) -> HostBatch:
        self._torn = True
        return super().chain_batch(tokens)

    def _read(self, chunk: Tokens, sequence: int) -> None:
        self._torn = True
        super()._read(chunk, sequence)

    def note(self, began: float, rows: int, seconds: float | None = None) -> None:
        super().note(began, rows, seconds)
        self._torn = False

    def _held(self) -> list[Tokens]:
        """What the cache holds for sure of each sequence's text."""
        texts = [] if self._torn else self._texts
        return [np.array(text[:count], np.int64) for text, count in zip(texts, self.cache.prefix_len)]

    def _copies(self, texts: dict[int, Tokens]) -> list[Kept]:
        """Of what the sequences hold, where that fits and there is no copy yet."""
        cache, copies = self.cache, []
        try:
            for s, text in texts.items():
                if self.store.fits(text) and not self.store.covers(text):
                    k, v = (part[:, s, :, : len(text)].clone() for part in (cache.k, cache.v))
                    copies.append(Kept(text, k, v))
        except (MemoryError, RuntimeError):
            self.store.texts = []
            if self.model.group is not None:  # the other ranks have their copies
                raise
            return []
        return copies

    def _source(self, wanted: Tokens, new: Sequence[Kept]) -> Kept | None:
        """The copy to take these tokens from."""
        every = (*new, *reversed(self.store.texts))
        return next((kept for kept in every if common(kept.tokens, wanted) == len(wanted) > 0), None)


def common(a: Tokens, b: Tokens) -> int:
    """How many leading tokens two texts share."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def told(opening: Opening, *runners: Runner, guided: bool = False) -> Opening:
    """The opening with how much all of the runners can keep, which a leader says to the ranks of its group. `guided`:
    they run the unconditional text, too, where there is one."""
    guidance = Guidance.of(opening.sampling, opening.tokens, opening.prompt_len) if guided else None
    texts = [opening.tokens] if guidance is None else [opening.tokens, guidance.tokens]
    found = [r.find(texts, opening.kept) if isinstance(r, KeepingRunner) else [0] * len(texts) for r in runners]
    return replace(opening, kept=tuple(map(min, zip(*found, strict=True))))
