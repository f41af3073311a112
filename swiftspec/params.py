"""Sampling parameters of a request. Each is declared once, at its field (see settings_schema.py)."""

import json
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from swiftspec.capabilities import Features, check_features, features_in
from swiftspec.settings_schema import check_fields, declared_settings, require, setting

MIN_TEMPERATURE = 0.001  # float32 logits divided by a smaller value may overflow
MAX_BIAS = 1e9  # effectively infinite, without overflow in float32
MAX_TOKEN_COUNT = 2**31 - 1  # limit of every setting in tokens
MAX_LOGPROB_VALUES = 2**20  # log-probabilities in one message, if those of the whole vocabulary are requested
MAX_LOGPROBS = 20  # most likely tokens per position; -1 stands for the whole vocabulary
MAX_CHOICES = 512  # outputs of one request
SAMPLING, STOPPING = "sampling", "length and stopping"  # headings of --help
OVERRIDE_GENERATION_CONFIG = "override_generation_config"  # the JSON flag for rarely used sampling parameters


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """Constraint of the output, as in vLLM: exactly one of the fields. Raises UserError otherwise.

    `json`: a JSON schema, as an object or as text. `regex`: a regular expression that the whole output matches.
    `choice`: the texts of which the output is one. `grammar`: a grammar in Lark or in llama.cpp's GBNF.
    `json_object`: any JSON object.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        given = [name for name in self.__slots__ if getattr(self, name) not in (None, False)]
        require(
            len(given) == 1,
            "structured_outputs needs exactly one of json, regex, choice, grammar and json_object,"
            f" not {' and '.join(given) or 'none'}",
        )

    @property
    def constraint(self) -> tuple[str, str]:
        """Kind and text of the constraint, for `sampling.grammar_process.build_grammar`."""
        if self.json_object:
            return "json_schema", '{"type": "object"}'
        if self.json is not None:
            return "json_schema", self.json if isinstance(self.json, str) else json.dumps(self.json)
        if self.choice is not None:
            return "choice", json.dumps([*self.choice])
        return ("regex", self.regex) if self.regex is not None else ("grammar", self.grammar or "")


@dataclass(slots=True, unsafe_hash=True)
class SamplingParams:
    """Parameters of the target's distribution and of the end of the output. Raises UserError on invalid values.

    The class is flat, since its constructor has vLLM's parameters. Fields can be assigned, as in vLLM. A request keeps
    the values that it was given, which are checked again.

    Logits are processed in this order: guidance, grammar, allowed_token_ids, bad_words_ids, min_tokens, logit_bias,
    penalties, temperature, min_p, top_k, top_p.
    repetition_penalty applies to the tokens of prompt and output, presence_penalty and frequency_penalty only to those
    of the output; at a node of a draft tree, the tokens on the path to the node count as output. Temperature 0 is
    greedy.

    `grammar`: a grammar for llguidance that the output follows, in Lark or as JSON. An end-of-text token is allowed
    only where the grammar may end, and ends the output.

    `allowed_token_ids`: the only tokens that are sampled; None: all. `bad_words_ids`: token sequences that the output
    does not contain: the last token of a sequence is excluded where the output ends with the tokens before it.
    `min_tokens`: end-of-text tokens and `stop_token_ids` are excluded before this many output tokens. A rule
    that would leave no token, in combination with a grammar or another rule, is not applied at that position.

    `logprobs` = k: output tokens are returned with their log-probabilities and with the k most likely tokens (-1: with
    all tokens), computed after guidance and before all other processing. `logprob_token_ids`: instead of the most
    likely tokens, these. `prompt_logprobs`: as `logprobs`, for the prompt tokens.

    `seed`: seed of the noise. The default 0 makes outputs reproducible; None draws a seed at random once, which all
    requests with this object share. `max_tokens`: None, the default, decodes up to the end of the context; vLLM's
    default is 16.

    The fields from `n` on apply to text and have no effect on `LLMEngine`. `n`: number of outputs, which differ in
    their seeds. `stop`: the output ends before the first of these strings, with `include_stop_str_in_output` after it.
    `skip_special_tokens`: leave special tokens out of the text. `detokenize` = False: no text, only token ids.
    `bad_words`: words that the text does not contain. `structured_outputs`: a constraint that becomes the `grammar`.

    `verify_batch` (bs; 1: without the draft) and `draft_steps` (d) override the engine's values for this request. They
    do not change the output; with rejection sampling they may change its tokens, but not their distribution. Nor does
    `suffix_memory`: whether suffix lookup proposes from the texts of other requests, and keeps this one for them.
    """

    temperature: float = setting(
        1.0,
        "Sampling temperature; 0 is greedy.",
        SAMPLING,
        "T",
        ge=MIN_TEMPERATURE,
        le=100,
        allow_zero=True,
        finite=True,
        wording=f"be 0 (greedy) or lie in {MIN_TEMPERATURE}..100",
        from_model="temperature",
    )
    top_p: float = setting(
        1.0,
        "Keep the most likely tokens whose total probability reaches P.",
        SAMPLING,
        "P",
        gt=0,
        le=1,
        finite=True,
        from_model="top_p",
        feature="filters",
    )
    top_k: int = setting(
        0,
        "Keep the K most likely tokens.",
        SAMPLING,
        "K",
        "off",
        ge=-1,
        le=MAX_TOKEN_COUNT,
        from_model="top_k",
        wording=f"be 0 (off) or lie in 1..{MAX_TOKEN_COUNT}",
        feature="filters",
    )
    min_p: float = setting(
        0.0,
        "Drop tokens less likely than P times the most likely one.",
        SAMPLING,
        "P",
        ge=0,
        le=1,
        finite=True,
        from_model="min_p",
        feature="filters",
    )
    repetition_penalty: float = setting(
        1.0,
        "Above 1: tokens of the prompt and output become less likely.",
        SAMPLING,
        "X",
        ge=0.01,
        le=100,
        finite=True,
        from_model="repetition_penalty",
        feature="penalties",
    )
    presence_penalty: float = setting(
        0.0,
        "Subtracted from the logit of each token that the output contains.",
        SAMPLING,
        "X",
        ge=-2,
        le=2,
        finite=True,
        feature="penalties",
        json_flag=OVERRIDE_GENERATION_CONFIG,
    )
    frequency_penalty: float = setting(
        0.0,
        "Subtracted from a token's logit once for each time it occurs in the output.",
        SAMPLING,
        "X",
        ge=-2,
        le=2,
        finite=True,
        feature="penalties",
        json_flag=OVERRIDE_GENERATION_CONFIG,
    )
    logit_bias: dict[int, float] = setting(  # noqa: RUF009
        {},
        'Added to the logits, by token id: {"42": -5}.',
        SAMPLING,
        "JSON",
        "{}",
        json_flag=OVERRIDE_GENERATION_CONFIG,
    )
    guidance_scale: float = setting(  # s in l_u + s (l_c - l_u), l_c: prompt, l_u: negative prompt; 1: off
        1.0,
        "Classifier-free guidance: above 1 moves the logits away from those after --negative-prompt.",
        SAMPLING,
        "S",
        ge=0,
        le=100,
        wording="lie in 0..100 (1: off)",
        finite=True,
        feature="guidance",
    )
    seed: int = setting(
        0,
        "Seed of the sampling noise. With --verify match, seed and prompt determine the text in every exact mode.",
        SAMPLING,
        "N",
        ge=0,
        le=2**64 - 1,
        wording="lie in 0..2^64-1",
        order=-1,
    )
    max_tokens: int | None = setting(
        None,
        "Maximum number of output tokens.",
        STOPPING,
        "N",
        "to the end of the context",
        ge=1,
        le=MAX_TOKEN_COUNT,
        from_model="max_new_tokens",
    )
    stop: tuple[str, ...] = setting(
        (), "Stop before this text. May be given several times.", STOPPING, "TEXT", "none", feature="stop strings"
    )
    stop_token_ids: tuple[int, ...] = setting(
        (),
        "Stop after any of these tokens.",
        STOPPING,
        "ID[,ID]",
        "none",
        json_flag=OVERRIDE_GENERATION_CONFIG,
    )
    ignore_eos: bool = setting(False, "Continue after an end-of-text token.", STOPPING)
    logprobs: int | None = setting(
        None, ge=-1, le=MAX_LOGPROBS, wording=f"lie in 0..{MAX_LOGPROBS} (-1: all tokens)", feature="log-probabilities"
    )
    prompt_logprobs: int | None = setting(
        None,
        ge=-1,
        le=MAX_LOGPROBS,
        wording=f"lie in 0..{MAX_LOGPROBS} (-1: all tokens)",
        feature="prompt log-probabilities",
    )
    grammar: str | None = setting(
        None, "Grammar of the output, for llguidance: Lark or JSON.", SAMPLING, "TEXT", "none", feature="grammar"
    )
    negative_prompt_ids: tuple[int, ...] = ()  # negative prompt of guidance; empty: the last token of the prompt
    verify_batch: int | None = setting(None, ge=1)
    draft_steps: int | None = setting(None, ge=1)
    suffix_memory: bool = True
    min_tokens: int = setting(0, ge=0, le=MAX_TOKEN_COUNT)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    logprob_token_ids: tuple[int, ...] = setting((), feature="listed log-probabilities")
    n: int = setting(1, ge=1, le=MAX_CHOICES)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    bad_words: tuple[str, ...] = ()
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        if self.seed is None:
            object.__setattr__(self, "seed", secrets.randbits(63))
        check_fields(self)
        self.top_k = max(self.top_k, 0)  # -1: off, as in vLLM
        require(all(self.stop), "a stop string must not be empty")
        require(min(self.stop_token_ids, default=0) >= 0, "stop_token_ids must not be negative")
        require(
            all(abs(b) <= MAX_BIAS for b in self.logit_bias.values()),
            f"logit_bias must lie in -{MAX_BIAS:g}..{MAX_BIAS:g}",
        )
        check_features(self.features)
        self._check_rules()

    def _check_rules(self) -> None:
        """Raises UserError if token rules contradict each other."""
        require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}",
        )
        require(all(self.bad_words_ids), "a sequence in bad_words_ids must not be empty")
        require(
            self.allowed_token_ids is None or not self.bad_tokens.issuperset(self.allowed_token_ids),
            "no token is left: allowed_token_ids is empty, or bad_words_ids exclude all of its tokens",
        )

    @property
    def features(self) -> Features:
        """The rows of the capability table (capabilities.py) that the request uses."""
        declared = (
            declaration.feature
            for item, declaration in declared_settings(self)
            if declaration.feature is not None and getattr(self, item.name) != item.default
        )
        found = dict.fromkeys(declared, True) | {
            "greedy": self.greedy,
            "filters": self.filtered,
            "excluded tokens": self.excludes_tokens,
            "path rules": self.has_path_rules,
            "bad sequences": bool(self.bad_sequences),
            "no log-probabilities": self.logprobs is None,
            "request shape": self.sets_shape,
            "request draft": (self.verify_batch or 1) > 1 or self.draft_steps is not None,
            "no text": not self.detokenize,
            "structured outputs": self.structured_outputs is not None,
        }
        return features_in(found)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def guided(self) -> bool:
        """Whether classifier-free guidance is on."""
        return self.guidance_scale != 1

    @property
    def sets_shape(self) -> bool:
        """Whether the request sets bs or d, so that its rounds do not depend on measured times."""
        return self.verify_batch is not None or self.draft_steps is not None

    @property
    def filtered(self) -> bool:
        """Whether a filter excludes tokens. False at temperature 0, where no filter changes the output."""
        return not self.greedy and self._sets_any(FILTERS)

    @property
    def penalised(self) -> bool:
        """Whether a penalty is set, so that logits depend on the preceding tokens."""
        return self._sets_any(PENALTIES)

    def _sets_any(self, names: Iterable[str]) -> bool:
        return any(getattr(self, name) != SWITCHED_OFF[name] for name in names)

    def values_of(self, names: Iterable[str]) -> dict[str, float]:
        """Returns the values of the fields `names`, such as FILTERS, by name."""
        return {name: getattr(self, name) for name in names}

    def without(self, names: Iterable[str]) -> "SamplingParams":
        """Returns the parameters with the filters and penalties `names` switched off."""
        return replace(self, **{name: SWITCHED_OFF[name] for name in names})

    @property
    def bad_tokens(self) -> set[int]:
        """The bad words of one token, which are excluded at every position."""
        return {word[0] for word in self.bad_words_ids if len(word) == 1}

    @property
    def bad_sequences(self) -> tuple[tuple[int, ...], ...]:
        """The bad words of several tokens."""
        return tuple(word for word in self.bad_words_ids if len(word) > 1)

    def rule_token_ids(self) -> Iterator[tuple[str, Iterable[int]]]:
        """Yields the name and the token ids of each field that refers to tokens by id, except prompts and stop
        tokens."""
        yield "logit_bias", self.logit_bias
        yield "allowed_token_ids", self.allowed_token_ids or ()
        yield "bad_words_ids", (token for word in self.bad_words_ids for token in word)
        yield "logprob_token_ids", self.logprob_token_ids

    @property
    def excludes_tokens(self) -> bool:
        """Whether some tokens are excluded at every position: all but `allowed_token_ids`, or a bad word that is one
        token."""
        return self.allowed_token_ids is not None or bool(self.bad_tokens)

    @property
    def has_path_rules(self) -> bool:
        """Whether the tokens that are excluded depend on the preceding output: `min_tokens`, or a bad word of several
        tokens."""
        return self.min_tokens > 0 or bool(self.bad_sequences)


def _fields_of(feature: str) -> tuple[str, ...]:
    return tuple(item.name for item, declaration in declared_settings(SamplingParams) if declaration.feature == feature)


# The filters and the penalties, in the order of their fields. Everything that handles all of them (request fields, the
# draft's parameters, scalars on the device, arguments of native code) uses these names.
FILTERS, PENALTIES = _fields_of("filters"), _fields_of("penalties")
SWITCHED_OFF = {
    item.name: cast(float, item.default) for item in fields(SamplingParams) if item.name in FILTERS + PENALTIES
}
