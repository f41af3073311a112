"""Processes of a sweep.

Rank 0 publishes which engine is built next and every rank builds its shard, repeatedly and without restarts.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from swiftspec.backends import cpu as host
from swiftspec.builder.load_options import LoadOptions
from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.distributed.launch.world import World, available_cores, pin_to_cores
from swiftspec.errors import RankLost, UserError
from swiftspec.llm import LLM, serve_rank
from swiftspec.observe.step_time_emulation import StepTimeEmulation
from swiftspec.serve.settings.flags import MAX_THREADS

Ops = Literal["auto", "reference"]


@dataclass(frozen=True, slots=True)
class EngineBuild:
    """An engine to build on the first ranks of the job.

    `alone`: one of the two models without the other, for step times.
    """

    plan: EngineConfig
    ops: str = "auto"
    alone: str | None = None  # "target" or "draft"
    paced: bool = True  # uses emulated step times, if there are any
    trace: str | None = None

    def pack(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def unpack(text: str) -> EngineBuild:
        data: dict[str, Any] = json.loads(text)
        plan = data.pop("plan")
        return EngineBuild(EngineConfig(**{**plan, "population": PopulationConfig(**plan["population"])}), **data)


@dataclass(frozen=True, slots=True)
class Pair:
    """The two models and their load options."""

    target: Path
    draft: Path
    options: LoadOptions
    threads: int | None = None  # threads per operation; None: the number of this rank's cores

    def options_for(self, order: EngineBuild) -> LoadOptions:
        """Returns the load options of a build. The prefix cache is disabled, so that each run reads its prompts."""
        emulate = (self.options.get("emulate") if order.paced else None) or StepTimeEmulation()
        if order.alone == "draft":
            emulate = StepTimeEmulation(target=emulate.draft)
        trace = None if order.trace is None else Path(order.trace)
        ops: Ops = "reference" if order.ops == "reference" else "auto"
        return {**self.options, "emulate": emulate, "trace": trace, "ops": ops, "prefix_cache_memory": 0}

    def models(self, order: EngineBuild) -> tuple[Path, Path | None]:
        """Returns the paths of the target and the draft of a build."""
        if order.alone is not None:
            return (self.target if order.alone == "target" else self.draft), None
        return self.target, None if order.plan.mode == "ar" else self.draft


class RankPool:
    """All ranks of the job, or this process alone. Rank 0 builds and dismisses; the other ranks follow."""

    def __init__(self, pair: Pair, world: World | None) -> None:
        self.pair = pair
        self._world = world
        self._orders = 0

    @property
    def ranks(self) -> int:
        return 1 if self._world is None else self._world.size

    @contextlib.contextmanager
    def engine(self, order: EngineBuild) -> Iterator[LLM]:
        """Builds the engine of an order and yields it. Raises UserError if it cannot be built."""
        if self._world is not None:
            self._world.store.set(f"order {self._orders}", order.pack())
        part = self._part(order)
        llm = LLM(*self.pair.models(order), order.plan, world=part, **self.pair.options_for(order))
        try:
            yield llm
        finally:
            llm.close()

    def dismiss(self) -> None:
        """Ends the other ranks and waits until they have left, because the store ends with this process."""
        if self._world is not None:
            self._world.store.set(f"order {self._orders}", "")
            for rank in range(1, self._world.size):
                self._world.store.get(f"gone {rank}")

    def follow(self) -> None:
        """Main loop of every rank but 0, until it is dismissed. Raises RankLost if rank 0 is lost."""
        while (text := self._next()) != "":
            order = EngineBuild.unpack(text)
            part = self._part(order)
            if part is not None and part.rank < part.size:
                with contextlib.suppress(UserError):  # rank 0 raises the same error and reports it
                    serve_rank(part, *self.pair.models(order), order.plan, **self.pair.options_for(order))
        assert self._world is not None
        self._world.store.set(f"gone {self._world.rank}", "")

    def _next(self) -> str:
        assert self._world is not None
        while True:
            try:
                return self._world.store.get(f"order {self._orders}").decode()
            except RuntimeError as error:  # raised by the store
                if "timeout" not in str(error).lower():
                    raise RankLost("rank 0 is gone") from None

    def _part(self, order: EngineBuild) -> World | None:
        """Returns the ranks of an order, this rank on its cores, or None for a process without a world."""
        number, self._orders = self._orders, self._orders + 1
        part = None if self._world is None else self._world.subworld(order.plan.num_ranks, f"part {number}")
        alone = part is None or part.size == 1
        cores = part.own_cores() if part is not None and part.rank < part.size else available_cores()
        pin_to_cores(cores)
        threads = self.pair.threads or min(len(cores) if part is None or part.spin else 1, MAX_THREADS)
        host.set_threads(threads)
        torch.set_num_threads(threads if self._world is None and order.ops == "reference" else 1)
        if alone and part is not None and part.rank == 0:
            return None
        return part
