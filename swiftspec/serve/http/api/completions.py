"""Endpoint /v1/completions: OpenAI's completions of text without a chat template."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from swiftspec.serve.http.api.generation import JSON_OR_SSE, replace_key, respond
from swiftspec.serve.http.api.sampling import grammar_request, requested_choices, sampling_params
from swiftspec.serve.http.api.token_fields import (
    bad_word_ids,
    listed_logprobs,
    response_fields,
    scoring_params,
    truncate_prompt,
    truncates,
)
from swiftspec.serve.http.app_context import AppContext, check_tokens, new_id
from swiftspec.serve.http.engine_link.engine_client import EngineRequest
from swiftspec.serve.http.engine_link.frames import EngineInfo, TokenLogprob, TokensFrame
from swiftspec.serve.http.errors import ApiError, unsupported
from swiftspec.serve.http.format.generation_output import (
    GenerationOutput,
    GenerationRequest,
    MarkerCodec,
    OutputDelta,
    choice_end_fields,
)
from swiftspec.serve.http.format.logprobs import LogprobFormatter, TokenFields
from swiftspec.serve.http.known_fields import reject_unsupported
from swiftspec.serve.http.schema import (
    ConstraintFields,
    Count,
    LogprobCount,
    SamplingFields,
    ScoringFields,
    ShortText,
    Stop,
    Stops,
    StreamOptions,
    Text,
    Token,
)
from swiftspec.serve.http.sse import DONE_EVENT, sse_event
from swiftspec.serve.text.codec import TextCodec
from swiftspec.serve.text.stream import TextBuilder, TokenCodec

DEFAULT_MAX_TOKENS = 16  # as in OpenAI's API
TokenList = Annotated[list[Token], Field(min_length=1, max_length=1 << 22)]
TextList = Annotated[list[Text], Field(max_length=128)]
TokenLists = Annotated[list[TokenList], Field(max_length=128)]
# Fill-in-the-middle tokens that precede the prefix, the suffix and the middle. One row each for Qwen and Gemma,
# StarCoder and Granite, DeepSeek, Code Llama.
FIM_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)


class CompletionRequest(SamplingFields, ConstraintFields, ScoringFields):
    """Request of OpenAI's completions endpoint, with vLLM's sampling parameters."""

    model: ShortText | None = None
    prompt: Text | TokenList | TextList | TokenLists
    suffix: Text | None = None
    max_tokens: Count | None = Field(
        DEFAULT_MAX_TOKENS, description="0 only with echo: returns the log-probabilities of the prompt."
    )
    echo: bool | None = None
    logprobs: LogprobCount | None = Field(None, description="-1: of all tokens.")
    stop: Stop | Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    n: Count | None = Field(None, description="With smc: number of texts of the population, each with its weight.")


def single_prompt(prompt: str | list[int] | list[str] | list[list[int]]) -> str | list[int]:
    """Returns the prompt as text or token ids. Raises ApiError if `prompt` is a list of zero or several prompts."""
    if isinstance(prompt, str):
        return prompt
    tokens = [token for token in prompt if isinstance(token, int)]
    if tokens:
        return tokens
    prompts = [item for item in prompt if not isinstance(item, int)]
    if len(prompts) != 1:
        raise unsupported("prompt", f"only one prompt per request is supported, not {len(prompts)}")
    return prompts[0]


async def encode_prompt(context: AppContext, info: EngineInfo, codec: TextCodec, body: CompletionRequest) -> list[int]:
    """Returns the token ids of the prompt. With a suffix they have the fill-in-the-middle format of the model. Raises
    ApiError on a prompt that is empty or invalid."""
    prompt = single_prompt(body.prompt)
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if body.suffix:
        if truncates(body):
            raise unsupported("truncate_prompt_tokens", "not supported with suffix; omit it")
        return await _encode_fill_in_the_middle(context, info, codec, prompt, body.suffix)
    if not isinstance(prompt, str):
        check_tokens(prompt, info, "prompt")
        return truncate_prompt(prompt, body, info, limit)
    longest = None if truncates(body) else info.max_model_len
    tokens = await context.run_in_tokenizer_thread(codec.encode, prompt, longest, body.add_special_tokens is not False)
    if not tokens:
        raise ApiError(400, "prompt: must not be empty", "prompt")
    return truncate_prompt(tokens, body, info, limit)


async def _encode_fill_in_the_middle(
    context: AppContext, info: EngineInfo, codec: TextCodec, prompt: str | list[int], suffix: str
) -> list[int]:
    markers = next((names for names in FIM_TOKENS if all(name in codec.vocab for name in names)), None)
    if markers is None:
        raise unsupported("suffix", "this model's tokenizer has no fill-in-the-middle tokens")
    if not isinstance(prompt, str):
        raise unsupported("suffix", "requires a prompt that is text")
    empty = await context.run_in_tokenizer_thread(codec.encode, "", info.max_model_len)
    bos = empty[:1] if empty[:1] == [codec.tokenizer.bos_token_id] else []
    before = await context.run_in_tokenizer_thread(codec.encode, prompt, info.max_model_len, False)
    after = await context.run_in_tokenizer_thread(codec.encode, suffix, info.max_model_len, False)
    prefix_token, suffix_token, middle_token = (codec.vocab[name] for name in markers)
    return [*bos, prefix_token, *before, suffix_token, *after, middle_token]


def echoed_text(
    codec: TextCodec, prompt: str | list[int], tokens: Sequence[int], truncated: bool
) -> tuple[str, list[int]]:
    """Returns the text of a prompt for `echo`, and the position of each token in it.

    `prompt`: the prompt as it was sent. A text is returned as it is, unless it was truncated; tokens are decoded
    without special tokens.
    `tokens`: the prompt's token ids.
    `truncated`: whether some of them may have been removed.
    """
    if isinstance(prompt, str):
        sent = codec.encode(prompt, None, add_special_tokens=False)
        added = len(tokens) - len(sent)  # such as BOS, which the text does not contain
        for before in (added, 0):
            if added >= 0 and list(tokens[before : before + len(sent)]) == sent:
                return prompt, [*[0] * before, *_text_of(MarkerCodec(codec, skip_special=False), tokens[before:])[1]]
    text, offsets = _text_of(codec, tokens)
    return prompt if isinstance(prompt, str) and not truncated else text, offsets


def _text_of(codec: TokenCodec, tokens: Sequence[int]) -> tuple[str, list[int]]:
    builder = TextBuilder(codec)
    builder.push(TokensFrame(0, list(tokens), 0, finish_reason="length"))
    return builder.text, builder.text_offsets


class CompletionWriter:
    """Formatter of a generation as a response of OpenAI's completions endpoint.

    `top`: number of top log-probabilities per token; None: no log-probabilities.
    `usage`: whether a stream ends with a usage chunk.
    `echo`: the prompt's text, which precedes the generated text; empty if not requested.
    `prompt_offsets`: positions of the prompt's tokens in its text; None unless their log-probabilities are requested.
    `token_fields`: formatter of vLLM's additional fields.
    """

    def __init__(
        self, output: GenerationOutput, model: str, logprob_formatter: LogprobFormatter, top: int | None, usage: bool,
        echo: str, prompt_offsets: Sequence[int] | None, token_fields: TokenFields,
    ) -> None:  # fmt: skip
        self._output, self._logprob_formatter, self._top, self._usage = output, logprob_formatter, top, usage
        self._echo, self._prompt_offsets, self._token_fields = echo, prompt_offsets, token_fields
        self._common_fields = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def start_events(self) -> bytes:
        """Returns a chunk with the echoed prompt or its token ids; empty if neither is requested."""
        if not self._echo and self._prompt_offsets is None and not self._token_fields.token_ids:
            return b""
        fields = {**self._token_fields.of_prompt(self._output.prompt), **self._token_fields.of_output(())}
        return self._chunk(self._echo, self._logprobs(0, 0, True), fields)

    def delta_events(self, delta: OutputDelta) -> bytes:
        """Returns the chunk of one round; empty if the round adds nothing visible."""
        if self._top is None and not delta.content and not self._token_fields.token_ids:
            return b""
        tokens = self._output.tokens[delta.first_token : delta.end_token]
        logprobs = self._logprobs(delta.first_token, delta.end_token, False)
        return self._chunk(delta.content, logprobs, self._token_fields.of_output(tokens))

    def end_events(self) -> bytes:
        """Returns the last chunks: finish reason, usage and statistics."""
        output = self._output
        stats = output.stats()
        last = self._chunk("", None, finish=output.finish_reason, **({} if self._usage else stats))
        if self._usage:
            last += sse_event({**self._common_fields, "choices": [], "usage": output.usage(), **stats})
        return last + DONE_EVENT

    def full_response(self) -> dict[str, Any]:
        """Returns the complete response."""
        output = self._output
        logprobs = self._logprobs(0, len(output.tokens), True)
        prompt_fields = self._token_fields.of_prompt(output.prompt, output.prompt_logprobs)
        choices = [
            self._choice(self._echo + choice.content, logprobs, choice.finish_reason, index)
            | self._token_fields.of_output(choice.tokens) | prompt_fields
            for index, choice in enumerate(output.choices)
        ]  # fmt: skip
        return {**self._common_fields, "choices": choices, "usage": output.usage(), **output.stats()}

    def _logprobs(self, first: int, last: int, with_prompt: bool) -> dict[str, Any] | None:
        if self._top is None:
            return None
        output = self._output
        tokens = output.tokens[first:last]
        logprobs: list[TokenLogprob | None] = [*output.logprobs[first:last]]
        starts = [len(self._echo) + start for start in output.text_builder.text_offsets[first:last]]
        if with_prompt and self._prompt_offsets is not None:
            tokens = [*output.prompt, *tokens]
            logprobs = [None, *output.prompt_logprobs, *logprobs]
            starts = [*self._prompt_offsets, *starts]
        return self._logprob_formatter.completion_logprobs(tokens, logprobs, self._top, starts)

    def _choice(self, text: str, logprobs: Any, finish: str | None, index: int = 0) -> dict[str, Any]:
        ended = {} if finish is None else choice_end_fields(self._output.choices[index])
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish, **ended}

    def _chunk(
        self, text: str, logprobs: Any, choice_fields: Mapping[str, Any] | None = None, finish: str | None = None,
        **more: Any,
    ) -> bytes:  # fmt: skip
        choice = {**self._choice(text, logprobs, finish), **(choice_fields or {})}
        usage = self._token_fields.of_chunk(self._output.usage)
        return sse_event({**self._common_fields, "choices": [choice], **usage, **more})


async def completion_request(context: AppContext, request: Request, body: CompletionRequest) -> GenerationRequest:
    """Builds the generation request of a completion. Raises ApiError on an unsupported combination of fields."""
    info, codec = context.require_ready()
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise ApiError(400, "max_tokens: 0 is only supported with echo or prompt_logprobs", "max_tokens")
    prompt = await encode_prompt(context, info, codec, body)
    negative = None
    if body.guidance_scale not in (None, 1):
        negative = await context.run_in_tokenizer_thread(codec.encode, body.negative_prompt or "", info.max_model_len)
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else max(body.max_tokens, 1)
    sampling = sampling_params(body, info, prompt, negative, limit) | await bad_word_ids(context, codec, body)
    sampling |= scoring_params(body, info, sampling, prompt, body.logprobs, echo=bool(body.echo), stream=body.stream)
    grammar = grammar_request(body)
    if grammar is not None:
        sampling["grammar"] = await context.compile_grammar(grammar)
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return GenerationRequest(
        EngineRequest(prompt, sampling, replace_key(request, body), requested_choices(body, body.n, body.stream,
        info)), stops,
        continues_text=not body.suffix, prompt_only=body.max_tokens == 0,
        include_stop=bool(body.include_stop_str_in_output), end_tokens=info.eos_token_ids,
        skip_special_tokens=body.skip_special_tokens is not False,
    )  # fmt: skip


def completions_router(context: AppContext) -> APIRouter:
    """Returns the router of /v1/completions."""
    router = APIRouter()

    @router.post("/v1/completions", responses=JSON_OR_SSE)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        _, codec = context.require_ready()
        model = context.resolve_model_name(body.model)
        reject_unsupported(body)
        generation_request = await completion_request(context, request, body)
        output = GenerationOutput.create(generation_request, codec)
        echo, offsets = "", None
        if body.echo:
            tokens = generation_request.engine_request.prompt
            echo, offsets = await context.run_in_tokenizer_thread(
                echoed_text, codec, single_prompt(body.prompt), tokens, truncates(body)
            )
        usage = context.always_usage or bool(body.stream_options and body.stream_options.include_usage)
        formatter = LogprobFormatter(codec, bool(body.return_tokens_as_token_ids))
        token_fields = response_fields(body, body.stream_options, formatter)
        writer = CompletionWriter(
            output, model, formatter, listed_logprobs(body, body.logprobs), usage, echo,
            None if body.logprobs is None else offsets, token_fields,
        )  # fmt: skip
        return await respond(context, request, output, writer, body.stream)

    return router
