"""Start of the front-end process by the supervisor: listening socket, command line and configuration.

This module imports neither FastAPI nor uvicorn, since the supervisor imports it.
"""

from __future__ import annotations

import re
import socket
import sys
from typing import Any

import msgspec

from swiftspec.contrib.otel import exporter
from swiftspec.distributed.launch.supervised_process import Program
from swiftspec.errors import UserError, truncated_repr
from swiftspec.extras import require_extra
from swiftspec.params import FILTERS, PENALTIES, SamplingParams
from swiftspec.serve.link import frames
from swiftspec.settings.flags import SETTINGS
from swiftspec.settings.kv_events_config import KvEventsConfig
from swiftspec.settings.settings import Settings, UsageError, check_usage
from swiftspec.startup.built_in_models import chat_template_file, served_model_names
from swiftspec.startup.worker_endpoints import remote_target_name
from swiftspec.stdio import warn
from swiftspec.text.template import read_template

BACKLOG_CONNECTIONS = 128  # connections that the kernel holds until the front end, or its successor, accepts them
HEARTBEAT_TIMEOUT_S = 15.0  # without a heartbeat of the event loop for this long, the front end is restarted
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
ORIGIN_PATTERN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+")  # "null": a page from a file
# sampling flags that are valid as defaults of all requests
DEFAULTABLE_FIELDS = ("temperature", *FILTERS, *PENALTIES, "max_tokens", "stop_token_ids", "ignore_eos")


def check_frontend_settings(settings: Settings) -> None:
    """Validates the front end's settings before any model is loaded. Raises UserError if one is invalid."""
    sampling_defaults(settings)
    if settings.system_prompt is not None:
        check_usage({"server", "system prompt"})
    if settings.chat_template_file is not None:
        read_template(settings.chat_template_file)
    if settings.otlp_endpoint is not None:
        exporter.check_otlp_endpoint(settings.otlp_endpoint)
    requested_kv_events(settings)
    for origin in settings.allowed_origin or ():
        if ORIGIN_PATTERN.fullmatch(origin) is None:
            raise UsageError(
                f"--allowed-origin: {truncated_repr(origin)} is not an origin: use scheme://host or scheme://host:port,"
                " without a path, or * for all"
            )
    if not settings.api_key and local_host_names(settings.host) is None:
        warn(f"--host {settings.host} without --api-key: anyone who can reach this machine can send requests")


def requested_kv_events(settings: Settings) -> KvEventsConfig | None:
    """Returns the configuration of KV events; None if they are not published. Raises UserError if they are not
    supported with other settings, or ZeroMQ is not installed."""
    if not settings.kv_events_config.enabled:
        return None
    settings.check_features(None)
    require_extra("kv-events", "--kv-events-config")
    return settings.kv_events_config


def frontend_program(settings: Settings, listener: socket.socket) -> Program:
    """Returns the program with which the supervisor starts the front end. The process inherits `listener`."""

    def command(control: int, incarnation: int) -> list[str]:
        numbers = (control, incarnation, listener.fileno())
        return [sys.executable, "-m", "swiftspec.serve.frontend", *map(str, numbers)]

    return Program(
        "the HTTP front end",
        command,
        inherited_fds=(listener.fileno(),),
        heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
        first_message=msgspec.msgpack.encode(frontend_config(settings)),
    )


def listener_url(listener: socket.socket) -> str:
    """Returns the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def local_host_names(host: str) -> frozenset[str] | None:
    """Returns the values of the `Host` header with which local programs reach a server that listens on `host`. Returns
    None if other machines can reach the server too, so that any name is possible."""
    bare = host.strip("[]").lower()
    if bare in ("localhost", "::1") or bare.startswith("127."):
        return LOOPBACK | {f"[{bare}]" if ":" in bare else bare}
    return None


def sampling_defaults(settings: Settings) -> dict[str, Any]:
    """Returns the sampling parameters from the command line, the defaults for requests that do not set them. Raises
    UsageError on a parameter that only a request can set."""
    defaults: dict[str, Any] = {}
    for name, flag in SETTINGS.items():
        if name in settings.model_fields_set and (flag.config is SamplingParams or name == "negative_prompt"):
            if name not in DEFAULTABLE_FIELDS:
                check_usage({"server": "", "request settings": f"{{{name}}}"})
            defaults[name] = getattr(settings, name)
    return defaults


def open_listener(host: str, port: int) -> socket.socket:
    """Opens a listening TCP socket. Raises UserError if the address is in use or does not belong to this machine."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG_CONNECTIONS)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise UserError(
            f"cannot listen on {host}:{port} ({error.strerror}): use another --port or --host, or stop the process"
            " that uses it"
        ) from None
    return listener


def frontend_config(settings: Settings) -> frames.FrontendConfig:
    """Returns the front end's part of the settings. Raises UserError if --target-url is set and its worker does not
    answer."""
    if settings.target_url is None:
        names = served_model_names(settings)
        template = chat_template_file(settings.model, settings.chat_template_file)
    else:
        names = list(settings.served_model_name) or [remote_target_name(settings)]
        template = settings.chat_template_file
    return frames.FrontendConfig(
        model_names=names,
        api_keys=list(settings.api_key or []),
        max_queue=settings.max_queue,
        request_timeout=settings.request_timeout,
        host=settings.host,
        otlp_endpoint=settings.otlp_endpoint,
        chat_template=None if template is None else str(template.resolve()),
        allowed_origins=list(settings.allowed_origin or []),
        public_metrics=settings.public_metrics,
        kv_block_size=settings.kv_events_config.block_size,
    )
