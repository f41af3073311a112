"""Determines from the code which executor runs which request and which model: the roles select among the executors of
each machine.

No model is loaded. The executors are built on stand-ins that declare the capabilities of a machine, and only report
which features they support.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from swiftspec import params
from swiftspec.capabilities import MODEL_FEATURES, OPERATORS, Features, check_features, why_slower
from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.errors import UserError
from swiftspec.messages import RequestStart
from swiftspec.params import SamplingParams
from swiftspec.runtime.executors import Executor, TreeExecutor, available, select_executor
from swiftspec.runtime.executors.head import HeadExecutor
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.target_verifier import TargetVerifier
from swiftspec.sampling.vocab import TOP_CANDIDATES
from swiftspec.smc.executors import PopulationExecutor, population_executors
from swiftspec.tree.rejection import RejectionSampling

REFUSED = "refused"
RANKS = 2  # ranks per group
DEEP = TOP_CANDIDATES * RANKS  # a top-k that exceeds what the ranks of such a group exchange
SERIAL, DRAWN = EngineConfig(), EngineConfig(proposal="sample")
REJECTED = EngineConfig(verify="reject")


@dataclass(frozen=True, slots=True)
class Machine:
    """Capabilities of a machine, which determine the executors that it offers.

    `operators`: the name of the backend of native operators; empty: torch's own operators.
    `fused`: the model is one native call.
    `graphs`: maximum sequences per forward in a CUDA graph; 0: no graphs.
    `tree`: there is a draft tree on the device.
    `group`: there is a tensor-parallel group.
    `messages`: the group's messages may be part of a graph.
    """

    name: str
    operators: str = ""
    fused: bool = False
    graphs: int = 0
    tree: bool = False
    group: bool = False
    messages: bool = False

    def runner(self, sequences: int = 1) -> Any:
        """Returns a stand-in for the runner of either model. `sequences`: of its cache."""
        group = SimpleNamespace(captures=lambda x: self.messages) if self.group else None
        cpu = torch.device("cpu")
        model = SimpleNamespace(group=group, dtype=torch.float32, device=cpu)
        shard = SimpleNamespace(num_exchanged=DEEP) if self.group else None
        cache = SimpleNamespace(buffer_kv_len=lambda: [0] * sequences)
        return SimpleNamespace(model=model, shard=shard, vocab=1, tree_slots=16, cache=cache)

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

    def expansion_executors(self, sequences: int = 1) -> list[TreeExecutor]:
        return available.draft_executors(self.runner(sequences), self.deps(), SERIAL)[0]

    def verification_executors(self, sequences: int = 1) -> list[TreeExecutor]:
        return available.target_executors(self.runner(sequences), self.deps())

    def population_executors(self) -> list[PopulationExecutor]:
        return population_executors(self.runner(), self.runner(), self.deps(), self.deps(), PopulationConfig())


MACHINES = (
    Machine("CPU, native operators", "cpu", fused=True),
    Machine("one GPU, CUDA operators", "cuda", graphs=2, tree=True),
    Machine("several GPUs, CUDA operators", "cuda", graphs=2, tree=True, group=True, messages=True),
    Machine("one GPU, `--ops unfused`", graphs=1),
    Machine("several GPUs, `--ops unfused`", graphs=1, group=True, messages=True),
    Machine("everything else"),
)
# kind of machine -> with native operators, with torch's own
MACHINE_KINDS = {
    "CPU": (MACHINES[0], MACHINES[5]),
    "one GPU": (MACHINES[1], MACHINES[3]),
    "several GPUs": (MACHINES[2], MACHINES[4]),
}


@dataclass(frozen=True, slots=True)
class RequestCase:
    """A request, the engine configuration for it, and traits of the model."""

    name: str
    sampling: SamplingParams
    config: EngineConfig = SERIAL
    traits: Features = frozenset()

    @property
    def start(self) -> RequestStart:
        return RequestStart(0, (0,), self.sampling, 1)

    @property
    def company(self) -> Features:
        """The features of a request among others."""
        return frozenset({"company", "several requests"} if self.config.max_num_seqs > 1 else ())


TEMPERATURE = RequestCase("temperature above 0", SamplingParams())
GREEDY = RequestCase("temperature 0", SamplingParams(temperature=0.0))
BIAS = RequestCase("logit bias, allowed tokens, or a bad word of one token", SamplingParams(logit_bias={0: 1.0}))
FILTERS = RequestCase(f"a filter ({', '.join(params.FILTERS)})", SamplingParams(top_p=0.9))
DEEP_FILTERS = RequestCase(f"top-k of {TOP_CANDIDATES} or more for each rank of a group", SamplingParams(top_k=DEEP))
PENALTIES = RequestCase(f"a penalty ({', '.join(params.PENALTIES)})", SamplingParams(presence_penalty=1.0))
GUIDANCE = RequestCase("guidance", SamplingParams(guidance_scale=2.0))
GRAMMAR = RequestCase("a grammar", SamplingParams(grammar="start: /a/"))
MIN_TOKENS = RequestCase("`min_tokens`", SamplingParams(min_tokens=2))
BAD_WORDS = RequestCase("a bad word of several tokens", SamplingParams(bad_words_ids=((1, 2),)))
SCORED = RequestCase("log-probabilities", SamplingParams(logprobs=1))
SHAPED = (
    GREEDY, TEMPERATURE, BIAS, FILTERS, DEEP_FILTERS, PENALTIES, GUIDANCE, GRAMMAR, MIN_TOKENS, BAD_WORDS, SCORED,
)  # fmt: skip
HIDDEN = RequestCase("a target that keeps hidden states", SamplingParams(), traits=frozenset({"hidden states"}))
HEAD = RequestCase("a draft head", SamplingParams(), traits=frozenset({"draft head", "draft_head"}))
OTHER = RequestCase("a draft whose vocabulary is not the target's", SamplingParams())  # nothing is selected by it
MODELS = (
    RequestCase("none of them", SamplingParams()),
    OTHER,
    *(
        RequestCase(feature.title, SamplingParams(), traits=frozenset({name}))
        for name, feature in MODEL_FEATURES.items()
        if name not in HEAD.traits
    ),
)
JOINED = RequestCase(
    "one of several at a time (`--max-num-seqs` above 1)", SamplingParams(), EngineConfig(max_num_seqs=2)
)
SAMPLE = RequestCase("proposal `sample`", SamplingParams(), DRAWN)
REJECT = RequestCase("`--verify reject`", SamplingParams(), REJECTED)
COLD = RequestCase("proposal `sample` at temperature 0", SamplingParams(temperature=0.0), DRAWN)


Choice = tuple[Sequence[Executor], Features]  # executors of a role, the fastest first, and what a request requires


def expansion(machine: Machine, case: RequestCase) -> Choice:
    """Returns the executors that expand draft trees, and the features that a request requires of them."""
    case.config.check_request(case.sampling)
    offered = machine.expansion_executors(case.config.max_num_seqs)
    executors: list[Any] = [HeadExecutor] if HEAD.traits <= case.traits else offered
    nothing: Any = None
    children: Any = SimpleNamespace(sampled=case.config.proposal == "sample")
    drafter = LocalDrafter(machine.runner(), executors, nothing, children, case.config)
    return executors, drafter.required_features(case.start) | case.company


def verification(machine: Machine, case: RequestCase) -> Choice:
    """As `expansion`, for runs of the target on a proposal."""
    case.config.check_request(case.sampling)
    executors = machine.verification_executors(case.config.max_num_seqs)
    rejection = RejectionSampling if case.config.verify == "reject" else None
    required = TargetVerifier(machine.runner(), executors, rejection).required_features(case.sampling)
    return executors, required | case.company


def population(machine: Machine, case: RequestCase) -> Choice:
    """As `expansion`, for rounds of particles."""
    check_features(EngineConfig("smc").features | case.sampling.features | case.traits)
    return machine.population_executors(), case.sampling.features


Phase = Callable[[Machine, RequestCase], Choice]
# title, phase, requests, models
PHASES: tuple[tuple[str, Phase, tuple[RequestCase, ...], tuple[RequestCase, ...]], ...] = (
    ("Expansions of the draft tree", expansion, (*SHAPED, JOINED, SAMPLE, REJECT, COLD), (*MODELS, HEAD)),
    ("Verifications", verification, (*SHAPED, JOINED, HIDDEN, SAMPLE, REJECT, COLD), (*MODELS, HIDDEN)),
    ("Population rounds (mode smc)", population, (*SHAPED, HIDDEN), (*MODELS, HIDDEN, HEAD)),
)


def level(phase: Phase, machine: Machine, case: RequestCase) -> str:
    """Returns the name of the executor that runs a request on a machine, or "refused"."""
    try:
        return select_executor(*phase(machine, case)).name
    except UserError:
        return REFUSED


def rows(phase: Phase, requests: Sequence[RequestCase]) -> Iterator[list[str]]:
    """Yields for each request its name and the name of its executor on each machine."""
    for case in requests:
        yield [case.name, *(level(phase, machine, case) for machine in MACHINES)]


def machine_for(kind: str, traits: Features) -> Machine:
    """Returns the machine of a kind, with the operators that run a model with these traits."""
    native, library = MACHINE_KINDS[kind]
    return native if traits & MODEL_FEATURES.keys() <= OPERATORS[native.operators] else library


def model_rows(phase: Phase, cases: Sequence[RequestCase]) -> Iterator[list[str]]:
    """Yields for models with equal executors their traits and the name of the executor on each kind of machine."""
    found: dict[tuple[str, ...], list[str]] = {}
    for case in cases:
        levels = tuple(level(phase, machine_for(kind, case.traits), case) for kind in MACHINE_KINDS)
        found.setdefault(levels, []).append(case.name)
    yield from (["; ".join(names), *levels] for levels, names in found.items())


def eager_reasons(phase: Phase, requests: Sequence[RequestCase]) -> list[str]:
    """Returns why requests run eagerly on machines with faster executors, a sentence for each reason."""
    found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}  # reason -> names of cases and of machines
    for case in requests:
        for machine in MACHINES:
            if (machine.fused or machine.graphs) and level(phase, machine, case) == "eager":
                executors, required = phase(machine, case)
                columns = executors[0].columns or ("graph of one sequence",)  # offered only for one sequence
                cases, machines = found.setdefault(str(why_slower(columns, required)), ({}, {}))
                cases[case.name], machines[machine.name] = None, None
    every = sum(any(level(phase, machine, case) != REFUSED for machine in MACHINES) for case in requests)
    return [
        f"{'every request' if len(cases) == every else '; '.join(cases)} ({'; '.join(machines)}): {reason}"
        for reason, (cases, machines) in found.items()
    ]


def offered_executors() -> list[type]:
    """Returns the executor classes that any machine offers, the fastest first."""
    offers = (
        machine.expansion_executors() + machine.verification_executors() + machine.population_executors()
        for machine in MACHINES
    )
    found = dict.fromkeys(type(steps) for offer in offers for steps in offer)
    return sorted(found, key=lambda kind: ("native", "graph", "graph forwards", "eager").index(kind.name))
