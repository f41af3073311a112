"""How a server's keeper makes its front end: the listening socket, and what the settings say of it. Nothing heavy."""

from __future__ import annotations

import socket
import sys
from typing import Any

import msgspec

from swiftspec.errors import UserError
from swiftspec.serve.http.engine_link import frames
from swiftspec.serve.http.engine_link.address import names_of
from swiftspec.serve.otel import exporter
from swiftspec.serve.settings.settings import Settings, UsageError, flag_name
from swiftspec.serve.stdio import warn
from swiftspec.serve.supervisor.supervised_process import Program

BACKLOG = 128  # connections that wait to be accepted, while no front end is there
SILENCE = 15.0  # seconds for its event loop
DEFAULTS = (  # sampling flags that make sense for every request
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "max_tokens", "stop_token_ids", "ignore_eos",
)  # fmt: skip


def check(settings: Settings) -> None:
    """Raises UserError where a server cannot be what the settings say, as far as that shows at once."""
    defaults_of(settings)
    if settings.otlp_endpoint is not None:
        exporter.check(settings.otlp_endpoint)
    if not settings.api_key and names_of(settings.host) is None:
        warn(f"--host {settings.host} without --api-key: everybody who reaches this machine may ask")


def program(settings: Settings, listening: socket.socket) -> Program:
    """The front end, as it is kept."""

    def command(control: int, life: int) -> list[str]:
        return [sys.executable, "-m", "swiftspec.serve.http", str(control), str(life), str(listening.fileno())]

    return Program(
        "the HTTP front end", command, files=(listening.fileno(),), silence=SILENCE,
        first=msgspec.msgpack.encode(configuration(settings)),
    )  # fmt: skip


def address(listening: socket.socket) -> str:
    """Where it is to be reached."""
    host, port = listening.getsockname()[:2]
    return f"http://{host}:{port}"


def defaults_of(settings: Settings) -> dict[str, Any]:
    """The sampling values that were given at the start, for requests that name none. Raises UsageError on what only a
    request can mean."""
    table, defaults = settings.table, dict[str, Any]()
    for name, flag in table.flags.items():
        if name in settings.model_fields_set and (flag.config is table.sampling or name == "negative_prompt"):
            if name not in DEFAULTS:
                raise UsageError(f"{flag_name(name)} is for one request, and clients bring their own: leave it out")
            defaults[name] = getattr(settings, name)
    return defaults


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises UserError where the address is taken or not this machine's."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(BACKLOG)
        except BaseException:
            listening.close()
            raise
    except OSError as error:
        raise UserError(
            f"{host}:{port} cannot be served ({error.strerror}): take another --port or --host, or end what is there"
        ) from None
    return listening


def configuration(settings: Settings) -> frames.Configure:
    """What the settings say of the front end."""
    return frames.Configure(
        model_name=settings.served_model_name or settings.model or "swiftspec-demo",
        api_keys=list(settings.api_key or []),
        max_queue=settings.max_queue,
        queue_timeout=settings.queue_timeout,
        request_timeout=settings.request_timeout,
        drain_timeout=settings.drain_timeout,
        host=settings.host,
        otlp_endpoint=settings.otlp_endpoint,
    )
