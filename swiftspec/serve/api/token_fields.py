"""Request fields about tokens: bad words, truncation of the prompt, log-probabilities and token ids of the response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swiftspec.params import MAX_LOGPROB_VALUES
from swiftspec.serve.app_context import AppContext, check_tokens
from swiftspec.serve.errors import ApiError, check_request_fields
from swiftspec.serve.format.generation_output import GenerationRequest
from swiftspec.serve.format.logprobs import LogprobFormatter, TokenFields
from swiftspec.serve.link.frames import EngineInfo
from swiftspec.serve.schema import SamplingFields, ScoringFields
from swiftspec.text.codec import TextCodec, Truncation

EVERY_TOKEN = 1 << 31  # number of top log-probabilities in a response that lists all that the engine returns


def prompt_truncation(body: SamplingFields, info: EngineInfo, limit: int | None) -> Truncation | None:
    """Returns the truncation of the prompt that `truncate_prompt_tokens` requests, or None. `limit`: maximum number of
    output tokens, for which -1 leaves room; None: the server's default, or one token. Raises ApiError if nothing would
    be left of the prompt."""
    count = body.truncate_prompt_tokens
    if count is None:
        return None
    if count == 0:
        raise ApiError(400, "truncate_prompt_tokens: must be -1 or at least 1", "truncate_prompt_tokens")
    if count < 0:
        count = info.max_model_len - max(info.defaults.get("max_tokens") or 1 if limit is None else limit, 1)
        if count < 1:
            message = f"-1 leaves no room for a prompt in the context of {info.max_model_len}: use a smaller max_tokens"
            raise ApiError(400, f"truncate_prompt_tokens: {message}", "truncate_prompt_tokens")
    return Truncation(count, body.truncation_side or "left")


async def bad_word_ids(context: AppContext, codec: TextCodec, body: SamplingFields) -> dict[str, Any]:
    """Returns the field `bad_words_ids` of SamplingParams: the tokens of each bad word at the start of a text, and of
    the word after a space."""
    if not body.bad_words:
        return {}
    ids = await context.run_in_tokenizer_thread(codec.encode_bad_words, body.bad_words)
    if not all(ids):
        raise ApiError(400, "bad_words: a word must contain more than blanks", "bad_words")
    return {"bad_words_ids": ids}


def scoring_params(
    body: ScoringFields, info: EngineInfo, logprobs: int | None, *, echo: bool = False, stream: bool | None = None
) -> dict[str, Any]:
    """Returns the fields of SamplingParams for log-probabilities. Raises ApiError if the request is incomplete.

    `logprobs`: requested number of top log-probabilities per token; -1: of all tokens; None: none.
    `echo`: whether they are requested for the prompt, too.
    """
    values: dict[str, Any] = {} if logprobs is None else {"logprobs": logprobs}
    if body.logprob_token_ids:
        if logprobs is None:
            check_request_fields("logprob_token_ids", "listed log-probabilities", "no log-probabilities")
        check_tokens(body.logprob_token_ids, info, "logprob_token_ids")
        values |= {"logprob_token_ids": [*dict.fromkeys(body.logprob_token_ids)], "logprobs": 0}
    if body.prompt_logprobs is not None and stream:
        check_request_fields("prompt_logprobs", "prompt log-probabilities", "stream")
    requested = [count for count in (logprobs if echo else None, body.prompt_logprobs) if count is not None]
    if requested:
        values["prompt_logprobs"] = -1 if -1 in requested else max(requested)
    return values


def check_logprob_size(body: ScoringFields, info: EngineInfo, requests: Sequence[GenerationRequest]) -> None:
    """Raises ApiError if the log-probabilities of all tokens are requested at too many positions. `requests`: those of
    all prompts and choices."""
    positions = 0
    for request in requests:
        sampling = request.engine_request.sampling
        positions += (sampling.max_tokens or info.max_model_len) if sampling.logprobs == -1 else 0
        positions += len(request.engine_request.prompt) if sampling.prompt_logprobs == -1 else 0
    most = MAX_LOGPROB_VALUES // info.vocab_size
    if positions > most:
        names = ("logprobs", "top_logprobs", "prompt_logprobs")
        name = next(each for each in names if getattr(body, each, None) == -1)
        message = f"-1 returns {info.vocab_size} values per token, so all choices and prompts must have at most {most}"
        raise ApiError(400, f"{name}: {message} tokens together, not {positions}", name)


def listed_logprobs(body: ScoringFields, requested: int | None) -> int | None:
    """Returns how many of the engine's top log-probabilities a response lists per token; None: no log-probabilities.
    `requested`: see `scoring_params`."""
    return EVERY_TOKEN if requested is not None and (requested < 0 or body.logprob_token_ids) else requested


def logprob_formatter(body: ScoringFields, codec: TextCodec) -> LogprobFormatter:
    """Returns the formatter of the log-probabilities that a request asks for."""
    return LogprobFormatter(codec, bool(body.return_tokens_as_token_ids), bool(body.logprob_token_ids))


def response_fields(body: ScoringFields, formatter: LogprobFormatter) -> TokenFields:
    """Returns the formatter of the additional response fields that a request asks for."""
    prompt_top = EVERY_TOKEN if body.prompt_logprobs == -1 else body.prompt_logprobs
    return TokenFields(formatter, bool(body.return_token_ids), prompt_top)
