"""Settings of KV events: what is accepted, and one line for what is not."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from swiftspec.cli.config_sources import load_settings
from swiftspec.deploy.replica import replica_settings
from swiftspec.errors import UserError
from swiftspec.serve.__main__ import main
from swiftspec.serve.link.frontend_process import requested_kv_events
from swiftspec.settings.kv_events_config import KvEventsConfig
from swiftspec.settings.settings import Settings, UsageError

ENDPOINT = "tcp://*:5557"


def settings(config: Any, **others: Any) -> Settings:
    return load_settings({"kv_events_config": config, **others})


def test_the_defaults_are_those_of_vllm() -> None:
    for off in ({}, {"enable_kv_cache_events": True, "publisher": "null"}):
        assert requested_kv_events(settings(off)) is None
    for given in (
        {"enable_kv_cache_events": True},
        '{"enable_kv_cache_events": true}',
        {"enable_kv_cache_events": "1"},
    ):
        config = requested_kv_events(settings(given))
        assert config == KvEventsConfig(
            enable_kv_cache_events=True, endpoint=ENDPOINT, replay_endpoint=None, topic="", block_size=16
        )


@pytest.mark.parametrize(
    ("endpoint", "binds"),
    [
        (ENDPOINT, True), ("tcp://[::]:5557", True), ("tcp://[::1]:5557", True), ("ipc:///run/kv", True),
        ("tcp://collector:5557", False), ("tcp://10.0.0.1:5557", False),
    ],
)  # fmt: skip
def test_addresses(endpoint: str, binds: bool) -> None:
    assert KvEventsConfig(endpoint=endpoint, replay_endpoint="tcp://*:1").binds is binds


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"endpoint": "5557"}, r"^--kv-events-config.endpoint must be a ZeroMQ address .*, not '5557'$"),
        ({"endpoint": "tcp://*:70000"}, "not 'tcp://\\*:70000'"),
        ({"endpoint": "tcp://*:0"}, "not 'tcp://\\*:0'"),
        ({"endpoint": "http://*:5557"}, "must be a ZeroMQ address"),
        ({"replay_endpoint": "x"}, "^--kv-events-config.replay_endpoint must be"),
        ({"replay_endpoint": ENDPOINT}, "^--kv-events-config: replay_endpoint must differ from endpoint$"),
        ({"buffer_steps": 3}, "^--kv-events-config: unknown field 'buffer_steps'; known are block_size, "),
        ({"publisher": "kafka"}, "^--kv-events-config.publisher must be one of zmq, null, not 'kafka'$"),
        ({"block_size": 0}, "block_size must be valid"),
        ([], r"^--kv-events-config must be a JSON object, not \[\]$"),
        ("{", "^--kv-events-config is not valid JSON"),
    ],
)
def test_invalid_settings_are_one_line(values: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        settings(values)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"prefix_cache_memory": 0}, "--prefix-cache-memory 0"),
        ({"target_url": "host:7070"}, "not supported with --target-url"),
    ],
)
def test_settings_that_do_not_fit(others: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        requested_kv_events(settings({"enable_kv_cache_events": True}, **others))


def test_a_server_reports_them_before_it_loads_models(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--port", "0", "--model", "demo", "--kv-events-config.endpoint", "5557"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setitem(sys.modules, "zmq", None)
    assert main(["--port", "0", "--model", "demo", "--kv-events-config.enable_kv_cache_events", "true"]) == 1
    line = "swiftspec: error: --kv-events-config needs ZeroMQ: run pip install '.[kv-events]' "
    error = capsys.readouterr().err
    assert error.startswith(line) and error.count("\n") == 1
    assert main(["--port", "0", "--kv-events-endpoint", ENDPOINT]) == 2
    assert "it is now --kv-events-config.endpoint" in capsys.readouterr().err


def test_a_replica_of_ray_refuses_them() -> None:
    with pytest.raises(UserError, match="a replica publishes no KV events"):
        replica_settings({"kv_events_config": {"enable_kv_cache_events": True}})
