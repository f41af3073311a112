"""Grammars: which tokens may follow each path of a tree. llguidance reads them, and is imported when one comes.

The answer of a parser is a function of the tokens before, so a target's rows and a draft's children are masked alike on
every rank, and the text under a grammar is plain decoding's. Letters: n paths, V tokens of the base vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftspec.errors import RequestFailed, UserError
from swiftspec.sampling.sampler import Paths
from swiftspec.settings_schema import require

T = TypeVar("T")
Tokens = tuple[int, ...]

MAX_GRAMMAR_CHARS = 2**18  # characters of a grammar
MAX_COMPILED_GRAMMARS = 4  # grammars that are kept ready
# a few seconds to read even the worst grammar, about 10 ms for a mask by the library's own measure, and 100 MB
PARSER_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 100_000, "step_lexer_fuel": 100_000, "step_max_items": 25_000, "max_lexer_states": 50_000,
    "verbose_errors": False,
}  # fmt: skip


class GrammarTooComplex(RequestFailed):
    """A parser cannot go on: on all ranks, which read the same tokens, at the same one."""


class GrammarCompiler:
    """Makes the rules of grammars over one tokenizer, which is the one in the folder of the target."""

    def __init__(self, folder: Path, eos: Sequence[int], vocab: int) -> None:
        """`eos`: the tokens that end a text."""
        self._folder, self._eos, self._vocab = folder, tuple(eos), vocab
        self._tokenizer: Any = None
        self._ready: dict[str, Any] = {}  # parsers at their start, the one used last at the end

    def compile(self, text: str) -> GrammarConstraint:
        """Those of one request. Raises UserError on what is no grammar."""
        parser = self._ready.pop(text, None) or self._compile(text)
        self._ready[text] = parser
        if len(self._ready) > MAX_COMPILED_GRAMMARS:
            del self._ready[next(iter(self._ready))]
        return GrammarConstraint(parser.deep_copy(), self._eos, self._vocab, self._read_tokenizer().vocab_size)

    def _compile(self, text: str) -> Any:
        require(
            len(text) <= MAX_GRAMMAR_CHARS,
            f"a grammar of {len(text)} characters is above the limit of {MAX_GRAMMAR_CHARS}",
        )
        from llguidance import LLMatcher, LLParserLimits

        parser = LLMatcher(self._read_tokenizer(), text, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
        require(not parser.is_error(), f"the grammar cannot be read: {_reason(parser.get_error())}")
        return parser

    def _read_tokenizer(self) -> Any:
        from llguidance import LLTokenizer

        if self._tokenizer is None:
            require(bool(self._eos), "a grammar needs an end-of-text token, and the target's config.json names none")
            file = self._folder / "tokenizer.json"
            require(file.is_file(), f"a grammar needs the target's tokenizer, and there is no {file}")
            try:
                self._tokenizer = LLTokenizer(str(file), eos_token=list(self._eos))
            except Exception as error:  # of any kind, by what the file holds
                raise UserError(f"{file} is no tokenizer that a grammar can use: {_reason(error)}") from None
        return self._tokenizer


class GrammarConstraint:
    """One grammar along one request's text, as `sampler.Rules`. Tokens that end the text end it: after one of them
    nothing but these may follow."""

    def __init__(self, parser: Any, eos: Sequence[int], vocab: int, known: int) -> None:
        """`parser`: at the start of the text; it knows tokens below `known`."""
        self._parser, self._eos, self._vocab, self._known = parser, frozenset(eos), vocab, known
        self._at: Tokens = ()  # what the parser has read below the last verified token
        self._masks: dict[Tokens, NDArray[np.uint8]] = {}  # by path
        self._ended = False
        end = np.zeros(vocab, np.bool_)
        end[[token for token in eos if token < vocab]] = True
        self._end = np.packbits(end, bitorder="little")

    def observe(self, tokens: Sequence[int]) -> None:
        path = tuple(tokens)
        self._ended = self._ended or not self._eos.isdisjoint(path)
        if not self._ended and not self._follow(path):
            raise GrammarTooComplex("the text does not follow its grammar")
        self._at, self._masks = (), _below(self._masks, path)

    def allowed_mask(self, paths: Paths) -> Tensor:
        """[n, V] bool. After a path that the grammar forbids every token is: nobody gets there."""
        every = np.unpackbits(self.bitmask(paths), axis=-1, count=self._vocab, bitorder="little")
        return torch.from_numpy(every.view(np.bool_))

    def bitmask(self, paths: Paths) -> NDArray[np.uint8]:
        """The same as rows of bits [n, bytes], the lowest of a byte first."""
        return np.stack([self._mask(tuple(path)) for path in paths])

    def _mask(self, path: Tokens) -> NDArray[np.uint8]:
        if self._ended or not self._eos.isdisjoint(path):
            return self._end
        if path not in self._masks:
            if not self._follow(path):
                return np.full_like(self._end, 255)
            found = np.frombuffer(self._parser.compute_bitmask(), np.uint8)
            self._check()
            if not found.any():  # the tokenizer cannot spell what the grammar wants
                raise GrammarTooComplex("the grammar cannot be followed any further: no token fits")
            mask = self._masks[path] = np.zeros_like(self._end)  # tokens beyond the tokenizer's are not allowed
            mask[: len(found)] = found[: len(mask)]
        return self._masks[path]

    def _follow(self, path: Tokens) -> bool:
        """Moves the parser to a path without an end. False where the grammar forbids it."""
        same = next((i for i, (a, b) in enumerate(zip(self._at, path)) if a != b), min(len(self._at), len(path)))
        if same < len(self._at):
            self._parser.rollback(len(self._at) - same)
            # without this llguidance 1.9 may lack tokens in the masks of what it reads next
            self._parser.compute_bitmask()
        rest = [*takewhile(lambda token: token < self._known, path[same:])]
        read = self._parser.try_consume_tokens(rest) if rest else 0
        self._at = path[: same + read]
        self._check()
        return len(self._at) == len(path)

    def _check(self) -> None:
        """Raises TooComplex where the parser has met its limits."""
        if self._parser.is_error():
            raise GrammarTooComplex(f"the grammar cannot be followed any further: {_reason(self._parser.get_error())}")


def _below(found: dict[Tokens, T], path: Tokens) -> dict[Tokens, T]:
    """What is known of paths from this one on."""
    return {known[len(path) :]: value for known, value in found.items() if known[: len(path)] == path}


def _reason(error: object) -> str:
    """The beginning of an error, in one line."""
    return " ".join(str(error).split())[:200]
