"""The front end's process: the URL and the host names of its address, and its settings."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swiftspec.cli.config_sources import load_settings
from swiftspec.errors import UserError
from swiftspec.serve.link.frontend_process import (
    LOOPBACK,
    check_frontend_settings,
    frontend_config,
    listener_url,
    local_host_names,
)
from swiftspec.settings.settings import UsageError


def test_host_names_depend_on_the_address() -> None:
    assert (
        local_host_names("0.0.0.0") is None
        and local_host_names("192.168.1.2") is None
        and local_host_names("::") is None
    )
    assert local_host_names("localhost") == local_host_names("127.0.0.1") == local_host_names("::1") == LOOPBACK
    assert local_host_names("127.0.0.2") == LOOPBACK | {"127.0.0.2"}


@pytest.mark.parametrize(
    ("address", "url"), [(("127.0.0.1", 8000), "http://127.0.0.1:8000"), (("::1", 8000, 0, 0), "http://[::1]:8000")]
)
def test_the_url_of_an_ipv6_address_has_brackets(address: tuple[object, ...], url: str) -> None:
    listener: Any = SimpleNamespace(getsockname=lambda: address)
    assert listener_url(listener) == url


def test_a_chat_template_is_passed_and_a_system_prompt_refused(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    settings = load_settings({"chat_template": str(file)})
    with pytest.raises(UserError, match=r"^--chat-template .*No such file"):
        check_frontend_settings(settings)
    file.write_text("{{ messages }}")
    check_frontend_settings(settings)
    assert frontend_config(settings).chat_template == str(file.resolve())
    assert frontend_config(load_settings({})).chat_template is None
    with pytest.raises(UserError, match=r"^--system-prompt is not supported by a server"):
        check_frontend_settings(load_settings({"system_prompt": "x"}))


def test_allowed_origins_are_validated() -> None:
    origins = ["https://example.com", "http://localhost:3000", "*", "null"]
    settings = load_settings({"allowed_origin": origins})
    check_frontend_settings(settings)
    config = frontend_config(settings)
    assert config.allowed_origins == origins
    for origin in ("https://example.com/", "example.com", ""):
        with pytest.raises(UsageError, match=r"--allowed-origin: .* is not an origin"):
            check_frontend_settings(load_settings({"allowed_origin": [origin]}))
