"""File of a GPU trial's verdict, so that later starts on the same GPU with the same models do not repeat the trial."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from swiftspec.builder.gpu_trial import GpuVerdict
from swiftspec.errors import UserError
from swiftspec.file_io import read_object
from swiftspec.model.tensor_parallel import TensorParallelGroup

FORMAT = 2
MAX_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class VerdictFile:
    """File of a verdict."""

    path: Path

    @staticmethod
    def of(folder: Path, facts: Mapping[str, object]) -> VerdictFile:
        """Returns the file for `facts`: everything that determines a verdict, serialisable as JSON."""
        words = json.dumps({"format": FORMAT, **facts}, sort_keys=True).encode()
        return VerdictFile(folder / f"{hashlib.sha256(words).hexdigest()[:40]}.json")

    def read(self) -> GpuVerdict | None:
        """Returns the verdict; None if there is none, or if the file is damaged."""
        try:
            return GpuVerdict.from_json(read_object(self.path, max_bytes=MAX_BYTES))
        except (UserError, ValueError):
            return None

    def write(self, verdict: GpuVerdict) -> None:
        """Replaces the file. Does nothing if the folder cannot be written to: the next start repeats the trial."""
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(verdict.to_json()), encoding="utf-8")
            temporary.replace(self.path)


@dataclass(slots=True)
class VerdictRecord:
    """The verdict that this process uses, which its group may have lowered since the trial, and the file of the next
    start's verdict. `groups`: those whose ranks this process exchanges data with."""

    file: VerdictFile
    verdict: GpuVerdict
    groups: list[TensorParallelGroup] = field(default_factory=list)

    def lower(self, error: Exception, why: str, *, grouped: bool) -> None:
        """Writes the next lower verdict to the file (see `GpuVerdict.lower`), unless another rank has caused the error:
        a kernel that has waited too long for a rank fails on all GPUs of the group."""
        if all(group.lost(error) is None for group in self.groups):
            self.file.write(self.verdict.lower(why, grouped=grouped))
