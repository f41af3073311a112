"""Output of one generation: converts the engine's frames to reasoning, content and tool calls, round by round."""

from __future__ import annotations

import contextlib
import copy
from bisect import bisect_left
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from swiftspec.serve.http.engine_link.engine_client import EngineClient, EngineRequest, GenerationFailedError
from swiftspec.serve.http.engine_link.frames import Choice, DoneFrame, PromptLogprobsFrame, TokenLogprob, TokensFrame
from swiftspec.serve.http.format.reasoning import ReasoningParser
from swiftspec.serve.http.format.tools import ParsedToolCall, ToolCallParser
from swiftspec.serve.text.codec import TextCodec
from swiftspec.serve.text.stream import TextBuilder

CONTEXT_TOKENS = 16  # last prompt tokens that precede the output in detokenization if it continues the prompt


class MarkerCodec:
    """Codec that detokenizes the special tokens in `marker_tokens`, which delimit reasoning and tool calls; without
    `skip_special` all special tokens."""

    def __init__(
        self, codec: TextCodec, marker_tokens: frozenset[int] = frozenset(), skip_special: bool = True
    ) -> None:
        self.codec = codec
        self.special = codec.special - marker_tokens if skip_special else frozenset[int]()
        self.byte_tokens = codec.byte_tokens

    def token_text(self, tokens: Sequence[int]) -> str:
        """Returns the text of `tokens`."""
        return self.codec.token_text(tokens)


@dataclass(slots=True)
class GenerationRequest:
    """Engine request and the parsers of its output.

    `continues_text`: whether the output continues the prompt's text; its first word then keeps a leading space.
    `single_tool_call`: whether the output ends after the first tool call.
    `prompt_only`: whether only the prompt's log-probabilities are requested; the one generated token is then dropped.
    `marker_tokens`: special tokens that are detokenized because the parsers search for their text.
    `include_stop`: whether the text contains the stop string or the text of the token that ends it.
    `end_tokens`: end-of-text tokens of the model.
    `skip_special_tokens`: whether special tokens are left out of the text.
    """

    engine_request: EngineRequest
    stop_strings: Sequence[str] = ()
    continues_text: bool = False
    reasoning_parser: ReasoningParser | None = None
    tool_call_parser: ToolCallParser | None = None
    single_tool_call: bool = False
    prompt_only: bool = False
    marker_tokens: frozenset[int] = frozenset()
    include_stop: bool = False
    end_tokens: Sequence[int] = ()
    skip_special_tokens: bool = True

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """Tokens that the request names as ends of its output."""
        return self.engine_request.sampling.get("stop_token_ids") or ()

    def text_builder(self, codec: TextCodec) -> TextBuilder:
        """Returns an empty builder of the output's text."""
        context = self.engine_request.prompt[-CONTEXT_TOKENS:] if self.continues_text else ()
        return TextBuilder(
            MarkerCodec(codec, self.marker_tokens, self.skip_special_tokens), self.stop_strings, context,
            min_tokens=self.engine_request.sampling.get("min_tokens") or 0, include_stop=self.include_stop,
            hidden_ends=() if self.include_stop else {*self.end_tokens, *self.stop_token_ids},
        )  # fmt: skip


def choice_end_fields(answer: GenerationOutput) -> dict[str, Any]:
    """Returns a finished choice's `stop_reason`, and in mode smc also its `weight`."""
    weight = {} if answer.weight is None else {"weight": answer.weight}
    return {"stop_reason": answer.stop_reason, **weight}


@dataclass(slots=True)
class OutputDelta:
    """Output that one round adds. Its tokens are `tokens[first_token:end_token]` of the `GenerationOutput`."""

    reasoning_text: str
    content: str
    tool_calls: list[ParsedToolCall]
    first_token: int
    end_token: int


@dataclass(slots=True)
class GenerationOutput:
    """The output of a generation so far: `reasoning_text`, `content`, `tool_calls`, tokens and log-probabilities.

    After the last round, `choices` holds the outputs that the client gets: this output itself, or in mode smc the
    requested texts of the population, each with its `weight`.

    `num_accepted`: accepted draft tokens in the output.
    `done`: the engine's last frame; None before it arrives.
    `started`: whether the engine has sent a frame.
    """

    request: GenerationRequest
    codec: TextCodec
    text_builder: TextBuilder
    reasoning_parser: ReasoningParser | None
    tool_call_parser: ToolCallParser | None
    reasoning_text: str = ""
    content: str = ""
    tool_calls: list[ParsedToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    num_accepted: int = 0
    done: DoneFrame | None = None
    started: bool = False
    weight: float | None = None
    choices: list[GenerationOutput] = field(default_factory=list)

    @staticmethod
    def create(request: GenerationRequest, codec: TextCodec) -> GenerationOutput:
        """Creates an empty output with its own copies of the request's parsers."""
        parsers = copy.deepcopy(request.reasoning_parser), copy.deepcopy(request.tool_call_parser)  # parsers have state
        return GenerationOutput(request, codec, request.text_builder(codec), *parsers)

    @property
    def prompt(self) -> list[int]:
        return self.request.engine_request.prompt

    @property
    def tokens(self) -> list[int]:
        return self.text_builder.token_ids

    @property
    def finish_reason(self) -> str:
        """Finish reason in OpenAI's terms: "stop", "length" or "tool_calls"."""
        reason = self.text_builder.finish_reason or "stop"
        return "tool_calls" if self.tool_calls and reason == "stop" else reason

    @property
    def stop_reason(self) -> str | int | None:
        """What ended the output: a stop string, a token of `stop_token_ids`, or neither (None)."""
        if self.text_builder.stop_string is not None or self.text_builder.finish_reason != "stop" or not self.tokens:
            return self.text_builder.stop_string
        return self.tokens[-1] if self.tokens[-1] in self.request.stop_token_ids else None

    async def deltas(self, engine: EngineClient) -> AsyncGenerator[OutputDelta]:
        """Runs the request and yields the output of each round. A stop string ends the request early; closing this
        generator cancels the request. Raises the exceptions of `EngineClient.stream_frames`."""
        stop: bool | None = None
        async with contextlib.aclosing(engine.stream_frames(self.request.engine_request)) as frames:
            while self.done is None:
                try:
                    frame = await frames.asend(stop)
                except StopAsyncIteration:
                    break
                self.started, stop = True, None
                if isinstance(frame, PromptLogprobsFrame):
                    self.prompt_logprobs = frame.logprobs
                elif isinstance(frame, DoneFrame):
                    self.done = frame
                elif self.text_builder.finish_reason is None:
                    if self.request.prompt_only:
                        frame = TokensFrame(frame.request, [], 0, finish_reason="length")
                    delta = self._add_frame(frame)
                    stop = self._should_stop(frame)
                    yield delta
        if self.text_builder.finish_reason is None:
            raise GenerationFailedError("the engine ended the answer without a finish reason", "engine_error")
        choice_frames = [] if self.done is None else self.done.choices
        self.choices = [self._from_choice(choice) for choice in choice_frames] or [self]
        if not choice_frames and self.request.engine_request.choices is not None:
            self.weight = 1.0  # a stop string ended the request before the population diverged

    def _from_choice(self, choice: Choice) -> GenerationOutput:
        """Returns the output for one text of the population (mode smc)."""
        other = GenerationOutput.create(self.request, self.codec)
        other.weight = choice.weight
        other._add_frame(
            TokensFrame(0, [] if self.request.prompt_only else choice.token_ids, 0, finish_reason=choice.finish_reason)
        )
        return other

    def _should_stop(self, frame: TokensFrame) -> bool:
        """Returns whether the output has ended although the engine would decode further tokens."""
        if self.request.single_tool_call and self.tool_calls:
            self.text_builder.finish_reason = self.text_builder.finish_reason or "stop"
        return self.text_builder.finish_reason is not None and frame.finish_reason is None

    def _add_frame(self, frame: TokensFrame) -> OutputDelta:
        first_token = len(self.tokens)
        text = "".join(piece.text for piece in self.text_builder.push(frame))
        end_token = len(self.tokens)
        self.num_accepted += min(frame.accepted, end_token - first_token)
        if frame.logprobs is not None:
            self.logprobs += frame.logprobs[: end_token - first_token]
        ended = self.text_builder.finish_reason is not None
        reasoning_text, content, tool_calls = "", text, list[ParsedToolCall]()
        if self.reasoning_parser is not None:
            reasoning_text, content = self.reasoning_parser.push(text, ended)
        if self.tool_call_parser is not None:
            content, tool_calls = self.tool_call_parser.push(content, ended)
        if self.request.single_tool_call and tool_calls:
            tool_calls = tool_calls[: 1 - len(self.tool_calls)]
        self.reasoning_text += reasoning_text
        self.content += content
        self.tool_calls += tool_calls
        return OutputDelta(reasoning_text, content, tool_calls, first_token, end_token)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache supplied."""
        return 0 if self.done is None else int(self.done.timings.get("cache_n") or 0)

    @property
    def reasoning_tokens(self) -> int:
        if self.reasoning_parser is None:
            return 0
        if self.reasoning_parser.reasoning_end is None:
            return len(self.tokens) if self.reasoning_parser.in_reasoning else 0
        return bisect_left(self.text_builder.text_offsets, self.reasoning_parser.reasoning_end)

    @property
    def num_rejected(self) -> int:
        """Draft tokens that were verified and not accepted."""
        spec = (self.done.metrics.get("speculative_decoding") if self.done else None) or {}
        return int(spec.get("num_draft_tokens", 0)) - int(spec.get("num_accepted_draft_tokens", 0))

    def usage(self) -> dict[str, Any]:
        """Returns OpenAI's `usage` object. Output tokens are summed over all choices."""
        choices = self.choices or [self]
        tokens = sum(len(choice.tokens) for choice in choices)
        return {
            "prompt_tokens": len(self.prompt),
            "completion_tokens": tokens,
            "total_tokens": len(self.prompt) + tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.num_accepted,
                "rejected_prediction_tokens": self.num_rejected,
                "reasoning_tokens": sum(choice.reasoning_tokens for choice in choices),
            },
        }

    def stats(self) -> dict[str, Any]:
        """Returns llama.cpp's `timings`, vLLM's `metrics` and further statistics; {} until the request completes."""
        if self.done is None:
            return {}
        return {"timings": self.done.timings, "metrics": self.done.metrics, **self.done.extra}
