"""Packed weights kept on disk, so that the next start maps them in place of packing again.

An entry is a folder of units (units.py), one a layer and one for the head: a start takes those that are there and whole
and packs the others. What was packed is written behind the answers, a piece at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from swiftspec.backends.cpu import packed_weight_file
from swiftspec.backends.cpu.packed_weight_file import Unit
from swiftspec.backends.cpu.packing import Packed
from swiftspec.model.packed_model import Layer, Stack
from swiftspec.model.weights import LayerWeights, ModelWeights, Weight

VERSION = "v1-"  # of the layouts: what entries begin with
LEAST = 64 << 20  # bytes of a model that is worth a file
MOST = 32 << 30  # bytes of all entries; beyond them the oldest go
SPARE = 1 << 30  # bytes that are left free on the disk
STALE = 3600.0  # seconds after which a file that is not whole has been left behind
MATRICES, NORMS = ("qkv", "o", "gate_up", "down"), ("input_norm", "post_norm")
T = TypeVar("T")


class Stopped(Exception):
    """The process ends, and nothing more is written."""


@dataclass(frozen=True, slots=True)
class PackedCache:
    """The folder of all entries, and what this process has still to write.

    `most`, `least`: bytes of all entries together, and of a model that is worth one.
    """

    folder: Path
    most: int = MOST
    least: int = LEAST
    writer: Writer = field(default_factory=lambda: Writer())

    def entry(self, facts: Mapping[str, object]) -> Entry:
        """Where a model's weights are, or will be. `facts`: all that their bytes follow from, as JSON takes it."""
        words = json.dumps(facts, sort_keys=True, default=str).encode()
        return Entry(self, self.folder / f"{VERSION}{hashlib.sha256(words).hexdigest()[:40]}")

    def make_room(self, size: int, own: Path) -> bool:
        """Whether so many bytes may be written for an entry, after others were evicted: those of other layouts first,
        then those that were not used for longest."""
        sizes = {found: _size(found) for found in self.folder.iterdir() if found.name[:1] == "v"}
        if sizes.get(own, 0) + size > self.most:
            return False
        for found in sorted(sizes, key=lambda found: (found.name.startswith(VERSION), _used(found))):
            if sum(sizes.values()) + size <= self.most:
                break
            if found not in self.writer.used:
                shutil.rmtree(found, ignore_errors=True)
                del sizes[found]
        return sum(sizes.values()) + size <= self.most and shutil.disk_usage(self.folder).free >= size + SPARE


def _used(entry: Path) -> float:
    """When an entry was last used."""
    try:
        return entry.stat().st_mtime
    except OSError:  # somebody else has just evicted it
        return 0.0


def _size(entry: Path) -> int:
    """Bytes of an entry, without what somebody began to write long ago, which goes."""
    total = 0
    with contextlib.suppress(OSError):
        for file in [*entry.iterdir()]:
            state = file.stat()
            if file.suffix == ".tmp" and time.time() - state.st_mtime > STALE:
                file.unlink()
            else:
                total += state.st_size
    return total


@dataclass(frozen=True, slots=True)
class Entry:
    """One model's weights, or one rank's share of them."""

    cache: PackedCache
    folder: Path
    missing: set[str] = field(default_factory=set)  # units that were packed anew

    def over(self, weights: ModelWeights, dtype: torch.dtype, skip: Callable[[str], object]) -> ModelWeights:
        """The weights, in `dtype`, without reading those that are kept. `skip` hears the prefix of the tensors that
        nobody will take."""
        with contextlib.suppress(OSError):
            os.utime(self.folder)  # it is in use
        self.cache.writer.used.add(self.folder)
        embedding = weights.embedding
        if embedding.dtype != dtype:
            kept = self._taken("embedding", lambda unit: unit.tensors["embedding"])
            embedding = embedding.to(dtype) if kept is None else kept
        layers = [partial(self._layer, index, read, skip) for index, read in enumerate(weights.layers)]
        return replace(weights, embedding=embedding, layers=layers, head=partial(self._head, weights.head, skip))

    def keep(self, stack: Stack) -> None:
        """Has what was packed anew written when there is time."""
        names: dict[str, Callable[[], Unit]] = {}
        for index, layer in enumerate(stack.layers):
            names[_name(index)] = partial(_unit_of, layer)
        names["head"] = partial(_unit, head=stack.head)
        names["embedding"] = lambda: Unit({"embedding": stack.embedding}, {})
        total = sum(make().nbytes for name, make in names.items() if name != "embedding")
        if total >= self.cache.least:
            for name in names.keys() & self.missing:
                size, work = names[name]().nbytes, partial(self._write, name, names[name])
                self.cache.writer.add(self.folder / name, size, work)

    def _layer(self, index: int, read: Callable[[], LayerWeights], skip: Callable[[str], object]) -> LayerWeights:
        found = self._taken(_name(index), _layer_of)
        if found is None:
            return read()
        skip(f"model.layers.{index}.")
        return found

    def _head(self, read: Callable[[], Weight], skip: Callable[[str], object]) -> Weight:
        found = self._taken("head", lambda unit: _packed(unit, "head"))
        if found is None:
            return read()
        skip("lm_head.")
        return found

    def _taken(self, name: str, make: Callable[[Unit], T]) -> T | None:
        """What `make` makes of a unit; None where that is to be packed anew."""
        unit = packed_weight_file.read(self.folder / name)
        with contextlib.suppress(LookupError, TypeError, ValueError):  # whole, but not what belongs here
            if unit is not None:
                return make(unit)
        self.missing.add(name)
        return None

    def _write(self, name: str, make: Callable[[], Unit], go: Callable[[], None]) -> None:
        unit = make()
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.cache.make_room(unit.nbytes, self.folder):
            packed_weight_file.write(self.folder / name, unit, go)


def _name(index: int) -> str:
    return f"layer-{index:05}"


def _layer_of(unit: Unit) -> LayerWeights:
    fields: dict[str, Any] = {name: unit.tensors[name] for name in NORMS}
    fields |= {name: _packed(unit, name) for name in MATRICES}
    return LayerWeights(**fields)


def _unit_of(layer: Layer) -> Unit:
    norms = {name: getattr(layer, name).weight for name in NORMS}
    unit = _unit(**{name: getattr(layer, name) for name in MATRICES})
    return replace(unit, tensors={**unit.tensors, **norms})


def _unit(**matrices: Packed) -> Unit:
    tensors: dict[str, Tensor] = {}
    told: dict[str, Any] = {}
    for name, matrix in matrices.items():
        parts = {"data": matrix.data, "scales": matrix.scales, "zeros": matrix.zeros, "bias": matrix.bias}
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items() if tensor is not None}
        told[name] = {"inputs": matrix.inputs, "outputs": matrix.outputs, "rounds": matrix.rounds}
    return Unit(tensors, told)


def _packed(unit: Unit, name: str) -> Weight:
    """A matrix of a unit. `pack` takes it as it is, and nobody else meets it."""
    tensors = (unit.tensors.get(f"{name}.{part}") for part in ("scales", "zeros", "bias"))
    told = unit.told[name]
    packed = Packed.of(told["inputs"], told["outputs"], told["rounds"], unit.tensors[f"{name}.data"], *tensors)
    return cast(Weight, packed)


Work = Callable[[Callable[[], None]], None]  # is handed what it must call every now and then


class Writer:
    """A thread that writes what is to be kept. It begins after the first request, rests while one runs, and gives up
    for good on the first error."""

    def __init__(self) -> None:
        self.used: set[Path] = set()  # entries that this process maps, or writes
        self.trouble: str | None = None  # why nothing more is written
        self._work: dict[Path, tuple[int, Work]] = {}
        self._free = threading.Event()  # no request runs
        self._end = float("inf")
        self._thread: threading.Thread | None = None

    def add(self, file: Path, size: int, work: Work) -> None:
        """What is to be written there."""
        self._work[file] = size, work

    def rest(self) -> None:
        """A request begins."""
        self._free.clear()

    def go(self) -> None:
        """A request has ended."""
        self._free.set()
        if self._thread is None and self._work:
            self._thread = threading.Thread(target=self._run, name="packed cache", daemon=True)
            self._thread.start()

    def close(self, patience: float = 0.8) -> None:
        """Writes on for at most so many seconds, then takes back what is not whole."""
        self._end = time.monotonic() + patience
        self._free.set()
        if self._thread is not None:
            self._thread.join(patience + 0.2)

    def _run(self) -> None:
        try:
            # last what is largest: a short run may not come to its end
            for _, (_, work) in sorted(self._work.items(), key=lambda item: (item[1][0], item[0])):
                self._pause()
                work(self._pause)
        except Stopped:
            pass
        except OSError as error:  # a full disk, a folder that is closed to us: the next start packs again
            self.trouble = error.strerror or type(error).__name__

    def _pause(self) -> None:
        self._free.wait()
        if time.monotonic() > self._end:
            raise Stopped
