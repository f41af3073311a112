"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from swiftspec.serve.http.engine_link.frames import Likelihood
from swiftspec.serve.text.codec import TextCodec
from swiftspec.serve.text.stream import BROKEN

LEAST = -9999.0  # JSON has no infinity
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_letters() -> dict[str, int]:
    """The letters that byte-level tokenizers write bytes with."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}


LETTERS = _byte_letters()


class Scores:
    """Writes tokens of one tokenizer and their likelihoods."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._known: dict[int, tuple[str, bytes]] = {}

    def _token(self, token: int) -> tuple[str, bytes]:
        """The text and the bytes of a token. What is no text by itself is written `bytes:\\xe2\\x80`."""
        known = self._known.get(token)
        if known is None:
            text = self._codec.spell([token, token])[len(self._codec.spell([token])) :]  # so it keeps its space
            data = text.encode()
            if BROKEN in text or not text:
                data = self._bytes(token) or data
                text = data.decode("utf-8", "ignore")
                if text.encode() != data:
                    text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            known = self._known[token] = text, data
        return known

    def _bytes(self, token: int) -> bytes:
        name = self._codec.tokenizer.convert_ids_to_tokens(token)
        if not isinstance(name, str):  # models have more rows than their tokenizers tokens
            return b""
        single = BYTE.fullmatch(name)
        if single:
            return bytes([int(single[1], 16)])
        if all(letter in LETTERS for letter in name):
            return bytes(LETTERS[letter] for letter in name)
        return b""

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        text, data = self._token(token)
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(data)}

    def chat(self, tokens: Sequence[int], likelihoods: Sequence[Likelihood], top: int) -> list[dict[str, Any]]:
        """The items of `logprobs.content`, each with `top` of the likeliest."""
        return [
            {**self._one(token, how.logprob), "top_logprobs": [self._one(*one) for one in how.top[:top]]}
            for token, how in zip(tokens, likelihoods)
        ]

    def completion(
        self, tokens: Sequence[int], likelihoods: Sequence[Likelihood | None], top: int, starts: Sequence[int]
    ) -> dict[str, Any]:
        """The object of a completion; None for the likelihood of a prompt's first token, of which there is none."""
        texts = [self._token(token)[0] for token in tokens]
        tops: list[dict[str, float] | None] = []
        for text, how in zip(texts, likelihoods):
            if how is None:
                tops.append(None)
                continue
            best = {self._token(token)[0]: max(logprob, LEAST) for token, logprob in how.top[:top]}
            tops.append({**best, text: max(how.logprob, LEAST)})
        return {
            "tokens": texts,
            "token_logprobs": [None if how is None else max(how.logprob, LEAST) for how in likelihoods],
            "top_logprobs": tops,
            "text_offset": list(starts),
        }
