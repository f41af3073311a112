"""State of a request on each side that exchanges messages about it: leader and followers, draft client and server, and
worker sessions. Every message about the request is validated against it before use.

A message that does not fit the state or the models' limits raises ValueError; StaleRound, if it is of an earlier round.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

from swiftspec.config import MAX_TREE_NODES
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.params import SamplingParams
from swiftspec.tree.rejection import check_draft_probs


class StaleRound(ValueError):
    """A message of a round that has already ended."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of a job, against which token ids and sequence lengths in messages are validated."""

    vocab_size: int
    max_model_len: int  # most tokens of a sequence; the last round may exceed it by `max_nodes`
    max_nodes: int  # bs, most nodes of a proposal


@dataclass(slots=True)
class RequestState:
    """State of a request: whether it is open, and its position.

    `rejection_sampling`: whether proposals must carry draft distributions, unless the request is greedy.
    `round`: the round that the next result ends, or a later one if rounds are skipped; messages of earlier rounds are
    stale.
    `prefix_len`: number of verified tokens before the root.
    `root`: token id of the root.
    `expects_draft_probs`: whether proposals of the open request must carry draft distributions.
    """

    limits: ModelLimits
    rejection_sampling: bool = False
    is_open: bool = False
    request: int = 0
    round: int = 0
    prefix_len: int = 0
    root: int = 0
    expects_draft_probs: bool = False
    extra_negative_tokens: int = 0  # with guidance: additional tokens of the negative sequence

    def open(self, start: RequestStart) -> None:
        """Opens another request whose root is the last of its verified tokens. Raises ValueError if it is invalid."""
        self.is_open = False
        _check_tokens(start.tokens, self.limits, "a request start")
        _check_sampling(start.sampling, self.limits)
        self.extra_negative_tokens = 0
        if start.sampling.guided:
            self.extra_negative_tokens = max(len(start.sampling.negative_prompt_ids) - start.prompt_len, 0)
        _check_length(
            len(start.tokens) + self.extra_negative_tokens, self.limits, "a request start's negative sequence"
        )
        self.request, self.round, self.prefix_len = start.request, 0, len(start.tokens) - 1
        self.root, self.is_open = start.tokens[-1], True
        self.expects_draft_probs = self.rejection_sampling and not start.sampling.greedy

    def require_open(self) -> None:
        if not self.is_open:
            raise ValueError("no request is open")

    @contextmanager
    def close_on_error(self) -> Iterator[None]:
        """Context manager for work on the request. An exception in it leaves the request closed, since the state of the
        models is then undefined."""
        self.is_open = False
        yield
        self.is_open = True

    def is_current(self, proposal: Proposal) -> bool:
        """Returns whether a proposal is of the current request and round. Raises ValueError if it is of a later
        round."""
        if proposal.request == self.request and proposal.round > self.round:
            raise ValueError(f"a proposal is of round {proposal.round}; expected round {self.round}")
        return (proposal.request, proposal.round) == (self.request, self.round)

    def check_proposal(self, proposal: Proposal) -> None:
        """Raises ValueError if a proposal does not fit this state.

        Without this check, a wrong root would change the output, and a token outside the vocabulary would read outside
        the embedding table.
        """
        self._check_position(proposal)
        _check_tokens(proposal.tokens, self.limits, "a proposal")
        if len(proposal.tokens) > self.limits.max_nodes:
            raise ValueError(f"a proposal of {len(proposal.tokens)} nodes exceeds the limit of {self.limits.max_nodes}")
        if self.prefix_len + self.extra_negative_tokens >= self.limits.max_model_len:
            raise ValueError(f"a proposal at {self.prefix_len + self.extra_negative_tokens}, beyond the context")
        if proposal.tokens[0] != self.root:
            raise ValueError(f"a proposal has root token {proposal.tokens[0]}; expected {self.root}")
        if len({*zip(proposal.parents, proposal.tokens)}) < len(proposal.tokens):
            raise ValueError("a proposal has two children with the same token under one node")
        if proposal.draft_probs is not None:
            _check_tokens(
                map(int, proposal.draft_probs.tokens.ravel()), self.limits, "a proposal's distribution", most=None
            )
        if self.expects_draft_probs or proposal.draft_probs is not None:
            check_draft_probs(proposal)

    def advance(self, result: VerifyResult) -> None:
        """Advances the position by the tokens of a result, which may merge several rounds. Raises ValueError if the
        result does not fit this state."""
        self._check_position(result)
        _check_tokens(result.tokens, self.limits, "a result")
        if result.path[0] != 0 or any(a >= b for a, b in zip(result.path, result.path[1:])):
            raise ValueError("a result's path does not descend from the root")
        prefix_len = self.prefix_len + len(result.tokens)
        if prefix_len > self.limits.max_model_len + self.limits.max_nodes:
            raise ValueError(f"a result's sequence of {prefix_len} tokens is longer than the context")
        self.round, self.prefix_len, self.root = result.round + 1, prefix_len, result.tokens[-1]

    def _check_position(self, message: Proposal | VerifyResult) -> None:
        self.require_open()
        if message.request == self.request and message.round < self.round:
            raise StaleRound(f"round {message.round} has already ended; expected round {self.round}")
        if (message.request, message.prefix_len) != (self.request, self.prefix_len):
            theirs, ours = (f"request {each.request} at {each.prefix_len}" for each in (message, self))
            raise ValueError(f"a message for {theirs} does not match {ours}")


def check_result(result: VerifyResult, proposal: Proposal) -> None:
    """Raises ValueError unless the result is of the proposal's round, its path is a path of the proposal, and its
    tokens are the tokens of that path."""
    if (result.request, result.round, result.prefix_len) != (proposal.request, proposal.round, proposal.prefix_len):
        raise ValueError(
            f"a result of request {result.request}, round {result.round} at {result.prefix_len} does not match the"
            f" proposal of request {proposal.request}, round {proposal.round} at {proposal.prefix_len}"
        )
    path, parents = result.path, proposal.parents
    inside = path[0] == 0 and 0 <= min(path) <= max(path) < len(parents)
    if not inside or any(parents[b] != a for a, b in pairwise(path)):
        raise ValueError("a result's path is not a path of the proposal")
    if tuple(proposal.tokens[node] for node in path[1:]) != result.tokens[:-1]:
        raise ValueError("a result's tokens do not match its path")


def in_range(value: int, low: int, high: int, what: str) -> int:
    """Returns `value`. Raises ValueError, with `what` as its name, if it is outside low..high."""
    if not low <= value <= high:
        raise ValueError(f"{what} must lie in {low}..{high}, not {value}")
    return value


def _check_length(length: int, bounds: ModelLimits, what: str) -> None:
    if length > bounds.max_model_len + bounds.max_nodes:
        raise ValueError(f"{what} of {length} tokens is longer than the context")


def _check_tokens(tokens: Iterable[int], bounds: ModelLimits, what: str, most: int | None = 0) -> None:
    """Raises ValueError if a token is outside the vocabulary, or, unless `most` is None, if there are more tokens than
    the context holds. `what`: name of the tokens in the error."""
    tokens = tuple(tokens)
    if most is not None:
        _check_length(len(tokens), bounds, what)
    if tokens and not 0 <= min(tokens) <= max(tokens) < bounds.vocab_size:
        raise ValueError(f"{what} contains a token outside 0..{bounds.vocab_size - 1}")


def _check_sampling(sampling: SamplingParams, bounds: ModelLimits) -> None:
    """Raises ValueError if a parameter exceeds the models' limits. SamplingParams validates everything else itself."""
    _check_tokens(sampling.negative_prompt_ids, bounds, "a negative prompt")
    for name, tokens in sampling.rule_token_ids():
        _check_tokens(tokens, bounds, f"a request's {name}", most=None)
    in_range(sampling.verify_batch or 1, 1, bounds.max_nodes, "a request's verify_batch")
    in_range(sampling.draft_steps or 1, 1, MAX_TREE_NODES, "a request's draft_steps")
