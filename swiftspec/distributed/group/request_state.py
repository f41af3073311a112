"""State of a request shared by two ranks, against which every message is validated before it is used.

A message that does not fit the state or the models' limits raises ValueError.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from swiftspec.config import MAX_TREE_NODES
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.params import SamplingParams
from swiftspec.tree.rejection import check_draft_probs


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits that the tokens and lengths of a job must respect."""

    vocab_size: int
    max_model_len: int  # tokens of a sequence; the last round may exceed it by `max_nodes`
    max_nodes: int  # bs, the nodes of a proposal


@dataclass(slots=True)
class RequestState:
    """Position of a request: the number of its verified tokens before the root, and the root token.

    `rejection_sampling`: proposals carry draft distributions, unless the request is greedy.
    """

    limits: ModelLimits
    rejection_sampling: bool = False
    is_open: bool = False
    request: int = 0
    prefix_len: int = 0
    root: int = 0
    expects_draft_probs: bool = False
    extra_negative_tokens: int = 0  # with guidance: tokens by which the negative sequence is longer

    def open(self, start: RequestStart) -> None:
        """Starts another request from its verified tokens."""
        self.is_open = False
        _check_tokens(start.tokens, self.limits, "a request start")
        _check_sampling(start.sampling, self.limits)
        self.extra_negative_tokens = 0
        if start.sampling.guided:
            self.extra_negative_tokens = max(len(start.sampling.negative_prompt_ids) - start.prompt_len, 0)
        _check_length(
            len(start.tokens) + self.extra_negative_tokens, self.limits, "a request start's unconditional text"
        )
        self.request, self.prefix_len = start.request, len(start.tokens) - 1
        self.root, self.is_open = start.tokens[-1], True
        self.expects_draft_probs = self.rejection_sampling and not start.sampling.greedy

    def require_open(self) -> None:
        if not self.is_open:
            raise ValueError("no request is open")

    @contextmanager
    def close_on_error(self) -> Iterator[None]:
        """Context of work on the request: closes it on an exception, since its state is then undefined."""
        self.is_open = False
        yield
        self.is_open = True

    def check_proposal(self, proposal: Proposal) -> None:
        """Raises ValueError if a proposal cannot be verified in this state.

        A wrong root would give wrong output; a token outside the vocabulary would read outside the embedding.
        """
        self._check_position(proposal)
        _check_tokens(proposal.tokens, self.limits, "a proposal")
        if len(proposal.tokens) > self.limits.max_nodes:
            raise ValueError(
                f"a proposal of {len(proposal.tokens)} nodes is above the {self.limits.max_nodes} of a round"
            )
        if self.prefix_len + self.extra_negative_tokens >= self.limits.max_model_len:
            raise ValueError(f"a proposal at {self.prefix_len + self.extra_negative_tokens}, where the context is full")
        if proposal.tokens[0] != self.root:
            raise ValueError(f"a proposal from token {proposal.tokens[0]}, where the text ends with {self.root}")
        if len({*zip(proposal.parents, proposal.tokens)}) < len(proposal.tokens):
            raise ValueError("a proposal has the same token twice under one node")
        if proposal.draft_probs is not None:
            _check_tokens(
                map(int, proposal.draft_probs.tokens.ravel()), self.limits, "a proposal's distribution", most=None
            )
        if self.expects_draft_probs or proposal.draft_probs is not None:
            check_draft_probs(proposal)

    def advance(self, result: VerifyResult) -> None:
        """Moves the position forward by a result, which may be that of several rounds."""
        self._check_position(result)
        _check_tokens(result.tokens, self.limits, "a result")
        if result.path[0] != 0 or any(a >= b for a, b in zip(result.path, result.path[1:])):
            raise ValueError("a result's path does not lead down from the root")
        prefix_len = self.prefix_len + len(result.tokens)
        if prefix_len > self.limits.max_model_len + self.limits.max_nodes:
            raise ValueError(f"a result's text of {prefix_len} tokens is longer than the context")
        self.prefix_len, self.root = prefix_len, result.tokens[-1]

    def _check_position(self, message: Proposal | VerifyResult) -> None:
        self.require_open()
        if (message.request, message.prefix_len) != (self.request, self.prefix_len):
            theirs, ours = (f"request {each.request} at {each.prefix_len}" for each in (message, self))
            raise ValueError(f"a message about {theirs}, where this side has {ours}")


def in_range(value: int, low: int, high: int, what: str) -> int:
    """Returns the value; raises ValueError if it is outside low..high."""
    if not low <= value <= high:
        raise ValueError(f"{what} must lie in {low}..{high}, not {value}")
    return value


def _check_length(length: int, bounds: ModelLimits, what: str) -> None:
    if length > bounds.max_model_len + bounds.max_nodes:
        raise ValueError(f"{what} of {length} tokens is longer than the context")


def _check_tokens(tokens: Iterable[int], bounds: ModelLimits, what: str, most: int | None = 0) -> None:
    """Checks tokens against the vocabulary, and their number against the context length; most=None skips the latter."""
    tokens = tuple(tokens)
    if most is not None:
        _check_length(len(tokens), bounds, what)
    if tokens and not 0 <= min(tokens) <= max(tokens) < bounds.vocab_size:
        raise ValueError(f"{what} names a token outside 0..{bounds.vocab_size - 1}")


def _check_sampling(sampling: SamplingParams, bounds: ModelLimits) -> None:
    """Checks the parameters that depend on the models' limits; SamplingParams checks the others itself."""
    _check_tokens(sampling.negative_prompt_ids, bounds, "a negative prompt")
    _check_tokens(sampling.logit_bias, bounds, "a logit_bias", most=None)
    if sampling.top_k > bounds.vocab_size:
        raise ValueError(f"a top_k of {sampling.top_k} is above the vocabulary of {bounds.vocab_size}")
    in_range(sampling.verify_batch or 1, 1, bounds.max_nodes, "a request's verify_batch")
    in_range(sampling.draft_steps or 1, 1, MAX_TREE_NODES, "a request's draft_steps")
