"""Two drafters that should propose the same, round after round; for tests with and without a GPU."""

from __future__ import annotations

import numpy as np

from swiftspec.batch import Proposal, VerifyResult
from swiftspec.params import SamplingParams
from swiftspec.worker.local_drafter import LocalDrafter


def as_paths(proposal: Proposal) -> set[tuple[int, ...]]:
    """The nodes by what they spell: the two number them differently."""
    rows: list[tuple[int, ...]] = []
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        rows.append((*(rows[parent] if parent >= 0 else ()), token))
    return set(rows)


def same_rounds(one: LocalDrafter, other: LocalDrafter, sampling: SamplingParams, vocab: int) -> None:
    """Two requests of 20 rounds; the target takes a path of the proposal, and a token that may be beyond it."""
    dice = np.random.default_rng(3)
    for request in range(2):
        prompt = dice.integers(0, vocab, 9).tolist()
        for drafter in (one, other):
            drafter.open(request, prompt, sampling, len(prompt))
        for round_ in range(20):
            want, got = one.propose(), other.propose()
            paths = as_paths(want)
            assert as_paths(got) == paths and got.prefix_len == want.prefix_len
            path = sorted(paths, key=lambda path: (len(path), path))[int(dice.integers(0, len(paths)))]
            tokens = (*path[1:], int(dice.integers(0, vocab)))
            result = VerifyResult(request, round_, want.prefix_len, tuple(range(len(tokens))), tokens)
            for drafter in (one, other):
                drafter.grow()
                drafter.observe(result)
        for drafter in (one, other):
            drafter.close()
