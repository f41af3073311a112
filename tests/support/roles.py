"""Runners and roles on models made in a test, as builder/ makes them on those of a job."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from swiftspec.builder.model_pair import drafter_on
from swiftspec.builder.roles import Tree, decoding_on
from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.llm import LLM
from swiftspec.messages import Opening
from swiftspec.params import SamplingParams
from swiftspec.runtime.drafter import Drafter
from swiftspec.runtime.executors import selection
from swiftspec.runtime.executors.graph import Capture
from swiftspec.runtime.executors.selection import Tools
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.rejection_verifier import FullVerifier
from swiftspec.runtime.runner import Runner
from swiftspec.runtime.verifier import LocalVerifier, Verifier
from swiftspec.sampling.vocab import VocabShard
from swiftspec.smc.group_result import Answer
from swiftspec.smc.population import SMC, Group
from swiftspec.tree.rejection import Rejection


def opening(
    tokens: Sequence[int], sampling: SamplingParams, prompt_len: int | None = None, request: int = 1
) -> Opening:
    """Of a request whose tokens are all prompt, if nothing else is said."""
    return Opening(request, tuple(tokens), sampling, len(tokens) if prompt_len is None else prompt_len)


def make_runner(model: Any, ops: Any, vocab: int | None = None, *, context: int, tree_slots: int) -> Runner:
    """A runner on a model of this process; in a group, on this rank's share."""
    size: int = model.config.vocab_size if vocab is None else vocab
    shard = None if model.group is None else VocabShard(model.group, model.head_rows, size)
    return Runner(model, ops, size, context=context, tree_slots=tree_slots, shard=shard)


def tools(runner: Runner, capture: Capture | None = None) -> Tools:
    """What the runner's model offers."""
    ops: Any = runner.ops
    return Tools(ops, getattr(runner.model, "fused", None), capture)


def make_drafter(
    runner: Runner, config: EngineConfig, capture: Capture | None = None, *, ahead: bool | None = None
) -> LocalDrafter:
    """One that grows ahead of the target, or in turn with it; if that is not said, as the mode wants it."""
    if ahead is not None:
        config = replace(config, mode="async" if ahead else "serial", target_tp=1, draft_tp=-1)
    return drafter_on(runner, tools(runner, capture), config)


def make_verifier(runner: Runner, method: str = "match", capture: Capture | None = None) -> LocalVerifier:
    """`method`: as EngineConfig.verify."""
    return FullVerifier(
        runner, selection.for_target(runner, tools(runner, capture)), Rejection if method == "reject" else None
    )


class Alone(SMC):
    """Serves one request at a time, as an engine does whose caller waits for each."""

    group: Group

    def open(self, opening: Opening, stops: Collection[int], limit: int) -> Group:
        for group in [*self.groups]:
            self.leave(group)
        self.group = self.admit(opening, stops, limit)
        return self.group

    def answer(self) -> Answer:
        return self.finish(self.group)

    def drain(self) -> None:
        """Takes in what the rounds so far have left."""
        while self._told:
            self._take_in()


def make_population(
    target: Runner,
    draft: Runner,
    config: PopulationConfig,
    *,
    longest: int,
    lag: int = 0,
    captures: tuple[Capture | None, Capture | None] = (None, None),
) -> Alone:
    """Particles on two models of this process."""
    made = tools(target, captures[0]), tools(draft, captures[1])
    steps = selection.for_population(target, draft, *made, config)
    return Alone(target, draft, steps, config, longest=longest, lag=lag)


def only(role: LocalDrafter | LocalVerifier | SMC, *names: str) -> None:
    """Leaves a role these kinds of steps."""
    left: list[Any] = [kind for kind in role.steps_known if kind.name in names]
    role.steps_known = left


def tree_of(llm: LLM) -> Tree:
    """The roles of an engine that decodes by a draft tree."""
    assert isinstance(llm.roles.parts, Tree)
    return llm.roles.parts


def drafter_of(llm: LLM) -> LocalDrafter:
    """Its drafter, which is one of this process."""
    drafter = tree_of(llm).drafter
    assert isinstance(drafter, LocalDrafter)
    return drafter


def verifier_of(llm: LLM) -> LocalVerifier:
    """Its verifier, likewise."""
    verifier = tree_of(llm).verifier
    assert isinstance(verifier, LocalVerifier)
    return verifier


def population_of(llm: LLM) -> SMC:
    """The particles of an engine in mode smc."""
    assert isinstance(llm.roles.parts, SMC)
    return llm.roles.parts


def put(llm: LLM, drafter: Drafter | None = None, verifier: Verifier | None = None) -> None:
    """Has an engine decode with another drafter or verifier; without a controller."""
    parts = tree_of(llm)
    llm.engine.decoding = decoding_on(drafter or parts.drafter, verifier or parts.verifier)
