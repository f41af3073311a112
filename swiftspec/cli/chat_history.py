"""Conversation of the chat: its messages, files of messages, and the tokens of the model's own answers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftspec import file_io
from swiftspec.errors import UserError
from swiftspec.text.codec import MAX_TEXT_BYTES, ChatMessage, TextCodec

ROLES = ("user", "assistant")
EXPECTED = 'a list of {"role": ..., "content": ...}: system first, if any, then user and assistant alternately'


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of the user and its answer. `tokens`: the prompt and the answer as they were decoded; empty if the
    answer was not decoded here."""

    user: str
    answer: str
    tokens: tuple[int, ...] = ()


class ChatHistory:
    """The turns of a chat. `system`: the system prompt; None: the chat template's own."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.turns: list[Turn] = []

    def messages(self) -> list[ChatMessage]:
        """Returns the conversation as messages of OpenAI's schema, without fields except role and content."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        texts = [text for turn in self.turns for text in (turn.user, turn.answer)]
        return [*system, *({"role": ROLES[at % 2], "content": text} for at, text in enumerate(texts))]

    def encode(
        self, text: str, encode_chat: Callable[[Sequence[ChatMessage]], list[int]], codec: TextCodec
    ) -> list[int]:
        """Returns the tokens of the conversation with the next message `text`.

        They begin with the tokens of the last prompt and answer as they were decoded, which the KV cache contains, if
        the chat template repeats their text unchanged.
        """
        prompt = encode_chat([*self.messages(), {"role": "user", "content": text}])
        return with_decoded_tokens(self.turns[-1].tokens, prompt, codec) if self.turns else prompt

    def save(self, name: str) -> Path:
        """Writes the messages to a JSON file. Raises UserError if the file cannot be written, or if it exists and does
        not contain messages."""
        file = file_io.expand_user(name)
        if os.path.exists(file):  # noqa: PTH110  (pathlib raises on names too long)
            try:
                read_messages(file)
            except UserError:
                raise UserError(f"{file} exists and contains no messages: use another name") from None
        file_io.write_text(file, json.dumps(self.messages(), ensure_ascii=False, indent=1) + "\n")
        return file

    def load(self, name: str) -> Path:
        """Replaces the conversation by the messages of a JSON file. Raises UserError if it contains none."""
        file = file_io.expand_user(name)
        messages = read_messages(file)
        self.system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else None
        texts = [message["content"] for message in messages]
        self.turns = [Turn(user, answer) for user, answer in zip(texts[::2], texts[1::2])]
        return file


def with_decoded_tokens(decoded: Sequence[int], prompt: Sequence[int], codec: TextCodec) -> list[int]:
    """Returns a prompt with the same text as `prompt` that begins with the tokens `decoded`. Returns `prompt` if its
    text does not begin with theirs.

    The tokenizer may split the text of a sampled answer into other tokens than were sampled; from the first difference
    on, nothing in the KV cache could be reused.
    """
    text, begin = codec.token_text(prompt), codec.token_text(decoded)
    if not decoded or not text.startswith(begin):
        return list(prompt)
    joined = [*decoded, *codec.encode(text[len(begin) :], add_special_tokens=False)]
    return joined if codec.token_text(joined) == text else list(prompt)


def read_messages(file: Path) -> list[dict[str, str]]:
    """Reads a JSON file of messages, a list or an object with field `messages`. Raises UserError unless it begins with
    at most one system message, and user and assistant alternate after it to the assistant's last answer."""
    data: Any = file_io.parse_json(file_io.read_text(file, max_bytes=MAX_TEXT_BYTES), str(file))
    messages: Any = data.get("messages") if isinstance(data, dict) else data
    if not (isinstance(messages, list) and all(_is_message(one) for one in messages)):
        raise UserError(f"{file} does not contain {EXPECTED}")
    turns = messages[1:] if messages and messages[0]["role"] == "system" else messages
    if len(turns) % 2 or any(one["role"] != ROLES[at % 2] for at, one in enumerate(turns)):
        raise UserError(f"{file} does not contain {EXPECTED}, up to an answer of the assistant")
    return messages


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))
