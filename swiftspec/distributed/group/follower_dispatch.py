"""A follower's roles, as its leader's messages move them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from swiftspec.config import MAX_TREE
from swiftspec.distributed.group.request_state import Bounds, Standing, in_range
from swiftspec.distributed.transport.codec import Words, one_word, read_opening, read_proposal, read_result
from swiftspec.distributed.transport.opcodes import Call
from swiftspec.messages import Opening, Proposal
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.prefix_cache import told
from swiftspec.runtime.runner import Runner
from swiftspec.runtime.verifier import LocalVerifier
from swiftspec.smc.population import SMC, Group

Act = Callable[[], object]


class Follower:
    """The roles of one rank; None for those that it has not. Every message is checked before anything is done with it:
    against the models' sizes, and against what the messages before it have opened."""

    def __init__(
        self, verifier: LocalVerifier | None, drafter: LocalDrafter | None, smc: SMC | None, bounds: Bounds
    ) -> None:
        self._verifier, self._drafter, self._smc, self._bounds = verifier, drafter, smc, bounds
        self._target, self._draft, self._population = (Standing(bounds) for _ in range(3))

    def read(self, kind: int, words: Words) -> Act:
        """What a message asks for. Raises ValueError on what no leader sends."""
        if self._verifier is not None and kind in (Call.VERIFIER_OPEN, Call.VERIFY, Call.VERIFIER_CLOSE):
            return self._read_verifier(self._verifier, kind, words)
        if self._drafter is not None and (Call.DRAFTER_OPEN <= kind <= Call.STEPS):
            return self._read_drafter(self._drafter, kind, words)
        if self._smc is not None and (Call.POPULATION_OPEN <= kind <= Call.POPULATION_CLOSE):
            return self._read_population(self._smc, kind, words)
        raise ValueError(f"a leader does not send messages of kind {kind} to this rank")

    def _read_verifier(self, verifier: LocalVerifier, kind: int, words: Words) -> Act:
        match kind:
            case Call.VERIFIER_OPEN:
                return partial(verifier.open, _opening(words, self._target, verifier, verifier.runner, guided=True))
            case Call.VERIFY:
                proposal = read_proposal(words)
                self._target.check(proposal)
                return partial(self._verify, verifier, proposal)
            case _:
                self._target.is_open = False
                return verifier.close

    def _verify(self, verifier: LocalVerifier, proposal: Proposal) -> None:
        result = verifier.verify(proposal)
        verifier.settle()
        self._target.move(result)

    def _read_drafter(self, drafter: LocalDrafter, kind: int, words: Words) -> Act:
        if kind in (Call.PROPOSE, Call.GROW, Call.OBSERVE):
            self._draft.require_open()
        match kind:
            case Call.DRAFTER_OPEN:
                return partial(drafter.open, _opening(words, self._draft, drafter, drafter.runner))
            case Call.PROPOSE:
                return drafter.propose
            case Call.GROW:
                return drafter.grow
            case Call.OBSERVE:
                result = read_result(words)
                self._draft.move(result)
                return partial(drafter.observe, result)
            case Call.DRAFTER_CLOSE:
                self._draft.is_open = False
                return drafter.close
            case _:
                steps = in_range(one_word(words, "number of steps"), 1, MAX_TREE, "steps")
                return partial(setattr, drafter, "draft_steps", steps)

    def _read_population(self, smc: SMC, kind: int, words: Words) -> Act:
        match kind:
            case Call.POPULATION_OPEN:
                opening = _opening(words, self._population, smc, smc.target, smc.draft)
                ends = opening.sampling
                if ends.max_tokens is None:
                    raise ValueError("a population is opened with a limit of its tokens")
                if not smc.has_room:
                    raise ValueError("a population is opened where there is no room for another")
                most = self._bounds.context - len(opening.tokens)
                in_range(ends.max_tokens, 1, max(most, 1), "the tokens of a population")
                return partial(smc.admit, opening, ends.stop_token_ids, ends.max_tokens)
            case Call.POPULATION_ROUND:
                if not smc.groups:
                    raise ValueError("no request is open")
                return partial(_round, smc)
            case _:
                sequence = one_word(words, "sequence")
                leaving = [group for group in smc.groups if group.sequence == sequence]
                return partial(_leave, smc, leaving)


def _round(smc: SMC) -> None:
    smc.launch()
    smc.collect()


def _leave(smc: SMC, groups: Sequence[Group]) -> None:
    for group in groups:
        smc.leave(group)


def _opening(words: Words, standing: Standing, role: Any, *runners: Runner, guided: bool = False) -> Opening:
    """An opening, whose steps the leader has chosen among those that all ranks of the group can use, and which keeps
    no more than this rank has."""
    opening = read_opening(words)
    if opening.steps not in {kind.name for kind in role.steps_known}:
        raise ValueError("an opening names no steps that this rank knows")
    standing.open(opening)
    here = told(opening, *runners, guided=guided).kept
    if here != opening.kept:
        raise ValueError(f"an opening keeps {opening.kept} tokens of earlier texts, where this rank has {here}")
    return opening
