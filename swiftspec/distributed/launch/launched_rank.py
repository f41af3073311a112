"""The rank that a launcher assigns to this process: torchrun by environment variables (RANK, WORLD_SIZE, ...), others
by explicit values.

Only this module reads the variables. It does not import torch, so that a command knows its rank before slow imports.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from swiftspec.errors import UserError, truncated_repr
from swiftspec.settings_schema import require

MAX_RANKS = 4096  # larger values are rejected as typing errors
TORCHRUN_HINT = "start several ranks with torchrun"


@dataclass(frozen=True, slots=True)
class LaunchedRank:
    """One rank of a job with several ranks.

    `local_rank`, `local_size`: rank among the ranks of this machine, and their number.
    `host`, `port`: address of the store.
    `agent`: whether the launcher serves the store; if False, rank 0 serves it.
    `attempt`: restart count of the launcher.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int
    agent: bool = False
    attempt: str = "0"


def launched(environment: Mapping[str, str] = os.environ) -> LaunchedRank | None:
    """Returns the rank that a launcher has assigned to this process, or None if WORLD_SIZE is 1 or unset; RANK is not
    read then. Raises UserError if a variable is missing or invalid."""
    size = _number(environment, "WORLD_SIZE", 1, MAX_RANKS, 1)
    if size == 1:
        return None
    rank = _number(environment, "RANK", 0, size - 1)
    local_size = _number(environment, "LOCAL_WORLD_SIZE", 1, size, size)
    local_rank = _number(environment, "LOCAL_RANK", 0, local_size - 1, rank)
    if not local_rank <= rank <= size - local_size + local_rank:  # ranks of one machine are numbered consecutively
        raise UserError(
            f"LOCAL_RANK={local_rank} of {local_size} does not match RANK={rank} of {size}: {TORCHRUN_HINT}"
        )
    host = environment.get("MASTER_ADDR", "").strip()
    if not host:
        raise UserError(f"WORLD_SIZE is {size}, but MASTER_ADDR is not set: {TORCHRUN_HINT}")
    port = _number(environment, "MASTER_PORT", 1, 65535)
    agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return LaunchedRank(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        host=host,
        port=port,
        agent=agent,
        attempt=attempt,
    )


def explicit_rank(
    rank: int, size: int, store_address: str, local_rank: int | None, local_size: int | None
) -> LaunchedRank:
    """Returns the rank with these values, for a launcher that sets no environment variables. Parameters are those of
    `World.join`. Raises UserError if they are not consistent."""
    local_size = size if local_size is None else local_size
    local_rank = rank if local_rank is None else local_rank
    host, _, port = store_address.rpartition(":")
    require(2 <= size <= MAX_RANKS, f"size must lie in 2..{MAX_RANKS}, not {size}; a single rank needs no World")
    require(0 <= rank < size, f"rank must lie in 0..{size - 1}, not {rank}")
    require(1 <= local_size <= size, f"local_size must lie in 1..{size}, not {local_size}")
    fits = 0 <= local_rank < local_size and local_rank <= rank <= size - local_size + local_rank
    hint = "number the ranks of one machine consecutively"
    require(fits, f"local_rank {local_rank} of {local_size} does not match rank {rank} of {size}: {hint}")
    valid = host and port.isdecimal() and 1 <= int(port[:6]) <= 65535
    require(bool(valid), f"store_address must be HOST:PORT, not {truncated_repr(store_address)}")
    return LaunchedRank(rank, size, local_rank, local_size, host.strip("[]"), int(port))


def own_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Returns the number of this process's rank; 0 without a launcher. Returns 0 also if the variables are invalid, so
    that the process reports the error as rank 0 does."""
    try:
        process = launched(environment)
    except UserError:
        return 0
    return 0 if process is None else process.rank


def _number(environment: Mapping[str, str], name: str, low: int, high: int, default: int | None = None) -> int:
    """Returns the integer value of a variable. Raises UserError if it is unset and has no default, or is not in
    low..high. An empty variable counts as unset."""
    text = environment.get(name, "").strip()
    if not text:
        if default is None:
            raise UserError(f"WORLD_SIZE is set, but {name} is not: {TORCHRUN_HINT}")
        text = str(default)
    number = int(text) if text.removeprefix("-").isdecimal() and len(text) < 20 else None
    if number is None or not low <= number <= high:
        raise UserError(f"{name} must be a whole number in {low}..{high}, not {truncated_repr(text)}: {TORCHRUN_HINT}")
    return number
