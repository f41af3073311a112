"""Address of a worker and its access rules.

Programs on the same machine may connect freely; those on other machines need the token and TLS. This module does not
import gRPC, so that an address can be parsed without loading it.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from swiftspec.errors import UserError, truncated_repr

DRAFT_SERVICE, TARGET_SERVICE = "swiftspec.v1.DraftService", "swiftspec.v1.TargetService"
SERVICES = {"draft": DRAFT_SERVICE, "target": TARGET_SERVICE}
STREAM_METHODS = {DRAFT_SERVICE: "GenerateDrafts", TARGET_SERVICE: "VerifyDrafts"}
MAX_MESSAGE_BYTES = 16 << 20  # largest message in bytes
KEEPALIVE_TIME_MS, KEEPALIVE_TIMEOUT_MS = (
    10_000,
    5_000,
)  # milliseconds: interval of keepalive pings on an idle connection, and timeout of their acknowledgement
KEEPALIVE_OPTIONS = (("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS), ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS))
LOOKAHEAD_BYTES = (
    1 << 20
)  # flow-control window of a stream; with gRPC's default of 64 KiB, tree deltas would block on a slow network
SIZE_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Host and port of a worker."""

    host: str
    port: int

    @staticmethod
    def parse(text: str, flag: str) -> Endpoint:
        """Parses HOST:PORT. Raises UserError on invalid text."""
        host, colon, port = text.rpartition(":")
        bare = host.strip("[]")
        if not (colon and bare and port.isascii() and port.isdigit() and int(port) < 65536) or "/" in host:
            raise UserError(f"{flag} must be HOST:PORT, such as 127.0.0.1:7070, not {truncated_repr(text)}")
        return Endpoint(bare, int(port))

    @property
    def is_loopback(self) -> bool:
        """Whether only programs on this machine can connect."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host.lower() == "localhost"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class RpcSecurity:
    """Credentials of either end of a connection; certificates and keys are in PEM format.

    `token`: bearer token that a client sends and a worker checks.
    `cert`, `key`: certificate and private key of a worker.
    `ca`: certificates that a client trusts instead of those of the system.
    """

    token: str | None = None
    cert: bytes | None = None
    key: bytes | None = None
    ca: bytes | None = None

    def check_client(self, endpoint: Endpoint, flag: str) -> None:
        """Raises UserError if the token is missing and the worker is on another machine. A client always uses TLS
        there."""
        if not endpoint.is_loopback and self.token is None:
            raise UserError(f"{flag} {endpoint} is on another machine: pass the worker's --token")

    def check_worker(self, endpoint: Endpoint) -> None:
        """Raises UserError if other machines could connect without TLS and a token."""
        if (self.cert is None) != (self.key is None):
            raise UserError("--tls-cert and --tls-key must be used together: pass both")
        if not endpoint.is_loopback and (self.cert is None or self.token is None):
            raise UserError(
                f"--listen {endpoint} is open to other machines: pass --tls-cert, --tls-key and --token, or listen on"
                " 127.0.0.1"
            )

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """gRPC metadata that a client sends with each call."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)
