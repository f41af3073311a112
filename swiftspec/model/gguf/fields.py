"""Metadata of a GGUF file that describe its model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from swiftspec.errors import UserError, truncated_repr
from swiftspec.model.gguf.file import GgufFile


@dataclass(frozen=True, slots=True)
class GgufFields:
    """The metadata whose names begin with that of the architecture, by the rest of the name."""

    architecture: str
    values: Mapping[str, Any]

    @staticmethod
    def of(file: GgufFile) -> GgufFields:
        """Returns the fields of a file. A file without an architecture has none."""
        name = str(file.metadata.get("general.architecture"))
        own = {key: value for key, value in file.metadata.items() if key.startswith(f"{name}.")}
        return GgufFields(name, {key.removeprefix(f"{name}."): value for key, value in own.items()})

    def scalar(self, name: str) -> Any:
        """Returns a value, which may be given for each layer; None if it is missing. A number that is stored as float32
        becomes the shortest decimal one that it stands for, such as 1e-06. Raises UserError if the layers differ."""
        value = self.values.get(name)
        if isinstance(value, float):
            return float(str(np.float32(value)))
        if not isinstance(value, np.ndarray):
            return value
        if len(value) == 0 or (value != value[0]).any():
            raise UserError(f"{self.architecture}.{name}: layers that differ in shape are not supported")
        return value[0].item()

    def number(self, name: str) -> float:
        """Returns a value as a number: 0 if it is missing, NaN if it is not a number."""
        value = self.scalar(name)
        if value is None:
            return 0.0
        return float(value) if isinstance(value, int | float) else math.nan

    def average_head_dim(self) -> float:
        """Returns the size of a head if the heads divide the hidden size; 0 or NaN if the metadata imply none."""
        hidden, heads = self.number("embedding_length"), self.number("attention.head_count")
        return hidden // heads if heads > 0 else 0.0

    def head_dim(self) -> float:
        """Returns the size of a head; 0 or NaN if the metadata imply none, which the parser of config.json refuses."""
        return self.number("attention.key_length") or self.average_head_dim()

    def is_off(self, name: str) -> bool:
        """Returns whether a feature is not in use: its value is missing or 0, or 0 for each layer."""
        value = self.values.get(name)
        if isinstance(value, np.ndarray):
            return not value.any()
        return value is None or (isinstance(value, int | float) and value == 0)

    def unsupported(self, name: str) -> UserError:
        """Returns the error for a value that is not supported."""
        return UserError(f"{self.architecture}.{name} {truncated_repr(self.values.get(name))} is not supported")
