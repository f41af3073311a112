"""Dispatcher of a follower: decodes its leader's commands and executes them on its own roles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from swiftspec.config import MAX_TREE_NODES
from swiftspec.distributed.transport.codec import (
    Words,
    single_word,
    unpack_proposal,
    unpack_request_start,
    unpack_result,
)
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.distributed.transport.request_state import ModelLimits, RequestState, in_range
from swiftspec.messages import Proposal, RequestStart
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.prefix_caching import with_cached_lengths
from swiftspec.runtime.runner import Runner
from swiftspec.runtime.verifier import LocalVerifier
from swiftspec.smc.scheduler import BatchScheduler
from swiftspec.smc.sequence_group import SequenceGroup

Action = Callable[[], object]


class FollowerDispatcher:
    """Decoder of the leader's commands for the roles of one rank. A role is None if this rank does not have it.

    Every message is validated before it is executed, against the models' limits and the state of the open request.
    """

    def __init__(
        self,
        verifier: LocalVerifier | None,
        drafter: LocalDrafter | None,
        scheduler: BatchScheduler | None,
        bounds: ModelLimits,
    ) -> None:
        self._verifier, self._drafter, self._scheduler, self._bounds = verifier, drafter, scheduler, bounds
        self._target, self._draft, self._group = (RequestState(bounds) for _ in range(3))

    def decode(self, kind: int, words: Words) -> Action:
        """Returns a function that executes the command with opcode `kind`. Raises ValueError if the command is
        invalid."""
        if self._verifier is not None and kind in (Opcode.VERIFIER_OPEN, Opcode.VERIFY, Opcode.VERIFIER_CLOSE):
            return self._decode_verifier(self._verifier, kind, words)
        if self._drafter is not None and (Opcode.DRAFTER_OPEN <= kind <= Opcode.SET_DRAFT_STEPS):
            return self._decode_drafter(self._drafter, kind, words)
        if self._scheduler is not None and (Opcode.POPULATION_OPEN <= kind <= Opcode.POPULATION_CLOSE):
            return self._decode_scheduler(self._scheduler, kind, words)
        raise ValueError(f"unexpected opcode {kind} from the leader")

    def _decode_verifier(self, verifier: LocalVerifier, kind: int, words: Words) -> Action:
        match kind:
            case Opcode.VERIFIER_OPEN:
                return partial(verifier.open, _opening(words, self._target, verifier, verifier.runner, guided=True))
            case Opcode.VERIFY:
                proposal = unpack_proposal(words)
                self._target.check_proposal(proposal)
                return partial(self._verify, verifier, proposal)
            case _:
                self._target.is_open = False
                return verifier.close

    def _verify(self, verifier: LocalVerifier, proposal: Proposal) -> None:
        result = verifier.verify(proposal)
        verifier.settle()
        self._target.advance(result)

    def _decode_drafter(self, drafter: LocalDrafter, kind: int, words: Words) -> Action:
        if kind in (Opcode.PROPOSE, Opcode.EXPAND, Opcode.OBSERVE):
            self._draft.require_open()
        match kind:
            case Opcode.DRAFTER_OPEN:
                return partial(drafter.open, _opening(words, self._draft, drafter, drafter.runner))
            case Opcode.PROPOSE:
                return drafter.propose
            case Opcode.EXPAND:
                return drafter.grow
            case Opcode.OBSERVE:
                result = unpack_result(words)
                self._draft.advance(result)
                return partial(drafter.observe, result)
            case Opcode.DRAFTER_CLOSE:
                self._draft.is_open = False
                return drafter.close
            case _:
                steps = in_range(single_word(words, "number of steps"), 1, MAX_TREE_NODES, "steps")
                return partial(setattr, drafter, "draft_steps", steps)

    def _decode_scheduler(self, scheduler: BatchScheduler, kind: int, words: Words) -> Action:
        match kind:
            case Opcode.POPULATION_OPEN:
                start = _opening(words, self._group, scheduler, scheduler.target, scheduler.draft)
                ends = start.sampling
                if ends.max_tokens is None:
                    raise ValueError("the request start of a sequence group lacks max_tokens")
                if not scheduler.has_room:
                    raise ValueError("the scheduler has no room for another sequence group")
                most = self._bounds.max_model_len - len(start.tokens)
                in_range(ends.max_tokens, 1, max(most, 1), "max_tokens of a sequence group")
                return partial(scheduler.admit, start, ends.stop_token_ids, ends.max_tokens)
            case Opcode.POPULATION_ROUND:
                if not scheduler.groups:
                    raise ValueError("no request is open")
                return scheduler.step
            case _:
                sequence = single_word(words, "sequence")
                leaving = [group for group in scheduler.groups if group.sequence == sequence]
                return partial(_evict, scheduler, leaving)


def _evict(scheduler: BatchScheduler, groups: Sequence[SequenceGroup]) -> None:
    for group in groups:
        scheduler.evict_group(group)


def _opening(words: Words, standing: RequestState, role: Any, *runners: Runner, guided: bool = False) -> RequestStart:
    """Unpacks a request start, opens the request in `standing` and returns the request start.

    `runners`: runners of `role`. `guided`: whether they also run the negative prompt of a request with guidance.
    Raises ValueError if the message is invalid, if this rank does not have the executor that the leader has chosen, or
    if it has another number of cached tokens.
    """
    start = unpack_request_start(words)
    if start.executor not in {kind.name for kind in role.executors}:
        raise ValueError("the request start names an executor that this rank does not have")
    standing.open(start)
    here = with_cached_lengths(start, *runners, guided=guided).num_cached_tokens
    if here != start.num_cached_tokens:
        raise ValueError(
            f"the leader has {start.num_cached_tokens} cached tokens of this prompt, but this rank has {here}"
        )
    return start
