"""Requests and outputs as text: what `LLM` and `AsyncEngine` take and return, built from the engine's chunks of
tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from swiftspec.engine import Stats, TokenChunk
from swiftspec.errors import UserError
from swiftspec.messages import SampledLogprob
from swiftspec.params import SamplingParams
from swiftspec.sampling.grammar_process import build_grammar
from swiftspec.settings_schema import require
from swiftspec.text.codec import TextCodec
from swiftspec.text.stream import CONTEXT_TOKENS, MarkerCodec, TextBuilder


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token at one position. `rank`: 1 for the most likely token; None if it is not known, which
    happens with `logprob_token_ids`. `decoded_token`: its text."""

    logprob: float
    rank: int | None
    decoded_token: str


TokenLogprobs = dict[int, Logprob]  # of one position, by token id: the token itself first


@dataclass(frozen=True, slots=True)
class TextChunk:
    """The output of one round. The text never ends within a character or a possible stop string, so that it can be
    empty although there are tokens.

    `accepted`: number of leading tokens that the draft proposed; the target sampled the others.
    `logprobs`: one item per token, if requested.
    `finish_reason`: "stop" or "length" on the last chunk, else None; "error" if the logits were not finite.
    `stop_reason`: on the last chunk the stop string or the token of `stop_token_ids` that ended the output, else None.
    `stats`: on the last chunk, the statistics of the request.
    """

    text: str
    token_ids: tuple[int, ...]
    accepted: int
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    stats: Stats | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One output of a request.

    `index`: position among the `n` outputs. `cumulative_logprob`: sum of the log-probabilities of the tokens; it and
    `logprobs` are None unless requested. `finish_reason`, `stop_reason`, `stats`: see `TextChunk`.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: str | int | None
    stats: Stats


@dataclass(slots=True)
class RequestOutput:
    """The outputs of one prompt.

    `prompt`: None if the prompt was given as token ids. `prompt_logprobs`: one item per prompt token, None for the
    first one; None unless requested.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool = True


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A prompt with its sampling parameters, as the engine takes them.

    `prompt`: the text; None if the prompt was given as token ids.
    `sampling`: the parameters, with the grammar and the token ids that structured outputs and bad words stand for.
    `continues_text`: the output continues the prompt's text; its first word then keeps a leading space.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    sampling: SamplingParams
    continues_text: bool

    @staticmethod
    def create(
        prompt: str | None, token_ids: list[int], sampling: SamplingParams, codec: TextCodec, *, continues_text: bool
    ) -> TextRequest:
        """Resolves the parameters that apply to text, in a copy. Raises UserError if they are invalid."""
        sampling = replace(sampling)  # the caller may assign fields later
        if sampling.structured_outputs is not None:
            try:
                grammar = build_grammar(*sampling.structured_outputs.constraint)
            except ValueError as error:
                raise UserError(f"structured_outputs: {error}") from None
            sampling = replace(sampling, structured_outputs=None, grammar=grammar)
        if sampling.bad_words:
            words = codec.encode_bad_words(sampling.bad_words)
            require(all(words), "bad_words: a word must contain more than blanks")
            sampling = replace(sampling, bad_words=(), bad_words_ids=(*sampling.bad_words_ids, *words))
        return TextRequest(prompt, token_ids, sampling, continues_text)

    def samplings(self) -> Iterator[SamplingParams]:
        """Yields the parameters of the `n` outputs, which differ in their seeds. Only the first one computes the
        log-probabilities of the prompt, so that the others can use the prefix cache."""
        yield replace(self.sampling, n=1)
        for index in range(1, self.sampling.n):
            yield replace(self.sampling, n=1, seed=choice_seed(self.sampling.seed, index), prompt_logprobs=None)


def choice_seed(seed: int, index: int) -> int:
    """Returns the seed of an output other than the first: 8 bytes of the BLAKE2b hash of "seed:index". Neighbouring
    seeds of requests share no outputs, as they would with seed + index."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest(), "little")


class DecodedTokens:
    """Texts of single tokens, decoded once."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._texts: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        """Returns the text of a token, with its leading space."""
        if token not in self._texts:
            self._texts[token] = self._codec.single_token_text(token)
        return self._texts[token]


def position_logprobs(
    token: int, sampled: SampledLogprob, text_of: Callable[[int], str], ranked: bool
) -> TokenLogprobs:
    """Returns the log-probabilities at one position: those of the token itself and of the listed ones. `ranked`: the
    listed tokens are the most likely ones."""
    found = {token: Logprob(sampled.logprob, sampled.rank, text_of(token))}
    for rank, (other, logprob) in enumerate(sampled.top, 1):
        found.setdefault(other, Logprob(logprob, rank if ranked else None, text_of(other)))
    return found


@dataclass(slots=True)
class OutputBuilder:
    """Builder of one output from the chunks of the engine.

    `eos_token_ids`: end-of-text tokens of the model, which have no text at the end.
    """

    request: TextRequest
    codec: TextCodec
    eos_token_ids: Collection[int]
    text_of: Callable[[int], str]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    _builder: TextBuilder = field(init=False)

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        shown = not sampling.include_stop_str_in_output
        self._builder = TextBuilder(
            MarkerCodec(self.codec, skip_special=sampling.skip_special_tokens),
            sampling.stop,
            self.request.prompt_token_ids[-CONTEXT_TOKENS:] if self.request.continues_text else (),
            min_tokens=sampling.min_tokens,
            include_stop=sampling.include_stop_str_in_output,
            hidden_ends={*self.eos_token_ids, *sampling.stop_token_ids} if shown else (),
        )

    @property
    def finish_reason(self) -> str | None:
        """See `TextChunk`; None until the output is complete."""
        return self._builder.finish_reason

    def push(self, chunk: TokenChunk) -> TextChunk:
        """Adds a chunk of the engine and returns what it adds to the output, without statistics."""
        builder, begin = self._builder, len(self._builder.token_ids)
        text = self._push_text(chunk)
        tokens = tuple(builder.token_ids[begin:])
        logprobs = self._add_logprobs(chunk, tokens)
        accepted = min(chunk.accepted, len(tokens))
        if builder.finish_reason is None:
            return TextChunk(text, tokens, accepted, logprobs)
        reason = builder.stop_reason(self.request.sampling.stop_token_ids)
        return TextChunk(text, tokens, accepted, logprobs, builder.finish_reason, reason)

    def with_stats(self, last: TextChunk, stats: Stats) -> TextChunk:
        """Returns the last chunk with the statistics of the request, of which those of the tokens after a stop string
        are removed."""
        stats.keep_tokens(len(self._builder.token_ids))
        return replace(last, stats=stats)

    def _push_text(self, chunk: TokenChunk) -> str:
        if self.request.sampling.detokenize:
            return "".join(piece.text for piece in self._builder.push(chunk))
        self._builder.token_ids += chunk.token_ids
        self._builder.finish_reason = chunk.finish_reason
        return ""

    def _add_logprobs(self, chunk: TokenChunk, tokens: Sequence[int]) -> list[TokenLogprobs] | None:
        sampling = self.request.sampling
        ranked = not sampling.logprob_token_ids
        if chunk.prompt_logprobs is not None:
            prompt = zip(self.request.prompt_token_ids[1:], chunk.prompt_logprobs)
            known = [position_logprobs(token, one, self.text_of, ranked=True) for token, one in prompt]
            self.prompt_logprobs = [None, *known]
        if chunk.logprobs is None:
            return None
        added = [position_logprobs(token, one, self.text_of, ranked) for token, one in zip(tokens, chunk.logprobs)]
        self.logprobs += added
        return added

    def output(self, index: int, stats: Stats) -> CompletionOutput:
        """Returns the whole output. `index`: its position among the outputs of the request."""
        builder, sampling = self._builder, self.request.sampling
        stats.keep_tokens(len(builder.token_ids))
        tokens, scored = builder.token_ids, sampling.logprobs is not None
        return CompletionOutput(
            index=index,
            text=builder.text,
            token_ids=tokens,
            cumulative_logprob=sum(one[token].logprob for token, one in zip(tokens, self.logprobs)) if scored else None,
            logprobs=self.logprobs if scored else None,
            finish_reason=builder.finish_reason,
            stop_reason=builder.stop_reason(sampling.stop_token_ids),
            stats=stats,
        )
