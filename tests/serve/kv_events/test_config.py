"""Settings of KV events: what is accepted, and one line for what is not."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from swiftspec.deploy.replica import replica_settings
from swiftspec.errors import UserError
from swiftspec.serve.__main__ import main
from swiftspec.serve.kv_events.config import KvEventsConfig, kv_events_config
from swiftspec.settings.settings import Settings, UsageError

ENDPOINT = "tcp://*:5557"


def test_the_defaults_are_those_of_vllm() -> None:
    assert kv_events_config(Settings()) is None
    config = kv_events_config(Settings(kv_events_endpoint=ENDPOINT, served_model_name=("m",)))
    assert config == KvEventsConfig(ENDPOINT, None, "", 16, "m")


@pytest.mark.parametrize(
    ("endpoint", "binds"),
    [
        (ENDPOINT, True), ("tcp://[::]:5557", True), ("tcp://[::1]:5557", True), ("ipc:///run/kv", True),
        ("tcp://collector:5557", False), ("tcp://10.0.0.1:5557", False),
    ],
)  # fmt: skip
def test_addresses(endpoint: str, binds: bool) -> None:
    config = kv_events_config(Settings(kv_events_endpoint=endpoint, kv_events_replay_endpoint="tcp://*:1"))
    assert config is not None and config.binds is binds


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kv_events_endpoint": "5557"}, r"^--kv-events-endpoint must be a ZeroMQ address .*, not '5557'$"),
        ({"kv_events_endpoint": "tcp://*:70000"}, "not 'tcp://\\*:70000'"),
        ({"kv_events_endpoint": "tcp://*:0"}, "not 'tcp://\\*:0'"),
        ({"kv_events_endpoint": "http://*:5557"}, "must be a ZeroMQ address"),
        ({"kv_events_endpoint": ENDPOINT, "kv_events_replay_endpoint": "x"}, "^--kv-events-replay-endpoint must be"),
        ({"kv_events_endpoint": ENDPOINT, "kv_events_replay_endpoint": ENDPOINT}, "must differ"),
        ({"kv_events_replay_endpoint": ENDPOINT}, "--kv-events-replay-endpoint requires --kv-events-endpoint"),
        ({"kv_events_topic": "kv@"}, "--kv-events-topic requires --kv-events-endpoint"),
        ({"kv_events_endpoint": ENDPOINT, "prefix_cache_memory": 0}, "--prefix-cache-memory 0"),
        ({"kv_events_endpoint": ENDPOINT, "target_url": "host:7070"}, "not supported with --target-url"),
    ],
)
def test_invalid_settings_are_one_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        kv_events_config(Settings(**values))


def test_a_server_reports_them_before_it_loads_models(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--port", "0", "--model", "demo", "--kv-events-endpoint", "5557"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setitem(sys.modules, "zmq", None)
    assert main(["--port", "0", "--model", "demo", "--kv-events-endpoint", ENDPOINT]) == 1
    line = "swiftspec: error: --kv-events-endpoint needs ZeroMQ: run pip install '.[kv-events]' "
    error = capsys.readouterr().err
    assert error.startswith(line) and error.count("\n") == 1
    assert main(["--port", "0", "--kv-events-config", "{}"]) == 2
    assert "did you mean --kv-events-endpoint" in capsys.readouterr().err


def test_a_replica_of_ray_refuses_them() -> None:
    with pytest.raises(UserError, match="a replica publishes no KV events"):
        replica_settings({"kv_events_endpoint": ENDPOINT})
