"""Runners and roles on models made in a test, built as builder/ builds them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from swiftspec.builder.drafters import build_drafter
from swiftspec.builder.roles import TreeRoles
from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.engine import TreeDecoding
from swiftspec.llm_engine import LLMEngine
from swiftspec.messages import RequestStart
from swiftspec.params import SamplingParams
from swiftspec.runtime.drafter import Drafter
from swiftspec.runtime.executors import available
from swiftspec.runtime.executors.available import ExecutorDeps
from swiftspec.runtime.executors.graph import Capture
from swiftspec.runtime.fallback_drafter import FallbackDrafter
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.runner import Runner
from swiftspec.runtime.target_verifier import TargetVerifier
from swiftspec.runtime.verifier import LocalVerifier, Verifier
from swiftspec.sampling.vocab import VocabShard
from swiftspec.smc.executors import population_executors
from swiftspec.smc.group_result import GroupResult
from swiftspec.smc.particles import Particles
from swiftspec.smc.scheduler import BatchScheduler
from swiftspec.smc.sequence_group import SequenceGroup
from swiftspec.tree.rejection import RejectionSampling


def request_start(
    tokens: Sequence[int], sampling: SamplingParams, prompt_len: int | None = None, request: int = 1
) -> RequestStart:
    """A request whose tokens are all prompt by default."""
    return RequestStart(request, tuple(tokens), sampling, len(tokens) if prompt_len is None else prompt_len)


def make_runner(model: Any, ops: Any, vocab: int | None = None, *, context: int, tree_slots: int) -> Runner:
    """A runner on a model of this process; in a group, on this rank's shard."""
    size: int = model.spec.vocab_size if vocab is None else vocab
    shard = None if model.group is None else VocabShard(model.group, model.head_rows, size)
    return Runner(model, ops, size, context=context, tree_slots=tree_slots, shard=shard)


def executor_deps(runner: Runner, capture: Capture | None = None) -> ExecutorDeps:
    """What the executors of the runner's model are built from."""
    ops: Any = runner.ops
    return ExecutorDeps(ops, getattr(runner.model, "fused", None), capture)


def make_drafter(
    runner: Runner, config: EngineConfig, capture: Capture | None = None, *, ahead: bool | None = None
) -> LocalDrafter:
    """`ahead`: a lookahead or a serial drafter; None: as the mode requires."""
    if ahead is not None:
        config = replace(config, mode="async" if ahead else "serial", target_tp=1, draft_tp=-1)
    return build_drafter(runner, executor_deps(runner, capture), config)


def make_verifier(
    runner: Runner, method: str = "match", capture: Capture | None = None, *, synthetic_length: float | None = None
) -> LocalVerifier:
    """`method`, `synthetic_length`: as EngineConfig.verify and EngineConfig.synthetic_acceptance_length."""
    return TargetVerifier(
        runner,
        available.target_executors(runner, executor_deps(runner, capture)),
        RejectionSampling if method == "reject" else None,
        synthetic_length,
    )


class SequentialScheduler(BatchScheduler):
    """Serves one request at a time, as an engine does whose caller waits for each."""

    group: SequenceGroup

    @property
    def particles(self) -> Particles:
        """The particles of all groups."""
        return self.round.particles

    def open(self, start: RequestStart, stops: Collection[int], limit: int) -> SequenceGroup:
        for group in [*self.groups]:
            self.evict_group(group)
        self.group = self.admit(start, stops, limit)
        return self.group

    def answer(self) -> GroupResult:
        return self.finish(self.group)

    def drain(self) -> None:
        """Reads the results of all rounds so far."""
        while self._in_flight:
            self._read_result()


def make_scheduler(
    target: Runner,
    draft: Runner,
    config: PopulationConfig,
    *,
    max_tokens: int,
    lag: int = 0,
    captures: tuple[Capture | None, Capture | None] = (None, None),
) -> SequentialScheduler:
    """A scheduler of sequence groups on two models of this process."""
    made = executor_deps(target, captures[0]), executor_deps(draft, captures[1])
    steps = population_executors(target, draft, *made, config)
    return SequentialScheduler(target, draft, steps, config, max_tokens=max_tokens, lag=lag)


def restrict_executors(role: LocalDrafter | LocalVerifier | BatchScheduler, *names: str) -> None:
    """Restricts a role to these executors."""
    left: list[Any] = [kind for kind in role.executors if kind.name in names]
    role.executors = left


def tree_of(llm: LLMEngine) -> TreeRoles:
    """The roles of an engine that decodes by a draft tree."""
    assert isinstance(llm.roles.inner_roles, TreeRoles)
    return llm.roles.inner_roles


def drafter_of(llm: LLMEngine) -> LocalDrafter:
    """Its drafter, which is one of this process."""
    drafter = tree_of(llm).drafter
    assert isinstance(drafter, LocalDrafter)
    return drafter


def verifier_of(llm: LLMEngine) -> LocalVerifier:
    """Its verifier, likewise."""
    verifier = tree_of(llm).verifier
    assert isinstance(verifier, LocalVerifier)
    return verifier


def scheduler_of(llm: LLMEngine) -> BatchScheduler:
    """The scheduler of an engine that decodes sequence groups."""
    assert isinstance(llm.roles.inner_roles, BatchScheduler)
    return llm.roles.inner_roles


def replace_roles(
    llm: LLMEngine, drafter: Drafter | None = None, verifier: Verifier | None = None, spare: Drafter | None = None
) -> None:
    """Replaces drafter or verifier of an engine; without a controller. `spare`: see `FallbackDrafter`."""
    parts = tree_of(llm)
    safe = FallbackDrafter(drafter or parts.drafter, spare)
    llm.decoding = TreeDecoding(safe, verifier or parts.verifier)
