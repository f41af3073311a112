"""Sampler of the nodes of a tree: logits processing and position-keyed noise.

The token at absolute position i is argmax over tokens of log p(token) + gumbel(seed, stream, i, token), where p is the
target's distribution after logits processing. It is a pure function of prompt, seed, sampling parameters and target
logits, and does not depend on the draft tree. Letters: as in logits_processor.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftspec.backends.reference import Backend, reference
from swiftspec.backends.reference.sampling import Scores, calibrated_scores, compute_scores
from swiftspec.params import SamplingParams
from swiftspec.sampling import filters
from swiftspec.sampling.logits_params import PROCESSED, RAW, LogitsParams
from swiftspec.sampling.logits_processor import LogitsProcessor, ShardedVocab
from swiftspec.sampling.noise import TARGET_STREAM, PositionNoise

ReadTensors = Callable[..., list[NDArray[Any]]]  # returns the values of device tensors
NoiseRows = Callable[[Tensor, range, torch.dtype], tuple[Tensor, Tensor]]  # signature of PositionNoise.rows
Paths = Sequence[Sequence[int]]  # per row of logits, its unverified tokens, the row's own included; empty at the root


class History:
    """Token counts for penalties. `prompt` [V] bool: whether the prompt contains a token. `output` [V]: occurrences of
    each token in the verified output."""

    def __init__(self, prompt: Sequence[int], vocab: int, device: torch.device | str) -> None:
        self.prompt = torch.zeros(vocab, dtype=torch.bool, device=device)
        self.prompt[torch.tensor(list(prompt), dtype=torch.int64, device=device)] = True
        self.output = torch.zeros(vocab, device=device)
        on_host = self.output.device.type == "cpu"
        self._host_counts = self.output.numpy() if on_host else None  # the same memory

    def tokens(self) -> tuple[list[int], list[int]]:
        """Returns the tokens of the prompt, each once, and those of the verified output, in ascending order."""
        ids = torch.arange(len(self.output), device=self.output.device)
        return ids[self.prompt].tolist(), ids.repeat_interleave(self.output.long()).tolist()

    def observe(self, tokens: Sequence[int]) -> None:
        """Counts verified output tokens."""
        if self._host_counts is not None:  # without operator calls, which would cost more than the sampling
            for token in tokens:
                self._host_counts[token] += 1
            return
        index = torch.tensor(list(tokens), dtype=torch.int64, device=self.output.device)
        self.output.index_add_(0, index, torch.ones(len(tokens), device=self.output.device))

    def counts(self, paths: Paths) -> Tensor:
        """Returns token counts [n, V]: row i counts each token in the verified output followed by `paths[i]`."""
        counts, vocab = self.output.repeat(len(paths), 1), len(self.output)
        places = [row * vocab + token for row, path in enumerate(paths) for token in path]
        if places:  # all rows at once, by one copy to the device
            index = torch.tensor(places, device=counts.device)
            counts.view(-1).index_add_(0, index, torch.ones(len(places), device=counts.device))
        return counts


class TokenFollower(Protocol):
    """Follows the verified output of a request."""

    def observe(self, tokens: Sequence[int], /) -> None: ...  # advances by verified output tokens


class TokenConstraint(TokenFollower, Protocol):
    """A restriction of the next token, such as a grammar (sampling/grammar.py)."""

    def allowed_mask(self, paths: Paths, /) -> Tensor: ...  # [n, V] bool, for the token after each path
    def bitmask(self, paths: Paths, /) -> Any: ...  # the same as NumPy uint8 [n, bytes], lowest bit first


def read_tensors(*tensors: Tensor) -> list[NDArray[Any]]:
    """Returns the values of tensors. Waits for the device."""
    return [tensor.cpu().numpy() for tensor in tensors]


class Sampler(LogitsProcessor):
    """Sampler of one request: processes logits, samples the target's tokens and ranks the draft's children.

    `read`: copies results to the host; those of concurrent requests are copied together (sequence_runner.py).

    `shard`: this rank's part of the vocabulary in a tensor-parallel group; logits are then this rank's columns of the
    LM head. Every rank must call `draw` and `children`, which return the same result on all ranks.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        vocab: int,
        device: torch.device | str,
        ops: Backend = reference,
        *,
        shard: ShardedVocab | None = None,
        constraint: TokenConstraint | None = None,
    ) -> None:
        super().__init__(params, vocab, device, ops, shard)
        self.constraint = constraint
        self.read: ReadTensors = read_tensors
        self.noise = self.noise_of(TARGET_STREAM)
        self.noise_rows: NoiseRows = self.noise.rows
        self._children_values: LogitsParams | None = None  # as `values`, for the scores of `children`
        self.history = History(prompt, vocab, device) if params.penalised else None
        self.followers: list[TokenFollower] = []  # besides the history, which graphs replace, and the constraint

    @property
    def needs_paths(self) -> bool:
        """Whether a row's logits depend on the tokens of its path."""
        return self.history is not None or self.constraint is not None

    def noise_of(self, stream: int) -> PositionNoise:
        """Returns the request's noise of a noise stream (noise.py)."""
        return PositionNoise(self.params.seed, self.device, stream=stream, gumbel_rows=self.ops.gumbel_rows)

    def observe(self, tokens: Sequence[int]) -> None:
        """Adds verified output tokens to the penalty counts and the token constraint."""
        for follower in (self.history, self.constraint, *self.followers):
            if follower is not None:
                follower.observe(tokens)

    def process_logits(self, logits: Tensor, paths: Paths | None) -> Tensor:
        """Returns the logits [n, m] of the distribution that tokens are sampled from; filtered tokens are -inf.

        `logits` [n, >= m]: raw; columns beyond the vocabulary are ignored. `paths`: required if `needs_paths`. Logits
        of greedy requests are neither scaled nor filtered, since that does not change the argmax.
        """
        here = self.columns
        logits = self.add_bias(self._apply_constraint(logits[:, : here.stop - here.start], paths, here))
        if self.history is not None:
            assert paths is not None
            logits = self.apply_penalties(logits, self.history.prompt[here], self.history.counts(paths)[:, here])
        return self.apply_filters(self.apply_temperature(logits))

    def _apply_constraint(self, logits: Tensor, paths: Paths | None, here: slice) -> Tensor:
        """Sets the logits [n, m] of tokens that the constraint forbids to -inf. `here`: token ids of the columns."""
        if self.constraint is None:
            return logits
        assert paths is not None
        return logits.masked_fill(~self.constraint.allowed_mask(paths)[:, here].to(logits.device), filters.NEG_INF)

    def draw(self, logits: Tensor, paths: Paths | None, positions: Tensor) -> Tensor:
        """Samples the target's token after each row, [n]; -1 if the highest score of the row is not finite. `logits`:
        raw. `positions` [n]: absolute positions of the rows, without a synchronisation if they are on the host."""
        if self.shard is None:
            at = None if self.greedy else positions
            return self.ops.draw(*self._operator_inputs(logits, paths, at, self.values))
        shaped = self.process_logits(logits, paths)
        if self.greedy:
            return self.shard.argmax(shaped)
        noise, rows = self.noise_rows(positions + 1, self.shard.tokens, shaped.dtype)
        scores = Scores(noise=noise, rows=rows, scalars=self.values.scores[PROCESSED])
        return self.shard.argmax(compute_scores(shaped, scores))

    def drawn(self, logits: Tensor, paths: Paths | None, positions: Tensor) -> list[int]:
        """As `draw`, on the host, after one wait for the device: assumes that the top candidates suffice for a filter,
        and draws again if they do not."""
        check, assumed = self.check_all, list[Tensor]()

        def assume(holds: Tensor) -> bool:
            assumed.append(holds)
            return True

        self.check_all = assume
        try:
            tokens = self.draw(logits, paths, positions)
        finally:
            self.check_all = check
        found, *certain = self.read(tokens, *assumed)
        if not all(holds.all() for holds in certain):
            [found] = self.read(self.draw(logits, paths, positions))
        return found.tolist()

    def children(
        self, logits: Tensor, paths: Paths | None, positions: Tensor, *, k: int, coupled: bool = False, tau: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Returns the `k` best children of each row of raw draft logits: tokens [n, k] and log-probabilities [n, k],
        the most likely first.

        The log-probabilities are log_softmax(log q / tau), where q is the draft's distribution after the same logits
        processing as the target's. With `coupled` they are log_softmax((log q + gumbel) / tau), with the noise that the
        target will use at that position, so that both tend to select the same token.
        """
        k = min(k, self.vocab)
        noisy = coupled and not self.greedy
        values = self._children_values = self._children_values or LogitsParams(self.device)
        values.load(self.params, noisy=noisy, tau=tau)
        if self.shard is None:
            logits, vocab, scores = self._operator_inputs(logits, paths, positions if noisy else None, values)
            return self.ops.children(logits, vocab, k, scores)
        shaped, noise, rows = self.process_logits(logits, paths), None, None
        if noisy:
            noise, rows = self.noise_rows(positions + 1, self.shard.tokens, shaped.dtype)
        scores = Scores(noise=noise, rows=rows, scalars=values.scores[PROCESSED])
        return self.shard.log_top_k(calibrated_scores(shaped, scores), k)

    def _operator_inputs(
        self, logits: Tensor, paths: Paths | None, positions: Tensor | None, values: LogitsParams
    ) -> tuple[Tensor, int, Scores]:
        """Returns the arguments (logits, vocab, scores) of `Backend.draw` and `children`, which apply bias and
        temperature themselves unless penalties or filters require `process_logits`. `positions`: None for no noise."""
        bias, scalars = None, values.scores[PROCESSED]
        if self.history is not None or self.filtered:
            logits = self.process_logits(logits, paths)
        else:
            logits = self._apply_constraint(logits[:, : self.vocab], paths, slice(self.vocab))
            bias, scalars = self.bias, values.scores[RAW]
        if positions is None:
            return logits, self.vocab, Scores(bias=bias, scalars=scalars)
        noise, rows = self.noise_rows(positions + 1, range(self.vocab), logits.dtype)
        return logits, self.vocab, Scores(bias=bias, noise=noise, rows=rows, scalars=scalars)
