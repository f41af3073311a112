"""Location of models: directories, GGUF files, and models of the Hugging Face Hub, which are downloaded.

Of a hub model the small files come first (configuration, tokenizer, index of the weights), so that it can be judged
before its weights. Weights are the files that the loader reads, never a second copy of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swiftspec import file_io
from swiftspec.errors import UserError, truncated_repr
from swiftspec.model.checkpoint_files import INDEX_FILE, SHARD, SINGLE_FILE, indexed_files
from swiftspec.model.gguf.families import architecture_named
from swiftspec.model.gguf.file import is_gguf

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

HUB_PREFIXES = ("hf.co/", "huggingface.co/")  # before a hub id, as Ollama has them
HUB_ID_PATTERN = re.compile(r"([\w-][\w.-]*(?:/[\w-][\w.-]*)?)(?::([\w.-]+))?")
SMALL_SUFFIXES = (".json", ".jinja")
SMALL_FILES = ("tokenizer.model", "merges.txt")
USUAL_TYPE = "Q4_K_M"  # of the GGUF files of a repository, if the name does not select one
PART_OF_GGUF = re.compile(r"-[0-9]{5}-of-[0-9]{5}\.gguf$")
MAX_NAME_CHARS = 255  # of a file's path on the hub; files with longer ones are passed over
HUB_TIMEOUT_S = 10.0  # of the request for the names of a model's files
HUB_REFUSALS = {
    "LocalEntryNotFoundError": "the hub cannot be reached, and the model is not in the cache",
    "GatedRepoError": "accept the model's licence on the hub, then run `hf auth login`",
    "RepositoryNotFoundError": "the model does not exist, or it is private and needs `hf auth login`",
    "RevisionNotFoundError": "the revision does not exist",
}


def locate_model(
    name: str,
    revision: str | None = None,
    on_download: Callable[[], object] = lambda: None,
    *,
    weights: bool = True,
) -> Path:
    """Returns the directory or the GGUF file of a model. Downloads a hub id such as ORG/NAME, or ORG/NAME:Q4_K_M for a
    GGUF file: weights, configuration and tokenizer, never code. Raises UserError if `name` is neither a directory, nor
    a GGUF file, nor an available hub id.

    `on_download`: called before the download of weights that the cache does not contain. `weights`: False downloads
    the small files only.
    """
    path = file_io.expand_user(name)
    if file_io.is_folder(path):
        return path
    if is_gguf(path):
        return path
    if os.path.exists(path):  # noqa: PTH110  (pathlib raises on names too long)
        raise UserError(f"{name} is a file, but not a GGUF file: specify the model's directory")
    model = _HubModel.of(name, revision)
    if model is None:
        kind = "file" if name.endswith(".gguf") else "directory"
        raise UserError(f"{truncated_repr(name, 300)[1:-1]}: no such {kind}")
    return model.locate(on_download, weights=weights)


def needs_download(name: str, revision: str | None = None) -> bool:
    """Returns whether `name` is a hub id whose weights the cache does not have."""
    if os.path.exists(file_io.expand_user(name)):  # noqa: PTH110  (pathlib raises on names too long)
        return False
    model = _HubModel.of(name, revision)
    return model is not None and not model.is_cached()


def locate_small_files(name: str, revision: str | None = None) -> Path | None:
    """Returns the directory with configuration and tokenizer of a hub model whose weights have to be downloaded; None
    for another model, and for a GGUF file, which has both. Downloads the small files. Raises UserError if the model is
    not available."""
    if not needs_download(name, revision):
        return None
    folder = locate_model(name, revision, weights=False)
    return folder if file_io.is_file(folder / "config.json") else None


@dataclass(frozen=True, slots=True)
class _HubModel:
    """A model of the hub. `type`: of the GGUF file, such as Q4_K_M; None: not given."""

    name: str
    revision: str | None
    type: str | None

    @staticmethod
    def of(name: str, revision: str | None) -> _HubModel | None:
        """Returns the model; None if `name` is not a hub id."""
        for prefix in HUB_PREFIXES:
            name = name.removeprefix(prefix)
        found = HUB_ID_PATTERN.fullmatch(name)
        return None if found is None else _HubModel(found[1], revision, found[2])

    def locate(self, on_download: Callable[[], object], *, weights: bool) -> Path:
        """Returns the directory or the GGUF file in the cache, after the download; see `locate_model`."""
        from huggingface_hub.utils.logging import set_verbosity_error

        set_verbosity_error()
        info = self._info()
        if info is None:  # what is in the cache has to do
            folder = self._download([], cached=True)
            names = [file.relative_to(folder).as_posix() for file in folder.rglob("*")]
            gguf = self._gguf(names) if weights else None
            return folder if gguf is None else folder / gguf
        names = [name for file in info.siblings or () if _is_valid(name := file.rfilename)]
        gguf, small = self._gguf(names), [name for name in names if _is_small(name)]
        kind = info.gguf.get("architecture") if isinstance(info.gguf, dict) else None
        if gguf is not None and isinstance(kind, str):
            architecture_named(kind)
        if not weights:
            return self._download(small)
        chosen = [gguf] if gguf is not None else self._safetensors(names)
        cached = self.is_cached()
        if not cached:
            on_download()
        folder = self._download([*small, *chosen], bars=not cached)
        return folder if gguf is None else folder / gguf

    def is_cached(self) -> bool:
        """Returns whether the cache has weights of the model."""
        try:
            folder = self._download([], cached=True)
        except UserError:  # not in the cache, or an error that the download then raises, too
            return False
        if self.type is None and any(folder.glob("*.safetensors")):
            return True
        return any(self._is_wanted(file.name) for file in folder.rglob("*.gguf"))

    def _info(self) -> ModelInfo | None:
        """Returns the properties of the model on the hub; None if that cannot be reached. Raises UserError if the hub
        does not have the model."""
        from huggingface_hub import HfApi

        try:
            return HfApi().model_info(self.name, revision=self.revision, timeout=HUB_TIMEOUT_S)
        except Exception as error:  # of the client or its HTTP library
            if type(error).__name__ in HUB_REFUSALS:
                raise self._unavailable(error) from None
            return None

    def _download(self, names: Sequence[str], *, cached: bool = False, bars: bool = False) -> Path:
        """Downloads files and returns the directory in the cache. `cached`: downloads nothing. `bars`: shows the
        progress of the hub's client."""
        from huggingface_hub import snapshot_download

        try:
            if cached:
                # without patterns it would miss what is not wanted, such as a second copy of the weights
                options = {"local_files_only": True, "allow_patterns": list[str]()}
                return Path(snapshot_download(self.name, revision=self.revision, **options))
            with nullcontext() if bars else _no_bars():
                return Path(snapshot_download(self.name, revision=self.revision, allow_patterns=list(names)))
        except Exception as error:  # of the client, its HTTP library or the disk: the model is unavailable
            raise self._unavailable(error) from None

    def _unavailable(self, error: Exception) -> UserError:
        reason = HUB_REFUSALS.get(type(error).__name__) or file_io.one_line(error)
        return UserError(f"{self.name} is not a directory and cannot be downloaded from the Hugging Face Hub: {reason}")

    def _safetensors(self, names: Sequence[str]) -> list[str]:
        """Returns the names of the weights that the loader reads. Raises UserError if there are none."""
        if SINGLE_FILE in names:
            return [SINGLE_FILE]
        if INDEX_FILE in names:
            return indexed_files(self._download([INDEX_FILE]))
        if shards := [name for name in names if SHARD.fullmatch(name)]:
            return shards
        if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
            raise UserError(f"{self.name}: pickle weights can execute code and are not loaded; use a safetensors model")
        raise UserError(f"{self.name} has no weights: expected {SINGLE_FILE}, {INDEX_FILE} or a GGUF file")

    def _gguf(self, names: Iterable[str]) -> str | None:
        """Returns the name of the GGUF file: that of the given type, or of USUAL_TYPE, or the only one; None if the
        model has safetensors and no type is given. Raises UserError if there is none, or several to choose from."""
        found = sorted(name for name in names if name.endswith(".gguf") and "mmproj" not in name.lower())
        if self.type is None and (not found or any(name.endswith(".safetensors") for name in names)):
            return None
        types = [self.type] if self.type is not None else [None, USUAL_TYPE]
        for kind in types:
            wanted = [name for name in found if _HubModel(self.name, None, kind)._is_wanted(name)]
            if len(wanted) == 1 and not PART_OF_GGUF.search(wanted[0]):
                return wanted[0]
        if any(PART_OF_GGUF.search(name) for name in found if self._is_wanted(name)):
            what = "that file is divided into parts, which have to be merged with `llama-gguf-split --merge`"
        else:
            listed = ", ".join(name.rpartition("/")[2] for name in found[:8]) or "none"
            what = f"name the type of one GGUF file, as in {self.name}:{USUAL_TYPE}; it has {listed}"
        raise UserError(f"{self.name}: {what}{', ...' if len(found) > 8 else ''}")

    def _is_wanted(self, name: str) -> bool:
        """Returns whether a GGUF file has the given type, by its name."""
        stem, kind = PART_OF_GGUF.sub(".gguf", name).removesuffix(".gguf").lower(), (self.type or "").lower()
        return stem.endswith(kind) and (not kind or not stem.removesuffix(kind)[-1:].isalnum())


@contextmanager
def _no_bars() -> Iterator[None]:
    """Context manager in which the hub's client shows no progress."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _is_valid(name: object) -> bool:
    """Returns whether the hub's name of a file is a relative path of printable characters that stays in the folder."""
    if not isinstance(name, str) or not name.isprintable() or len(name) > MAX_NAME_CHARS:
        return False
    return not name.startswith("/") and ".." not in name.split("/")


def _is_small(name: str) -> bool:
    return "/" not in name and (name.endswith(SMALL_SUFFIXES) or name in SMALL_FILES)
