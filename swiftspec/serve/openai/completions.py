"""Endpoint /v1/completions: OpenAI's completions of text without a chat template."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from swiftspec.errors import UserError
from swiftspec.params import SamplingParams
from swiftspec.serve.api.generation import JSON_OR_SSE, replace_key, respond
from swiftspec.serve.api.sampling import context_exceeded_error, grammar_request, sampling_params, stop_list
from swiftspec.serve.api.token_fields import (
    bad_word_ids,
    check_logprob_size,
    listed_logprobs,
    logprob_formatter,
    prompt_truncation,
    response_fields,
    scoring_params,
)
from swiftspec.serve.app_context import AppContext, check_tokens, new_id
from swiftspec.serve.errors import ApiError, check_request_fields, to_api_error, unsupported
from swiftspec.serve.format.generation_output import (
    GenerationOutput,
    GenerationRequest,
    OutputDelta,
    RequestOutputs,
)
from swiftspec.serve.format.logprobs import LogprobFormatter, TokenFields
from swiftspec.serve.known_fields import reject_unsupported
from swiftspec.serve.link.engine_client import EngineRequest
from swiftspec.serve.link.frames import EngineInfo, TokenLogprob, TokensFrame
from swiftspec.serve.openai.choice_writer import ChoiceWriter
from swiftspec.serve.openai.choices import RequestedChoices, requested_choices, sampled_requests
from swiftspec.serve.schema import (
    N_DESCRIPTION,
    ConstraintFields,
    Count,
    LogprobCount,
    SamplingFields,
    ScoringFields,
    ShortText,
    Stop,
    Stops,
    StreamOptions,
    StreamUsage,
    Text,
    Token,
    stream_usage,
)
from swiftspec.text.codec import TextCodec
from swiftspec.text.stream import MarkerCodec, TextBuilder, TokenCodec
from swiftspec.text.template import PromptTooLong

DEFAULT_MAX_TOKENS = 16  # as in OpenAI's API
TokenList = Annotated[list[Token], Field(min_length=1, max_length=1 << 22)]
MAX_PROMPTS = 128
# Longer than MAX_PROMPTS, so that `prompt_list` refuses a list that is too long: pydantic's error would name the types.
TextList = Annotated[list[Text], Field(max_length=1 << 16)]
TokenLists = Annotated[list[TokenList], Field(max_length=1 << 16)]
Prompt = str | list[int]
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
    prompt: Text | TokenList | TextList | TokenLists = Field(
        description=f"A text, a list of token ids, or a list of up to {MAX_PROMPTS} of these."
    )
    suffix: Text | None = None
    max_tokens: Count | None = Field(
        DEFAULT_MAX_TOKENS, description="0 only with echo or prompt_logprobs: generates nothing."
    )
    echo: bool | None = None
    logprobs: LogprobCount | None = Field(None, description="-1: of all tokens.")
    stop: Stop | Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    n: Count | None = Field(None, description=N_DESCRIPTION)


def prompt_list(prompt: str | list[int] | list[str] | list[list[int]]) -> list[Prompt]:
    """Returns the prompts of a request. Raises ApiError if there is none, or more than MAX_PROMPTS."""
    if isinstance(prompt, str):
        return [prompt]
    tokens = [token for token in prompt if isinstance(token, int)]
    prompts: list[Prompt] = [tokens] if tokens else [item for item in prompt if not isinstance(item, int)]
    if not prompts:
        raise ApiError(400, "prompt: must not be empty", "prompt")
    if len(prompts) > MAX_PROMPTS:
        message = f"{len(prompts)} prompts are more than {MAX_PROMPTS}; send several requests"
        raise ApiError(400, f"prompt: {message}", "prompt")
    return prompts


async def encode_prompt(
    context: AppContext, info: EngineInfo, codec: TextCodec, body: CompletionRequest, prompt: Prompt, limit: int
) -> list[int]:
    """Returns the token ids of a prompt. With a suffix they have the fill-in-the-middle format of the model. Raises
    ApiError on a prompt that is empty or invalid. `limit`: maximum number of output tokens."""
    truncation = prompt_truncation(body, info, limit)
    if body.suffix:
        if truncation is not None:
            check_request_fields("truncate_prompt_tokens", "truncation", "suffix")
        return await _encode_fill_in_the_middle(context, info, codec, prompt, body.suffix)
    if not isinstance(prompt, str):
        check_tokens(prompt, info, "prompt")
        return prompt if truncation is None else truncation.apply(prompt)
    special = body.add_special_tokens is not False
    try:
        tokens = await context.run_in_tokenizer_thread(codec.encode, prompt, info.max_model_len, special, truncation)
    except PromptTooLong:
        raise context_exceeded_error(None, info, "prompt") from None
    if not tokens:
        raise ApiError(400, "prompt: must not be empty", "prompt")
    return tokens


async def _encode_fill_in_the_middle(
    context: AppContext, info: EngineInfo, codec: TextCodec, prompt: Prompt, suffix: str
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


def prompt_text_and_offsets(
    codec: TextCodec, prompt: Prompt, tokens: Sequence[int], truncated: bool
) -> tuple[str, list[int]]:
    """Returns the text of a prompt for `echo`, and the position of each token in it.

    `prompt`: the prompt as it was sent. A text is returned as it is, or if it was truncated, decoded without special
        tokens, which the tokenizer may have added. Token ids are decoded with special tokens.
    `tokens`: the prompt's token ids.
    `truncated`: whether some of them may have been removed.
    """
    was_cut = truncated and len(prompt) > len(tokens) * codec.longest_token_bytes
    if isinstance(prompt, str) and not was_cut:
        sent = codec.encode(prompt, None, add_special_tokens=False)
        added = len(tokens) - len(sent)  # such as BOS, which the text does not contain
        for before in (added, 0):
            if added >= 0 and list(tokens[before : before + len(sent)]) == sent:
                return prompt, [*[0] * before, *_text_of(MarkerCodec(codec, skip_special=False), tokens[before:])[1]]
    text, offsets = _text_of(codec if isinstance(prompt, str) else MarkerCodec(codec, skip_special=False), tokens)
    return prompt if isinstance(prompt, str) and not truncated else text, offsets


def _text_of(codec: TokenCodec, tokens: Sequence[int]) -> tuple[str, list[int]]:
    builder = TextBuilder(codec)
    builder.push(TokensFrame(0, list(tokens), 0, finish_reason="length"))
    return builder.text, builder.text_offsets


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt at the beginning of a choice.

    `text`: empty if no echo is requested.
    `offsets`: positions of the prompt's tokens in the text; None unless their log-probabilities are requested.
    """

    text: str = ""
    offsets: Sequence[int] | None = None


class CompletionWriter(ChoiceWriter):
    """Formatter of the outputs of a request as a response of OpenAI's completions endpoint.

    `top`: number of top log-probabilities per token; None: no log-probabilities.
    `echoes`: one for each prompt.
    `token_fields`: formatter of vLLM's additional fields.
    """

    def __init__(
        self,
        outputs: RequestOutputs,
        model: str,
        logprob_formatter: LogprobFormatter,
        top: int | None,
        usage: StreamUsage,
        fingerprint: str,
        echoes: Sequence[Echo],
        token_fields: TokenFields,
    ) -> None:
        common_fields = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        super().__init__(outputs, usage, common_fields, top is not None or token_fields.has_prompt_logprobs)
        self._logprob_formatter, self._top = logprob_formatter, top
        self._echoes, self._token_fields = echoes, token_fields
        self._begun: set[int] = set()  # choices of which a chunk was sent

    def delta_events(self, delta: OutputDelta) -> bytes:
        """Returns the chunk of one round, after the echoed prompt or its token ids if it is the first of its choice.
        The last delta of a choice becomes the chunk with the finish reason. Returns nothing if the round adds nothing
        to the response, or if the response is not a stream."""
        if not self._streaming:
            return b""
        head = b""
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            head = self._prompt_chunk(delta.choice)
        if delta.last:
            return head + self._end_chunk(delta.choice, {"text": "", **self._token_fields.output_chunk(())})
        if self._top is None and not delta.content and not self._token_fields.token_ids:
            return head
        output = self._outputs.outputs[delta.choice]
        logprobs = self._logprobs(delta.choice, output, delta.first_token, delta.end_token)
        token_fields = self._token_fields.output_chunk(output.tokens[delta.first_token : delta.end_token])
        return head + self._chunk(delta.choice, {"text": delta.content}, delta.end_token, logprobs, token_fields)

    def _prompt_chunk(self, choice: int) -> bytes:
        """Returns a chunk with the echoed prompt or its token ids; empty if neither is requested."""
        output, echo = self._outputs.outputs[choice], self._echo(choice)
        if not echo.text and echo.offsets is None and not self._token_fields.token_ids:
            return b""
        fields = {**self._token_fields.prompt_chunk(output.prompt), **self._token_fields.output_chunk(())}
        logprobs = self._logprobs(choice, output, 0, 0, with_prompt=True)
        return self._chunk(choice, {"text": echo.text}, 0, logprobs, fields)

    def full_response(self) -> dict[str, Any]:
        """Returns the complete response."""
        outputs = self._outputs
        choices = [self._full_choice(index, choice) for index, choice in outputs.choices()]
        return {**self._common_fields, "choices": choices, "usage": outputs.usage(), **outputs.stats()}

    def _full_choice(self, index: int, choice: GenerationOutput) -> dict[str, Any]:
        logprobs = self._logprobs(index, choice, 0, len(choice.tokens), with_prompt=True)
        return {
            "index": index,
            "text": self._echo(index).text + choice.content,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            **self._outputs.choice_end_fields(choice),
            **self._token_fields.whole_output(choice.tokens),
            **self._token_fields.whole_prompt(choice.prompt, self._prompt_logprobs(index)),
        }

    def _echo(self, choice: int) -> Echo:
        return self._echoes[choice // self._outputs.n]

    def _prompt_logprobs(self, choice: int) -> list[TokenLogprob]:
        """Returns the log-probabilities of the prompt of a choice, which the first output of the prompt has."""
        return self._outputs.prompts[choice // self._outputs.n][0].prompt_logprobs

    def _logprobs(
        self, choice: int, output: GenerationOutput, first: int, last: int, *, with_prompt: bool = False
    ) -> dict[str, Any] | None:
        if self._top is None:
            return None
        echo, tokens = self._echo(choice), output.tokens[first:last]
        logprobs: list[TokenLogprob | None] = [*output.logprobs[first:last]]
        starts = [len(echo.text) + start for start in output.text_builder.text_offsets[first:last]]
        if with_prompt and echo.offsets is not None:
            tokens = [*output.prompt, *tokens]
            logprobs = [None, *self._prompt_logprobs(choice), *logprobs]
            starts = [*echo.offsets, *starts]
        return self._logprob_formatter.completion_logprobs(tokens, logprobs, self._top, starts)


async def completion_requests(
    context: AppContext, request: Request, body: CompletionRequest, prompts: Sequence[Prompt], choices: RequestedChoices
) -> list[list[GenerationRequest]]:
    """Builds the generation requests of a completion: for each prompt, those of its choices. Raises ApiError on an
    unsupported combination of fields."""
    info, codec = context.require_ready()
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise ApiError(400, "max_tokens: 0 is only supported with echo or prompt_logprobs", "max_tokens")
    if body.suffix and body.echo and body.logprobs is not None:
        check_request_fields("echo", "echoed log-probabilities", "suffix")
    negative = None
    if body.guidance_scale not in (None, 1):
        negative = await context.run_in_tokenizer_thread(codec.encode, body.negative_prompt or "", info.max_model_len)
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else max(body.max_tokens, 1)
    grammar = grammar_request(body)
    more = await bad_word_ids(context, codec, body)
    if grammar is not None:
        more["grammar"] = await context.compile_grammar(grammar)
    is_ranked = body.logprobs is None and choices.num_samples > choices.n  # by log-probability, for best_of
    key = replace_key(request, body)
    requests: list[list[GenerationRequest]] = []
    for number, prompt in enumerate(prompts):
        try:
            tokens = await encode_prompt(context, info, codec, body, prompt, limit)
            sampling = sampling_params(body, info, tokens, negative, limit) | more
            sampling |= scoring_params(body, info, body.logprobs, echo=bool(body.echo), stream=body.stream)
            sampling |= {"logprobs": 0} if is_ranked else {}
            engine_request = EngineRequest(tokens, SamplingParams(**sampling), key, choices.population)
        except (ApiError, UserError) as error:
            raise _prompt_error(error, number, len(prompts)) from None
        generation_request = GenerationRequest(
            engine_request,
            stop_list(body.stop),
            continues_text=not body.suffix,
            prompt_only=body.max_tokens == 0,
            include_stop=bool(body.include_stop_str_in_output),
            end_tokens=info.eos_token_ids,
            skip_special_tokens=body.skip_special_tokens is not False,
        )
        requests.append(sampled_requests(generation_request, choices.num_samples, body.seed is not None))
    return requests


def _prompt_error(error: Exception, number: int, num_prompts: int) -> ApiError:
    """Returns an error of one prompt; if there are several, it names the prompt's index."""
    found = to_api_error(error)
    if num_prompts == 1:
        return found
    return ApiError(found.status, f"prompt {number}: {found.message}", found.param, found.code, found.kind)


async def prompt_echo(
    context: AppContext, codec: TextCodec, body: CompletionRequest, prompt: Prompt, tokens: Sequence[int]
) -> Echo:
    """Returns the echo of a prompt, whose token ids are `tokens`."""
    if not body.echo:
        return Echo()
    text, offsets = await context.run_in_tokenizer_thread(
        prompt_text_and_offsets, codec, prompt, tokens, body.truncate_prompt_tokens is not None
    )
    return Echo(text, None if body.logprobs is None else offsets)


def completions_router(context: AppContext) -> APIRouter:
    """Returns the router of /v1/completions."""
    router = APIRouter()

    @router.post("/v1/completions", responses=JSON_OR_SSE)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        info, codec = context.require_ready()
        model = context.resolve_model_name(body.model)
        reject_unsupported(body)
        usage = stream_usage(body.stream, body.stream_options, context.always_usage)
        prompts = prompt_list(body.prompt)
        choices = requested_choices(body, body.n, body.stream, info, num_prompts=len(prompts), ranked=True)
        requests = await completion_requests(context, request, body, prompts, choices)
        check_logprob_size(body, info, [each for group in requests for each in group])
        outputs = RequestOutputs.create(requests, codec, choices.n)
        echoes = [
            await prompt_echo(context, codec, body, prompt, group[0].engine_request.prompt)
            for prompt, group in zip(prompts, requests)
        ]
        formatter = logprob_formatter(body, codec)
        writer = CompletionWriter(
            outputs=outputs,
            model=model,
            logprob_formatter=formatter,
            top=listed_logprobs(body, body.logprobs),
            usage=usage,
            fingerprint=context.system_fingerprint(),
            echoes=echoes,
            token_fields=response_fields(body, formatter),
        )
        return await respond(context, request, outputs, writer, body.stream)

    return router
