"""Log-probabilities in OpenAI's schemas for chat and for completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from swiftspec.serve.link.frames import TokenLogprob
from swiftspec.text.codec import TextCodec
from swiftspec.text.stream import REPLACEMENT_CHARACTER

MIN_LOGPROB = -9999.0  # replaces -inf, which JSON cannot represent


def _encoded(value: Any) -> msgspec.Raw:
    """Encodes the log-probabilities of one position as JSON. With those of the whole vocabulary the objects take
    gigabytes, if all positions are kept as objects until the response is encoded."""
    return msgspec.Raw(msgspec.json.encode(value))


class LogprobFormatter:
    """Formatter of tokens and their log-probabilities in OpenAI's schemas.

    `as_token_ids`: tokens are written as `token_id:29`.
    `list_sampled`: in chat completions the token itself is listed before the top log-probabilities if it is not one of
        them; in completions it always is.
    """

    def __init__(self, codec: TextCodec, as_token_ids: bool = False, list_sampled: bool = False) -> None:
        self._codec, self._as_token_ids, self._list_sampled = codec, as_token_ids, list_sampled
        self._cache: dict[int, tuple[str, bytes]] = {}

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._as_token_ids else self._token(token)[0]

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
        data = self._token(token)[1]
        return {"token": self._name(token), "logprob": max(logprob, MIN_LOGPROB), "bytes": list(data)}

    def chat_logprobs(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob], top: int) -> list[dict[str, Any]]:
        """Returns the items of `logprobs.content` in a chat completion, each with the `top` most likely tokens."""
        return [
            {
                **self._entry(token, logprob.logprob),
                "top_logprobs": _encoded([self._entry(*one) for one in self._listed(token, logprob, top)]),
            }
            for token, logprob in zip(tokens, logprobs)
        ]

    def _listed(self, token: int, logprob: TokenLogprob, top: int) -> list[tuple[int, float]]:
        """Returns the tokens that are listed at the position of `token`, with their log-probabilities."""
        listed = [*logprob.top[:top]]
        if self._list_sampled and all(other != token for other, _ in listed):
            listed.insert(0, (token, logprob.logprob))
        return listed

    def completion_logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None], top: int, text_offsets: Sequence[int]
    ) -> dict[str, Any]:
        """Returns the `logprobs` object of a completion, with the token itself and the `top` most likely ones at each
        position.

        `logprobs`: one item per token; None for the first prompt token.
        `text_offsets`: position of each token in the text, in characters.
        """
        texts = [self._name(token) for token in tokens]
        top_logprobs: list[msgspec.Raw | None] = []
        for text, logprob in zip(texts, logprobs):
            if logprob is None:
                top_logprobs.append(None)
                continue
            best = {self._name(token): max(value, MIN_LOGPROB) for token, value in logprob.top[:top]}
            own = {text: max(logprob.logprob, MIN_LOGPROB)}
            top_logprobs.append(_encoded({**own, **best}))  # the token itself first, as in vLLM
        return {
            "tokens": texts,
            "token_logprobs": [None if logprob is None else max(logprob.logprob, MIN_LOGPROB) for logprob in logprobs],
            "top_logprobs": top_logprobs,
            "text_offset": list(text_offsets),
        }

    def prompt_logprobs(
        self, prompt: Sequence[int], logprobs: Sequence[TokenLogprob], top: int
    ) -> list[msgspec.Raw | None]:
        """Returns vLLM's `prompt_logprobs`: None for the first token, and for each other one, by token id, the
        log-probability, rank and text of the token and of the `top` most likely ones.

        `logprobs`: one item per token except the first.
        """
        items: list[msgspec.Raw | None] = [None]
        for token, one in zip(prompt[1:], logprobs):
            entries: dict[str, dict[str, Any]] = {}
            best = [(other, value, rank) for rank, (other, value) in enumerate(one.top[:top], 1)]
            for other, value, rank in [(token, one.logprob, one.rank), *best]:
                entry = {"logprob": max(value, MIN_LOGPROB), "rank": rank, "decoded_token": self._token(other)[0]}
                entries.setdefault(str(other), entry)
            items.append(_encoded(entries))
        return items


class TokenFields:
    """Formatter of vLLM's additional fields of a response: token ids, and log-probabilities of the prompt.

    `token_ids`: whether token ids are requested.
    `prompt_top`: number of top log-probabilities per prompt token; None: none.
    """

    def __init__(self, formatter: LogprobFormatter, token_ids: bool = False, prompt_top: int | None = None) -> None:
        self._formatter, self.token_ids, self._prompt_top = formatter, token_ids, prompt_top

    @property
    def has_prompt_logprobs(self) -> bool:
        return self._prompt_top is not None

    def prompt_chunk(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Returns the fields of the prompt in a stream: its token ids, if requested."""
        return {"prompt_token_ids": list(prompt)} if self.token_ids else {}

    def output_chunk(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Returns the fields of output tokens in a chunk of a stream: their ids, if requested."""
        return {"token_ids": list(tokens)} if self.token_ids else {}

    def whole_prompt(self, prompt: Sequence[int], logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Returns the fields of the prompt in a complete response; null as in vLLM unless requested. `logprobs`: one
        item per token except the first."""
        top = self._prompt_top
        items = None if top is None else self._formatter.prompt_logprobs(prompt, logprobs, top)
        return {"prompt_token_ids": list(prompt) if self.token_ids else None, "prompt_logprobs": items}

    def whole_output(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Returns the fields of the output in a complete response; null as in vLLM unless requested."""
        return {"token_ids": list(tokens) if self.token_ids else None}
