"""End-of-text tokens of a checkpoint: those of its configuration and of its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from swiftspec.file_io import Fields, is_file, read_object
from swiftspec.model.checkpoint_files import read_config
from swiftspec.model.gguf.file import GgufFile, is_gguf
from swiftspec.model.gguf.tokenizer import end_token_ids

MAX_TOKENIZER_BYTES = 256 << 20  # several times the size of tokenizer.json of the largest vocabularies


def end_tokens(folder: Path) -> tuple[int, ...]:
    """Returns the ids of the end-of-text tokens of a checkpoint: those in the metadata of a GGUF file and
    those that its vocabulary has by their text, or the union of `eos_token_id` in config.json and in
    generation_config.json and of `eos_token` in tokenizer_config.json. Fine-tuned models often name the token that ends
    a turn in one of these places only. Raises UserError if a file is damaged."""
    config = read_config(folder)
    if is_gguf(folder):
        named = (number for number in end_token_ids(GgufFile.read(folder)) if number < config.spec.vocab_size)
        return (*dict.fromkeys((*config.eos_token_ids, *named)),)
    return (*dict.fromkeys((*config.eos_token_ids, *_tokenizer_end(folder, config.spec.vocab_size))),)


def _tokenizer_end(folder: Path, vocab: int) -> Iterator[int]:
    """Yields the id of `eos_token` in tokenizer_config.json; nothing if it names none, or one that is not in the
    vocabulary of `vocab` tokens."""
    file = folder / "tokenizer_config.json"
    if not is_file(file):
        return
    fields = Fields(read_object(file), f"{file}: ")
    is_object = isinstance(fields.data.get("eos_token"), dict)  # with the properties of an added token
    text = fields.object("eos_token").string("content", "") if is_object else fields.string("eos_token", "")
    if not text:
        return
    for number, token in fields.object("added_tokens_decoder").data.items():
        if isinstance(token, dict) and token.get("content") == text and number.isdecimal() and int(number) < vocab:
            yield int(number)
            return
    yield from (number for number in _ids_in_tokenizer(folder / "tokenizer.json", text) if 0 <= number < vocab)


def _ids_in_tokenizer(file: Path, text: str) -> Iterator[int]:
    """Yields the id of a token in tokenizer.json, as an added token or in the vocabulary of its model, if it is
    there."""
    if not is_file(file):
        return
    fields = Fields(read_object(file, max_bytes=MAX_TOKENIZER_BYTES), f"{file}: ")
    for token in fields.objects("added_tokens"):
        if token.data.get("content") == text:
            yield token.integer("id")
            return
    vocab = fields.object("model").data.get("vocab")
    if isinstance(vocab, dict) and isinstance(vocab.get(text), int):
        yield vocab[text]
