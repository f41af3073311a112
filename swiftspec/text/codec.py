"""Tokenizer of a model: encoding, chat template, decoding, vocabulary."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from swiftspec import file_io
from swiftspec.errors import UserError
from swiftspec.model.end_tokens import MAX_TOKENIZER_BYTES
from swiftspec.model.gguf.file import GgufFile, is_gguf
from swiftspec.model.gguf.tokenizer import has_vocabulary, tokenizer_json, tokenizer_settings
from swiftspec.model.vocabulary import Vocabulary
from swiftspec.observe.trace_format import TokenText
from swiftspec.text.messages import SystemMessages, accepted_system_messages, with_fitting_system_messages
from swiftspec.text.stream import REPLACEMENT_CHARACTER
from swiftspec.text.template import PromptTooLong, TemplateRenderer, read_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ChatMessage = Mapping[
    str, Any
]  # role, content, and other fields that a template may read: tool_calls, tool_call_id, ...
COMMON_ROLES = ("system", "user", "assistant", "tool")
TOKENIZER_FILES = (  # all files of a model that its tokenizer reads, and its configuration
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # each tokenizer has one of these
MAX_TEXT_BYTES = 64 << 20  # limit of a text if the context length is not known
PATH_FIELDS = {"name_or_path", "tokenizer_file", "vocab_file", "merges_file"}  # of tokenizer_config.json
# classes that read only tokenizer.json; the last two would split a text by GPT-2's rule instead of that of the file
FAST_TOKENIZER_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend", "GPT2Tokenizer", "GPT2TokenizerFast")
CHARSMAP = re.compile(rb'"precompiled_charsmap"\s*:\s*"([A-Za-z0-9+/=]*)')


def _byte_letters() -> dict[str, int]:
    """Returns the byte for each character of a byte-level vocabulary (the inverse of GPT-2's `bytes_to_unicode`)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}


TRUNCATION_MARGIN_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Truncation:
    """Truncation of a prompt to `count` tokens. `side`: the end at which tokens are removed."""

    count: int
    side: Literal["left", "right"] = "left"

    def apply(self, tokens: list[int]) -> list[int]:
        return tokens[: self.count] if self.side == "right" else tokens[-self.count :]

    def cut_text(self, text: str, longest_token: int) -> str:
        """Returns the part of a text that is encoded, which has at least the tokens that are kept. Near the cut tokens
        can differ from those of the whole text, hence the margin. `longest_token`: length of the longest token."""
        kept = (self.count + TRUNCATION_MARGIN_TOKENS) * longest_token
        return text[:kept] if self.side == "right" else text[-kept:]


BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
BYTE_LETTERS = _byte_letters()


class TextCodec:
    """The tokenizer of one model. Raises UserError if it cannot be read, or if its chat template fails.

    `renderer`: renderer of the model's chat template, if the caller has started one already.
    `chat_template`: file of a Jinja template that replaces the model's own.
    """

    def __init__(self, path: Path, renderer: TemplateRenderer | None = None, chat_template: Path | None = None) -> None:
        self.path = path
        self._system_messages: dict[str, SystemMessages] = {}  # by the source of a template
        self._renderer = renderer or TemplateRenderer(chat_template or path)
        template = None if chat_template is None else read_template(chat_template)
        try:
            self.tokenizer = _read_tokenizer(path)
            self.vocab: dict[str, int] = self.tokenizer.get_vocab()
            self.tokenizer.encode("a")  # fails here rather than in the first request
        except BaseException as error:  # transformers and tokenizers raise anything on damaged files, Rust's panics too
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            if is_gguf(path) and isinstance(error, UserError):  # names the file
                raise
            if not has_tokenizer(path):
                raise UserError(f"{path}: no tokenizer; expected {' or '.join(VOCABULARY_FILES)}") from None
            raise UserError(f"{path}: the tokenizer cannot be read ({file_io.one_line(error)})") from None
        if not self.vocab:
            raise UserError(f"{path}: the tokenizer is empty; is tokenizer.json missing?")
        if template is not None:
            self.tokenizer.chat_template = template
        self._backend = _decoding_backend(self.tokenizer)
        self.size = max(self.vocab.values()) + 1  # of the base vocabulary
        added = self.tokenizer.added_tokens_decoder
        self.special = frozenset(token for token, what in added.items() if what.special)
        self.byte_tokens = frozenset(number for token, number in self.vocab.items() if BYTE_TOKEN.fullmatch(token))

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokens by id, for comparison with those of another model."""
        kind = type(self.tokenizer).__name__
        return Vocabulary.of(str(self.path), kind, self.vocab, self.tokenizer.added_tokens_decoder)

    def tokenizer_info(self) -> dict[str, Any]:
        """Returns the contents of tokenizer_config.json, with the class of the tokenizer, its chat template and the
        texts of its special tokens, such as `bos_token`. Raises UserError if the file cannot be read."""
        file = self.path / "tokenizer_config.json"
        config = file_io.read_object(file) if file_io.is_file(file) else {}
        shown = {name: value for name, value in config.items() if name not in PATH_FIELDS}
        special = {name: text for name, text in self.tokenizer.special_tokens_map.items() if isinstance(text, str)}
        tokenizer_class = type(self.tokenizer).__name__
        return {
            **shown,
            **special,
            "tokenizer_class": tokenizer_class,
            "chat_template": self.tokenizer.chat_template,
        }

    def close(self) -> None:
        """Ends the process that renders the chat template, if one runs."""
        self._renderer.close()

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """The ids of the special tokens by their text."""
        return {str(token): number for number, token in self.tokenizer.added_tokens_decoder.items() if token.special}

    def without_paths(self, message: str) -> str:
        """Returns a message without the paths of the model and of its chat template, which clients do not see."""
        for path in (self.path, self._renderer.model):
            message = message.replace(f"{path}: ", "")
        return message

    @property
    def has_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    @cached_property
    def longest_token_bytes(self) -> int:
        """Length of the longest token in UTF-8 bytes. A token can stand for a longer text only if the tokenizer drops
        text first (repeated spaces) or maps unknown text to one token."""
        return max(len(token.encode("utf-8", "surrogatepass")) for token in self.vocab)

    def max_text_bytes(self, context: int | None) -> int:
        """Returns the length in bytes above which a text certainly exceeds `context` tokens. `context`: None if
        unknown."""
        return MAX_TEXT_BYTES if context is None else context * self.longest_token_bytes

    def encode(
        self,
        text: str,
        context: int | None = None,
        add_special_tokens: bool = True,
        truncation: Truncation | None = None,
    ) -> list[int]:
        """Encodes raw text. Raises PromptTooLong if the text has too many bytes to fit `context` tokens. The result may
        have more than `context` tokens nevertheless.

        `add_special_tokens`: add those that the tokenizer puts around any text, such as BOS.
        `truncation`: removes tokens of a text, which may then have any length.
        """
        return self._encode(text, context, add_special_tokens, truncation)

    def encode_bad_words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Returns the values of `SamplingParams.bad_words_ids`: the tokens of each word at the start of a text, and of
        the word after a space. They are empty for a word of blanks."""
        forms = [form for word in words for form in (word.lstrip(), f" {word.lstrip()}" if word.strip() else "")]
        return [*dict.fromkeys(tuple(self.encode(form, None, add_special_tokens=False)) for form in forms)]

    def template_source(self, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Returns the source of the chat template. If there are several, this is the default one, or with `tools` the
        one for tools. Raises UserError if there is none."""
        if not self.has_template:
            raise UserError(f"{self.path} has no chat template: use --raw to continue plain text, or --chat-template")
        try:
            return str(self.tokenizer.get_chat_template(tools=None if tools is None else [dict(t) for t in tools]))
        except ValueError as error:
            raise UserError(f"{self.path}: the chat template failed ({file_io.one_line(error)})") from None

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        context: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        add_generation_prompt: bool = True,
        truncation: Truncation | None = None,
        template: str | None = None,
    ) -> list[int]:
        """Renders a conversation with the chat template and encodes it; see `render_chat` and `encode`.

        As in transformers and vLLM the template alone adds special tokens such as BOS. System messages are moved to
        where the template accepts them.
        """
        if truncation is not None:
            context = None
        if any(message.get("role") == "system" for message in messages):
            accepted = self._accepted_system_messages(template or self.template_source(tools))
            messages = with_fitting_system_messages(messages, accepted)
        text = self.render_chat(
            messages=messages,
            context=context,
            tools=tools,
            variables=variables,
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt,
            template=template,
        )
        return self._encode(text, context, False, truncation)

    def _accepted_system_messages(self, template: str) -> SystemMessages:
        """Returns where a template takes system messages, determined once per template."""
        if template not in self._system_messages:
            self._system_messages[template] = accepted_system_messages(
                lambda messages: self.render_chat(messages, template=template)
            )
        return self._system_messages[template]

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        context: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        add_generation_prompt: bool = True,
        template: str | None = None,
    ) -> str:
        """Renders a conversation with the chat template.

        `context`: see `encode`. `tools`: JSON schemas of the tools. `variables`: additional variables of
        the template.
        `continue_final_message`: leave the last message open, instead of beginning the assistant's turn.
        `add_generation_prompt`: begin the assistant's turn, unless the last message is left open. `template`: source of
        a template that replaces the model's.
        """
        template = template or self.template_source(tools)
        for message in messages:
            for text in message.values():
                if isinstance(text, str):
                    self._check_size(text, context)
        special = {
            name: [str(token) for token in value] if isinstance(value, list) else str(value)
            for name, value in self.tokenizer.special_tokens_map.items()
        }
        known = {**(variables or {}), **special}
        text = self._renderer.render(
            template=template,
            messages=messages,
            variables=known,
            max_bytes=self.max_text_bytes(context),
            tools=tools,
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
        )
        self._check_roles(messages, text)
        return text

    def _check_roles(self, messages: Sequence[ChatMessage], text: str) -> None:
        """Raises UserError if the template has left out a message with a role that few templates know."""
        for message in messages:
            role, content = message.get("role"), message.get("content")
            if role not in COMMON_ROLES and isinstance(content, str) and content.strip() not in text:
                raise UserError(f"{self.path}: the chat template does not render messages of role {role!r}")

    def decode(self, tokens: Sequence[int]) -> str:
        """Decodes tokens; special tokens are left out."""
        return self.token_text([token for token in tokens if token not in self.special])

    def without_final_special(self, tokens: Sequence[int]) -> Sequence[int]:
        """Returns tokens without the special tokens at their end, such as the end-of-text token."""
        end = len(tokens)
        while end and tokens[end - 1] in self.special:
            end -= 1
        return tokens[:end]

    def single_token_text(self, token: int) -> str:
        """Decodes one token, with its leading space, which some tokenizers drop at the start of a text."""
        return self.token_text([token, token])[len(self.token_text([token])) :]

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes of a token in a byte-level vocabulary, or of a byte token; empty for other tokens."""
        name = self.tokenizer.convert_ids_to_tokens(token)
        if not isinstance(name, str):  # the model's vocabulary can be larger than the tokenizer's
            return b""
        single = BYTE_TOKEN.fullmatch(name)
        if single:
            return bytes([int(single[1], 16)])
        if all(letter in BYTE_LETTERS for letter in name):
            return bytes(BYTE_LETTERS[letter] for letter in name)
        return b""

    def trace_text(self, token: int) -> TokenText:
        """Returns the text of a token for traces."""
        text = self.single_token_text(token)
        data = self.token_bytes(token) if REPLACEMENT_CHARACTER in text else b""
        return TokenText(text, data or None, token in self.special)

    def token_text(self, tokens: Sequence[int]) -> str:
        """Decodes tokens, including special ones."""
        if self._backend is not None:
            return str(self._backend.decode(list(tokens), skip_special_tokens=False))
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    def _encode(self, text: str, context: int | None, special: bool, truncation: Truncation | None) -> list[int]:
        if truncation is not None:
            text, context = truncation.cut_text(text, self.longest_token_bytes), None
        self._check_size(text, context)
        try:
            tokens = list(self.tokenizer.encode(text, add_special_tokens=special))
        except BaseException as error:  # PanicException of Rust code is not an Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise UserError(f"the tokenizer cannot encode this text ({file_io.one_line(error)})") from None
        return tokens if truncation is None else truncation.apply(tokens)

    def _check_size(self, text: str, context: int | None) -> None:
        """Raises PromptTooLong if the text has too many bytes to fit `context` tokens. Called before tokenizing, which
        itself has no limit on time and memory."""
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise UserError("the prompt is not valid UTF-8") from None
        if size > (context or 0) and size > self.max_text_bytes(
            context
        ):  # short texts need no search for the longest token
            where = "any context" if context is None else f"the context of {context} with room for an answer"
            raise PromptTooLong(f"the prompt of {size} bytes does not fit {where}: shorten it or raise max_model_len")


def has_tokenizer(path: Path) -> bool:
    """Returns whether the directory or the GGUF file of a model contains a tokenizer. Raises UserError if the GGUF file
    is damaged."""
    if is_gguf(path):
        return has_vocabulary(GgufFile.read(path))
    return any((path / name).is_file() for name in VOCABULARY_FILES)


def may_have_template(path: Path) -> bool:
    """Guesses from the files of a model whether it has a chat template, without loading the tokenizer."""
    if is_gguf(path):
        return True
    if any((path / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    file = path / "tokenizer_config.json"
    if not file.is_file():
        return False
    try:
        with file.open("rb") as stream:
            return b'"chat_template"' in stream.read(4 << 20)
    except OSError:
        return False


def template_renderer(path: Path, chat_template: Path | None = None, *, start: bool = False) -> TemplateRenderer:
    """Returns the renderer of a model's chat template. `chat_template`: file of a template that replaces it. `start`:
    starts its process now if there may be a template, because its imports take seconds."""
    renderer = TemplateRenderer(chat_template or path)
    if start and (chat_template is not None or may_have_template(path)):
        renderer.start()
    return renderer


def _read_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Loads the tokenizer that AutoTokenizer would load. Where that is PreTrainedTokenizerFast, uses the class
    directly: AutoTokenizer reads the model's config first and imports half of torch for that (1.5 s)."""
    os.environ.setdefault(
        "TOKENIZERS_PARALLELISM", "false"
    )  # prompts come one at a time; this also silences a warning on fork
    from transformers.utils.logging import set_verbosity_error

    set_verbosity_error()
    if is_gguf(path):
        return _gguf_tokenizer(path)
    _check_charsmap(path / "tokenizer.json")
    if (path / "tokenizer.json").is_file() and (path / "tokenizer_config.json").is_file():
        config = file_io.read_object(path / "tokenizer_config.json")
        if config.get("tokenizer_class") in FAST_TOKENIZER_CLASSES and "auto_map" not in config:
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def _check_charsmap(file: Path) -> None:
    """Raises UserError if tokenizer.json has a table of characters (SentencePiece's normaliser) that is shorter than
    its first number, the size that the library would allocate."""
    if not file_io.is_file(file):
        return
    for found in CHARSMAP.finditer(file_io.read_bytes(file, max_bytes=MAX_TOKENIZER_BYTES)):
        table = base64.b64decode(found[1])
        if len(table) < 4 or int.from_bytes(table[:4], "little") > len(table) - 4:
            raise UserError("precompiled_charsmap is damaged")


def _decoding_backend(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Returns the tokenizer of the library tokenizers whose `decode` the given one calls, which takes a fifth of the
    time; None if it decodes in its own way."""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    inherited = all(
        getattr(kind, name, None) is getattr(PreTrainedTokenizerFast, name) for name in ("decode", "_decode")
    )
    return tokenizer.backend_tokenizer if inherited else None


def _gguf_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Builds the tokenizer in a GGUF file. Raises UserError if there is none, or one of a kind that is not
    supported."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    file = GgufFile.read(path)
    settings = tokenizer_settings(file) if has_vocabulary(file) else {}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer_json(file)), **settings)


def write_tokenizer_files(path: Path, folder: Path) -> Path:
    """Writes the tokenizer in a GGUF file to `folder` as files of a Hugging Face directory, and returns `folder`.
    Raises UserError if there is none, or one of a kind that is not supported."""
    file = GgufFile.read(path)
    text = tokenizer_json(file)
    settings = {**tokenizer_settings(file), "tokenizer_class": FAST_TOKENIZER_CLASSES[0]}
    file_io.write_text(folder / "tokenizer.json", text)
    file_io.write_text(folder / "tokenizer_config.json", json.dumps(settings))
    return folder
