"""The front end's process: the URL and the host names of its address."""

from __future__ import annotations

import socket

import pytest

from swiftspec.serve.http.engine_link.frontend_process import LOOPBACK, listener_url, local_host_names


def test_host_names_depend_on_the_address() -> None:
    assert (
        local_host_names("0.0.0.0") is None
        and local_host_names("192.168.1.2") is None
        and local_host_names("::") is None
    )
    assert local_host_names("localhost") == local_host_names("127.0.0.1") == local_host_names("::1") == LOOPBACK
    assert local_host_names("127.0.0.2") == LOOPBACK | {"127.0.0.2"}


@pytest.mark.parametrize(("family", "host", "url"), [
    (socket.AF_INET, "127.0.0.1", "http://127.0.0.1:{port}"),
    (socket.AF_INET6, "::1", "http://[::1]:{port}"),
])  # fmt: skip
def test_the_url_of_an_ipv6_address_has_brackets(family: int, host: str, url: str) -> None:
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError as error:
        pytest.skip(f"no address {host} here: {error}")
    with listener:
        assert listener_url(listener) == url.format(port=listener.getsockname()[1])
