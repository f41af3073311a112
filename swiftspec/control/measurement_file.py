"""Files of measurements that later starts with the same models on the same machine continue with."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

FORMAT = 3
MAX_FILE_BYTES = 1 << 14


class Measurement(Protocol):
    """A measurement that is stored as JSON."""

    FILE_STEM: ClassVar[str]  # first part of the name of its files

    def to_json(self) -> Mapping[str, object]: ...
    @staticmethod
    def from_json(data: object) -> Any:
        """Raises ValueError if `data` was not made by `to_json`."""
        ...


M = TypeVar("M", bound=Measurement)


@dataclass(frozen=True, slots=True)
class MeasurementFile(Generic[M]):
    """File of a measurement of one pair, or of a target alone, on one machine. `kind`: the class of the measurement."""

    path: Path
    kind: type[M]

    @staticmethod
    def of(folder: Path, facts: Mapping[str, object], kind: type[M]) -> MeasurementFile[M]:
        """Returns the file for `facts`: everything that determines the measurement, serialisable as JSON."""
        words = json.dumps({"format": FORMAT, **facts}, sort_keys=True).encode()
        return MeasurementFile(folder / f"{kind.FILE_STEM}-{hashlib.sha256(words).hexdigest()[:40]}.json", kind)

    def read(self) -> M | None:
        """Returns the measurement; None if there is no file, or if it is damaged."""
        try:
            with self.path.open("rb") as file:
                return self.kind.from_json(json.loads(file.read(MAX_FILE_BYTES)))
        except (OSError, ValueError, RecursionError):
            return None

    def write(self, measured: M) -> None:
        """Replaces the file. Does nothing if the folder cannot be written to: the next start measures again."""
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(measured.to_json()), encoding="utf-8")
            temporary.replace(self.path)
