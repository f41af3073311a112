"""Addresses and credentials of the workers that the settings name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swiftspec import file_io
from swiftspec.distributed.transport.grpc.endpoint import TARGET_SERVICE, Endpoint, RpcSecurity
from swiftspec.errors import UserError
from swiftspec.extras import require_extra
from swiftspec.settings.settings import Settings, UsageError

if TYPE_CHECKING:
    from swiftspec.builder.load_options import WorkerAddress

MAX_TOKEN_BYTES = 4096


def draft_worker(settings: Settings) -> WorkerAddress | None:
    """Returns address and credentials of the draft worker; None if --draft-url is not set. Raises UserError if they are
    invalid."""
    return None if settings.draft_url is None else _worker(settings, settings.draft_url, "--draft-url")


def target_worker(settings: Settings) -> WorkerAddress:
    """Returns address and credentials of the target worker. --target-url must be set. Raises UserError if they are
    invalid."""
    assert settings.target_url is not None
    return _worker(settings, settings.target_url, "--target-url")


def remote_target_name(settings: Settings) -> str:
    """Returns the name of the target worker's model, which it pings. --target-url must be set. Raises UserError if the
    settings contradict each other, or the worker does not answer. Does not import torch."""
    assert settings.target_url is not None
    settings.check_features(settings.mode)
    require_extra("network", "--target-url")
    from swiftspec.distributed.remote.session_messages import ModelInfo
    from swiftspec.distributed.transport.grpc.client import GrpcConnection

    connection = GrpcConnection(settings.target_url, "--target-url", TARGET_SERVICE, load_security(settings))
    try:
        return ModelInfo.from_json(connection.ping(settings.remote_timeout)).name
    except (ConnectionError, ValueError) as error:
        raise UserError(f"{error}; start it with `swiftspec worker target`") from None
    finally:
        connection.close()


def _worker(settings: Settings, url: str, flag: str) -> WorkerAddress:
    from swiftspec.builder.load_options import WorkerAddress

    endpoint, security = Endpoint.parse(url, flag), load_security(settings)
    security.check_client(endpoint, flag)
    return WorkerAddress(str(endpoint), flag, security, settings.remote_timeout)


def load_security(settings: Settings) -> RpcSecurity:
    """Reads the token and the PEM files that the settings name. Raises UsageError if one cannot be read or is
    invalid."""
    read = {name: _pem(getattr(settings, f"tls_{name}"), f"--tls-{name}") for name in ("cert", "key", "ca")}
    return RpcSecurity(_token(settings.token), **read)


def _pem(file: str | None, flag: str) -> bytes | None:
    if file is None:
        return None
    try:
        data = file_io.read_bytes(file_io.expand_user(file), f"{flag} {file}", file_io.SMALL_FILE_BYTES)
    except UserError as error:
        raise UsageError(str(error)) from None
    if b"-----BEGIN" not in data:
        raise UsageError(f"{flag} {file} is not a PEM file: it must begin with -----BEGIN")
    return data


def _token(token: str | None) -> str | None:
    if token is not None and token.startswith("@"):
        try:
            token = file_io.read_text(file_io.expand_user(token[1:]), f"--token {token}", MAX_TOKEN_BYTES).strip()
        except UserError as error:
            raise UsageError(str(error)) from None
    if token is not None and not (token.isascii() and token.isprintable() and token.strip() == token and token):
        raise UsageError("--token must be printable ASCII without leading or trailing spaces")
    return token
