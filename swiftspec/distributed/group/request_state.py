"""Where a request stands between two ranks: what a message about it must fit, before anything is computed with it or
indexed by it. What does not fit raises ValueError."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from swiftspec.config import MAX_TREE
from swiftspec.messages import Opening, Proposal, VerifyResult
from swiftspec.params import SamplingParams
from swiftspec.tree.rejection import check_drawn


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a job's tokens and lengths keep to."""

    vocab: int
    context: int  # tokens of a text; the last round may overshoot it by `nodes`
    nodes: int  # bs: of a proposal


@dataclass(slots=True)
class Standing:
    """A request, its verified tokens before the root, and the root. `rejects`: proposals say what they were drawn from,
    unless the request is greedy."""

    bounds: Bounds
    rejects: bool = False
    is_open: bool = False
    request: int = 0
    prefix_len: int = 0
    root: int = 0
    drawn: bool = False
    longer: int = 0  # tokens by which a guided request's unconditional text is longer

    def open(self, opening: Opening) -> None:
        """Another request, from its verified tokens on."""
        self.is_open = False
        _check_tokens(opening.tokens, self.bounds, "an opening")
        _check_sampling(opening.sampling, self.bounds)
        self.longer = 0
        if opening.sampling.guided:
            self.longer = max(len(opening.sampling.negative_prompt_ids) - opening.prompt_len, 0)
        _check_length(len(opening.tokens) + self.longer, self.bounds, "an opening's unconditional text")
        self.request, self.prefix_len = opening.request, len(opening.tokens) - 1
        self.root, self.is_open = opening.tokens[-1], True
        self.drawn = self.rejects and not opening.sampling.greedy

    def require_open(self) -> None:
        if not self.is_open:
            raise ValueError("no request is open")

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Around work on the request: where that fails it is open no longer, as nobody knows how far it came."""
        self.is_open = False
        yield
        self.is_open = True

    def check(self, proposal: Proposal) -> None:
        """Whether a proposal can be verified here. A wrong root would be a wrong answer, a token outside the vocabulary
        a read outside the embedding."""
        self._check_place(proposal)
        _check_tokens(proposal.tokens, self.bounds, "a proposal")
        if len(proposal.tokens) > self.bounds.nodes:
            raise ValueError(f"a proposal of {len(proposal.tokens)} nodes is above the {self.bounds.nodes} of a round")
        if self.prefix_len + self.longer >= self.bounds.context:
            raise ValueError(f"a proposal at {self.prefix_len + self.longer}, where the context is full")
        if proposal.tokens[0] != self.root:
            raise ValueError(f"a proposal from token {proposal.tokens[0]}, where the text ends with {self.root}")
        if len({*zip(proposal.parents, proposal.tokens)}) < len(proposal.tokens):
            raise ValueError("a proposal has the same token twice under one node")
        if proposal.drawn is not None:
            _check_tokens(map(int, proposal.drawn.tokens.ravel()), self.bounds, "a proposal's distribution", most=None)
        if self.drawn or proposal.drawn is not None:
            check_drawn(proposal)

    def move(self, result: VerifyResult) -> None:
        """On by what the target made of a proposal, or of several in one."""
        self._check_place(result)
        _check_tokens(result.tokens, self.bounds, "a result")
        if result.path[0] != 0 or any(a >= b for a, b in zip(result.path, result.path[1:])):
            raise ValueError("a result's path does not lead down from the root")
        prefix_len = self.prefix_len + len(result.tokens)
        if prefix_len > self.bounds.context + self.bounds.nodes:
            raise ValueError(f"a result's text of {prefix_len} tokens is longer than the context")
        self.prefix_len, self.root = prefix_len, result.tokens[-1]

    def _check_place(self, message: Proposal | VerifyResult) -> None:
        self.require_open()
        if (message.request, message.prefix_len) != (self.request, self.prefix_len):
            theirs, ours = (f"request {each.request} at {each.prefix_len}" for each in (message, self))
            raise ValueError(f"a message about {theirs}, where this side has {ours}")


def in_range(value: int, least: int, most: int, what: str) -> int:
    """The value, which must lie there."""
    if not least <= value <= most:
        raise ValueError(f"{what} must lie in {least}..{most}, not {value}")
    return value


def _check_length(length: int, bounds: Bounds, what: str) -> None:
    if length > bounds.context + bounds.nodes:
        raise ValueError(f"{what} of {length} tokens is longer than the context")


def _check_tokens(tokens: Iterable[int], bounds: Bounds, what: str, most: int | None = 0) -> None:
    """`most`: how many there may be; 0: as the context has, None: any."""
    tokens = tuple(tokens)
    if most is not None:
        _check_length(len(tokens), bounds, what)
    if tokens and not 0 <= min(tokens) <= max(tokens) < bounds.vocab:
        raise ValueError(f"{what} names a token outside 0..{bounds.vocab - 1}")


def _check_sampling(sampling: SamplingParams, bounds: Bounds) -> None:
    """What the models' sizes ask of the parameters; the rest they have checked themselves."""
    _check_tokens(sampling.negative_prompt_ids, bounds, "a negative prompt")
    _check_tokens(sampling.logit_bias, bounds, "a logit_bias", most=None)
    if sampling.top_k > bounds.vocab:
        raise ValueError(f"a top_k of {sampling.top_k} is above the vocabulary of {bounds.vocab}")
    in_range(sampling.verify_batch or 1, 1, bounds.nodes, "a request's verify_batch")
    in_range(sampling.draft_steps or 1, 1, MAX_TREE, "a request's draft_steps")
