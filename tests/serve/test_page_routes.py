"""The files of the page over HTTP: served without a key, and nothing else is."""

from __future__ import annotations

import httpx
import pytest


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/", "text/html"), ("/page/app.js", "text/javascript"), ("/page/style.css", "text/css"),
     ("/page/icon.svg", "image/svg+xml"), ("/page/traces/pair.jsonl", "")],
)  # fmt: skip
def test_the_page_needs_no_key_and_has_a_strict_policy(client: httpx.Client, path: str, kind: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith(kind)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    known = client.get(path, headers={"if-none-match": answer.headers["etag"]})
    assert known.status_code in (200, 304) and known.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize(
    "path", ["/page/none.js", "/page/", "/page/../app.py", "/page/%2e%2e/http/app.py", "/page/traces"]
)
def test_only_the_pages_files_are_served(client: httpx.Client, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404 and "error" in answer.json()


def test_the_model_info_reports_the_chat_template(client: httpx.Client) -> None:
    assert client.get("/v1/models").json()["data"][0]["chat_template"] is True
