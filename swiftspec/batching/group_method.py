"""What differs between exact batches and particles: how a round drafts and verifies, and how an answer is picked.

Shapes: N rows per group, K draft tokens per row and round, V tokens in the vocabulary; `groups` is the number of groups
that share a sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Protocol, TypeVar

from torch import Tensor

from swiftspec.batching.group_spans import GroupSpan, concatenate
from swiftspec.batching.noise_streams import RowStreams
from swiftspec.batching.rows import GroupRows
from swiftspec.batching.sequence_group import GroupAnswer, SequenceGroup
from swiftspec.config import GroupShape, NativeRoundParams
from swiftspec.params import SamplingParams
from swiftspec.sampling.row_sampler import RowSampler


@dataclass(frozen=True, slots=True)
class DraftedTokens:
    """The draft tokens of a round, and the noise for their verification and for the token after them."""

    tokens: Tensor  # [groups, N, K]
    log_q: Tensor  # [groups, N, K], log-probabilities of the tokens under q
    logits: list[Tensor]  # the draft's processed logits [groups * N, V] of each step that may be rejected
    keys: list[Tensor | None]  # noise keys [groups * N] of each draft token, then of the token after them
    uniforms: Callable[[int], Tensor]  # returns uniform numbers in (0, 1) for the first n tokens, [groups, N, n]


@dataclass(frozen=True, slots=True)
class RoundVerdict:
    """Result of the verification of a round."""

    accepted: Tensor  # [groups, N], number of leading draft tokens that are kept
    bonus: Tensor  # [groups, N], the token after those; -1 if logits are not finite

    def not_finite(self) -> Tensor:
        """Returns whether the logits of a group are not finite, [groups] bool."""
        return (self.bonus < 0).any(-1)


RowsT = TypeVar("RowsT", bound=GroupRows)
VerdictT = TypeVar("VerdictT", bound=RoundVerdict)


def join_verdicts(parts: Sequence[VerdictT]) -> VerdictT:
    """Returns the verdict of consecutive spans of groups."""
    if len(parts) == 1:
        return parts[0]
    kind = type(parts[0])
    return kind(*(concatenate([getattr(part, each.name) for part in parts]) for each in fields(kind)))


class GroupMethod(Protocol[RowsT, VerdictT]):
    """Drafting, verification and choice of the answer, and the tensors that they keep for all groups. Implemented by
    the chains of an exact batch (chains.py) and by the particles of mode smc (smc/particle_method.py)."""

    @property
    def exact(self) -> bool: ...  # whether the output follows the target's distribution exactly
    @property
    def shape(self) -> GroupShape: ...
    @property
    def rows(self) -> RowsT: ...
    @property
    def streams(self) -> RowStreams: ...
    @property
    def native_params(self) -> NativeRoundParams | None:
        """Parameters of native rounds that compute the same; None if there are none."""
        ...

    def may_reject(self, sampling: SamplingParams) -> bool:
        """Returns whether a round may reject draft tokens of a request, so that its rows grow by fewer than K + 1
        tokens."""
        ...

    def noise_keys(self, rows: RowsT, spans: Sequence[GroupSpan]) -> Iterator[Tensor | None]:
        """Yields the noise keys [groups * N] of each draft step, then those of the token after the draft tokens; None
        if all requests are greedy. `rows`: of the groups that take part in the round."""
        ...

    def draw(self, sampler: RowSampler, logits: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        """Samples a draft token from each row of raw logits. Returns the tokens [rows] and their log-probabilities
        [rows]."""
        ...

    def keeps_logits(self, sampler: RowSampler, step: int) -> bool:
        """Returns whether the verification of a draft step needs the draft's logits."""
        ...

    def verify(self, sampler: RowSampler, logits: Tensor, drafted: DraftedTokens) -> VerdictT:
        """Verifies the draft tokens of groups that share a sampler. `logits`: the target's, [groups, K + 1, N,
        at least V], raw or with penalties applied."""
        ...

    def append(self, rows: RowsT, drafts: Tensor, verdict: VerdictT, stops: Tensor, width: int) -> None:
        """Appends a round to the rows of the groups that take part; parameters as in `GroupRows.append_round`."""
        ...

    def pick(self, group: SequenceGroup, place: int) -> GroupAnswer:
        """Returns the answer of a group, whose rows are at index `place` of the tensors. Waits for the device."""
        ...
