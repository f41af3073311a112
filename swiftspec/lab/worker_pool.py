"""Ranks of a sweep, which build one engine after another without a restart.

Rank 0 publishes the description of each engine in the rendezvous store, and every rank builds its part of it.
"""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from swiftspec.builder.load_options import LoadOptions
from swiftspec.config import MAX_THREADS, EngineConfig, PopulationConfig
from swiftspec.distributed.launch.world import World, available_cores, pin_to_cores
from swiftspec.errors import RankLost, UserError
from swiftspec.llm_engine import LLMEngine, serve_rank
from swiftspec.model.checkpoint_files import read_config
from swiftspec.observe.step_time_emulation import StepTimeEmulation
from swiftspec.profiles.emulation import parse_emulation

Ops = Literal["auto", "reference", "unfused"]


@dataclass(frozen=True, slots=True)
class EngineBuild:
    """Description of an engine that the first `plan.num_ranks` ranks of the job build.

    `ops`: operators, see `--ops`.
    `alone`: name of a model that is loaded without the other one, to measure its step times.
    `trace`: path of the trace file, or None.
    `emulate`: step times in the format of `--emulate`; empty: those of the load options.
    `context`: tokens of a request that suffice; None: the models' own limit. A limit in the load options has priority.
    """

    plan: EngineConfig
    ops: Ops = "auto"
    alone: str | None = None  # "target" or "draft"
    paced: bool = True  # whether to emulate the step times that the load options contain
    trace: str | None = None
    emulate: str = ""
    context: int | None = None

    def pack(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def unpack(text: str) -> EngineBuild:
        data: dict[str, Any] = json.loads(text)
        plan = data.pop("plan")
        return EngineBuild(EngineConfig(**{**plan, "population": PopulationConfig(**plan["population"])}), **data)


@dataclass(frozen=True, slots=True)
class Pair:
    """Paths of the two models, and their load options."""

    target: Path
    draft: Path
    options: LoadOptions
    threads: int | None = None  # threads per operation; None: the number of this rank's cores

    def options_for(self, order: EngineBuild) -> LoadOptions:
        """Returns the load options of a build. The prefix cache is disabled, so that every run prefills its prompts."""
        given = parse_emulation(order.emulate) if order.emulate else self.options.get("emulate")
        emulate = (given if order.paced else None) or StepTimeEmulation()
        if order.alone == "draft":
            emulate = StepTimeEmulation(target=emulate.draft)
        trace = None if order.trace is None else Path(order.trace)
        limit = self.options.get("max_model_len")
        if limit is None and order.context is not None:
            limit = min(order.context, read_config(self.models(order)[0]).max_position_embeddings)
        return {
            **self.options,
            "emulate": emulate,
            "trace": trace,
            "ops": order.ops,
            "prefix_cache_memory": 0,
            "max_model_len": limit,
        }

    def models(self, order: EngineBuild) -> tuple[Path, Path | None]:
        """Returns the paths of the models that a build loads as target and as draft; None if it has no draft."""
        if order.alone is not None:
            return (self.target if order.alone == "target" else self.draft), None
        return self.target, None if order.plan.mode == "ar" else self.draft


class RankPool:
    """Pool of all ranks of the job; without a job, of this process alone.

    Rank 0 calls `engine` repeatedly, then `dismiss`. The other ranks call `follow`.
    `context`: `EngineBuild.context` of all engines, set on rank 0.
    """

    def __init__(self, pair: Pair, world: World | None) -> None:
        self.pair = pair
        self.context: int | None = None
        self._world = world
        self._orders = 0
        self._threads = 1  # of one operator, in the current build

    @property
    def ranks(self) -> int:
        return 1 if self._world is None else self._world.size

    @contextlib.contextmanager
    def engine(self, order: EngineBuild) -> Iterator[LLMEngine]:
        """Context manager that builds an engine on its ranks, yields its `LLMEngine` and closes it.

        The caller has to drop its reference to the `LLMEngine` before the next engine is built, which needs the memory.
        Raises UserError if the engine cannot be built.
        """
        order = replace(order, context=self.context)
        if self._world is not None:
            self._world.store.set(f"order {self._orders}", order.pack())
        part = self._part(order)
        gc.collect()  # caches and graphs of the engine before, whose objects refer to each other
        llm = LLMEngine(*self.pair.models(order), order.plan, world=part, **self._options(order))
        try:
            yield llm
        finally:
            llm.close()

    def dismiss(self) -> None:
        """Makes `follow` return on the other ranks and blocks until it has, since they need the store, which ends with
        this process."""
        if self._world is not None:
            self._world.store.set(f"order {self._orders}", "")
            for rank in range(1, self._world.size):
                self._world.store.get(f"gone {rank}")

    def follow(self) -> None:
        """Runs the main loop of a rank other than 0: builds and serves each engine of rank 0 that includes this rank.

        Returns after `dismiss`. Raises RankLost if rank 0 is lost.
        """
        while (text := self._next()) != "":
            order = EngineBuild.unpack(text)
            part = self._part(order)
            if part is not None and part.rank < part.size:
                gc.collect()  # as in `engine`
                with contextlib.suppress(UserError):  # rank 0 raises the same error and reports it
                    serve_rank(part, *self.pair.models(order), order.plan, **self._options(order))
        assert self._world is not None
        self._world.store.set(f"gone {self._world.rank}", "")

    def _options(self, order: EngineBuild) -> LoadOptions:
        """Returns the load options of a build, with the number of threads that `_part` has set."""
        return {**self.pair.options_for(order), "threads": self._threads, "set_torch_threads": False}

    def _next(self) -> str:
        assert self._world is not None
        while True:
            try:
                return self._world.store.get(f"order {self._orders}").decode()
            except RuntimeError as error:  # raised by the store
                if "timeout" not in str(error).lower():
                    raise RankLost("rank 0 is gone") from None

    def _part(self, order: EngineBuild) -> World | None:
        """Pins this process to its cores, sets its thread counts, and returns the ranks that build the engine.

        Returns None if this process builds the engine alone.
        """
        number, self._orders = self._orders, self._orders + 1
        part = None if self._world is None else self._world.subworld(order.plan.num_ranks, f"part {number}")
        alone = part is None or part.size == 1
        cores = part.own_cores() if part is not None and part.rank < part.size else available_cores()
        pin_to_cores(cores)
        self._threads = self.pair.threads or min(len(cores) if part is None or part.spin else 1, MAX_THREADS)
        torch.set_num_threads(self._threads if self._world is None and order.ops == "reference" else 1)
        if alone and part is not None and part.rank == 0:
            return None
        return part
