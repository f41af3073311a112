"""Whom an address is open to."""

from __future__ import annotations

LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


def names_of(host: str) -> frozenset[str] | None:
    """Under which names a server that listens at `host` can be asked by programs of this machine; None where others
    reach it, too, by whatever name."""
    bare = host.strip("[]").lower()
    if bare in ("localhost", "::1") or bare.startswith("127."):
        return LOOPBACK | {f"[{bare}]" if ":" in bare else bare}
    return None
