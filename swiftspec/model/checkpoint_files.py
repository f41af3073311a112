"""Files of a checkpoint: a directory with config.json and the weights as safetensors, or a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from swiftspec.errors import UserError, truncated_repr
from swiftspec.file_io import Fields, damage_reported, file_facts, is_file, is_folder, one_line, read_object
from swiftspec.model.checkpoint import FLOATS
from swiftspec.model.config import ModelConfig
from swiftspec.model.config_json import parse_config, stop_tokens
from swiftspec.model.formats import format_of
from swiftspec.model.gguf.config import gguf_config
from swiftspec.model.gguf.file import GgufFile, is_gguf
from swiftspec.model.gguf.tensors import GgufTensors

Progress = Callable[[str, int, int], None]  # name of the directory, or description; bytes or steps so far; their total
LARGEST_MAPPED = 64 << 20  # bytes read through one mapping of a file; see Tensors._handle
LARGEST_INDEX = 64 << 20  # bytes; about ten times the index of the largest mixture-of-experts checkpoint
WHICH_GGUF = "GGUF files are loaded one at a time: name the file instead of its directory"
MAX_SHARDS = 10000
MAX_POINTER_BYTES, LFS_POINTER = 1024, b"version https://git-lfs.github.com/spec/"
INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
SHARD = re.compile(r"(model)-([0-9]{5})-of-([0-9]{5})\.safetensors")


def read_config(path: str | Path) -> ModelConfig:
    """Reads config.json of a checkpoint directory, and `eos_token_id` also from generation_config.json; or the metadata
    of a GGUF file.

    Raises UserError if there is no config.json, or if the model or the format of its weights is not supported.
    """
    folder = Path(path)
    if is_gguf(folder):
        return gguf_config(GgufFile.read(folder))
    file, stops = folder / "config.json", folder / "generation_config.json"
    if not is_folder(folder):
        raise UserError(f"{folder}: no such directory")
    if not is_file(file):
        raise UserError(f"{folder}: {_not_a_model(folder)}")
    data = read_object(file)
    with damage_reported(file):
        config = parse_config(data)
        format_of(config)
    named = Fields(read_object(stops) if is_file(stops) else {}, f"{stops}: ")
    ends = dict.fromkeys((*config.eos_token_ids, *stop_tokens(named)))
    return replace(config, eos_token_ids=(*ends,))


class Tensors:
    """Tensors of a checkpoint's safetensors files, by name. They are views of memory-mapped files, so data is read from
    disk when it is first used.

    `files`: names of the files in `folder`. `progress`: called before each tensor.
    """

    def __init__(self, folder: Path, files: list[str], progress: Progress | None) -> None:
        self.folder = folder
        self._progress = progress
        self._where: dict[str, str] = {}
        self._open: tuple[str, Any, int] | None = None  # the mapped file, its mapping, and the bytes taken through it
        for file in files:  # reads the headers, so that a truncated file is found before any tensor is read
            self._where.update(dict.fromkeys(_open(folder / file).keys(), file))
        self._left = set(self._where)
        self.facts = {file: file_facts(folder / file) for file in files}  # attributes that change with the contents
        self._read, self._bytes = 0, sum(size for size, *_ in self.facts.values())

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def shapes(self) -> dict[str, list[int]]:
        """Returns the shape of every tensor by name, file by file. Reads only the headers."""
        return {name: list(self._handle(file)[0].get_slice(name).get_shape()) for name, file in self._where.items()}

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Returns the shape of the tensor `name`. Raises UserError if it is missing or unreadable."""
        if name not in self._where:
            raise UserError(f"{self.folder}: tensor {name} is missing")
        file = self._where[name]
        try:
            return tuple(self._handle(file)[0].get_slice(name).get_shape())  # reads only the header
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise UserError(f"{self.folder / file}: cannot read {name} ({one_line(error)})") from None

    def take(self, name: str, *shape: int, kinds: tuple[torch.dtype, ...] = FLOATS) -> Tensor:
        """Maps the tensor `name` and marks it as taken. Raises UserError if it is missing or unreadable, its shape is
        not `shape`, or its dtype is not in `kinds`."""
        found = [*self.shape_of(name)]
        file = self._where[name]
        self._tell()
        handle, taken = self._handle(file)
        try:
            if found != list(shape):
                raise UserError(
                    f"{self.folder / file}: {name} has shape {truncated_repr(found)}, config.json implies {list(shape)}"
                )
            tensor: Tensor = handle.get_tensor(name)
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise UserError(f"{self.folder / file}: cannot read {name} ({one_line(error)})") from None
        if tensor.dtype not in kinds:
            raise UserError(f"{self.folder / file}: {name} has unsupported dtype {tensor.dtype}")
        self._left.discard(name)
        self._open = file, handle, taken + tensor.nbytes
        self._read += tensor.nbytes
        return tensor

    def skip(self, prefix: str) -> None:
        """Marks the tensors whose names begin with `prefix` as taken, because packed weights replace them."""
        names = [name for name in self._left if name.startswith(prefix)]
        self._read += sum(self._handle(self._where[name])[0].get_tensor(name).nbytes for name in names)
        self._left.difference_update(names)
        self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self.folder.name, min(self._read, self._bytes), self._bytes)

    def _handle(self, file: str) -> tuple[Any, int]:
        """Returns a mapping of `file` and the number of bytes taken through it. Makes a new mapping after every
        `LARGEST_MAPPED` bytes, because pages that were read through a mapping stay resident until the mapping's last
        tensor is freed. Raises UserError if the file has changed since it was opened."""
        if self._open is None or self._open[0] != file or self._open[2] > LARGEST_MAPPED:
            self._open = None
            self._open = file, _open(self.folder / file), 0
            if file_facts(self.folder / file) != self.facts[file]:
                raise UserError(f"{self.folder / file} was changed while it was read; restart")
        return self._open[1:]

    def check_all_taken(self, prefixes: tuple[str, ...] = ("",)) -> None:
        """Raises UserError if a tensor whose name begins with one of `prefixes` was not taken: the checkpoint then has
        weights that this architecture lacks."""
        # Some checkpoints contain the RoPE frequencies (old transformers), which are redundant.
        left = (name for name in self._left if name.startswith(prefixes))
        extra = sorted(name for name in left if not name.endswith("rotary_emb.inv_freq"))
        if extra:
            name = extra[0] if extra[0].isprintable() and len(extra[0]) <= 200 else truncated_repr(extra[0])
            raise UserError(f"{self.folder}: tensor {name} is not part of the architecture in config.json")


def open_tensors(
    path: str | Path, progress: Progress | None = None, dtype: torch.dtype = torch.float32
) -> Tensors | GgufTensors:
    """Opens the safetensors files of a checkpoint directory, or a GGUF file. `progress`: called before each tensor, at
    first with 0 bytes. `dtype`: that of a GGUF file's quantised matrices where a dense one is taken. Raises UserError
    if there are no such files or one is damaged."""
    folder = Path(path)
    if is_gguf(folder):
        return GgufTensors(folder, progress, dtype)
    return Tensors(folder, weight_files(folder), progress)


def weight_files(folder: Path) -> list[str]:
    """Returns the names of the safetensors files of a checkpoint directory: the single one, as in transformers also
    next to an index; those in the index; or without an index all shards. Raises UserError if one is missing."""
    if is_file(folder / SINGLE_FILE):
        return [SINGLE_FILE]
    if is_file(folder / INDEX_FILE):
        return _existing(folder, indexed_files(folder))
    if shards := [found for file in folder.glob("*.safetensors") if (found := SHARD.fullmatch(file.name))]:
        return _all_shards(folder, shards)
    if any(any(folder.glob(pattern)) for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt")):
        raise UserError(f"{folder}: pickle weights can execute code and are not loaded; convert them to safetensors")
    if any(folder.glob("*.gguf")):
        raise UserError(f"{folder}: {WHICH_GGUF}")
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    seen = f", not {truncated_repr(others[0])}" if others else ""
    raise UserError(f"{folder}: no weights; expected {SINGLE_FILE} or {INDEX_FILE}{seen}")


def _all_shards(folder: Path, shards: Sequence[re.Match[str]]) -> list[str]:
    """Returns the names of all shards of which a directory has `shards`. Raises UserError if one is missing."""
    stem, _, count = shards[0].groups()
    if int(count) > MAX_SHARDS:
        raise UserError(f"{folder}: {truncated_repr(shards[0].string)} is not one of at most {MAX_SHARDS} shards")
    names = [f"{stem}-{number:05}-of-{count}.safetensors" for number in range(1, int(count) + 1)]
    for name in names:
        if not is_file(folder / name):
            raise UserError(f"{folder / name}: not found, but other shards are there; download it")
    return names


def _not_a_model(folder: Path) -> str:
    """Returns the reason why a directory without config.json is not a model."""
    if is_file(folder / "adapter_config.json"):
        return (
            "a LoRA adapter; merge it into its base model (PEFT: merge_and_unload, save_pretrained) and use the result"
        )
    return WHICH_GGUF if any(folder.glob("*.gguf")) else "no config.json; expected a Hugging Face model directory"


def indexed_files(folder: Path) -> list[str]:
    """Returns the sorted names of the files in model.safetensors.index.json. Raises UserError if it is damaged."""
    index = Fields(read_object(folder / INDEX_FILE, max_bytes=LARGEST_INDEX), f"{folder / INDEX_FILE}: ")
    tensors = index.object("weight_map")
    if not tensors.data:
        raise UserError(f"{folder / INDEX_FILE}: not a safetensors index (weight_map is empty or missing)")
    files = sorted({tensors.string(tensor) for tensor in tensors.data})
    for file in files:
        if Path(file).name != file or not file.isprintable() or len(file) > 255:
            raise UserError(f"{folder / INDEX_FILE}: {truncated_repr(file)} is not a plain file name")
    return files


def _existing(folder: Path, files: list[str]) -> list[str]:
    """Returns the names of the files in the index. Raises UserError if one does not exist."""
    for file in files:
        if not is_file(folder / file):
            raise UserError(f"{folder / file}: not found, but listed in {INDEX_FILE}")
    return files


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        if is_file(file) and file.stat().st_size < MAX_POINTER_BYTES and file.read_bytes().startswith(LFS_POINTER):
            raise UserError(f"{file}: a pointer of Git LFS, not the file; run `git lfs pull` there") from None
        raise UserError(f"{file}: damaged or truncated ({one_line(error)}); download it again") from None
