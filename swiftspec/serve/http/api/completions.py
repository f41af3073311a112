"""/v1/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from swiftspec.serve.http.api.generation import BOTH_WAYS, replace_key, respond
from swiftspec.serve.http.api.sampling import choices_asked, grammar_asked, sampling_of
from swiftspec.serve.http.app_context import Server, check_tokens, number
from swiftspec.serve.http.engine_link.engine import Ask
from swiftspec.serve.http.engine_link.frames import Chunk, Likelihood, Ready
from swiftspec.serve.http.errors import ApiError, unsupported
from swiftspec.serve.http.format.answer import Answer, Job, Part, ended_by
from swiftspec.serve.http.format.logprobs import Scores
from swiftspec.serve.http.schema import (
    NEVER,
    WHOLE,
    Constrained,
    Count,
    Sampled,
    Stop,
    Stops,
    StreamOptions,
    Text,
    Token,
    Word,
    refuse,
)
from swiftspec.serve.http.sse import DONE, event
from swiftspec.serve.text.codec import TextCodec
from swiftspec.serve.text.stream import TextBuilder

USUAL = 16  # tokens of an answer where nothing is said, as OpenAI has it
Tokens = Annotated[list[Token], Field(min_length=1, max_length=1 << 22)]
Texts = Annotated[list[Text], Field(max_length=128)]
ManyTokens = Annotated[list[Tokens], Field(max_length=128)]
# Before a prefix, before a suffix, before the middle: Qwen and Gemma, StarCoder and Granite, DeepSeek, Code Llama.
FILL = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)


class CompletionRequest(Sampled, Constrained):
    """OpenAI's, with vLLM's sampling parameters."""

    model: Word | None = None
    prompt: Text | Tokens | Texts | ManyTokens
    suffix: Text | None = None
    max_tokens: Count | None = Field(USUAL, description="0 only with echo: the prompt's likelihoods alone.")
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    stop: Stop | Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    n: Count | None = Field(None, description="With smc: so many texts of the population, each with its weight.")


def one_prompt(prompt: str | list[int] | list[str] | list[list[int]]) -> str | list[int]:
    """The text or the tokens, maybe in a list of one. Raises ApiError on more than one."""
    if isinstance(prompt, str):
        return prompt
    tokens = [token for token in prompt if isinstance(token, int)]
    if tokens:
        return tokens
    several = [one for one in prompt if not isinstance(one, int)]
    if len(several) != 1:
        raise unsupported("prompt", f"one prompt a request, not {len(several)}")
    return several[0]


async def encode(server: Server, about: Ready, codec: TextCodec, body: CompletionRequest) -> list[int]:
    """The prompt's tokens; with a suffix, in the order that the model was taught to fill in the middle."""
    prompt = one_prompt(body.prompt)
    if body.suffix:
        return await _fill(server, about, codec, prompt, body.suffix)
    if not isinstance(prompt, str):
        check_tokens(prompt, about, "prompt")
        return prompt
    tokens = await server.threaded(codec.encode, prompt, about.max_model_len, body.add_special_tokens is not False)
    if not tokens:
        raise ApiError(400, "prompt: it is empty", "prompt")
    return tokens


async def _fill(server: Server, about: Ready, codec: TextCodec, prompt: str | list[int], suffix: str) -> list[int]:
    known = next((words for words in FILL if all(word in codec.vocab for word in words)), None)
    if known is None:
        raise unsupported("suffix", "this model's tokenizer has no tokens to fill in the middle")
    if not isinstance(prompt, str):
        raise unsupported("suffix", "the prompt must be text then")
    whole = await server.threaded(codec.encode, "", about.max_model_len)
    lead = whole[:1] if whole[:1] == [codec.tokenizer.bos_token_id] else []
    before = await server.threaded(codec.encode, prompt, about.max_model_len, False)
    after = await server.threaded(codec.encode, suffix, about.max_model_len, False)
    begin, hole, end = (codec.vocab[word] for word in known)
    return [*lead, begin, *before, hole, *after, end]


def spelled(codec: TextCodec, tokens: Sequence[int]) -> TextBuilder:
    """The text of a prompt, and where in it each token begins."""
    builder = TextBuilder(codec)
    builder.push(Chunk(0, list(tokens), 0, finish_reason="length"))
    return builder


class CompletionWriter:
    """An answer in the shape of completions. `echo`: text to put first; `prompt`: its tokens, where their likelihoods
    are asked for."""

    def __init__(
        self, answer: Answer, model: str, scores: Scores, top: int | None, usage: bool, echo: str,
        prompt: TextBuilder | None,
    ) -> None:  # fmt: skip
        self._answer, self._scores, self._top, self._usage = answer, scores, top, usage
        self._echo, self._prompt = echo, prompt
        self._head = {"id": number("cmpl-"), "object": "text_completion", "created": int(time.time()), "model": model}

    def begin(self) -> bytes:
        """The prompt, where it is to be echoed."""
        return self._chunk(self._echo, self._logprobs(0, 0, True)) if self._echo or self._prompt else b""

    def part(self, part: Part) -> bytes:
        """One chunk."""
        if self._top is None and not part.said:
            return b""
        return self._chunk(part.said, self._logprobs(part.first, part.last, False))

    def end(self) -> bytes:
        """What ended it; usage and cost."""
        answer = self._answer
        cost = answer.cost()
        last = self._chunk("", None, answer.finish_reason, **({} if self._usage else cost))
        if self._usage:
            last += event({**self._head, "choices": [], "usage": answer.usage(), **cost})
        return last + DONE

    def whole(self) -> dict[str, Any]:
        """As one object."""
        answer = self._answer
        logprobs = self._logprobs(0, len(answer.tokens), True)
        choices = [self._choice(self._echo + each.said, logprobs, each.finish_reason, at)
                   for at, each in enumerate(answer.choices)]  # fmt: skip
        return {**self._head, "choices": choices, "usage": answer.usage(), **answer.cost()}

    def _logprobs(self, first: int, last: int, with_prompt: bool) -> dict[str, Any] | None:
        if self._top is None:
            return None
        answer = self._answer
        tokens = answer.tokens[first:last]
        likelihoods: list[Likelihood | None] = [*answer.likelihoods[first:last]]
        starts = [len(self._echo) + start for start in answer.builder.starts[first:last]]
        if with_prompt and self._prompt is not None:
            tokens = [*answer.prompt, *tokens]
            likelihoods = [None, *answer.prompt_likelihoods, *likelihoods]
            starts = [*self._prompt.starts, *starts]
        return self._scores.completion(tokens, likelihoods, self._top, starts)

    def _choice(self, text: str, logprobs: Any, finish: str | None, index: int = 0) -> dict[str, Any]:
        ended = {} if finish is None else ended_by(self._answer.choices[index])
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish, **ended}

    def _chunk(self, text: str, logprobs: Any, finish: str | None = None, **more: Any) -> bytes:
        return event({**self._head, "choices": [self._choice(text, logprobs, finish)], **more})


async def job_of(server: Server, request: Request, body: CompletionRequest) -> Job:
    """What the answer is to be. Raises ApiError on whatever cannot be done."""
    about, codec = server.ready()
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens: 0 makes sense with echo only", "max_tokens")
    prompt = await encode(server, about, codec, body)
    negative = None
    if body.guidance_scale not in (None, 1):
        negative = await server.threaded(codec.encode, body.negative_prompt or "", about.max_model_len)
    limit = USUAL if body.max_tokens is None else max(body.max_tokens, 1)
    sampling = sampling_of(body, about, prompt, negative, limit)
    if body.logprobs is not None:
        sampling["logprobs"] = body.logprobs
        if body.echo:
            sampling["prompt_logprobs"] = body.logprobs
    asked = grammar_asked(body)
    if asked is not None:
        sampling["grammar"] = await server.grammar(asked)
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return Job(
        Ask(prompt, sampling, replace_key(request, body), choices_asked(body, body.n, body.stream, about)), stops,
        goes_on=not body.suffix, nothing=body.max_tokens == 0,
    )  # fmt: skip


def router(server: Server) -> APIRouter:
    """The endpoint."""
    made = APIRouter()

    @made.post("/v1/completions", responses=BOTH_WAYS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        _, codec = server.ready()
        model = server.name(body.model)
        refuse(body, NEVER)
        job = await job_of(server, request, body)
        answer = Answer.of(job, codec)
        echo, prompt = "", None
        if body.echo:
            given = one_prompt(body.prompt)
            echo = given if isinstance(given, str) else codec.decode(given)
            if body.logprobs is not None:
                prompt = await server.threaded(spelled, codec, job.ask.prompt)
        usage = server.always_usage or bool(body.stream_options and body.stream_options.include_usage)
        writer = CompletionWriter(answer, model, Scores(codec), body.logprobs, usage, echo, prompt)
        return await respond(server, request, answer, writer, body.stream)

    return made
