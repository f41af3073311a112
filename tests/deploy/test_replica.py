"""A replica without a scheduler: settings, ranks, health, and its end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from swiftspec.deploy.replica import EngineReplica, replica_settings
from swiftspec.errors import UserError
from swiftspec.settings.settings import UsageError
from tests.support.toy_pair import make_pair

REQUEST = {"prompt": "def f", "temperature": 0.0, "max_tokens": 9}


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    target, draft = make_pair(tmp_path_factory.mktemp("pair"))
    return {"model": str(target), "draft_model": str(draft), "device": "cpu", "threads": 1, "dtype": "float32"}


async def answer(replica: EngineReplica) -> str:
    transport = httpx.ASGITransport(replica.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        response = await client.post("/v1/completions", json=REQUEST)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["text"]


@pytest.mark.slow
def test_ranks_give_the_same_text(values: dict[str, Any]) -> None:
    texts = []
    for ranks, more in ((1, {}), (2, {"mode": "async"})):
        replica = EngineReplica({**values, **more}, ranks)
        texts.append(asyncio.run(answer(replica)))
        replica.check_health()
        asyncio.run(replica.close())
        assert [process.returncode for process in replica._followers] == [0] * (ranks - 1)
    assert texts[0] == texts[1] and texts[0]


@pytest.mark.slow
def test_a_lost_rank_makes_the_replica_unhealthy(values: dict[str, Any]) -> None:
    """A scheduler then replaces it; with a draft of its own, the target would go on without it."""
    replica = EngineReplica({**values, "target_tp": 2, "mode": "ar", "draft_model": None}, 2)
    replica._followers[0].kill()
    with pytest.raises(AssertionError):
        asyncio.run(answer(replica))
    with pytest.raises(UserError, match="the engine has failed"):
        replica.check_health()
    asyncio.run(replica.close())


def test_invalid_settings(tmp_path: Path, values: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="wide"):
        replica_settings({"wide": 3})
    with pytest.raises(UserError, match="missing"):
        EngineReplica({**values, "model": str(tmp_path / "missing")})
    with pytest.raises(UsageError, match="checks no API key"):
        replica_settings({"api_key": ["secret"]})
    assert replica_settings({"mode": "async"}).mode == "async"
