"""Text to tokens: where a model lies, its tokenizer, the chat template, and whether two tokenizers are the same."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from swiftspec import files
from swiftspec.errors import UserError, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, str]  # role and content
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
HUB_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model", "merges.txt")

HUB_REFUSALS = {
    "LocalEntryNotFoundError": "it cannot be reached, and there is no copy in the cache",
    "GatedRepoError": "accept its licence there, then `hf auth login`",
    "RepositoryNotFoundError": "no such model, or a private one that needs `hf auth login`",
    "RevisionNotFoundError": "no such revision",
}
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")  # all that they need is in tokenizer.json


def locate(name: str, revision: str | None = None) -> Path:
    """The directory of a model. A hub id is fetched: safetensors, configs and tokenizer only, never code."""
    path = files.expanded(name)
    if files.is_folder(path):
        return path
    if os.path.exists(path):  # noqa: PTH110  (pathlib raises on names too long)
        raise UserError(f"{name} is a file: name the model's directory")
    if not HUB_ID.fullmatch(name):
        raise UserError(f"{shown(name, 300)[1:-1]}: no such directory")
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.logging import set_verbosity_error

    set_verbosity_error()
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(HUB_FILES)))
    except Exception as error:  # the client's own, its HTTP library's, the disk's: all mean that there is no model
        reason = HUB_REFUSALS.get(type(error).__name__) or _line(error)
        raise UserError(f"{name} is no directory here, and the Hugging Face Hub did not give it: {reason}") from None


class TextCodec:
    """The tokenizer of one model. Raises UserError where it cannot be read, or a template does not work."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.tokenizer = _read_tokenizer(path)
            self.vocab: dict[str, int] = self.tokenizer.get_vocab()
        except Exception as error:  # transformers and tokenizers raise anything on damaged files
            raise UserError(f"{path}: the tokenizer cannot be read ({_line(error)})") from None
        if not self.vocab:
            raise UserError(f"{path}: the tokenizer is empty; is tokenizer.json missing?")
        self.size = max(self.vocab.values()) + 1  # the base vocabulary
        added = self.tokenizer.added_tokens_decoder
        self.special = frozenset(token for token, what in added.items() if what.special)
        self.byte_tokens = frozenset(
            number for token, number in self.vocab.items() if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token)
        )

    @property
    def has_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    def encode(self, text: str) -> list[int]:
        """Text as it stands, with the special tokens that the tokenizer puts around any text."""
        return self._encode(text, special=True)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """A conversation through the chat template, ready for the assistant's turn. As in transformers and vLLM the
        template alone decides about BOS and its like."""
        if not self.has_template:
            raise UserError(f"{self.path} has no chat template: continue plain text with --raw")
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template is a program of the model's author
            raise UserError(f"{self.path}: the chat template failed ({_line(error)})") from None
        return self._encode(str(text), special=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones left out."""
        return self.spell([token for token in tokens if token not in self.special])

    def spell(self, tokens: Sequence[int]) -> str:
        """The text of tokens, whatever they are."""
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    def _encode(self, text: str, special: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError("the prompt is not valid UTF-8") from None
        return list(self.tokenizer.encode(text, add_special_tokens=special))


def _read_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """As AutoTokenizer reads it. Where it would take the plain class anyway that is taken directly: AutoTokenizer looks
    at the model's config first, and imports half of torch for that (1.5 s)."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one prompt at a time; silences a fork warning
    from transformers.utils.logging import set_verbosity_error

    set_verbosity_error()
    if (path / "tokenizer.json").is_file() and (path / "tokenizer_config.json").is_file():
        config = files.read_object(path / "tokenizer_config.json")
        if config.get("tokenizer_class") in PLAIN_CLASSES and "auto_map" not in config:
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def check_pair(target: TextCodec, draft: TextCodec) -> None:
    """Raises UserError, naming the first difference, unless both map the same ids to the same tokens."""
    if target.vocab == draft.vocab:
        return
    ours = {number: token for token, number in target.vocab.items()}
    theirs = {number: token for token, number in draft.vocab.items()}
    at = min((i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i)), default=None)
    difference = "" if at is None else f": id {at} is {_name(ours.get(at))} here and {_name(theirs.get(at))} there"
    raise UserError(f"{target.path} and {draft.path} make no pair, their tokenizers differ{difference}")


def _name(token: str | None) -> str:
    return "nothing" if token is None else repr(token)


def _line(error: Exception) -> str:
    """An exception in one line of bounded length."""
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= 300 else words[:297] + "..."
