"""The demo models width-expanded to large shapes, and the same weights as GGUF, in a folder that runs can share."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.data.heldout import DEMO
from swiftspec.errors import UserError
from tools.width_expand.checkpoint import write
from tools.width_expand.shapes import read_shape

SHORT = {"1b": "Llama-3.2-1B", "3b": "Llama-3.2-3B", "8b": "Llama-3-8B", "70b": "Llama-3-70B"}
INT4, GGUF, DENSE, Q8_0 = 4.25 / 8, 20 / 32, 2.0, 34 / 32  # bytes per weight
READ = 1 << 24  # bytes per read

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Model:
    """A width-expanded demo model: its checkpoint, its source and its sizes. GGUF files are next to the checkpoint."""

    folder: Path  # the checkpoint
    source: Path  # the demo model that is width-expanded
    sizes: dict[str, Any]

    @staticmethod
    def of(folder: Path, side: str, shape: str) -> Model:
        """Returns the model of a side in `folder`.

        `side`: target or draft. `shape`: a short name, or any shape that tools.width_expand accepts.
        """
        name = Path(shape).stem if shape.endswith(".json") else shape
        return Model(folder / f"{side}-{name}", DEMO / side, read_shape(SHORT.get(shape, shape)))

    def gguf(self, kind: str) -> Path:
        return self.folder.with_name(f"{self.folder.name}.{kind}.gguf")

    @property
    def weights(self) -> tuple[int, int]:
        """Number of weights in the matrices of the layers, and in embedding and head together."""
        s = self.sizes
        heads = (2 * s["num_attention_heads"] + 2 * s["num_key_value_heads"]) * s["head_dim"]
        layer = s["hidden_size"] * (heads + 3 * s["intermediate_size"])
        ends = 1 if s["tie_word_embeddings"] else 2
        return s["num_hidden_layers"] * layer, ends * s["vocab_size"] * s["hidden_size"]

    @property
    def bytes_grown(self) -> int:
        """Approximate bytes of the checkpoint."""
        inner, ends = self.weights
        return int(inner * INT4 + ends * DENSE)

    def bytes_missing(self, kinds: tuple[str, ...]) -> int:
        """Returns the approximate bytes of the checkpoint and of the GGUF files that do not exist yet."""
        inner, ends = self.weights
        one = int(inner * GGUF + ends * Q8_0)
        checkpoint = 0 if self.folder.is_dir() else self.bytes_grown
        return checkpoint + sum(one for kind in kinds if not self.gguf(kind).is_file())

    def files(self) -> list[Path]:
        """Returns the safetensors files of the checkpoint."""
        return sorted(self.folder.glob("*.safetensors"))

    @property
    def size(self) -> int:
        """Bytes of the weights."""
        return sum(file.stat().st_size for file in self.files())

    def make(self, kinds: tuple[str, ...], say: Say) -> None:
        """Writes the checkpoint, and its GGUF files of the types `kinds`, unless they exist.

        Each gets its final name only when it is complete.
        """
        if self.folder.is_dir():
            say(f"{self.folder.name}: reused")
        else:
            say(f"{self.folder.name}: expanding")
            with complete(self.folder) as out:
                write(self.source, self.sizes, "int4", out)
                pad_tokenizer(out / "tokenizer.json", self.sizes["vocab_size"])
        for kind in kinds:
            if self.gguf(kind).is_file():
                say(f"{self.gguf(kind).name}: reused")
                continue
            say(f"{self.gguf(kind).name}: writing")
            from bench.baselines.to_gguf import write_gguf  # needs the package gguf

            with complete(self.gguf(kind)) as out:
                write_gguf(self.folder, out, kind)


def pad_tokenizer(file: Path, vocab_size: int) -> None:
    """Adds names for tokens that the small model lacks to tokenizer.json.

    Without them SwiftSpec would sample from a smaller vocabulary.
    """
    data = json.loads(file.read_text(encoding="utf-8"))
    vocab = data["model"]["vocab"]
    known = {*vocab.values(), *(token["id"] for token in data["added_tokens"])}
    vocab |= {f"<|unused{i}|>": i for i in range(vocab_size) if i not in known}
    file.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")


def check_room(folder: Path, needed: int, say: Say) -> None:
    """Reports the required bytes. Raises UserError if less than that, and a margin, is free in the folder."""
    free = shutil.disk_usage(folder).free
    if needed:
        say(f"{needed / 1e9:.1f} GB will be written to {folder} ({free / 1e9:.1f} GB free)")
    if needed > 0.95 * free:
        raise UserError(f"{folder}: {needed / 1e9:.1f} GB are needed; specify a larger disk with --folder")


def warm(files: list[Path]) -> None:
    """Reads files once, so that they are in the page cache."""
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.read(READ):
                pass


@contextmanager
def complete(path: Path) -> Iterator[Path]:
    """Yields a temporary path that is renamed at the end and removed after an error."""
    partial = path.with_name(f"{path.name}.partial")
    _remove(partial)
    try:
        yield partial
        partial.rename(path)
    finally:
        _remove(partial)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
