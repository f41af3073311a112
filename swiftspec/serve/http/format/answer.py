"""One answer: the engine's frames as what is thought, said and called, round by round, and what it cost in the end."""

from __future__ import annotations

import contextlib
import copy
from bisect import bisect_left
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from swiftspec.serve.http.engine_link.engine import Ask, Broken, Engine
from swiftspec.serve.http.engine_link.frames import Choice, Chunk, Done, Likelihood, Prompt
from swiftspec.serve.http.format.reasoning import Reasoning
from swiftspec.serve.http.format.tools import Call, Calls
from swiftspec.serve.text.codec import TextCodec
from swiftspec.serve.text.stream import TextBuilder

TAIL = 16  # tokens of a prompt that the text after it is spelled with


class Shown:
    """A codec that spells some of the special tokens: those that mark thoughts and calls."""

    def __init__(self, codec: TextCodec, markers: frozenset[int]) -> None:
        self.codec = codec
        self.special = codec.special - markers
        self.byte_tokens = codec.byte_tokens

    def spell(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return self.codec.spell(tokens)


@dataclass(slots=True)
class Job:
    """What an answer is to be. `goes_on`: the answer goes on the prompt's text, so that its first word may need a
    space. `single`: it ends with the first call."""

    ask: Ask
    stops: Sequence[str] = ()
    goes_on: bool = False
    reasoning: Reasoning | None = None
    calls: Calls | None = None
    single: bool = False
    nothing: bool = False  # only the prompt is of interest: the answer is one token, which is not shown
    markers: frozenset[int] = frozenset()  # special tokens that are spelled


def ended_by(answer: Answer) -> dict[str, Any]:
    """What a choice says besides, once it has ended: which stop string that was, and of several its weight."""
    weight = {} if answer.weight is None else {"weight": answer.weight}
    return {"stop_reason": answer.builder.stop, **weight}


@dataclass(slots=True)
class Part:
    """What one round adds. `first` and `last`: of its tokens among all of the answer's, for their likelihoods."""

    thought: str
    said: str
    calls: list[Call]
    first: int
    last: int


@dataclass(slots=True)
class Answer:
    """An answer as it comes. `thought`, `said` and `calls` say what has come by now. In the end `choices` are the texts
    that a client gets: this one, or those of a population that it has asked for, each with its `weight` there."""

    job: Job
    codec: TextCodec
    builder: TextBuilder
    reasoning: Reasoning | None
    called: Calls | None
    thought: str = ""
    said: str = ""
    calls: list[Call] = field(default_factory=list)
    likelihoods: list[Likelihood] = field(default_factory=list)
    prompt_likelihoods: list[Likelihood] = field(default_factory=list)
    accepted: int = 0
    done: Done | None = None
    started: bool = False
    weight: float | None = None
    choices: list[Answer] = field(default_factory=list)

    @staticmethod
    def of(job: Job, codec: TextCodec) -> Answer:
        """Before its first token."""
        shown = Shown(codec, job.markers)
        context = job.ask.prompt[-TAIL:] if job.goes_on else ()
        readers = copy.deepcopy(job.reasoning), copy.deepcopy(job.calls)  # which remember what they have read
        return Answer(job, codec, TextBuilder(shown, job.stops, context), *readers)

    @property
    def prompt(self) -> list[int]:
        return self.job.ask.prompt

    @property
    def tokens(self) -> list[int]:
        return self.builder.token_ids

    @property
    def finish_reason(self) -> str:
        """stop, length or tool_calls."""
        reason = self.builder.finish_reason or "stop"
        return "tool_calls" if self.calls and reason == "stop" else reason

    async def parts(self, engine: Engine) -> AsyncGenerator[Part]:
        """A part for each round that brings something. A stop string ends the request, and closing this cancels it, as
        the engine says. Raises what the engine raises."""
        over: bool | None = None
        async with contextlib.aclosing(engine.answer(self.job.ask)) as frames:
            while self.done is None:
                try:
                    frame = await frames.asend(over)
                except StopAsyncIteration:
                    break
                self.started, over = True, None
                if isinstance(frame, Prompt):
                    self.prompt_likelihoods = frame.likelihoods
                elif isinstance(frame, Done):
                    self.done = frame
                elif self.builder.finish_reason is None:
                    if self.job.nothing:
                        frame = Chunk(frame.request, [], 0, finish_reason="length")
                    part = self._part(frame)
                    over = self._ended(frame)
                    yield part
        if self.builder.finish_reason is None:
            raise Broken("the engine ended the answer without a word", "engine_error")
        told = [] if self.done is None else self.done.choices
        self.choices = [self._other(choice) for choice in told] or [self]
        if not told and self.job.ask.choices is not None:
            self.weight = 1.0  # the texts all began with this one, in which a stop string has ended it

    def _other(self, choice: Choice) -> Answer:
        """The answer that one of the texts makes, read from its beginning."""
        other = Answer.of(self.job, self.codec)
        other.weight = choice.weight
        other._part(Chunk(0, [] if self.job.nothing else choice.token_ids, 0, finish_reason=choice.finish_reason))
        return other

    def _ended(self, frame: Chunk) -> bool:
        """Whether the engine would go on, and nobody wants it to."""
        if self.job.single and self.calls:
            self.builder.finish_reason = self.builder.finish_reason or "stop"
        return self.builder.finish_reason is not None and frame.finish_reason is None

    def _part(self, frame: Chunk) -> Part:
        first = len(self.tokens)
        text = "".join(piece.text for piece in self.builder.push(frame))
        last = len(self.tokens)
        self.accepted += min(frame.accepted, last - first)
        if frame.likelihoods is not None:
            self.likelihoods += frame.likelihoods[: last - first]
        ended = self.builder.finish_reason is not None
        thought, said, calls = "", text, list[Call]()
        if self.reasoning is not None:
            thought, said = self.reasoning.push(text, ended)
        if self.called is not None:
            said, calls = self.called.push(said, ended)
        if self.job.single and calls:
            calls = calls[: 1 - len(self.calls)]
        self.thought += thought
        self.said += said
        self.calls += calls
        return Part(thought, said, calls, first, last)

    @property
    def cached(self) -> int:
        """Tokens of the prompt that were kept from earlier requests."""
        return 0 if self.done is None else int(self.done.timings.get("cache_n") or 0)

    @property
    def reasoning_tokens(self) -> int:
        if self.reasoning is None:
            return 0
        if self.reasoning.end is None:
            return len(self.tokens) if self.reasoning.thinking else 0
        return bisect_left(self.builder.starts, self.reasoning.end)

    @property
    def rejected(self) -> int:
        """Draft tokens that were verified and do not stand in the answer."""
        spec = (self.done.metrics.get("speculative_decoding") if self.done else None) or {}
        return int(spec.get("num_draft_tokens", 0)) - int(spec.get("num_accepted_draft_tokens", 0))

    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage`, of all choices."""
        choices = self.choices or [self]
        tokens = sum(len(each.tokens) for each in choices)
        return {
            "prompt_tokens": len(self.prompt),
            "completion_tokens": tokens,
            "total_tokens": len(self.prompt) + tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.rejected,
                "reasoning_tokens": sum(each.reasoning_tokens for each in choices),
            },
        }

    def cost(self) -> dict[str, Any]:
        """llama.cpp's `timings`, vLLM's `metrics`, and what else is to be said of the answer."""
        if self.done is None:
            return {}
        return {"timings": self.done.timings, "metrics": self.done.metrics, **self.done.more}
