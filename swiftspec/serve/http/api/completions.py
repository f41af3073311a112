"""Endpoint /v1/completions: OpenAI's completions of text without a chat template."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from swiftspec.serve.http.api.generation import JSON_OR_SSE, replace_key, respond
from swiftspec.serve.http.api.sampling import grammar_request, requested_choices, sampling_params
from swiftspec.serve.http.app_context import AppContext, check_tokens, new_id
from swiftspec.serve.http.engine_link.engine_client import EngineRequest
from swiftspec.serve.http.engine_link.frames import EngineInfo, TokenLogprob, TokensFrame
from swiftspec.serve.http.errors import ApiError, unsupported
from swiftspec.serve.http.format.generation_output import (
    GenerationOutput,
    GenerationRequest,
    OutputDelta,
    choice_end_fields,
)
from swiftspec.serve.http.format.logprobs import LogprobFormatter
from swiftspec.serve.http.schema import (
    INTEGRAL,
    UNSUPPORTED,
    ConstraintFields,
    Count,
    SamplingFields,
    ShortText,
    Stop,
    Stops,
    StreamOptions,
    StreamUsage,
    Text,
    Token,
    reject_unsupported,
    stream_usage,
)
from swiftspec.serve.http.sse import DONE_EVENT, sse_event
from swiftspec.serve.text.codec import TextCodec
from swiftspec.serve.text.stream import TextBuilder

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


class CompletionRequest(SamplingFields, ConstraintFields):
    """Request of OpenAI's completions endpoint, with vLLM's sampling parameters."""

    model: ShortText | None = None
    prompt: Text | TokenList | TextList | TokenLists
    suffix: Text | None = None
    max_tokens: Count | None = Field(
        DEFAULT_MAX_TOKENS, description="0 only with echo: returns the log-probabilities of the prompt."
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20), INTEGRAL] | None = None
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
    if body.suffix:
        return await _encode_fill_in_the_middle(context, info, codec, prompt, body.suffix)
    if not isinstance(prompt, str):
        check_tokens(prompt, info, "prompt")
        return prompt
    tokens = await context.run_in_tokenizer_thread(
        codec.encode, prompt, info.max_model_len, body.add_special_tokens is not False
    )
    if not tokens:
        raise ApiError(400, "prompt: must not be empty", "prompt")
    return tokens


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


def prompt_text(codec: TextCodec, tokens: Sequence[int]) -> TextBuilder:
    """Returns a `TextBuilder` with the prompt's text and the offset of each token in it."""
    builder = TextBuilder(codec)
    builder.push(TokensFrame(0, list(tokens), 0, finish_reason="length"))
    return builder


class CompletionWriter:
    """Formatter of a generation as a response of OpenAI's completions endpoint.

    `top`: number of top log-probabilities per token; None: no log-probabilities.
    `usage`: the usage that a stream contains.
    `echo`: the prompt's text, which precedes the generated text; empty if not requested.
    `prompt`: tokens of the prompt and their offsets; None unless the prompt's log-probabilities are requested.
    """

    def __init__(
        self, output: GenerationOutput, model: str, logprob_formatter: LogprobFormatter, top: int | None,
        usage: StreamUsage, fingerprint: str, echo: str, prompt: TextBuilder | None,
    ) -> None:  # fmt: skip
        self._output, self._logprob_formatter, self._top, self._usage = output, logprob_formatter, top, usage
        self._echo, self._prompt = echo, prompt
        self._common_fields = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def start_events(self) -> bytes:
        """Returns a chunk with the echoed prompt; empty if no echo is requested."""
        return self._chunk(self._echo, self._logprobs(0, 0, True), 0) if self._echo or self._prompt else b""

    def delta_events(self, delta: OutputDelta) -> bytes:
        """Returns the chunk of one round; empty if the round adds nothing visible."""
        if self._top is None and not delta.content:
            return b""
        logprobs = self._logprobs(delta.first_token, delta.end_token, False)
        return self._chunk(delta.content, logprobs, delta.end_token)

    def end_events(self) -> bytes:
        """Returns the last chunks: finish reason, usage and statistics."""
        output = self._output
        stats = output.stats()
        more = {} if self._usage.at_end else stats
        last = self._chunk("", None, len(output.tokens), output.finish_reason, **more)
        if self._usage.at_end:
            last += sse_event({**self._common_fields, "choices": [], "usage": output.usage(), **stats})
        return last + DONE_EVENT

    def full_response(self) -> dict[str, Any]:
        """Returns the complete response."""
        output = self._output
        logprobs = self._logprobs(0, len(output.tokens), True)
        choices = [self._choice(self._echo + choice.content, logprobs, choice.finish_reason, index)
                   for index, choice in enumerate(output.choices)]  # fmt: skip
        return {**self._common_fields, "choices": choices, "usage": output.usage(), **output.stats()}

    def _logprobs(self, first: int, last: int, with_prompt: bool) -> dict[str, Any] | None:
        if self._top is None:
            return None
        output = self._output
        tokens = output.tokens[first:last]
        logprobs: list[TokenLogprob | None] = [*output.logprobs[first:last]]
        starts = [len(self._echo) + start for start in output.text_builder.text_offsets[first:last]]
        if with_prompt and self._prompt is not None:
            tokens = [*output.prompt, *tokens]
            logprobs = [None, *output.prompt_logprobs, *logprobs]
            starts = [*self._prompt.text_offsets, *starts]
        return self._logprob_formatter.completion_logprobs(tokens, logprobs, self._top, starts)

    def _choice(self, text: str, logprobs: Any, finish: str | None, index: int = 0) -> dict[str, Any]:
        ended = {} if finish is None else choice_end_fields(self._output.choices[index])
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish, **ended}

    def _chunk(self, text: str, logprobs: Any, end_token: int, finish: str | None = None, **more: Any) -> bytes:
        """Returns a chunk. `end_token`: number of output tokens so far."""
        if self._usage.in_chunks:
            more["usage"] = self._output.usage_so_far(end_token)
        return sse_event({**self._common_fields, "choices": [self._choice(text, logprobs, finish)], **more})


async def completion_request(context: AppContext, request: Request, body: CompletionRequest) -> GenerationRequest:
    """Builds the generation request of a completion. Raises ApiError on an unsupported combination of fields."""
    info, codec = context.require_ready()
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens: 0 is only supported with echo", "max_tokens")
    prompt = await encode_prompt(context, info, codec, body)
    negative = None
    if body.guidance_scale not in (None, 1):
        negative = await context.run_in_tokenizer_thread(codec.encode, body.negative_prompt or "", info.max_model_len)
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else max(body.max_tokens, 1)
    sampling = sampling_params(body, info, prompt, negative, limit)
    if body.logprobs is not None:
        sampling["logprobs"] = body.logprobs
        if body.echo:
            sampling["prompt_logprobs"] = body.logprobs
    grammar = grammar_request(body)
    if grammar is not None:
        sampling["grammar"] = await context.compile_grammar(grammar)
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return GenerationRequest(
        EngineRequest(prompt, sampling, replace_key(request, body), requested_choices(body, body.n, body.stream,
        info)), stops,
        continues_text=not body.suffix, prompt_only=body.max_tokens == 0,
    )  # fmt: skip


def completions_router(context: AppContext) -> APIRouter:
    """Returns the router of /v1/completions."""
    router = APIRouter()

    @router.post("/v1/completions", responses=JSON_OR_SSE)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        _, codec = context.require_ready()
        model = context.resolve_model_name(body.model)
        reject_unsupported(body, UNSUPPORTED)
        usage = stream_usage(body.stream, body.stream_options, context.always_usage)
        generation_request = await completion_request(context, request, body)
        output = GenerationOutput.create(generation_request, codec)
        echo, prompt = "", None
        if body.echo:
            prompt_input = single_prompt(body.prompt)
            echo = prompt_input if isinstance(prompt_input, str) else codec.decode(prompt_input)
            if body.logprobs is not None:
                prompt = await context.run_in_tokenizer_thread(
                    prompt_text, codec, generation_request.engine_request.prompt
                )
        writer = CompletionWriter(
            output, model, LogprobFormatter(codec), body.logprobs, usage, context.system_fingerprint(), echo, prompt
        )
        return await respond(context, request, output, writer, body.stream)

    return router
