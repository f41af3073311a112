"""vLLM's `kv_events_config`: one JSON object with the settings of KV events."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

ENDPOINT_PATTERN = re.compile(r"tcp://(?:\*|\[[\w:.%]+\]|[\w.-]+):(\d{1,5})|ipc://.+")
MAX_PORT = 65_535


def _check_address(address: str) -> str:
    found = ENDPOINT_PATTERN.fullmatch(address)
    if found is None or (found[1] is not None and not 0 < int(found[1]) <= MAX_PORT):
        raise ValueError("must be a ZeroMQ address such as tcp://*:5557")
    return address


Address = Annotated[str, AfterValidator(_check_address)]


class KvEventsConfig(BaseModel):
    """Settings of KV events. Names and defaults are vLLM's.

    `endpoint`, `replay_endpoint`: ZeroMQ addresses of the events, and of requests to send them again; None: no replay.
    `topic`: first frame of each message; llm-d requires kv@POD_IP:PORT@MODEL.
    `block_size`: tokens per block, also in the metric cache_config_info; prefix-aware routers need the same value.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: Address = "tcp://*:5557"
    replay_endpoint: Address | None = None
    topic: str = ""
    block_size: Annotated[int, Field(ge=1, le=4096)] = 16

    @model_validator(mode="after")
    def _check(self) -> "KvEventsConfig":
        if self.replay_endpoint == self.endpoint:
            raise ValueError("replay_endpoint must differ from endpoint")
        return self

    @property
    def enabled(self) -> bool:
        """Whether events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"

    @property
    def binds(self) -> bool:
        """Whether the publisher binds `endpoint`, by vLLM's rule. Otherwise it connects to a subscriber that binds."""
        return self.endpoint.startswith("ipc://") or "*" in self.endpoint or "::" in self.endpoint
