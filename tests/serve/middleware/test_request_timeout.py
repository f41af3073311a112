"""RequestTimeoutProtocol: upgrade requests are answered as ordinary requests."""

from __future__ import annotations

import logging

import httpx
import pytest

from swiftspec.serve.middleware.request_timeout import RequestTimeoutProtocol
from tests.support.http import Player, application, serving


def test_upgrade_requests_are_answered_without_a_log_line(player: Player, caplog: pytest.LogCaptureFixture) -> None:
    with serving(
        application(player), http=RequestTimeoutProtocol, ws="none", log_level="warning", log_config=None
    ) as url:
        for upgrade in ("websocket", "h2c"):
            with caplog.at_level(logging.WARNING):
                answer = httpx.get(f"{url}/version", headers={"Connection": "Upgrade", "Upgrade": upgrade})
            assert answer.status_code == 200 and answer.json()["version"]
    assert not caplog.records
