"""Determines from the code which executor runs which request: the roles select among the executors of each machine.

No model is loaded. The executors are built on stand-ins that declare the capabilities of a machine, and only report
which features they support.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any

import torch

from swiftspec.batching.limits import check_batch_sampling
from swiftspec.config import BatchConfig, EngineConfig, NativeRoundParams, PopulationConfig
from swiftspec.errors import UserError
from swiftspec.messages import RequestStart
from swiftspec.params import SamplingParams
from swiftspec.runtime.executors import Executor, Features, TreeExecutor, available, features_of, select_executor
from swiftspec.runtime.executors.graph_verifications import GraphVerificationExecutor
from swiftspec.runtime.executors.native import NativeExecutor
from swiftspec.runtime.executors.native_population import NativePopulationExecutor
from swiftspec.runtime.executors.population_rounds import (
    EagerPopulationExecutor,
    GraphPopulationExecutor,
    PopulationExecutor,
)
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.target_verifier import TargetVerifier
from swiftspec.sampling.vocab import TOP_CANDIDATES
from swiftspec.smc.limits import check_particle_sampling
from swiftspec.tree.rejection import RejectionSampling

REFUSED = "refused"
ANY = ""  # as a feature: of every request
# why a request runs eagerly: fastest executor that the machine offers for the phase -> missing feature -> reason
EAGER_REASONS: Mapping[type, Mapping[str, str]] = {
    NativeExecutor: {
        "drawn proposals": "sampled children need the draft's exact distribution, with filters and penalties, on the"
        " host.",
        "rejection": "the native rejection sampling is that of chains (exact batches), not that of trees.",
    },
    GraphVerificationExecutor: {
        "guidance": "a guided request has two sequences, and a CUDA graph with torch's own operators has one.",
    },
    NativePopulationExecutor: {
        "guidance": "a guided request runs the target on a second sequence, and a native round has one for each"
        " request.",
    },
    GraphPopulationExecutor: {
        "guidance": "a guided request runs the target on a second sequence, and the graph of a round has one for each"
        " request.",
    },
    EagerPopulationExecutor: {
        ANY: "an exact batch has several sequences, and a CUDA graph with torch's own operators has one.",
    },
}
RANKS = 2  # ranks per group
DEEP = TOP_CANDIDATES * RANKS  # a top-k that exceeds what the ranks of such a group exchange
SERIAL, DRAWN = EngineConfig(), EngineConfig(proposal="sample")
REJECTED = EngineConfig(verify="reject")


@dataclass(frozen=True, slots=True)
class Machine:
    """Capabilities of a machine, which determine the executors that it offers.

    `fused`: the model is one native call.
    `graphs`: maximum sequences per forward in a CUDA graph; 0: no graphs.
    `tree`: there is a draft tree on the device.
    `group`: there is a tensor-parallel group.
    `messages`: the group's messages may be part of a graph.
    """

    name: str
    fused: bool = False
    graphs: int = 0
    tree: bool = False
    group: bool = False
    messages: bool = False

    def runner(self, hidden_layers: tuple[int, ...] = ()) -> Any:
        """Returns a stand-in for the runner of either model."""
        group = SimpleNamespace(captures=lambda x: self.messages) if self.group else None
        cpu = torch.device("cpu")
        model = SimpleNamespace(group=group, dtype=torch.float32, device=cpu, hidden_layers=hidden_layers)
        shard = SimpleNamespace(num_exchanged=DEEP) if self.group else None
        return SimpleNamespace(model=model, shard=shard, vocab=1, tree_slots=16)

    def deps(self) -> available.ExecutorDeps:
        """Returns stand-ins for the components that executors are built from."""
        tree = SimpleNamespace(rows=SimpleNamespace(tokens=()), host_tree=lambda arrays: None)
        ops: Any = SimpleNamespace(
            device_tree=lambda *shape: tree if self.tree else None,
            capture_bucket=lambda max_kv_len: None,
            MAX_CAPTURED_SEQUENCES=self.graphs,
        )
        fused: Any = SimpleNamespace(tree=lambda *shape: None) if self.fused else None
        capture: Any = (lambda work: None) if self.graphs else None
        return available.ExecutorDeps(ops, fused, capture)

    def expansion_executors(self) -> list[TreeExecutor]:
        return available.draft_executors(self.runner(), self.deps(), SERIAL)[0]

    def verification_executors(self) -> list[TreeExecutor]:
        return available.target_executors(self.runner(), self.deps())

    def batch_executors(self, verify: str) -> list[PopulationExecutor]:
        shape, params = BatchConfig(2, 1, verify).shape, NativeRoundParams(1, verify)
        return available.population_executors(self.runner(), self.runner(), self.deps(), self.deps(), shape, params)

    def population_executors(self) -> list[PopulationExecutor]:
        shape, params = PopulationConfig().shape, NativeRoundParams(1, "weigh")
        return available.population_executors(self.runner(), self.runner(), self.deps(), self.deps(), shape, params)


MACHINES = (
    Machine("CPU, native operators", fused=True),
    Machine("one GPU, CUDA operators", graphs=2, tree=True),
    Machine("several GPUs, CUDA operators", graphs=2, tree=True, group=True, messages=True),
    Machine("one GPU, `--ops unfused`", graphs=1),
    Machine("several GPUs, `--ops unfused`", graphs=1, group=True, messages=True),
    Machine("everything else"),
)


@dataclass(frozen=True, slots=True)
class ObservedExecutor:
    """An executor that records which features are required of it."""

    kind: Any
    required: list[tuple[Executor, Features]]

    @property
    def name(self) -> str:
        return self.kind.name

    def supports(self, required: Features) -> bool:
        self.required.append((self.kind, required))
        return self.kind.supports(required)


@dataclass(frozen=True, slots=True)
class ObservedMachine(Machine):
    """A machine that records the required features and the executors that they were required of, in order."""

    required: list[tuple[Executor, Features]] = field(default_factory=list)

    @classmethod
    def of(cls, machine: Machine) -> ObservedMachine:
        return cls(*(getattr(machine, each.name) for each in fields(Machine)))

    def _observe(self, kinds: Sequence[Any]) -> list[Any]:
        return [ObservedExecutor(kind, self.required) for kind in kinds]

    def expansion_executors(self) -> list[TreeExecutor]:
        return self._observe(Machine.expansion_executors(self))

    def verification_executors(self) -> list[TreeExecutor]:
        return self._observe(Machine.verification_executors(self))

    def batch_executors(self, verify: str) -> list[PopulationExecutor]:
        return self._observe(Machine.batch_executors(self, verify))

    def population_executors(self) -> list[PopulationExecutor]:
        return self._observe(Machine.population_executors(self))


@dataclass(frozen=True, slots=True)
class RequestCase:
    """A request, the engine configuration for it, and the layers whose hidden states the target keeps."""

    name: str
    sampling: SamplingParams
    config: EngineConfig = SERIAL
    hidden_layers: tuple[int, ...] = ()

    @property
    def start(self) -> RequestStart:
        return RequestStart(0, (0,), self.sampling, 1)


TEMPERATURE = RequestCase("temperature above 0", SamplingParams())
GREEDY = RequestCase("temperature 0", SamplingParams(temperature=0.0))
BIAS = RequestCase("logit bias, allowed tokens, or a bad word of one token", SamplingParams(logit_bias={0: 1.0}))
FILTERS = RequestCase("top-k, top-p or min-p", SamplingParams(top_p=0.9))
DEEP_FILTERS = RequestCase(f"top-k of {TOP_CANDIDATES} or more for each rank of a group", SamplingParams(top_k=DEEP))
PENALTIES = RequestCase("repetition, presence or frequency penalty", SamplingParams(presence_penalty=1.0))
GUIDANCE = RequestCase("guidance", SamplingParams(guidance_scale=2.0))
GRAMMAR = RequestCase("a grammar", SamplingParams(grammar="start: /a/"))
MIN_TOKENS = RequestCase("`min_tokens`", SamplingParams(min_tokens=2))
BAD_WORDS = RequestCase("a bad word of several tokens", SamplingParams(bad_words_ids=((1, 2),)))
SCORED = RequestCase("log-probabilities", SamplingParams(logprobs=1))
SHAPED = (
    GREEDY, TEMPERATURE, BIAS, FILTERS, DEEP_FILTERS, PENALTIES, GUIDANCE, GRAMMAR, MIN_TOKENS, BAD_WORDS, SCORED,
)  # fmt: skip
HIDDEN = RequestCase("a target that keeps hidden states", SamplingParams(), hidden_layers=(0,))
SAMPLE = RequestCase("`--proposal sample`", SamplingParams(), DRAWN)
REJECT = RequestCase("`--verify reject`", SamplingParams(), REJECTED)
COLD = RequestCase("`--proposal sample` at temperature 0", SamplingParams(temperature=0.0), DRAWN)


def expansion_executor(machine: Machine, case: RequestCase) -> TreeExecutor:
    """Returns the executor that expands the draft tree for a request."""
    case.config.check_request(case.sampling)
    nothing: Any = None
    children: Any = SimpleNamespace(sampled=case.config.proposal == "sample")
    return LocalDrafter(
        machine.runner(), machine.expansion_executors(), nothing, children, case.config
    ).select_executor(case.start)


def verification_executor(machine: Machine, case: RequestCase) -> TreeExecutor:
    """Returns the executor that runs the target on a proposal."""
    case.config.check_request(case.sampling)
    rejection = RejectionSampling if case.config.verify == "reject" else None
    runner = machine.runner(case.hidden_layers)
    return TargetVerifier(runner, machine.verification_executors(), rejection).select_executor(case.start)


def population_executor(machine: Machine, case: RequestCase) -> Executor:
    """Returns the executor that runs a round of particles."""
    check_particle_sampling(case.sampling)
    hidden = ["hidden states"] if case.hidden_layers else []
    return select_executor(machine.population_executors(), features_of(case.sampling, "population", *hidden))


def batch_executor(machine: Machine, case: RequestCase) -> Executor:
    """Returns the executor that runs a round of chains."""
    check_batch_sampling(case.sampling)
    case.config.check_request(case.sampling)
    more = ["guidance"] if case.sampling.guided else []
    more += ["hidden states"] if case.hidden_layers else []
    required = features_of(case.sampling, "population", *more)
    return select_executor(machine.batch_executors(case.config.verify), required)


SelectExecutor = Callable[[Machine, RequestCase], Executor]
PHASES: tuple[tuple[str, SelectExecutor, tuple[RequestCase, ...]], ...] = (
    ("Expansions of the draft tree", expansion_executor, (*SHAPED, SAMPLE, REJECT, COLD)),
    ("Verifications", verification_executor, (*SHAPED, HIDDEN, SAMPLE, REJECT, COLD)),
    ("Rounds of an exact batch (`--max-num-seqs`)", batch_executor, (*SHAPED, HIDDEN, REJECT)),
    ("Population rounds (mode smc)", population_executor, (*SHAPED, HIDDEN)),
)


def rows(select: SelectExecutor, requests: Sequence[RequestCase]) -> Iterator[list[str]]:
    """Yields for each request its name and the name of its executor on each machine."""
    for case in requests:
        yield [case.name, *(_name(select, machine, case) for machine in MACHINES)]


def eager_reasons(select: SelectExecutor, requests: Sequence[RequestCase]) -> list[str]:
    """Returns why requests run eagerly on machines with faster executors, a sentence for each reason."""
    found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}  # reason -> names of cases and of machines
    for case in requests:
        for machine in MACHINES:
            reason = _eager_reason(select, machine, case)
            if reason is not None:
                cases, machines = found.setdefault(reason, ({}, {}))
                cases[case.name], machines[machine.name] = None, None
    every = sum(any(_name(select, machine, case) != REFUSED for machine in MACHINES) for case in requests)
    return [
        f"{'every request' if len(cases) == every else '; '.join(cases)} ({'; '.join(machines)}): {reason}"
        for reason, (cases, machines) in found.items()
    ]


def _eager_reason(select: SelectExecutor, machine: Machine, case: RequestCase) -> str | None:
    """Returns why a request runs eagerly, or None if it does not, or if all requests do on this machine."""
    observed = ObservedMachine.of(machine)
    if not (machine.fused or machine.graphs) or _name(select, observed, case) != "eager":
        return None
    fastest, required = observed.required[0]
    missing = [feature for feature in sorted(required) if not fastest.supports(frozenset((feature,)))]
    return EAGER_REASONS[type(fastest)][missing[0] if missing else ANY]


def _name(select: SelectExecutor, machine: Machine, case: RequestCase) -> str:
    try:
        return select(machine, case).name
    except UserError:
        return REFUSED


def offered_executors() -> list[type]:
    """Returns the executor classes that any machine offers, the fastest first."""
    offers = (
        machine.expansion_executors() + machine.verification_executors() + machine.population_executors()
        for machine in MACHINES
    )
    found = dict.fromkeys(type(steps) for offer in offers for steps in offer)
    return sorted(found, key=lambda kind: ("native", "graph", "graph forwards", "eager").index(kind.name))
