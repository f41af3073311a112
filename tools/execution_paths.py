"""Which steps run which request, asked of the code: the roles choose among the steps that each machine offers.

No model is loaded: the steps are made on stand-ins that say what a machine can do, and only asked what they take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.errors import UserError
from swiftspec.messages import RequestStart
from swiftspec.params import SamplingParams
from swiftspec.runtime.executors import Executor, TreeExecutor, features_of, select_executor, selection
from swiftspec.runtime.executors.population_rounds import PopulationExecutor
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.rejection_verifier import RejectionVerifier
from swiftspec.sampling.vocab import TOP_CANDIDATES
from swiftspec.smc.limits import check_sampling
from swiftspec.tree.rejection import RejectionSampling

REFUSED = "refused"
RANKS = 2  # of a group, where a machine has one
DEEP = TOP_CANDIDATES * RANKS  # a top-k that the ranks of that group do not exchange
SERIAL, DRAWN = EngineConfig(), EngineConfig(proposal="sample")
REJECTED = EngineConfig(verify="reject")


@dataclass(frozen=True, slots=True)
class Machine:
    """What steps can be made of: the model as one native call, graphs of forwards over so many sequences, a tree on the
    device; a group of ranks, and whether its messages may be part of a graph."""

    name: str
    fused: bool = False
    graphs: int = 0
    tree: bool = False
    group: bool = False
    messages: bool = False

    def runner(self) -> Any:
        """Of either model."""
        group = SimpleNamespace(captures=lambda x: self.messages) if self.group else None
        model = SimpleNamespace(group=group, dtype=torch.float32, device=torch.device("cpu"))
        shard = SimpleNamespace(num_exchanged=DEEP) if self.group else None
        return SimpleNamespace(model=model, shard=shard, vocab=1, tree_slots=16)

    def tools(self) -> selection.ExecutorDeps:
        """Of either model."""
        tree = SimpleNamespace(rows=SimpleNamespace(tokens=()))
        ops: Any = SimpleNamespace(
            device_tree=lambda *shape: tree if self.tree else None, MAX_CAPTURED_SEQUENCES=self.graphs
        )
        fused: Any = SimpleNamespace(tree=lambda *shape: None) if self.fused else None
        capture: Any = (lambda work: None) if self.graphs else None
        return selection.ExecutorDeps(ops, fused, capture)

    def to_expand(self) -> list[TreeExecutor]:
        return selection.draft_executors(self.runner(), self.tools(), SERIAL)[0]

    def to_verify(self) -> list[TreeExecutor]:
        return selection.target_executors(self.runner(), self.tools())

    def for_rounds(self) -> list[PopulationExecutor]:
        return selection.population_executors(
            self.runner(), self.runner(), self.tools(), self.tools(), PopulationConfig()
        )


MACHINES = (
    Machine("CPU, native operators", fused=True),
    Machine("one GPU, CUDA operators", graphs=2, tree=True),
    Machine("several GPUs, CUDA operators", graphs=2, tree=True, group=True, messages=True),
    Machine("one GPU, `--ops unfused`", graphs=1),
    Machine("several GPUs, `--ops unfused`", graphs=1, group=True, messages=True),
    Machine("everything else"),
)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and the settings that it meets."""

    name: str
    sampling: SamplingParams
    config: EngineConfig = SERIAL

    @property
    def opening(self) -> RequestStart:
        return RequestStart(0, (0,), self.sampling, 1)


TEMPERATURE = Asked("temperature above 0", SamplingParams())
GREEDY = Asked("temperature 0", SamplingParams(temperature=0.0))
BIAS = Asked("logit bias", SamplingParams(logit_bias={0: 1.0}))
FILTERS = Asked("top-k, top-p or min-p", SamplingParams(top_p=0.9))
DEEP_FILTERS = Asked(f"top-k of {TOP_CANDIDATES} or more for each rank of a group", SamplingParams(top_k=DEEP))
PENALTIES = Asked("repetition, presence or frequency penalty", SamplingParams(presence_penalty=1.0))
GUIDANCE = Asked("guidance", SamplingParams(guidance_scale=2.0))
GRAMMAR = Asked("a grammar", SamplingParams(grammar="start: /a/"))
SCORED = Asked("log-probabilities", SamplingParams(logprobs=1))
SHAPED = (GREEDY, TEMPERATURE, BIAS, FILTERS, DEEP_FILTERS, PENALTIES, GUIDANCE, GRAMMAR, SCORED)
SAMPLE = Asked("`--proposal sample`", SamplingParams(), DRAWN)
REJECT = Asked("`--verify reject`", SamplingParams(), REJECTED)
COLD = Asked("`--proposal sample` at temperature 0", SamplingParams(temperature=0.0), DRAWN)


def expands(machine: Machine, asked: Asked) -> TreeExecutor:
    """What grows the draft tree for a request."""
    asked.config.check_request(asked.sampling)
    nothing: Any = None
    children: Any = SimpleNamespace(sampled=asked.config.proposal == "sample")
    return LocalDrafter(machine.runner(), machine.to_expand(), nothing, children, asked.config).select_executor(
        asked.opening
    )


def verifies(machine: Machine, asked: Asked) -> TreeExecutor:
    """What runs the target over a proposal."""
    asked.config.check_request(asked.sampling)
    rejection = RejectionSampling if asked.config.verify == "reject" else None
    return RejectionVerifier(machine.runner(), machine.to_verify(), rejection).select_executor(asked.opening)


def rounds(machine: Machine, asked: Asked) -> Executor:
    """What runs a round of particles."""
    check_sampling(asked.sampling)
    return select_executor(machine.for_rounds(), features_of(asked.sampling, "population"))


Step = Callable[[Machine, Asked], Executor]
STEPS: tuple[tuple[str, Step, tuple[Asked, ...]], ...] = (
    ("Expansions of the draft tree", expands, (*SHAPED, SAMPLE, REJECT, COLD)),
    ("Verifications", verifies, (*SHAPED, SAMPLE, REJECT, COLD)),
    ("Rounds of particles (mode smc)", rounds, SHAPED),
)


def rows(step: Step, requests: Sequence[Asked]) -> Iterator[list[str]]:
    """For each request, the name of the steps that run it on each machine."""
    for asked in requests:
        yield [asked.name, *(_name(step, machine, asked) for machine in MACHINES)]


def _name(step: Step, machine: Machine, asked: Asked) -> str:
    try:
        return step(machine, asked).name
    except UserError:
        return REFUSED


def met() -> list[type]:
    """The classes of steps that any machine offers, the fastest first."""
    offers = (machine.to_expand() + machine.to_verify() + machine.for_rounds() for machine in MACHINES)
    found = dict.fromkeys(type(steps) for offer in offers for steps in offer)
    return sorted(found, key=lambda kind: ("native", "graph", "graph forwards", "eager").index(kind.name))
