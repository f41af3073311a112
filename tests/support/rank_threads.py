"""A job whose ranks are threads of this process."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import HashStore

from swiftspec.builder.models import LocalRoles, Models
from swiftspec.builder.plan import Plan
from swiftspec.builder.ranks import run_until_shutdown, start_engine_rank
from swiftspec.config import EngineConfig
from swiftspec.distributed.launch.world import World
from swiftspec.llm_engine import LLMEngine


@contextmanager
def engine_on_threads(
    target: Path,
    draft: Path | str | None,
    config: EngineConfig,
    on_follower: Callable[[LocalRoles], object] = lambda held: None,
    **options: Any,
) -> Generator[tuple[LLMEngine, list[LocalRoles]]]:
    """An engine on the ranks of `config`, and the roles of all ranks; those of the followers are complete, and have
    executed all commands, after the context. `on_follower`: called before a follower executes commands. The context
    raises the error of a follower."""
    loading: Any = options
    size, store, roles = config.num_ranks, HashStore(), list[LocalRoles]()
    worlds = [World(rank, size, rank, size, "localhost", store) for rank in range(size)]

    def follow(world: World) -> None:
        plan = Plan.create(target, draft, config, world, loading)
        rank = start_engine_rank(world, plan.engine, Models.of(plan), None)
        roles.append(rank.held)
        on_follower(rank.held)
        run_until_shutdown(rank, traced=False)

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(follow, world) for world in worlds[1:]]
        try:
            with closing(LLMEngine(target, draft, config, world=worlds[0], **options)) as llm:
                rank = llm.roles.rank
                assert rank is not None
                roles.append(rank.held)
                yield llm, roles
        finally:
            for future in futures:
                future.result()
