"""Whom an address is open to."""

from __future__ import annotations

from swiftspec.serve.http.engine_link.address import LOOPBACK, names_of


def test_names_follow_the_address() -> None:
    assert names_of("0.0.0.0") is None and names_of("192.168.1.2") is None and names_of("::") is None
    assert names_of("localhost") == names_of("127.0.0.1") == names_of("::1") == LOOPBACK
    assert names_of("127.0.0.2") == LOOPBACK | {"127.0.0.2"}
