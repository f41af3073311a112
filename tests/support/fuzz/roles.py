"""Roles and a channel for hostile messages. The roles assert that their arguments are valid for a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np

from swiftspec.distributed.transport.codec import Words
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.params import MAX_TOKEN_COUNT, SamplingParams
from swiftspec.tree.tree import DraftTree
from tests.support.fuzz.message_words import BOUNDS, Message

FLAGS = ("ignore_eos", "stop", "stop_token_ids", "negative_prompt_ids", "logit_bias")  # that are not numbers


class FakeChannel:
    """Delivers the given messages, then is lost."""

    peer = "rank 9"

    def __init__(self, messages: Sequence[Message]) -> None:
        self._says = iter(messages)

    def send(self, kind: int, words: Sequence[int] = ()) -> None:
        np.array(words, np.int32)  # as a transport does

    def recv(self, timeout: float | None = None) -> Message:
        try:
            kind, words = next(self._says)
        except StopIteration:
            raise ConnectionError("rank 9 is gone") from None
        return kind, list(words)

    def recv_or_reply(self, reply: Any, asks: int, answers: int, note: int) -> tuple[int, Words, bool]:
        return *self.recv(), False

    def restart(self) -> None: ...

    def close(self) -> None: ...


class FakeRole:
    """Verifier and drafter of one rank. Asserts that its arguments are valid indices for a model."""

    grows = True
    runner = SimpleNamespace(first_token=0, cached_lengths=lambda texts, most: [0] * len(texts))

    def __init__(self) -> None:
        self.busy, self.draft_steps = 0.0, 3
        self.executors = [SimpleNamespace(name="eager")]
        self.start: RequestStart | None = None

    def select_executor(self, start: RequestStart) -> SimpleNamespace:
        assert start.executor in ("", "eager")
        return self.executors[0]

    def open(self, start: RequestStart) -> None:
        assert_valid_tokens(start.tokens)
        assert_valid_sampling(start.sampling)
        self.start, self.at, self.root, self.round = start, len(start.tokens) - 1, start.tokens[-1], 0

    def verify(self, proposal: Proposal) -> VerifyResult:
        assert self.start is not None and (proposal.prefix_len, proposal.tokens[0]) == (self.at, self.root)
        assert_valid_tokens(proposal.tokens, BOUNDS.max_nodes)
        self._move((7,))
        return VerifyResult(proposal.request, proposal.round, proposal.prefix_len, (0,), (7,))

    def settle(self) -> None: ...

    def observe(self, result: VerifyResult) -> None:
        assert self.start is not None and result.prefix_len == self.at
        assert_valid_tokens(result.tokens)
        self.round = result.round
        self._move(result.tokens)

    def propose(self) -> Proposal:
        assert self.start is not None
        return Proposal.root_only(self.start.request, self.round, self.at, self.root)

    def grow(self) -> None:
        assert self.start is not None

    def fast_reply(self) -> None:
        return None

    def close(self) -> None:
        self.start = None

    def _move(self, tokens: Sequence[int]) -> None:
        self.at, self.root = self.at + len(tokens), tokens[-1]


class LookaheadRole(FakeRole):
    """A lookahead drafter, whose tree has the same two tokens everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = DraftTree(40, 20)
        self.hooks: list[Callable[[int], None]] = []

    def open(self, start: RequestStart) -> None:
        super().open(start)
        self.tree.reset(self.root)
        self.grow()

    def settle(self) -> None: ...

    def observe(self, result: VerifyResult) -> None:
        super().observe(result)
        path = self.tree.match_prefix(result.tokens)
        if len(path) < len(result.tokens):
            self.tree.reset(self.root)
        else:
            self.tree.reroot(path[-1])

    def propose(self) -> Proposal:
        self.grow()
        return super().propose()

    def grow(self) -> None:
        super().grow()
        if self.tree.expandable_leaves(2) > 0:
            leaves = self.tree.best_leaves(1)
            count = len(leaves.nodes)
            self.tree.add_children(leaves.nodes, np.tile([7, 8], (count, 1)), np.tile([-0.5, -1.0], (count, 1)))
        for hook in self.hooks:
            hook(1)


def assert_valid_tokens(tokens: Sequence[int], most: int = BOUNDS.max_model_len + BOUNDS.max_nodes) -> None:
    """Asserts that the tokens are valid for a model's embedding."""
    assert 1 <= len(tokens) <= most and all(0 <= token < BOUNDS.vocab_size for token in tokens)


def assert_valid_sampling(sampling: SamplingParams) -> None:
    """Asserts that a sampler can compute with the values, within a model's sizes."""
    default = asdict(SamplingParams(max_tokens=1))
    for name, value in asdict(sampling).items():
        assert value is None or type(value) in (type(default[name]), *([int] if name not in FLAGS else [])), name
    whole = (
        *sampling.stop_token_ids,
        *sampling.negative_prompt_ids,
        *sampling.logit_bias,
        sampling.seed,
        sampling.top_k,
    )
    assert all(type(each) is int for each in whole) and all(type(each) is str for each in sampling.stop)
    assert sampling.top_k <= MAX_TOKEN_COUNT
    assert all(0 <= each < BOUNDS.vocab_size for each in (*sampling.logit_bias, *sampling.negative_prompt_ids))
