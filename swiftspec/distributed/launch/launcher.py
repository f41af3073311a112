"""What a launcher such as torchrun has put into the environment. Only this module reads it there, and without torch, so
that a command knows its rank before anything heavy is imported."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from swiftspec.errors import UserError, shown

MOST_RANKS = 4096  # more is a slip of the hand
MEND = "start several ranks with torchrun"


@dataclass(frozen=True, slots=True)
class Launched:
    """One rank of several. `host`, `port`: where rank 0 keeps the store, or the launcher does (`agent`), which it has
    started so many times (`attempt`)."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int
    agent: bool = False
    attempt: str = "0"


def launched(environment: Mapping[str, str] = os.environ) -> Launched | None:
    """The rank that this process is; None where it is alone, whatever RANK says then. Raises UserError where the
    variables make no sense."""
    size = _number(environment, "WORLD_SIZE", 1, MOST_RANKS, 1)
    if size == 1:
        return None
    rank = _number(environment, "RANK", 0, size - 1)
    local_size = _number(environment, "LOCAL_WORLD_SIZE", 1, size, size)
    local_rank = _number(environment, "LOCAL_RANK", 0, local_size - 1, rank)
    if not local_rank <= rank <= size - local_size + local_rank:  # ranks of one machine have numbers in a row
        raise UserError(f"LOCAL_RANK={local_rank} of {local_size} does not go with RANK={rank} of {size}: {MEND}")
    host = environment.get("MASTER_ADDR", "").strip()
    if not host:
        raise UserError(f"WORLD_SIZE is {size}, but MASTER_ADDR is not set: {MEND}")
    port = _number(environment, "MASTER_PORT", 1, 65535)
    agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Launched(rank, size, local_rank, local_size, host, port, agent, attempt)


def own_rank(environment: Mapping[str, str] = os.environ) -> int:
    """This process' rank. 0 where the variables make no sense, so that somebody says so."""
    try:
        here = launched(environment)
    except UserError:
        return 0
    return 0 if here is None else here.rank


def _number(environment: Mapping[str, str], name: str, least: int, most: int, default: int | None = None) -> int:
    """A variable's value, which must lie in least..most. An empty one is as good as none."""
    text = environment.get(name, "").strip()
    if not text:
        if default is None:
            raise UserError(f"WORLD_SIZE is set, but {name} is not: {MEND}")
        text = str(default)
    number = int(text) if text.removeprefix("-").isdecimal() and len(text) < 20 else None
    if number is None or not least <= number <= most:
        raise UserError(f"{name} must be a whole number in {least}..{most}, not {shown(text)}: {MEND}")
    return number
