"""A replica: an engine on all its ranks, with the HTTP application, inside a process that a scheduler has started."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp

from swiftspec.cli.config_sources import load_settings
from swiftspec.cli.terminal import StartupProgress
from swiftspec.distributed.launch.world import World
from swiftspec.errors import RankLost, UserError
from swiftspec.llm import LLM
from swiftspec.serve.app import create_app
from swiftspec.serve.async_engine import AsyncEngine
from swiftspec.serve.link.frames import QUEUE_TIMEOUT_S
from swiftspec.serve.link.frontend_process import sampling_defaults
from swiftspec.settings.settings import Settings, UsageError
from swiftspec.signals import DRAIN_TIMEOUT_S
from swiftspec.startup.built_in_models import served_model_names
from swiftspec.startup.session import open_session, run_follower_rank

LOCALHOST = "127.0.0.1"
UNUSED_PORT = 8000  # the settings are those of a server, but the scheduler listens
EXIT_TIMEOUT_S = 10.0  # for a rank to exit after the engine was closed


class EngineReplica:
    """An engine and its HTTP application. This process is rank 0, and starts the other ranks on this machine.

    `app`: the ASGI application of `swiftspec serve`, without its limits on clients and API keys: what routes requests
    to the replicas authenticates.
    """

    def __init__(self, values: Mapping[str, Any], ranks: int = 1) -> None:
        """Loads the models, and blocks until the engine is ready.

        `values`: settings of `swiftspec serve` by name, such as `draft_model`. `ranks`: number of ranks; with device
        "cuda" each has a GPU of this process. Raises UserError if the settings are invalid or the models cannot be
        loaded.
        """
        settings = replica_settings(values)
        address = free_address()
        self._followers = [start_replica_rank(values, rank, ranks, address) for rank in range(1, ranks)]
        try:
            world = World.join(0, ranks, address) if ranks > 1 else None
            self._session = open_session(settings, StartupProgress(), world, warm_up=True)
        except BaseException:
            for process in self._followers:
                process.kill()
            raise
        self.engine = AsyncEngine(
            LLM.from_session(self._session),
            max_queue=settings.max_queue,
            queue_timeout_s=QUEUE_TIMEOUT_S,
            request_timeout_s=settings.request_timeout,
            sampling_defaults=sampling_defaults(settings),
        )
        self.app: ASGIApp = create_app(self.engine, lambda: self._session.codec, served_model_names(settings))

    def check_health(self) -> None:
        """Raises UserError if the engine has failed. It does not recover: the scheduler has to replace the replica."""
        state = self.engine.state
        if state.phase == "dead":
            raise UserError(f"the engine has failed: {state.detail}")

    async def close(self) -> None:
        """Lets running requests finish, closes the engine and ends the other ranks."""
        await self.engine.close(DRAIN_TIMEOUT_S)
        self._session.codec.close()
        await asyncio.to_thread(self._end_followers)

    def _end_followers(self) -> None:
        for process in self._followers:  # they end when the engine is closed
            with suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_TIMEOUT_S)
            process.kill()
            process.wait()


def replica_settings(values: Mapping[str, Any]) -> Settings:
    """Returns the settings of a replica. Raises UsageError if they are invalid, or if they have an API key, which a
    replica would not check, or publish KV events."""
    settings = load_settings({**values, "port": values.get("port", UNUSED_PORT)})
    if settings.api_key:
        raise UsageError(
            "a replica checks no API key: remove api_key, and authenticate in front of the scheduler's proxy"
        )
    if settings.kv_events_config.enabled:
        raise UsageError("a replica publishes no KV events, as Ray selects replicas itself: remove kv_events_config")
    return settings


def start_replica_rank(values: Mapping[str, Any], rank: int, size: int, address: str) -> subprocess.Popen[bytes]:
    """Starts the process of another rank. It ends with rank 0, however that ends."""
    command = [sys.executable, "-m", "swiftspec.deploy.replica", str(rank), str(size), address]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert process.stdin is not None
    with process.stdin as stdin:
        stdin.write(json.dumps(dict(values)).encode())
    return process


def run_replica_rank(arguments: Sequence[str], values: str) -> None:
    """Runs a rank other than 0. Exits with one line if the settings are invalid or rank 0 is lost.

    `arguments`: rank, number of ranks and address of the store. `values`: the settings as JSON.
    """
    rank, size, address = arguments
    try:
        run_follower_rank(replica_settings(json.loads(values)), World.join(int(rank), int(size), address))
    except (UserError, RankLost) as error:
        sys.exit(f"swiftspec: rank {rank}: {error}")


def free_address() -> str:
    """Returns a free port of this machine, at which rank 0 can serve the store."""
    with socket.create_server((LOCALHOST, 0)) as probe:
        return f"{LOCALHOST}:{probe.getsockname()[1]}"


if __name__ == "__main__":
    run_replica_rank(sys.argv[1:], sys.stdin.read())
