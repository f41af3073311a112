"""Where a worker listens, and who may speak with it: any program of this machine; from others only who has the token,
over TLS. This file is plain data, so that whoever names a worker need not have gRPC in memory."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from swiftspec.errors import UserError, truncated_repr

MAX_MESSAGE_BYTES = 16 << 20  # of a message
KEEPALIVE_TIME_MS, KEEPALIVE_TIMEOUT_MS = (
    10_000,
    5_000,
)  # milliseconds: how often a silent peer is asked for a sign, and how long that may take
KEEPALIVE_OPTIONS = (("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS), ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS))
LOOKAHEAD_BYTES = (
    1 << 20
)  # bytes that a stream may have under way; with gRPC's 64 KiB growth would wait for a slow wire
SIZE_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host and a port."""

    host: str
    port: int

    @staticmethod
    def parse(text: str, flag: str) -> Endpoint:
        """Of HOST:PORT. Raises UserError on what is none."""
        host, colon, port = text.rpartition(":")
        bare = host.strip("[]")
        if not (colon and bare and port.isascii() and port.isdigit() and int(port) < 65536) or "/" in host:
            raise UserError(f"{flag} must be HOST:PORT, such as 127.0.0.1:7070, not {truncated_repr(text)}")
        return Endpoint(bare, int(port))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host.lower() == "localhost"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class RpcSecurity:
    """What both ends of a connection agree on. `token`: what a client shows. A worker has `cert` and `key`, a client
    `ca`, the certificates that it trusts beside those of the system; all are PEM."""

    token: str | None = None
    cert: bytes | None = None
    key: bytes | None = None
    ca: bytes | None = None

    def check_client(self, endpoint: Endpoint, flag: str) -> None:
        """Raises UserError where another machine would be asked without a token. It is asked over TLS."""
        if not endpoint.is_loopback and self.token is None:
            raise UserError(f"{flag} {endpoint} is another machine: give the worker's --token")

    def check_worker(self, endpoint: Endpoint) -> None:
        """Raises UserError where a worker would be open to other machines."""
        if (self.cert is None) != (self.key is None):
            raise UserError("--tls-cert and --tls-key go together: give both")
        if not endpoint.is_loopback and (self.cert is None or self.token is None):
            raise UserError(
                f"--listen {endpoint} is open to other machines: give --tls-cert, --tls-key and --token, or listen on"
                " 127.0.0.1"
            )

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a client shows with each call."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)
