"""How each rank was started and what it holds, compared before anything is connected or loaded: the mode alone decides
already who calls whom."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from swiftspec.config import EngineConfig
from swiftspec.distributed.launch.startup_barrier import Judge, Roll, Words, difference
from swiftspec.distributed.launch.supervision import Member
from swiftspec.distributed.launch.world import World
from swiftspec.errors import UserError


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands. The first rank of a group leads it, and rank 0 leads the target's and the job."""

    side: str  # "target" or "draft"; in modes serial and ar there is one group, the target's
    rank: int  # in its group
    size: int

    @staticmethod
    def of(rank: int, plan: EngineConfig) -> Place:
        if rank < plan.target_tp:
            return Place("target", rank, plan.target_tp)
        return Place("draft", rank - plan.target_tp, plan.draft_tp)


@dataclass(frozen=True, slots=True)
class Facts:
    """What must be the same: `settings` by their names in the whole job, and so the models in `files`, by what tells a
    directory from another; the models in `group_files` in the ranks of one group."""

    settings: Mapping[str, Any]
    files: Mapping[str, str]
    group_files: Mapping[str, str]


def settings_of(plan: EngineConfig) -> dict[str, Any]:
    """The fields of a plan by their names, those of the population among them."""
    values = asdict(plan)
    return values | values.pop("population")


def agree(world: World, plan: EngineConfig, facts: Facts) -> list[Member]:
    """Returns once all ranks of the job were started alike, on rank 0 all of them, elsewhere those that this one has
    heard of. Raises UserError on all of them where not, with one line
    that names the rank, what differs and both values; RankLost where rank 0 is gone."""
    more = {"one_machine": world.one_machine}
    life = 0 if world.keeping is None else world.keeping.life
    mine = asdict(facts) | {"settings": {**facts.settings, **more}, "pid": os.getpid(), "life": life}
    said = _roll(world).call(mine, _judge(world.rank, mine, plan))
    return [
        Member(rank, Place.of(rank, plan).side, words.get("pid", 0), "loading", words.get("life", 0))
        for rank, words in said.items()
    ]


@contextmanager
def telling(world: World | None) -> Iterator[None]:
    """What this rank is refused for before it can `agree`, the others hear in place of its facts."""
    try:
        yield
    except UserError as error:
        if world is not None:
            _roll(world.next_job()).refuse(str(error))
        raise


def _roll(world: World) -> Roll:
    return world.roll("start")


def _judge(own: int, mine: Words, plan: EngineConfig) -> Judge:
    def judge(said: dict[int, Words]) -> str | None:
        for rank, theirs in said.items():
            here, there = _part(mine, "settings"), _part(theirs, "settings")
            for name in here | there:
                line = difference(name, own, here.get(name), rank, there.get(name))
                if line is not None:
                    return line
            leader = rank - Place.of(rank, plan).rank
            line = _other_files(own, mine, rank, theirs, "files")
            if line is None and leader in said:
                line = _other_files(leader, said[leader], rank, theirs, "group_files")
            if line is not None:
                return line
        return None

    return judge


def _other_files(here: int, mine: Words, there: int, theirs: Words, part: str) -> str | None:
    """The line about a model directory that two ranks should have in common."""
    ours, yours = _part(mine, part), _part(theirs, part)
    for name in ours | yours:
        if ours.get(name) != yours.get(name):
            return (
                f"rank {there} has other files of the {name} model than rank {here}: give all ranks the same model"
                " directories"
            )
    return None


def _part(words: Words, name: str) -> dict[str, Any]:
    part = words.get(name)
    return part if isinstance(part, dict) else {}
