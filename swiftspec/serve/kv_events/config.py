"""Settings of KV events. Imports neither ZeroMQ nor torch, since the supervisor checks the settings."""

from __future__ import annotations

import re
from dataclasses import dataclass

from swiftspec.errors import truncated_repr
from swiftspec.extras import require_extra
from swiftspec.settings.settings import Settings, UsageError, flag_name
from swiftspec.startup.built_in_models import default_served_name

ENDPOINT_PATTERN = re.compile(r"tcp://(?:\*|\[[\w:.%]+\]|[\w.-]+):(\d{1,5})|ipc://.+")
MAX_PORT = 65_535


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """Configuration of a publisher of KV events.

    `endpoint`, `replay_endpoint`: ZeroMQ addresses of the events, and of requests to send them again; None: no replay.
    `topic`: first frame of each message.
    `block_size`: tokens per block.
    `model_name`: see `ReusableBlocks`.
    """

    endpoint: str
    replay_endpoint: str | None
    topic: str
    block_size: int
    model_name: str

    @property
    def binds(self) -> bool:
        """Whether the publisher binds `endpoint`, by vLLM's rule. Otherwise it connects to a subscriber that binds."""
        return self.endpoint.startswith("ipc://") or "*" in self.endpoint or "::" in self.endpoint


def kv_events_config(settings: Settings) -> KvEventsConfig | None:
    """Returns the configuration of KV events, or None without --kv-events-endpoint. Raises UserError if the settings
    are invalid or ZeroMQ is not installed."""
    endpoint, replay_endpoint = settings.kv_events_endpoint, settings.kv_events_replay_endpoint
    if endpoint is None:
        for name in ("kv_events_replay_endpoint", "kv_events_topic"):
            if name in settings.model_fields_set:
                raise UsageError(f"{flag_name(name)} requires --kv-events-endpoint; specify it too")
        return None
    for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
        address = getattr(settings, name)
        if address is not None and not _is_endpoint(address):
            raise UsageError(
                f"{flag_name(name)} must be a ZeroMQ address such as tcp://*:5557, not {truncated_repr(address)}"
            )
    if replay_endpoint == endpoint:
        raise UsageError("--kv-events-replay-endpoint must differ from --kv-events-endpoint")
    settings.check_features(None)
    require_extra("kv-events", "--kv-events-endpoint")
    name = next(iter(settings.served_model_name), None) or default_served_name(settings.model)
    return KvEventsConfig(endpoint, replay_endpoint, settings.kv_events_topic, settings.kv_block_size, name)


def _is_endpoint(address: str) -> bool:
    found = ENDPOINT_PATTERN.fullmatch(address)
    return found is not None and (found[1] is None or 0 < int(found[1]) <= MAX_PORT)
