"""The front end's process: host names of its address."""

from __future__ import annotations

from swiftspec.serve.http.engine_link.frontend_process import LOOPBACK, local_host_names


def test_host_names_depend_on_the_address() -> None:
    assert (
        local_host_names("0.0.0.0") is None
        and local_host_names("192.168.1.2") is None
        and local_host_names("::") is None
    )
    assert local_host_names("localhost") == local_host_names("127.0.0.1") == local_host_names("::1") == LOOPBACK
    assert local_host_names("127.0.0.2") == LOOPBACK | {"127.0.0.2"}
