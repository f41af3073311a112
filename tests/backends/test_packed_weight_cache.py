"""Disk cache of packed weights: valid units are mapped at the next start, everything else is packed again."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

import swiftspec
from swiftspec import _C
from swiftspec.backends.cpu import cpu, packed_weight_file
from swiftspec.backends.cpu import packed_weight_cache as caches
from swiftspec.backends.cpu.packed_weight_cache import BackgroundWriter, CacheEntry, PackedWeightCache, WriterStopped
from swiftspec.backends.cpu.packed_weight_file import PackedUnit
from swiftspec.backends.cpu.packing import OPTIONAL_TENSORS
from swiftspec.builder import models
from swiftspec.config import EngineConfig
from swiftspec.errors import UserError
from swiftspec.llm_engine import LLMEngine
from swiftspec.model.loader import load_model
from swiftspec.model.transformer import Transformer
from swiftspec.params import SamplingParams
from tests.model.architectures.test_gemma4 import NATIVE
from tests.support.cases import examples
from tests.support.gguf_files import SHAPE, write_gguf
from tests.support.tiny_checkpoints import make_checkpoint, make_model

pytestmark = pytest.mark.skipif(_C.level() == "none", reason="this CPU has no AVX2")

TARGET = Path(swiftspec.__file__).parent / "demo" / "target"
WRITE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Watched(PackedWeightCache):
    entries: list[CacheEntry] = field(default_factory=list)

    def entry(self, facts: Mapping[str, object]) -> CacheEntry:
        self.entries.append(super(Watched, self).entry(facts))
        return self.entries[-1]


def start(folder: Path, model: Path = TARGET, dtype: torch.dtype = torch.bfloat16) -> tuple[Transformer, set[str]]:
    """Loads with this cache folder and writes all packed units. Returns the model and the names of the units."""
    cache = Watched(folder, min_model_bytes=0)
    loaded = load_model(model, dtype=dtype, ops=cpu, max_positions=64, packed_cache=cache)
    cache.writer.resume()
    cache.writer.close(WRITE_TIMEOUT_S)
    assert cache.writer.error is None
    return loaded, cache.entries[0].missing


def tensors(model: Transformer) -> list[Tensor]:
    stack = model.stack
    layers = [(layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down) for layer in stack.layers]
    matrices = [stack.head, *(matrix for layer in layers for matrix in layer)]
    norms = [norm.weight for layer in stack.layers for norm in (layer.input_norm, layer.mlp_norm)]
    names = ("data", *OPTIONAL_TENSORS)
    parts = [getattr(matrix, name) for matrix in matrices for name in names]
    return [stack.embedding, *norms, *(part for part in parts if part is not None)]


def same(one: Transformer, other: Transformer) -> None:
    assert len(tensors(one)) == len(tensors(other))
    assert all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Transformer]:
    """A cache folder with a complete entry, and the packed model."""
    folder = tmp_path_factory.mktemp("packed")
    model, packed = start(folder)
    assert len(packed) == len(model.stack.layers) + 2
    return folder, model


def only_entry(folder: Path) -> Path:
    (entry,) = folder.iterdir()
    return entry


def test_the_next_start_maps_the_cached_weights(whole: tuple[Path, Transformer]) -> None:
    folder, model = whole
    files = {file: file.stat().st_mtime_ns for file in only_entry(folder).iterdir()}
    again, packed = start(folder)
    assert packed == set() and {"head", "embedding", "layer-00000"} < {file.name for file in files}
    same(again, model)
    assert {file: file.stat().st_mtime_ns for file in only_entry(folder).iterdir()} == files
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    assert all(str(file) in maps for file in files)


def test_a_gguf_file(tmp_path: Path) -> None:
    """Of all types of blocks, so that units have minima and super-scales."""
    kinds = dict(
        zip(("q_proj", "k_proj", "v_proj", "o_proj", "gate", "up"), ("Q4_K", "Q4_K", "Q4_K", "Q6_K", "Q5_K", "Q5_K"))
    )
    path = tmp_path / "model.gguf"
    write_gguf(
        path, make_model(layers=1, **SHAPE), lambda name: next((kinds[part] for part in kinds if part in name), "Q4_1")
    )
    model, packed = start(tmp_path / "packed", path)
    assert packed == {"layer-00000", "head"}
    again, packed = start(tmp_path / "packed", path)
    assert packed == set()
    same(again, model)
    assert all(
        getattr(model.stack.layers[0].qkv, part) is not None for part in ("minima", "super_scales", "super_minima")
    )


def test_missing_or_damaged_units_are_packed_again(whole: tuple[Path, Transformer], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole[0], tmp_path / "packed"))
    entry = only_entry(folder)
    (entry / "layer-00000").unlink()
    shortened, bent = entry / "layer-00001", bytearray((entry / "head").read_bytes())
    shortened.write_bytes(shortened.read_bytes()[: shortened.stat().st_size // 2])
    bent[len(bent) // 2] ^= 4
    (entry / "head").write_bytes(bent)
    (entry / "layer-00002").write_bytes((entry / "layer-00003").read_bytes()[:0])
    model, packed = start(folder)
    same(model, whole[1])
    assert packed == {"layer-00000", "layer-00001", "layer-00002", "head"}
    assert start(folder)[1] == set()


def test_what_is_no_file_blocks_no_start(whole: tuple[Path, Transformer], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole[0], tmp_path / "packed"))
    entry = only_entry(folder)
    for unit in ("head", "layer-00000", "layer-00001"):
        (entry / unit).unlink()
    os.mkfifo(entry / "head")
    (entry / "layer-00000").symlink_to("/dev/zero")
    (entry / "layer-00001").symlink_to("layer-00001")
    model, packed = start(folder)
    same(model, whole[1])
    assert packed == {"head", "layer-00000", "layer-00001"}


def test_a_complete_file_of_another_model_is_not_used(whole: tuple[Path, Transformer], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole[0], tmp_path / "packed"))
    unit = PackedUnit({"x": torch.ones(3)}, {"qkv": {}})
    packed_weight_file.write(only_entry(folder) / "layer-00000", unit, lambda: None)
    model, packed = start(folder)
    same(model, whole[1])
    assert packed == {"layer-00000"}


def test_a_changed_checkpoint_has_a_separate_entry(tmp_path: Path) -> None:
    model, folder = Path(shutil.copytree(TARGET, tmp_path / "model")), tmp_path / "packed"
    before, _ = start(folder, model)
    weights = load_file(model / "model.safetensors")
    name = next(name for name in weights if name.endswith("qweight"))
    save_file(weights | {name: weights[name] ^ 1}, model / "model.safetensors")
    after, packed = start(folder, model)
    assert len(packed) == len(after.stack.layers) + 2 and len([*folder.iterdir()]) == 2
    assert any(not torch.equal(a, b) for a, b in zip(tensors(before), tensors(after)))
    assert start(folder, model, torch.float32)[0].dtype == torch.float32 and len([*folder.iterdir()]) == 3


def test_norms_of_heads_are_cached(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", family="qwen3", head_dim=16, dtype=torch.bfloat16)
    packed = start(tmp_path / "packed", tmp_path / "model")[0].stack.layers
    mapped, missing = start(tmp_path / "packed", tmp_path / "model")
    assert missing == set() and len(packed) == 2
    for one, other in zip(packed, mapped.stack.layers):
        assert one.qk_norm.weight.shape == (6, 16) and torch.equal(one.qk_norm.weight, other.qk_norm.weight)


def test_per_layer_embeddings_and_shared_kv_layers_are_cached(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", dtype=torch.bfloat16, **NATIVE)
    packed = start(tmp_path / "packed", tmp_path / "model")[0].stack.layers
    mapped, missing = start(tmp_path / "packed", tmp_path / "model")
    assert missing == set() and len(packed) == 6
    for one, other in zip(packed, mapped.stack.layers):
        assert torch.equal(one.qk_norm.weight, other.qk_norm.weight)
        assert one.per_layer is not None and other.per_layer is not None
        assert torch.equal(one.per_layer.gate.data, other.per_layer.gate.data)
        assert torch.equal(one.per_layer.projection.data, other.per_layer.projection.data)
        assert torch.equal(one.per_layer.norm.weight, other.per_layer.norm.weight)


def test_all_levels_read_the_same_entry(whole: tuple[Path, Transformer], level: str) -> None:
    model, packed = start(whole[0])
    assert packed == set()
    same(model, whole[1])


def unit(seed: int = 1) -> PackedUnit:
    noise = torch.Generator().manual_seed(seed)
    numbers = {"a": torch.randn(5, 7, generator=noise), "b": torch.randn(3, generator=noise).bfloat16()}
    return PackedUnit(numbers | {"c": torch.arange(50, dtype=torch.uint8), "d": torch.empty(0, 2)}, {"x": {"y": 1}})


@given(st.integers(0, 10**9), st.integers(1, 255), st.booleans())
@settings(max_examples=examples(150))
def test_damage_is_detected(tmp_path_factory: pytest.TempPathFactory, at: int, change: int, cut: bool) -> None:
    file = tmp_path_factory.getbasetemp() / "unit"
    packed_weight_file.write(file, unit(), lambda: None)
    data = bytearray(file.read_bytes())
    at %= len(data)
    if cut:
        data = data[:at]
    else:
        data[at] ^= change
    file.unlink()  # a mapped file must not be overwritten
    file.write_bytes(data)
    found = packed_weight_file.read(file)
    if found is not None:  # the change was in the padding
        assert all(torch.equal(found.tensors[name], tensor) for name, tensor in unit().tensors.items())
        assert found.metadata == unit().metadata


def test_an_invalid_packed_unit(tmp_path: Path) -> None:
    assert packed_weight_file.read(tmp_path / "none") is None and packed_weight_file.read(tmp_path) is None
    (tmp_path / "text").write_text("a" * 1000)
    assert packed_weight_file.read(tmp_path / "text") is None
    os.mkfifo(tmp_path / "pipe")
    assert packed_weight_file.read(tmp_path / "pipe") is None


@pytest.mark.parametrize("bend", [lambda norm: norm[:-1].clone(), lambda norm: norm.int()], ids=["short", "integers"])
def test_a_unit_with_other_contents_is_packed_again(
    whole: tuple[Path, Transformer], tmp_path: Path, bend: Callable[[Tensor], Tensor]
) -> None:
    """The checksum does not tell who wrote a unit."""
    folder = Path(shutil.copytree(whole[0], tmp_path / "packed"))
    file = only_entry(folder) / "layer-00001"
    found = packed_weight_file.read(file)
    assert found is not None
    bent = {**found.tensors, "mlp_norm": bend(found.tensors["mlp_norm"])}
    packed_weight_file.write(file, PackedUnit(bent, found.metadata), lambda: None)
    model, packed = start(folder)
    same(model, whole[1])
    assert packed == {"layer-00001"}


@pytest.mark.parametrize("error", [WriterStopped(), OSError(errno.ENOSPC, "No space left on device")])
def test_unfinished_files_are_removed(tmp_path: Path, error: Exception) -> None:
    left = iter([None, None, error])

    def go() -> None:
        now = next(left)
        if now is not None:
            assert [file.suffix for file in tmp_path.iterdir()] == [".tmp"]
            raise now

    with pytest.raises(type(error)):
        packed_weight_file.write(tmp_path / "unit", unit(), go)
    assert [*tmp_path.iterdir()] == []


def test_two_concurrent_writers(tmp_path: Path) -> None:
    """Both write the same unit, and the later one replaces the file."""
    file, both = tmp_path / "unit", threading.Barrier(2)
    writers = [
        threading.Thread(target=packed_weight_file.write, args=(file, unit(), lambda: both.wait() and None))
        for _ in "ab"
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert packed_weight_file.read(file) is not None and [*tmp_path.iterdir()] == [file]


@pytest.mark.parametrize("spoil", ["a file", "no room"])
def test_a_cache_folder_that_is_not_writable(tmp_path: Path, spoil: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if spoil == "a file":
        (tmp_path / "packed").write_text("")
    else:
        monkeypatch.setattr(caches, "MIN_FREE_BYTES", 1 << 62)
    cache = PackedWeightCache(tmp_path / "packed", min_model_bytes=0)
    load_model(TARGET, dtype=torch.bfloat16, ops=cpu, max_positions=64, packed_cache=cache)
    cache.writer.resume()
    cache.writer.close(WRITE_TIMEOUT_S)
    assert cache.writer.error == ("Not a directory" if spoil == "a file" else None)
    assert not [*(tmp_path / "packed").glob("*/*")]


def test_entries_of_other_layouts_and_the_oldest_are_evicted_first(tmp_path: Path) -> None:
    """Nothing else is deleted: folders with like names, and what somebody put into an entry."""
    names = [f"{version}{digit * 40}" for version, digit in zip((*[caches.LAYOUT_VERSION] * 3, "v0-"), "acdb")]
    names = [names[0], names[3], names[1], names[2]]
    others = [tmp_path / "videos" / "film.mkv", tmp_path / "v3-notes" / "a.tmp", tmp_path / names[1] / "mine.txt"]
    for other in others:
        other.parent.mkdir()
        other.write_bytes(bytes(1000))
        os.utime(other, (0, 0))
    for age, name in enumerate(names):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "head").write_bytes(bytes(100))
        os.utime(tmp_path / name, (age, age))
    cache, mine = PackedWeightCache(tmp_path, max_bytes=400), tmp_path / names[-1]
    cache.writer.used.add(mine)
    assert cache.make_room(0, mine) and all((tmp_path / name / "head").exists() for name in names)
    assert cache.make_room(60, mine) and not (tmp_path / names[1] / "head").exists()
    assert cache.make_room(150, mine) and not (tmp_path / names[0]).exists()
    assert not cache.make_room(301, mine) and (tmp_path / names[2]).exists()
    assert cache.make_room(300, mine) and not (tmp_path / names[2]).exists() and mine.exists()
    assert all(other.exists() for other in others)


def test_the_writer_pauses_while_a_request_runs() -> None:
    writer, steps, reached = BackgroundWriter(), list[str](), threading.Event()

    def work(go: Callable[[], None]) -> None:
        steps.append("began")
        writer.pause()
        reached.set()
        go()
        steps.append("went on")

    writer.add(Path("a"), 1, work)
    assert steps == []
    writer.resume()
    assert reached.wait(WRITE_TIMEOUT_S) and steps == ["began"]
    writer.resume()
    writer.close(WRITE_TIMEOUT_S)
    assert steps == ["began", "went on"]


def test_the_smallest_is_written_first() -> None:
    """A head that a short run cannot finish writing does not delay the exit."""
    writer, written = BackgroundWriter(), list[str]()
    for name, size in (("head", 9), ("b", 2), ("a", 2), ("small", 1)):
        writer.add(Path(name), size, lambda go, name=name: written.append(name))
    writer.resume()
    writer.close(WRITE_TIMEOUT_S)
    assert written == ["small", "a", "b", "head"]


def test_the_writer_stops_at_its_time_limit() -> None:
    writer, ended = BackgroundWriter(), threading.Event()

    def work(go: Callable[[], None]) -> None:
        try:
            while True:
                go()
        finally:
            ended.set()

    writer.add(Path("a"), 1, work)
    writer.resume()
    writer.close(0.0)
    assert ended.wait(WRITE_TIMEOUT_S) and writer.error is None


def test_an_engine_writes_its_packed_weights_after_a_response(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "PackedWeightCache", partial(PackedWeightCache, min_model_bytes=0))
    folder, texts, plan = tmp_path / "packed", list[tuple[int, ...]](), EngineConfig(mode="ar")
    for files in (0, 1):
        llm = LLMEngine(TARGET, config=plan, dtype=torch.bfloat16, max_model_len=64, packed_cache=folder)
        assert len([*folder.glob("packed/*")]) == files and llm.load_time > 0
        texts.append(tuple(llm.generate([5, 6, 7], SamplingParams(max_tokens=8, temperature=0)).token_ids))
        assert llm.writer is not None
        llm.writer.close(WRITE_TIMEOUT_S)
        llm.close()
        with pytest.raises(UserError, match="closed"):
            llm.generate([5])
    assert texts[0] == texts[1] and (only_entry(folder / "packed") / "head").exists()


def test_small_models_are_not_cached(tmp_path: Path) -> None:
    cache = PackedWeightCache(tmp_path / "packed")
    load_model(TARGET, dtype=torch.bfloat16, ops=cpu, max_positions=64, packed_cache=cache)
    cache.writer.resume()
    cache.writer.close(WRITE_TIMEOUT_S)
    assert not (tmp_path / "packed").exists()
