"""The interface towards another machine."""

from __future__ import annotations

import os

import pytest

from swiftspec.distributed.launch.network_interface import (
    GLOO_INTERFACE,
    address_towards,
    interface_of,
    select_gloo_interface,
)


def test_the_loopback_interface() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") is None


def test_the_selection_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GLOO_INTERFACE, raising=False)
    select_gloo_interface("127.0.0.1")
    assert os.environ[GLOO_INTERFACE] == "lo"
    monkeypatch.setenv(GLOO_INTERFACE, "eth7")
    select_gloo_interface("127.0.0.1")
    assert os.environ[GLOO_INTERFACE] == "eth7"
