"""Outputs of a request: convert the engine's frames to reasoning, content and tool calls, round by round."""

from __future__ import annotations

import contextlib
import copy
import math
from bisect import bisect_left
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal

from swiftspec import answer_stats
from swiftspec.serve.format.output_parser import MarkupParser, OutputParser, OutputText
from swiftspec.serve.format.tool_parser import ParsedToolCall
from swiftspec.serve.link.engine_client import (
    EngineClient,
    EngineRequest,
    GenerationFailedError,
    RequestFrame,
)
from swiftspec.serve.link.frames import Choice, DoneFrame, PromptLogprobsFrame, TokenLogprob, TokensFrame
from swiftspec.serve.metrics.request_metrics import RequestRecorder
from swiftspec.text.codec import TextCodec
from swiftspec.text.harmony import HarmonyCodec
from swiftspec.text.stream import CONTEXT_TOKENS, MarkerCodec, TextBuilder, TokenCodec


@dataclass(slots=True)
class GenerationRequest:
    """Engine request and the parser of its output.

    `continues_text`: whether the output continues the prompt's text; its first word then keeps a leading space.
    `single_tool_call`: whether the output ends after the first tool call.
    `prompt_only`: whether only the prompt's log-probabilities are requested; the one generated token is then dropped.
    `marker_tokens`: special tokens that are detokenized because the parser searches for their text.
    `harmony_markers`: characters by token id of the markers of harmony, in which case the parser reads these.
    `include_stop`: whether the text contains the stop string or the text of the token that ends it.
    `end_tokens`: end-of-text tokens of the model.
    `skip_special_tokens`: whether special tokens are left out of the text.
    """

    engine_request: EngineRequest
    stop_strings: Sequence[str] = ()
    continues_text: bool = False
    parser: OutputParser = field(default_factory=MarkupParser)
    single_tool_call: bool = False
    prompt_only: bool = False
    marker_tokens: frozenset[int] = frozenset()
    harmony_markers: Mapping[int, str] = field(default_factory=dict)
    include_stop: bool = False
    end_tokens: Sequence[int] = ()
    skip_special_tokens: bool = True

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """Tokens that the request names as ends of its output."""
        return self.engine_request.sampling.stop_token_ids

    def text_builder(self, codec: TextCodec) -> TextBuilder:
        """Returns an empty builder of the output's text."""
        context = self.engine_request.prompt[-CONTEXT_TOKENS:] if self.continues_text else ()
        text_codec: TokenCodec = MarkerCodec(codec, self.marker_tokens, self.skip_special_tokens)
        if self.harmony_markers:
            text_codec = HarmonyCodec(codec, self.harmony_markers, self.skip_special_tokens)
        ends = {*self.end_tokens, *self.stop_token_ids} - self.harmony_markers.keys()
        return TextBuilder(
            text_codec,
            self.stop_strings,
            context,
            min_tokens=self.engine_request.sampling.min_tokens,
            include_stop=self.include_stop,
            hidden_ends=() if self.include_stop else ends,
        )


@dataclass(slots=True)
class OutputPiece:
    """Adjacent output of one kind: reasoning, content or one tool call. It was complete with the tokens
    `tokens[first_token:end_token]` of the `GenerationOutput`.

    `text`: the text; empty for a tool call.
    """

    kind: Literal["reasoning", "content", "tool_call"]
    text: str
    tool_call: ParsedToolCall | None
    first_token: int
    end_token: int


@dataclass(slots=True)
class OutputDelta:
    """Output that one round adds, in the order of generation. Its tokens are `tokens[first_token:end_token]` of the
    `GenerationOutput`.

    `choice`: index of that output among those of the request.
    `last`: the output is complete. This delta adds nothing to it, and no further one follows.
    """

    pieces: list[OutputPiece]
    first_token: int
    end_token: int
    choice: int = 0
    last: bool = False

    @property
    def content(self) -> str:
        """The content of all pieces."""
        return "".join(piece.text for piece in self.pieces if piece.kind == "content")


def merge_pieces(pieces: Iterable[OutputPiece]) -> list[OutputPiece]:
    """Joins adjacent pieces of text of the same kind."""
    merged: list[OutputPiece] = []
    for _, group in groupby(pieces, key=lambda piece: piece.kind):
        same = list(group)
        if same[0].kind == "tool_call":
            merged += same
        else:
            text = "".join(piece.text for piece in same)
            merged.append(OutputPiece(same[0].kind, text, None, same[0].first_token, same[-1].end_token))
    return merged


@dataclass(slots=True)
class GenerationOutput:
    """The output of a generation so far: pieces in the order of generation, tokens and log-probabilities.

    Rounds have no influence on the output: what ends or separates it is determined token by token.

    After the last round, `choices` holds the outputs that the client gets: this output itself, or in mode smc the
    requested texts of the population, each with its `weight`.

    `done`: the engine's last frame; None before it arrives.
    `started`: whether the engine has sent a frame.
    `num_cached_tokens`: prompt tokens that the prefix cache supplied; known from the first tokens on.
    """

    request: GenerationRequest
    codec: TextCodec
    text_builder: TextBuilder
    parser: OutputParser
    round_pieces: list[OutputPiece] = field(default_factory=list)  # of all rounds, merged within each
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    done: DoneFrame | None = None
    started: bool = False
    num_cached_tokens: int = 0
    weight: float | None = None
    choices: list[GenerationOutput] = field(default_factory=list)

    @staticmethod
    def create(request: GenerationRequest, codec: TextCodec) -> GenerationOutput:
        """Creates an empty output with its own copy of the request's parser, which has state."""
        return GenerationOutput(request, codec, request.text_builder(codec), copy.deepcopy(request.parser))

    @property
    def prompt(self) -> list[int]:
        return self.request.engine_request.prompt

    @property
    def tokens(self) -> list[int]:
        return self.text_builder.token_ids

    @property
    def pieces(self) -> list[OutputPiece]:
        """The output in the order of generation."""
        return merge_pieces(self.round_pieces)

    @property
    def reasoning_text(self) -> str:
        return "".join(piece.text for piece in self.round_pieces if piece.kind == "reasoning")

    @property
    def content(self) -> str:
        return "".join(piece.text for piece in self.round_pieces if piece.kind == "content")

    @property
    def tool_calls(self) -> list[ParsedToolCall]:
        return [piece.tool_call for piece in self.round_pieces if piece.tool_call is not None]

    @property
    def finish_reason(self) -> str:
        """Finish reason in OpenAI's terms: "stop", "length" or "tool_calls"."""
        reason = self.text_builder.finish_reason or "stop"
        return "tool_calls" if self.tool_calls and reason == "stop" else reason

    @property
    def stop_reason(self) -> str | int | None:
        """What ended the output: a stop string, a token of `stop_token_ids`, or neither (None)."""
        return self.text_builder.stop_reason(self.request.stop_token_ids)

    def deltas(self, engine: EngineClient, recorder: RequestRecorder) -> AsyncGenerator[OutputDelta]:
        """Runs the request and yields the output of each round; see `stream_deltas`."""
        return stream_deltas([self], engine, recorder)

    def add_frame(self, frame: RequestFrame) -> tuple[OutputDelta | None, bool]:
        """Adds a frame. Returns the output that it adds, and whether the engine is to end the request early."""
        self.started = True
        if isinstance(frame, PromptLogprobsFrame):
            self.prompt_logprobs += frame.logprobs
        elif isinstance(frame, DoneFrame):
            self.done = frame
            self.num_cached_tokens = int(frame.timings.get("cache_n") or 0)
            answer_stats.cut_statistics(frame.timings, frame.metrics, frame.rounds, len(self.tokens))
        elif self.text_builder.finish_reason is None:
            self.num_cached_tokens = frame.cached_tokens
            if self.request.prompt_only:
                frame = TokensFrame(frame.request, [], 0, finish_reason="length")
            delta = self._add_tokens(frame)
            return delta, self.text_builder.finish_reason is not None and frame.finish_reason is None
        return None, False

    def finish(self) -> OutputDelta:
        """Completes `choices` after the engine's last frame and returns the last delta. Raises GenerationFailedError if
        the frames contain no finish reason."""
        if self.text_builder.finish_reason is None:
            raise GenerationFailedError("the engine ended the answer without a finish reason", "engine_error")
        choice_frames = [] if self.done is None else self.done.choices
        self.choices = [self._from_choice(choice) for choice in choice_frames] or [self]
        if not choice_frames and self.request.engine_request.choices is not None:
            self.weight = 1.0  # a stop string ended the request before the population diverged
        return OutputDelta([], len(self.tokens), len(self.tokens), last=True)

    def _from_choice(self, choice: Choice) -> GenerationOutput:
        """Returns the output for one text of the population (mode smc)."""
        other = GenerationOutput.create(self.request, self.codec)
        other.weight, other.done, other.num_cached_tokens = choice.weight, self.done, self.num_cached_tokens
        other._add_tokens(
            TokensFrame(0, [] if self.request.prompt_only else choice.token_ids, 0, finish_reason=choice.finish_reason)
        )
        return other

    def _add_tokens(self, frame: TokensFrame) -> OutputDelta:
        """Adds the output of a round."""
        first_token = len(self.tokens)
        pieces: list[OutputPiece] = []
        for text in self.text_builder.push_by_token(frame):
            for piece in self._parse(text):
                pieces.append(piece)
                if self.request.single_tool_call and piece.tool_call is not None and piece.tool_call.is_closed:
                    self.text_builder.finish_reason = "stop"  # the token that completes the call is the last one
                    break
        end_token = len(self.tokens)
        if frame.logprobs is not None:
            self.logprobs += frame.logprobs[: end_token - first_token]
        merged = merge_pieces(pieces)
        self.round_pieces += merged
        return OutputDelta(merged, first_token, end_token)

    def _parse(self, text: str) -> Iterator[OutputPiece]:
        """Yields the pieces that the text after one token completes."""
        ended, end_token = self.text_builder.finish_reason is not None, len(self.tokens)
        first_token = max(end_token - 1, 0)
        for part in self.parser.push(text, ended):
            if isinstance(part, OutputText):
                yield OutputPiece(part.kind, part.text, None, first_token, end_token)
            elif part.cut_json is None or self.text_builder.finish_reason == "length":  # not if a stop string cut it
                yield OutputPiece("tool_call", "", part, first_token, end_token)

    @property
    def reasoning_tokens(self) -> int:
        offsets = self.text_builder.text_offsets
        return sum(
            bisect_left(offsets, end) - bisect_left(offsets, begin) for begin, end in self.parser.reasoning_ranges
        )

    @property
    def num_accepted(self) -> int:
        """Accepted draft tokens: all tokens except one per round."""
        return self._speculation_count("num_accepted_draft_tokens")

    @property
    def num_rejected(self) -> int:
        """Draft tokens that were verified and not accepted."""
        return self._speculation_count("num_draft_tokens") - self.num_accepted

    def _speculation_count(self, name: str) -> int:
        """Returns a count of the engine's statistics; 0 until the request completes, and in mode smc."""
        spec = (self.done.metrics.get("speculative_decoding") if self.done else None) or {}
        return int(spec.get(name, 0))

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability per output token; -inf without tokens or log-probabilities."""
        return sum(one.logprob for one in self.logprobs) / len(self.logprobs) if self.logprobs else -math.inf

    def usage_so_far(self, num_tokens: int) -> dict[str, int]:
        """Returns the `usage` object of a chunk in a stream, as in vLLM, after `num_tokens` output tokens."""
        prompt = len(self.prompt)
        return {"prompt_tokens": prompt, "completion_tokens": num_tokens, "total_tokens": prompt + num_tokens}

    def stats(self) -> dict[str, Any]:
        """Returns llama.cpp's `timings`, vLLM's `metrics` and further statistics; {} until the request completes."""
        if self.done is None:
            return {}
        return {"timings": self.done.timings, "metrics": self.done.metrics, **self.done.extra}

    def synthetic_stats(self) -> dict[str, Any]:
        """Returns the part of `stats` that marks an answer with synthetic acceptance; {} for other answers."""
        extra = {} if self.done is None else self.done.extra
        length = extra.get("synthetic_acceptance_length")
        return {} if length is None else {"exact": extra["exact"], "synthetic_acceptance_length": length}


class RequestOutputs:
    """The outputs of all engine requests of one HTTP request, which may have several prompts and choices.

    `prompts`: for each prompt, the outputs of its engine requests.
    `n`: number of choices that each prompt returns. If it has more outputs than that, the ones with the highest mean
        log-probability are returned.
    """

    def __init__(self, prompts: Sequence[Sequence[GenerationOutput]], n: int = 1) -> None:
        self.prompts, self.n = prompts, n
        self.outputs = [output for outputs in prompts for output in outputs]

    @staticmethod
    def create(prompts: Sequence[Sequence[GenerationRequest]], codec: TextCodec, n: int = 1) -> RequestOutputs:
        """Creates empty outputs for these requests."""
        return RequestOutputs(
            [[GenerationOutput.create(request, codec) for request in requests] for requests in prompts], n
        )

    @property
    def started(self) -> bool:
        """Whether the engine has sent a frame."""
        return any(output.started for output in self.outputs)

    def deltas(self, engine: EngineClient, recorder: RequestRecorder) -> AsyncGenerator[OutputDelta]:
        """Runs all requests and yields the output of each round; see `stream_deltas`."""
        return stream_deltas(self.outputs, engine, recorder)

    def choices(self) -> Iterator[tuple[int, GenerationOutput]]:
        """Yields the choices that the client gets, after the last delta, each with its index. The index is that of the
        prompt times `n` plus the number of the choice, also if a prompt has fewer than `n` (mode smc)."""
        for number, outputs in enumerate(self.prompts):
            if len(outputs) > self.n:
                outputs = sorted(outputs, key=lambda output: output.mean_logprob, reverse=True)[: self.n]
            for index, choice in enumerate(choice for output in outputs for choice in output.choices):
                yield number * self.n + index, choice

    def choice_end_fields(self, choice: GenerationOutput) -> dict[str, Any]:
        """Returns the `stop_reason` of a finished choice, in mode smc its `weight`, and if
        the request has several outputs the statistics of this one."""
        weight = {} if choice.weight is None else {"weight": choice.weight}
        return {
            "stop_reason": choice.stop_reason,
            **weight,
            **(choice.stats() if len(self.outputs) > 1 else {}),
        }

    def usage(self) -> dict[str, Any]:
        """Returns OpenAI's `usage` object: each prompt counts once, and the output tokens are summed over all outputs,
        also those that are not returned."""
        prompt_tokens = sum(len(outputs[0].prompt) for outputs in self.prompts)
        choices = [choice for output in self.outputs for choice in output.choices or [output]]
        tokens = sum(len(choice.tokens) for choice in choices)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": prompt_tokens + tokens,
            "prompt_tokens_details": {"cached_tokens": sum(outputs[0].num_cached_tokens for outputs in self.prompts)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": sum(output.num_accepted for output in self.outputs),
                "rejected_prediction_tokens": sum(output.num_rejected for output in self.outputs),
                "reasoning_tokens": sum(choice.reasoning_tokens for choice in choices),
            },
        }

    def stats(self) -> dict[str, Any]:
        """Returns the statistics of the only output. Of several outputs these are part of the choices, and the sum of
        their `timings` is returned; {} until all are complete."""
        done_frames = [output.done for output in self.outputs if output.done is not None]
        if len(done_frames) < len(self.outputs):
            return {}
        if len(self.outputs) == 1:
            return self.outputs[0].stats()
        return {"timings": _combined_timings([done.timings for done in done_frames])}


async def stream_deltas(
    outputs: Sequence[GenerationOutput], engine: EngineClient, recorder: RequestRecorder
) -> AsyncGenerator[OutputDelta]:
    """Runs the requests of these outputs and yields the output of each round, and a last delta for each output. A stop
    string ends its request early; closing this generator cancels all requests. Raises the exceptions of
    `EngineClient.stream_frames`.

    `recorder`: measures the requests, as one.
    """
    stop: bool | None = None
    unfinished = set(range(len(outputs)))
    requests = [output.request.engine_request for output in outputs]
    with recorder.record(requests) as record:
        async with contextlib.aclosing(engine.stream_frames(*requests)) as frames:
            while unfinished:
                try:
                    index, frame = await frames.asend(stop)
                except StopAsyncIteration:
                    break
                record.add_frame(index, frame)
                delta, stop = outputs[index].add_frame(frame)
                if stop:
                    record.choices[index].finish_reason = "stop"
                if delta is not None:
                    delta.choice = index
                    yield delta
                if isinstance(frame, DoneFrame):
                    unfinished.remove(index)
                    yield replace(outputs[index].finish(), choice=index)
    for index in sorted(unfinished):
        yield replace(outputs[index].finish(), choice=index)


def _combined_timings(timings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the sums of these `timings`. The times of outputs that are decoded concurrently overlap."""
    total = {name: sum(each.get(name, 0) for each in timings) for name in timings[0]}
    seconds = total["predicted_ms"] / 1e3
    total |= {"predicted_per_second": total["predicted_n"] / seconds if seconds else 0.0}
    return total | {"load_ms": timings[0]["load_ms"]} if "load_ms" in total else total
