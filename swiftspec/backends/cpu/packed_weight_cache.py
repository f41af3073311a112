"""Disk cache of packed weights, which later starts map into memory instead of packing again.

The entry of a model is a folder of units, one file each (packed_weight_file.py): one unit per layer, one for the LM
head, and one for the embedding if its dtype is converted. A start maps the valid units and packs the others. Newly
packed units are written in the background, in chunks, while no request runs.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
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
from swiftspec.backends.cpu.packed_weight_file import PackedUnit
from swiftspec.backends.cpu.packing import OPTIONAL_TENSORS, PackedLinear
from swiftspec.model.packed_model import PackedAttention, PackedLayer, PackedMixture, PackedModel
from swiftspec.model.weights import LayerWeights, ModelWeights, Weight

CACHE_FOLDER = "packed"  # below the folder that a user names, which may contain other things
LAYOUT_VERSION = "v3-"  # name prefix of entry folders; must change with the packed layout and the files
ENTRY_NAME = re.compile(r"v[0-9]+-[0-9a-f]{40}")  # of entry folders, whatever their layout
UNIT_NAME = re.compile(r"layer-[0-9]{5}|head|embedding")
UNFINISHED_NAME = re.compile(rf"\.({UNIT_NAME.pattern})\.[0-9]+\.[0-9]+\.tmp")  # see `packed_weight_file.write`
MIN_MODEL_BYTES = 64 << 20  # smaller models are not cached
MAX_CACHE_BYTES = 32 << 30  # of all entries; beyond, the least recently used are evicted
MIN_FREE_BYTES = 1 << 30  # left free on the disk
STALE_TEMP_FILE_S = 3600.0  # after this age an incomplete file counts as abandoned
MATRICES = ("qkv", "o", "gate_up", "down")
MIXTURE_MATRICES = ("router", "shared_gate_up", "shared_down")
PER_LAYER = ("per_layer_gate", "per_layer_projection")
NORMS = ("input_norm", "mlp_norm", "mixer_output_norm", "mlp_output_norm")
OPTIONAL_WEIGHTS = ("q_norm", "k_norm", "v_norm", "output_scale")
T = TypeVar("T")


class WriterStopped(Exception):
    """Raised in the writer thread to stop it when the process ends."""


@dataclass(frozen=True, slots=True)
class PackedWeightCache:
    """Disk cache of packed weights. It deletes only what has the names of its own folders and files.

    `folder`: contains all entries. `max_bytes`: size limit of all entries. `min_model_bytes`: smaller models are not
    cached. `writer`: writes new units in the background.
    """

    folder: Path
    max_bytes: int = MAX_CACHE_BYTES
    min_model_bytes: int = MIN_MODEL_BYTES
    writer: BackgroundWriter = field(default_factory=lambda: BackgroundWriter())

    def entry(self, facts: Mapping[str, object]) -> CacheEntry:
        """Returns the entry of a model. `facts`: everything that determines its packed bytes, serialisable as JSON."""
        words = json.dumps(facts, sort_keys=True, default=str).encode()
        return CacheEntry(self, self.folder / f"{LAYOUT_VERSION}{hashlib.sha256(words).hexdigest()[:40]}")

    def make_room(self, size: int, own: Path) -> bool:
        """Evicts entries until `size` more bytes fit: those of other layout versions first, then the least recently
        used. Does not evict entries that this process uses. `own`: folder of the entry that will grow. Returns whether
        the bytes fit, in the cache and on the disk."""
        sizes = {found: _size(found) for found in self.folder.iterdir() if _is_entry(found)}
        if sizes.get(own, 0) + size > self.max_bytes:
            return False
        for found in sorted(sizes, key=lambda found: (found.name.startswith(LAYOUT_VERSION), _used(found))):
            if sum(sizes.values()) + size <= self.max_bytes:
                break
            if found not in self.writer.used:
                _delete(found)
                del sizes[found]
        return (
            sum(sizes.values()) + size <= self.max_bytes
            and shutil.disk_usage(self.folder).free >= size + MIN_FREE_BYTES
        )


def _used(entry: Path) -> float:
    """Returns the time of the last use of an entry as a POSIX timestamp; 0 if it no longer exists."""
    try:
        return entry.stat().st_mtime
    except OSError:  # another process has just evicted it
        return 0.0


def _is_entry(folder: Path) -> bool:
    return ENTRY_NAME.fullmatch(folder.name) is not None and folder.is_dir() and not folder.is_symlink()


def _own_files(entry: Path) -> list[tuple[Path, os.stat_result]]:
    """Returns the regular files of an entry that have the names of units or of unfinished ones."""
    found: list[tuple[Path, os.stat_result]] = []
    with contextlib.suppress(OSError):  # another process has just evicted it
        for file in [*entry.iterdir()]:
            state = file.lstat()
            named = UNIT_NAME.fullmatch(file.name) or UNFINISHED_NAME.fullmatch(file.name)
            if named and stat.S_ISREG(state.st_mode):
                found.append((file, state))
    return found


def _size(entry: Path) -> int:
    """Returns the size of an entry in bytes. Deletes its abandoned temporary files."""
    total = 0
    with contextlib.suppress(OSError):
        for file, state in _own_files(entry):
            if file.suffix == ".tmp" and time.time() - state.st_mtime > STALE_TEMP_FILE_S:
                file.unlink()
            else:
                total += state.st_size
    return total


def _delete(entry: Path) -> None:
    """Deletes the files of an entry, and its folder if nothing else is in it."""
    with contextlib.suppress(OSError):
        for file, _ in _own_files(entry):
            file.unlink(missing_ok=True)
        entry.rmdir()


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """The packed weights of one model, or of one rank's shard."""

    cache: PackedWeightCache
    folder: Path
    missing: set[str] = field(default_factory=set)  # names of the units that this process had to pack

    def load(self, weights: ModelWeights, dtype: torch.dtype, skip: Callable[[int | None], object]) -> ModelWeights:
        """Returns `weights` with cached packed units instead of the weights that would be read from the checkpoint.

        `dtype`: that of the model, to which the embedding is converted. `skip`: called when a cached unit replaces
        weights of the checkpoint, with the index of the layer, or with None for the LM head.
        """
        with contextlib.suppress(OSError):
            os.utime(self.folder)  # marks the entry as used
        self.cache.writer.used.add(self.folder)
        embedding = weights.embedding
        if embedding.dtype != dtype:
            cached = self._read_unit("embedding", lambda unit: _tensor(unit, "embedding", embedding.shape))
            embedding = embedding.to(dtype) if cached is None else cached
        make = partial(_layer_of, hidden=len(weights.norm))
        layers = [partial(self._layer, index, make, read, skip) for index, read in enumerate(weights.layers)]
        return replace(weights, embedding=embedding, layers=layers, head=partial(self._head, weights.head, skip))

    def store(self, stack: PackedModel) -> None:
        """Queues the units that had to be packed for writing in the background. Does nothing for models below
        `min_model_bytes`."""
        names: dict[str, Callable[[], PackedUnit]] = {}
        for index, layer in enumerate(stack.layers):
            names[_name(index)] = partial(_unit_of, layer, stack.attention[layer.attention])
        names["head"] = partial(_unit, head=stack.head)
        names["embedding"] = lambda: PackedUnit({"embedding": stack.embedding}, {})
        total = sum(make().nbytes for name, make in names.items() if name != "embedding")
        if total >= self.cache.min_model_bytes:
            for name in names.keys() & self.missing:
                size, work = names[name]().nbytes, partial(self._write, name, names[name])
                self.cache.writer.add(self.folder / name, size, work)

    def _layer(
        self,
        index: int,
        make: Callable[[PackedUnit], LayerWeights],
        read: Callable[[], LayerWeights],
        skip: Callable[[int], object],
    ) -> LayerWeights:
        found = self._read_unit(_name(index), make)
        if found is None:
            return read()
        skip(index)
        return found

    def _head(self, read: Callable[[], Weight], skip: Callable[[None], object]) -> Weight:
        found = self._read_unit("head", lambda unit: _packed(unit, "head"))
        if found is None:
            return read()
        skip(None)
        return found

    def _read_unit(self, name: str, make: Callable[[PackedUnit], T]) -> T | None:
        """Returns make(unit) for the cached unit `name`. If the unit is missing or invalid, records it as missing and
        returns None."""
        unit = packed_weight_file.read(self.folder / name)
        with contextlib.suppress(LookupError, TypeError, ValueError):  # intact, but not the expected contents
            if unit is not None:
                return make(unit)
        self.missing.add(name)
        return None

    def _write(self, name: str, make: Callable[[], PackedUnit], check_stop: Callable[[], None]) -> None:
        unit = make()
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.cache.make_room(unit.nbytes, self.folder):
            packed_weight_file.write(self.folder / name, unit, check_stop)


def _name(index: int) -> str:
    return f"layer-{index:05}"


def _tensor(unit: PackedUnit, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
    """Returns a tensor of a unit that is not part of a matrix. Raises ValueError if it does not contain floating-point
    numbers or has another shape. `shape`: None if it is not known here."""
    tensor = unit.tensors[name]
    if not tensor.is_floating_point() or (shape is not None and tensor.shape != shape):
        raise ValueError(f"{name} [{', '.join(map(str, tensor.shape))}] {tensor.dtype}")
    return tensor


def _layer_of(unit: PackedUnit, hidden: int) -> LayerWeights:
    """Returns the weights of a layer. `hidden`: size of the hidden state."""
    shapes: dict[str, tuple[int, ...] | None] = dict.fromkeys((*NORMS, "per_layer_norm"), (hidden,))
    shapes |= dict.fromkeys((*OPTIONAL_WEIGHTS, "sinks", "correction"))
    fields: dict[str, Any] = {
        name: _tensor(unit, name, shape) if name in unit.tensors else None for name, shape in shapes.items()
    }
    matrices = (*MATRICES, *MIXTURE_MATRICES, *PER_LAYER)
    fields |= {name: _packed(unit, name) for name in matrices if name in unit.metadata}
    return LayerWeights(**fields)


def _unit_of(layer: PackedLayer, attention: PackedAttention) -> PackedUnit:
    norms = {name: norm.weight for name in NORMS if (norm := getattr(layer, name)) is not None}
    if layer.qk_norm is not None:
        queries, rest = layer.qk_norm.weight[: attention.num_heads], layer.qk_norm.weight[attention.num_heads :]
        others = rest.split(attention.kv_heads) if len(rest) > 0 else ()  # a shared KV layer has none
        norms |= dict(zip(OPTIONAL_WEIGHTS, (queries, *others), strict=False))
    if layer.output_scale is not None:
        norms["output_scale"] = layer.output_scale
    if layer.sinks is not None:
        norms["sinks"] = layer.sinks
    matrices = {"qkv": layer.qkv, "o": layer.o, "gate_up": layer.mlp.gate_up, "down": layer.mlp.down}
    if isinstance(layer.mlp, PackedMixture):
        shared = layer.mlp.shared
        matrices["router"] = layer.mlp.router
        norms |= {} if layer.mlp.correction is None else {"correction": layer.mlp.correction}
        matrices |= {} if shared is None else {"shared_gate_up": shared.gate_up, "shared_down": shared.down}
    if layer.per_layer is not None:
        norms["per_layer_norm"] = layer.per_layer.norm.weight
        matrices |= dict(zip(PER_LAYER, (layer.per_layer.gate, layer.per_layer.projection), strict=True))
    unit = _unit(**matrices)
    return replace(unit, tensors={**unit.tensors, **norms})


def _unit(**matrices: PackedLinear) -> PackedUnit:
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, Any] = {}
    for name, matrix in matrices.items():
        parts = {"data": matrix.data, **matrix.optional_tensors()}
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items() if tensor is not None}
        metadata[name] = {"inputs": matrix.inputs, "outputs": matrix.outputs, "rounds": matrix.int8_activations}
    return PackedUnit(tensors, metadata)


def _packed(unit: PackedUnit, name: str) -> Weight:
    """Returns the matrix `name` of a unit as a `PackedLinear`, which `pack` returns unchanged."""
    tensors = {part: unit.tensors.get(f"{name}.{part}") for part in OPTIONAL_TENSORS}
    shape = unit.metadata[name]
    packed = PackedLinear(
        inputs=shape["inputs"],
        outputs=shape["outputs"],
        int8_activations=shape["rounds"],
        data=unit.tensors[f"{name}.data"],
        **tensors,
    )
    return cast(Weight, packed)


# Writes a file. Calls its argument before each chunk; that call blocks while a request runs, and raises WriterStopped
# when the process ends.
WriteJob = Callable[[Callable[[], None]], None]


class BackgroundWriter:
    """Background thread that writes packed units. It starts after the first request, pauses while a request runs, and
    stops permanently after the first error.

    The interpreter's shutdown waits for the thread, as it would end the process if native code then returned to it.
    """

    def __init__(self) -> None:
        self.used: set[Path] = set()  # entries that this process maps or writes
        self.error: str | None = None  # why the writer has stopped
        self._work: dict[Path, tuple[int, WriteJob]] = {}
        self._free = threading.Event()  # set while no request runs
        self._end = float("inf")
        self._thread: threading.Thread | None = None

    def add(self, file: Path, size: int, work: WriteJob) -> None:
        """Queues `file`, which `work` writes. `size`: its size in bytes; small files are written first."""
        self._work[file] = size, work

    def pause(self) -> None:
        """Pauses writing; called when a request begins."""
        self._free.clear()

    def resume(self) -> None:
        """Resumes writing; called when a request has ended. Starts the thread if needed."""
        self._free.set()
        if self._thread is None and self._work:
            self._thread = threading.Thread(target=self._run, name="packed cache", daemon=True)
            atexit.register(self._finish)
            self._thread.start()

    def close(self, timeout_s: float = 0.8) -> None:
        """Continues writing for at most `timeout_s`, then stops and deletes the incomplete file."""
        self._end = time.monotonic() + timeout_s
        self._free.set()
        if self._thread is not None:
            self._thread.join(timeout_s + 0.2)

    def _finish(self) -> None:
        self.close()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            # smallest first, since a short run may end before all is written
            for _, (_, work) in sorted(self._work.items(), key=lambda item: (item[1][0], item[0])):
                self._pause()
                work(self._pause)
        except WriterStopped:
            pass
        except OSError as error:  # a full disk or a read-only folder: the next start packs again
            self.error = error.strerror or type(error).__name__
        finally:
            self._work.clear()
            atexit.unregister(self._finish)

    def _pause(self) -> None:
        self._free.wait()
        if time.monotonic() > self._end:
            raise WriterStopped
