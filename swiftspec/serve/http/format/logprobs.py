"""Log-probabilities in OpenAI's schemas for chat and for completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swiftspec.serve.http.engine_link.frames import TokenLogprob
from swiftspec.serve.text.codec import TextCodec
from swiftspec.serve.text.stream import REPLACEMENT_CHARACTER

MIN_LOGPROB = -9999.0  # replaces -inf, which JSON cannot represent


class LogprobFormatter:
    """Formatter of tokens and their log-probabilities in OpenAI's schemas."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._cache: dict[int, tuple[str, bytes]] = {}

    def _token(self, token: int) -> tuple[str, bytes]:
        """Returns the text and the bytes of a token. The text of an incomplete character is like `bytes:\\xe2\\x80`."""
        cached = self._cache.get(token)
        if cached is None:
            text = self._codec.single_token_text(token)
            data = text.encode()
            if REPLACEMENT_CHARACTER in text or not text:
                data = self._codec.token_bytes(token) or data
                text = data.decode("utf-8", "ignore")
                if text.encode() != data:
                    text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            cached = self._cache[token] = text, data
        return cached

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, data = self._token(token)
        return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": list(data)}

    def chat_logprobs(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob], top: int) -> list[dict[str, Any]]:
        """Returns the items of `logprobs.content` in a chat completion, each with the `top` most likely tokens."""
        return [
            {**self._entry(token, logprob.logprob), "top_logprobs": [self._entry(*one) for one in logprob.top[:top]]}
            for token, logprob in zip(tokens, logprobs)
        ]

    def completion_logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None], top: int, text_offsets: Sequence[int]
    ) -> dict[str, Any]:
        """Returns the `logprobs` object of a completion, with the `top` most likely tokens at each position.

        `logprobs`: one item per token; None for the first prompt token.
        `text_offsets`: position of each token in the text, in characters.
        """
        texts = [self._token(token)[0] for token in tokens]
        top_logprobs: list[dict[str, float] | None] = []
        for text, logprob in zip(texts, logprobs):
            if logprob is None:
                top_logprobs.append(None)
                continue
            best = {self._token(token)[0]: max(value, MIN_LOGPROB) for token, value in logprob.top[:top]}
            top_logprobs.append({**best, text: max(logprob.logprob, MIN_LOGPROB)})
        return {
            "tokens": texts,
            "token_logprobs": [None if logprob is None else max(logprob.logprob, MIN_LOGPROB) for logprob in logprobs],
            "top_logprobs": top_logprobs,
            "text_offset": list(text_offsets),
        }
