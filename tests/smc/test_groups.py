"""Several groups in one batch: each equals itself alone, whatever else is admitted and released; no sequence is
leaked."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from swiftspec.backends.reference import reference
from swiftspec.config import PopulationConfig
from swiftspec.params import SamplingParams
from swiftspec.smc.decoding import decode_groups
from swiftspec.smc.particles import DEAD
from swiftspec.smc.sequence_group import SequenceGroup
from tests.smc.test_smc_distribution import RunResults, check_unbiased
from tests.support.cases import examples
from tests.support.fake_cuda_graphs import Rerun
from tests.support.history_models import HistoryModel, global_power, make_worker, population
from tests.support.history_models import run as decode
from tests.support.roles import SequentialScheduler, make_runner, make_scheduler, request_start

WARM = SamplingParams(temperature=0.8)
FILTERED: dict[str, Any] = {"top_k": 2, "min_p": 0.05}
PENALISED: dict[str, Any] = {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "logit_bias": {1: 0.5}}
MODELS = HistoryModel(3, 1), HistoryModel(3, 2)


@dataclass(frozen=True)
class RequestSpec:
    """A request of a population."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    stops: frozenset[int]
    limit: int

    def admit(self, worker: SequentialScheduler) -> SequenceGroup:
        return worker.admit(request_start(self.prompt, self.sampling), self.stops, self.limit)


def mixed(count: int) -> list[RequestSpec]:
    """Requests with different prompts, lengths, parameters and ends."""
    prompts = [tuple((i + j) % 3 for j in range(1 + i % 4)) for i in range(count)]
    shaped = [{"temperature": 0.6}, FILTERED, {}, PENALISED]
    sampling = [replace(WARM, seed=i, **shaped[i % 4]) for i in range(count)]
    ends = [(frozenset({1} if i % 2 else ()), 4 + 5 * i % 13) for i in range(count)]
    return [RequestSpec(*spec, *end) for spec, end in zip(zip(prompts, sampling), ends)]


def decode_together(worker: SequentialScheduler, requests: Sequence[RequestSpec]) -> dict[int, Any]:
    """Decodes all of them as sequences become free, and checks that the streamed tokens of each form its answer."""
    waiting, numbers = deque(enumerate(requests)), dict[SequenceGroup, int]()
    streamed: dict[int, list[int]] = {}
    answers: dict[int, Any] = {}

    def admit() -> bool:
        if not waiting or not worker.has_room:
            return False
        number, spec = waiting.popleft()
        numbers[spec.admit(worker)] = number
        return True

    for group, tokens in decode_groups(worker, admit):
        streamed.setdefault(numbers[group], []).extend(tokens)
        if group.answer is not None:
            answers[numbers[group]] = group.answer
    assert {number: answer.tokens for number, answer in answers.items()} == streamed
    return answers


@pytest.mark.parametrize("plan", [PopulationConfig(3, 3, 0.7), PopulationConfig(3, 2, 0.7, 2.0, 1)], ids=str)
def test_each_group_equals_itself_alone(plan: PopulationConfig) -> None:
    """With any number of groups, with room or compacted often, and with the host one round behind."""
    requests, alone = mixed(10), make_worker(*MODELS, plan, max_tokens=24, slots=400)
    wanted = dict[int, Any]()
    for number, spec in enumerate(requests):
        decode(alone, spec.prompt, spec.sampling, set(spec.stops), spec.limit)
        wanted[number] = alone.answer()
    compactions = 0
    for groups, slots, lag in ((4, 400, 0), (3, 75, 0), (4, 90, 1)):
        worker = make_worker(*MODELS, replace(plan, smc_groups=groups), max_tokens=24, slots=slots, lag=lag)
        found = decode_together(worker, requests)
        assert {n: found[n].tokens for n in wanted} == {n: wanted[n].tokens for n in wanted}
        assert all(found[n].log_z == pytest.approx(wanted[n].log_z) for n in wanted)
        compactions += sum(answer.compactions for answer in found.values())
    assert compactions > 10


class Capturing:
    """The reference operators, declared as capturable with any number of sequences."""

    MAX_CAPTURED_SEQUENCES = 64

    def __getattr__(self, name: str) -> Any:
        return getattr(reference, name)


@pytest.mark.parametrize(("slots", "lag"), [(64, 0), (64, 1), (400, 1)])
def test_captured_rounds_do_not_change_idle_groups(slots: int, lag: int) -> None:
    """A graph runs over a power of two of groups, or all: including those without a request, and those that finished in
    the last round. Here one is out of room while three others continue, which were admitted later."""
    plan = PopulationConfig(3, 2, 0.0, smc_groups=4)
    specs = [(0, 24, ()), (1, 4, ()), (2, 4, {1}), (3, 4, ()), *((seed, 24, ()) for seed in (4, 5, 6)), (7, 9, {1})]
    requests = [RequestSpec((0, 1), replace(WARM, seed=seed), frozenset(stops), limit) for seed, limit, stops in specs]
    found: list[dict[int, Any]] = []
    for capture in (None, Rerun()):
        target, draft = (make_runner(model, Capturing(), context=40, tree_slots=slots) for model in MODELS)
        worker = make_scheduler(target, draft, plan, max_tokens=24, lag=lag, captures=(capture, capture))
        found.append(decode_together(worker, requests))
        assert (worker.executors[0].name == "graph") == (capture is not None)
        assert capture is None or capture.captures > 2
    for number, eager in found[0].items():
        graphed = found[1][number]
        assert graphed == replace(eager, log_z=graphed.log_z) and graphed.log_z == pytest.approx(eager.log_z)
    assert any(answer.full for answer in found[0].values()) == (slots == 64)


@pytest.mark.slow
def test_several_groups_follow_the_distribution() -> None:
    """By enumeration: two requests with different logits parameters, one that soon leaves, and one that then takes its
    sequence, with another prompt and penalties."""
    plan, limit = PopulationConfig(48, 2, 0.7, 2.0, smc_groups=3), 4
    target, draft = HistoryModel(3, 1), HistoryModel(3, 2, 0.6)
    worker = make_worker(target, draft, plan, slots=1 + 4 * plan.slots_per_round)
    specs = [((0, 1), replace(WARM, temperature=0.7)), ((0, 1), replace(WARM, **FILTERED))]
    specs.append(((2, 0), replace(WARM, **PENALISED)))
    found = [RunResults(target, []) for _ in specs]
    for seed in range(30):
        visitor = RequestSpec((1,), replace(WARM, seed=seed), frozenset(), 9).admit(worker)
        *first, late = [RequestSpec(prompt, replace(s, seed=seed), frozenset({2}), limit) for prompt, s in specs]
        groups = [each.admit(worker) for each in first]
        worker.launch()
        worker.collect()
        assert not visitor.is_finished
        worker.evict_group(visitor)
        groups.append(late.admit(worker))
        assert groups[-1].sequence == visitor.sequence
        while worker.launch():
            worker.collect()
        for group, each in zip(groups, found, strict=True):
            each.distributions.append(population(worker, worker.round.requests.order.index(group.sequence)))
            worker.evict_group(group)
    for (prompt, sampling), each in zip(specs, found, strict=True):
        check_unbiased(each, global_power(target, prompt, sampling, 2.0, {2}, limit))


class SequenceGroups(RuleBasedStateMachine):
    """Requests are admitted, continue, end and are cancelled in any order; each is compared with itself alone."""

    G, SLOTS, LIMIT = 3, 64, 12
    PLAN = PopulationConfig(2, 2, 0.8, smc_groups=G)
    KNOWN: ClassVar[dict[str, list[int]]] = {}  # answers of requests alone

    def __init__(self) -> None:
        super().__init__()
        self.worker = make_worker(*MODELS, self.PLAN, max_tokens=self.LIMIT, slots=self.SLOTS)
        self.alone = make_worker(*MODELS, replace(self.PLAN, smc_groups=1), max_tokens=self.LIMIT, slots=self.SLOTS)
        self.admitted: dict[SequenceGroup, RequestSpec] = {}

    def wanted(self, spec: RequestSpec) -> list[int]:
        """The result of a request alone."""
        key = repr(spec)
        if key not in self.KNOWN:
            decode(self.alone, spec.prompt, spec.sampling, set(spec.stops), spec.limit)
            self.KNOWN[key] = self.alone.answer().tokens
        return self.KNOWN[key]

    @precondition(lambda self: len(self.admitted) < self.G)
    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=3), seed=st.integers(0, 3),
        shaped=st.sampled_from([{}, FILTERED, PENALISED]), stops=st.sampled_from([frozenset[int](), frozenset({1})]),
        limit=st.integers(1, LIMIT),
    )  # fmt: skip
    def admit(self, prompt: list[int], seed: int, shaped: dict[str, Any], stops: frozenset[int], limit: int) -> None:
        spec = RequestSpec(tuple(prompt), replace(WARM, seed=seed, **shaped), stops, limit)
        assert self.worker.has_room
        self.admitted[spec.admit(self.worker)] = spec

    @rule()
    def step(self) -> None:
        going = {group: group.rounds for group in self.admitted if not group.is_finished}
        assert self.worker.launch() == bool(going)
        self.worker.collect()
        assert all(group.rounds == rounds + 1 for group, rounds in going.items() if not group.region.full)
        for group in [group for group in self.admitted if group.is_finished]:
            spec, answer = self.admitted.pop(group), self.worker.finish(group)
            self.worker.evict_group(group)
            assert answer.tokens == self.wanted(spec)
            assert answer.tokens[: len(group.tokens)] == group.tokens

    @precondition(lambda self: self.admitted)
    @rule(which=st.integers(0, G - 1))
    def cancel(self, which: int) -> None:
        group = [*self.admitted][which % len(self.admitted)]
        del self.admitted[group]
        self.worker.evict_group(group)

    @invariant()
    def no_place_is_lost(self) -> None:
        worker, p = self.worker, self.worker.particles
        assert worker.groups == [*self.admitted] and worker.has_room == (len(self.admitted) < self.G)
        requests = worker.round.requests
        assert sorted(requests.order) == [*range(self.G)] == sorted(requests.sequences.tolist())
        assert len({group.sequence for group in self.admitted}) == len(self.admitted)
        used = {group.sequence: group.region.used_slots for group in self.admitted}
        for at, sequence in enumerate(requests.order):
            state = p.slot_states(self.SLOTS)[at]
            if sequence not in used:
                assert (state == DEAD).all() and p.finished[at].all(), "a slot is leaked"
                continue
            assert int(p.slots_used[at]) == used[sequence] <= self.SLOTS and (state[used[sequence] :] == DEAD).all()
            prefix = worker.target.cache.prefix_len[sequence]
            assert worker.draft.cache.prefix_len[sequence] == prefix == int(requests.prefix[at])


SequenceGroups.TestCase.settings = settings(max_examples=examples(10), stateful_step_count=20)
TestSequenceGroups = SequenceGroups.TestCase


class ManySequenceGroups(SequenceGroups):
    """The same with more steps."""


ManySequenceGroups.TestCase.settings = settings(max_examples=examples(200), stateful_step_count=50)
TestManySequenceGroups = pytest.mark.long(ManySequenceGroups.TestCase)
