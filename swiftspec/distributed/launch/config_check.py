"""Consistency check of the ranks' configurations and model files, before any rank connects or loads weights.

The check comes first because the mode already determines which ranks connect to each other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from swiftspec.config import EngineConfig
from swiftspec.distributed.launch.startup_barrier import Entry, StartupBarrier, Validator, describe_difference
from swiftspec.distributed.launch.supervisor_link import RankInfo
from swiftspec.distributed.launch.world import World
from swiftspec.errors import UserError


@dataclass(frozen=True, slots=True)
class RankRole:
    """The group of a rank, and the rank's position in that group.

    Rank 0 of a group is its leader; rank 0 of the job leads the target group."""

    group: str  # "target" or "draft"; the modes serial, ar and smc have the target group only
    group_rank: int
    group_size: int

    @staticmethod
    def of(rank: int, plan: EngineConfig) -> RankRole:
        if rank < plan.target_tp:
            return RankRole("target", rank, plan.target_tp)
        return RankRole("draft", rank - plan.target_tp, plan.draft_tp)


@dataclass(frozen=True, slots=True)
class RankConfig:
    """Configuration of a rank that has to match the configuration of other ranks.

    `settings`: values by name, which must be the same on all ranks of the job.
    `files`: fingerprints of model directories by model name, which must be the same on all ranks of the job.
    `group_files`: fingerprints that must be the same only on the ranks of one group.
    `gpu`: UUID of the rank's GPU, which must be another one on each rank; None: a CPU, or a GPU that ranks may share.
    """

    settings: Mapping[str, Any]
    files: Mapping[str, str]
    group_files: Mapping[str, str]
    gpu: str | None = None


def settings_of(plan: EngineConfig) -> dict[str, Any]:
    """Returns the fields of `plan` by name, with the fields of its population at the same level."""
    values = asdict(plan)
    return values | values.pop("population")


def check_consistent(world: World, plan: EngineConfig, rank_config: RankConfig) -> list[RankInfo]:
    """Publishes this rank's configuration, and blocks until rank 0 has compared the configurations of all ranks.

    Returns the state of all ranks on rank 0, and only the states of rank 0 and of this rank on the other ranks. Raises
    UserError on all ranks if two configurations differ, with one line that names the rank, the setting and both values.
    Raises RankLost if rank 0 is gone.
    """
    settings = {**rank_config.settings, "one_machine": world.one_machine}
    own_entry = asdict(rank_config) | {"settings": settings, "pid": os.getpid(), "life": world.incarnation}
    entries = _barrier(world).wait_all(own_entry, _validator(world.rank, own_entry, plan))
    return [
        RankInfo(rank, RankRole.of(rank, plan).group, entry.get("pid", 0), "loading", entry.get("life", 0))
        for rank, entry in entries.items()
    ]


@contextmanager
def report_startup_error(world: World | None) -> Iterator[None]:
    """Context manager for what precedes `check_consistent`: publishes a UserError that is raised in it, so that all
    ranks raise UserError. `world`: None if there is only one rank."""
    try:
        yield
    except UserError as error:
        if world is not None:
            _barrier(world.next_engine()).abort(str(error))
        raise


def _barrier(world: World) -> StartupBarrier:
    return world.barrier("start")


def _validator(own: int, mine: Entry, plan: EngineConfig) -> Validator:
    def validate(said: dict[int, Entry]) -> str | None:
        for rank, theirs in said.items():
            here, there = _section(mine, "settings"), _section(theirs, "settings")
            for name in here | there:
                line = describe_difference(name, own, here.get(name), rank, there.get(name))
                if line is not None:
                    return line
            leader = rank - RankRole.of(rank, plan).group_rank
            line = _file_difference(own, mine, rank, theirs, "files")
            if line is None and leader in said:
                line = _file_difference(leader, said[leader], rank, theirs, "group_files")
            if line is not None:
                return line
        return _shared_gpu(said)

    return validate


def _shared_gpu(said: dict[int, Entry]) -> str | None:
    """Returns an error message if two ranks use the same GPU, else None."""
    owners: dict[str, int] = {}
    for rank, entry in said.items():
        gpu = entry.get("gpu")
        if isinstance(gpu, str) and owners.setdefault(gpu, rank) != rank:
            return (
                f"ranks {owners[gpu]} and {rank} use the same GPU: start at most one rank per GPU, or share GPUs with"
                " --share-gpus"
            )
    return None


def _file_difference(here: int, mine: Entry, there: int, theirs: Entry, part: str) -> str | None:
    """Returns an error message if the entries of ranks `here` and `there` differ in the files of a model, else None.
    `part`: "files" or "group_files"."""
    ours, yours = _section(mine, part), _section(theirs, part)
    for name in ours | yours:
        if ours.get(name) != yours.get(name):
            return (
                f"rank {there} and rank {here} have different files of the {name} model: use the same model directories"
                " on all ranks"
            )
    return None


def _section(words: Entry, name: str) -> dict[str, Any]:
    part = words.get(name)
    return part if isinstance(part, dict) else {}
