"""Optional dependencies: the extras of pyproject.toml that the engine itself can use."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from swiftspec.errors import UserError

ExtraName = Literal["kv-events", "network", "otel", "ray"]


@dataclass(frozen=True, slots=True)
class Extra:
    """An optional dependency. `library`: its name in messages. `purpose`: what needs it. `modules`: what is imported
    from it."""

    library: str
    purpose: str
    modules: tuple[str, ...]


EXTRAS: dict[ExtraName, Extra] = {
    "kv-events": Extra("ZeroMQ", "KV events", ("zmq",)),
    "network": Extra("gRPC", "workers", ("grpc", "grpc_health.v1", "grpc_reflection.v1alpha", "google.protobuf")),
    "otel": Extra(
        "OpenTelemetry", "spans of requests", ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
    ),
    "ray": Extra("Ray Serve", "replicas in Ray Serve", ("ray",)),
}


def require_extra(name: ExtraName, needed_by: str) -> None:
    """Raises UserError unless the extra `name` is installed; imports none of its modules. `needed_by`: the flag or
    command that needs it."""
    if not has_extra(name):
        raise UserError(f"{needed_by} needs {EXTRAS[name].library}: {install_hint(name)}")


def install_hint(name: ExtraName) -> str:
    """Returns what installs the extra `name`."""
    return f"run pip install '.[{name}]' in SwiftSpec's source directory"


def has_extra(name: ExtraName) -> bool:
    """Returns whether the extra `name` is installed; imports none of its modules."""
    return all(_is_installed(module) for module in EXTRAS[name].modules)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is not installed either
        return False
