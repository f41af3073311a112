"""Optional dependencies: the extras of pyproject.toml that the engine itself can use."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from swiftspec.errors import UserError

ExtraName = Literal["network", "otel", "report"]


@dataclass(frozen=True, slots=True)
class Extra:
    """An optional dependency. `library`: its name in messages. `modules`: what is imported from it."""

    library: str
    modules: tuple[str, ...]


EXTRAS: dict[ExtraName, Extra] = {
    "network": Extra("gRPC", ("grpc", "grpc_health.v1", "grpc_reflection.v1alpha", "google.protobuf")),
    "otel": Extra("OpenTelemetry", ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")),
    "report": Extra("matplotlib", ("matplotlib",)),
}


def require_extra(name: ExtraName, needed_by: str) -> None:
    """Raises UserError unless the extra `name` is installed; imports none of its modules. `needed_by`: the flag or
    command that needs it."""
    if missing_modules(name):
        raise UserError(f"{needed_by} needs {EXTRAS[name].library}: pip install 'swiftspec[{name}]'")


def missing_modules(name: ExtraName) -> list[str]:
    """Returns the modules of the extra `name` that are not installed."""
    return [module for module in EXTRAS[name].modules if not _is_installed(module)]


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is not installed either
        return False
