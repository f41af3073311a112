"""Ray Serve application whose replicas are whole engines (extra `ray`).

    serve run app.yaml

An application of the config has the `import_path` `swiftspec.deploy.ray:ray_application` and the `args` of that
function (docs/guides/deployment.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, cast

from ray import serve
from ray.serve import Application
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, RunningReplica
from starlette.types import ASGIApp

from swiftspec.deploy.replica import EngineReplica, replica_settings
from swiftspec.settings_schema import require

MAX_ONGOING_REQUESTS = 4  # of a replica, one of which it decodes; further ones wait in Ray's proxies
HEALTH_CHECK_PERIOD_S = 5.0
DRAIN_TIMEOUT_S = 600.0  # in which a replica that is scaled down can finish its requests


class ConversationRouter(PowerOfTwoChoicesRequestRouter):
    """Request router that keeps the requests of a conversation on one replica, whose prefix cache holds its tokens.

    Requests with the same session ID (header `x-session-id`) go to the same replica, and to another one only while that
    replica has no room. Requests without a session ID go to the less busy of two replicas.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """See `ray.serve.request_router.RequestRouter`."""
        session = "" if pending_request is None else pending_request.metadata.session_id
        if pending_request is None or not session:
            return await super().choose_replicas(candidate_replicas, pending_request)
        pending_request.routing_context.should_backoff = True  # waits before the replicas are tried again
        names = {replica.replica_id.to_full_id_str(): replica for replica in candidate_replicas}
        return [[names[name]] for name in rank_replicas(session, [*names])]


def rank_replicas(session: str, names: list[str]) -> list[str]:
    """Returns the replicas in the order in which a session prefers them (rendezvous hashing): if a replica comes or
    goes, only the sessions that prefer it move."""

    def weight(name: str) -> bytes:
        return hashlib.blake2b(f"{session}\0{name}".encode(), digest_size=8).digest()

    return sorted(names, key=weight, reverse=True)


@serve.deployment(
    name="Engine",
    max_ongoing_requests=MAX_ONGOING_REQUESTS,
    health_check_period_s=HEALTH_CHECK_PERIOD_S,
    graceful_shutdown_timeout_s=DRAIN_TIMEOUT_S,
    request_router_config=RequestRouterConfig(request_router_class=cast("Any", ConversationRouter)),
)
@serve.ingress()
class EngineDeployment:
    """Deployment whose replica is a whole engine on one node."""

    def __init__(self, values: Mapping[str, Any], ranks: int) -> None:
        self._replica = EngineReplica(values, ranks)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Returns the application that serves the requests of this replica."""
        return self._replica.app

    def check_health(self) -> None:
        """Raises if the engine has failed, so that Ray replaces this replica."""
        self._replica.check_health()

    async def __del__(self) -> None:
        """Closes the engine. Ray calls it once the requests of the replica have ended."""
        if hasattr(self, "_replica"):
            await self._replica.close()


def ray_application(args: dict[str, Any]) -> Application:
    """Returns the application for the `args` of a Serve config: the settings of `swiftspec serve` by name, such as
    `draft_model`, and `ranks`, the number of ranks of a replica (default 1).

    With `device: cuda` a replica takes as many GPUs of one node as it has ranks. The config can override the options of
    the deployment `Engine`, such as `num_replicas`, `autoscaling_config` and `ray_actor_options`. Raises UserError if
    the settings are invalid.
    """
    values = dict(args)
    ranks = values.pop("ranks", 1)
    require(isinstance(ranks, int) and ranks >= 1, f"ranks must be an integer of at least 1, not {ranks!r}")
    settings = replica_settings(values)
    resources = {"num_gpus": ranks} if settings.device == "cuda" else {"num_cpus": ranks * (settings.threads or 1)}
    return EngineDeployment.options(ray_actor_options=resources).bind(values, ranks)
