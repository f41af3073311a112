"""Grammars: which tokens may follow each path of a tree. llguidance reads them, and is imported when one comes.

The answer of a parser is a function of the tokens before, so a target's rows and a draft's children are masked alike on
every rank, and the text under a grammar is plain decoding's. Letters: n paths, V tokens of the base vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftspec.errors import RequestEnds, UserError
from swiftspec.sampling.sampler import Paths
from swiftspec.setting import require

T = TypeVar("T")
Tokens = tuple[int, ...]

LONGEST = 2**18  # characters of a grammar
COMPILED = 4  # grammars that are kept ready
LIMITS = {  # about 10 ms for a mask, by the library's own measure, and 100 MB
    "step_lexer_fuel": 100_000, "step_max_items": 25_000, "max_lexer_states": 50_000, "verbose_errors": False,
}  # fmt: skip


class TooComplex(RequestEnds):
    """A parser has met its limits: on all ranks, which read the same tokens, at the same one."""


class Grammars:
    """Makes the rules of grammars over one tokenizer, which is the one in the folder of the target."""

    def __init__(self, folder: Path, eos: Sequence[int], vocab: int) -> None:
        """`eos`: the tokens that end a text."""
        self._folder, self._eos, self._vocab = folder, tuple(eos), vocab
        self._tokenizer: Any = None
        self._ready: dict[str, Any] = {}  # parsers at their start, the one used last at the end

    def rules(self, text: str) -> GrammarRules:
        """Those of one request. Raises UserError on what is no grammar."""
        parser = self._ready.pop(text, None) or self._compile(text)
        self._ready[text] = parser
        if len(self._ready) > COMPILED:
            del self._ready[next(iter(self._ready))]
        return GrammarRules(parser.deep_copy(), self._eos, self._vocab, self._read_tokenizer().vocab_size)

    def _compile(self, text: str) -> Any:
        require(len(text) <= LONGEST, f"a grammar of {len(text)} characters is above the limit of {LONGEST}")
        from llguidance import LLMatcher, LLParserLimits

        parser = LLMatcher(self._read_tokenizer(), text, log_level=0, limits=LLParserLimits(**LIMITS))
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


class GrammarRules:
    """One grammar along one request's text, as `sampler.Rules`. Tokens that end the text end it: after one of them
    nothing but these may follow.

    Every node has a parser of its own, a copy of its parent's that has read one more token. A copy takes as long as a
    step back, and after steps back llguidance 1.9 may give another mask than on the straight way.
    """

    def __init__(self, parser: Any, eos: Sequence[int], vocab: int, known: int) -> None:
        """`parser`: at the start of the text; it knows tokens below `known`."""
        self._eos, self._vocab, self._known = frozenset(eos), vocab, known
        self._parsers: dict[Tokens, Any] = {(): parser}  # by path; None where the grammar forbids it
        self._masks: dict[Tokens, NDArray[np.uint8]] = {}
        self._ended = False
        end = np.zeros(vocab, np.bool_)
        end[[token for token in eos if token < vocab]] = True
        self._end = np.packbits(end, bitorder="little")

    def observe(self, tokens: Sequence[int]) -> None:
        self._ended = self._ended or not self._eos.isdisjoint(tokens)
        if self._ended:
            return
        path = tuple(tokens)
        if self._parser(path) is None:
            raise TooComplex("the text does not follow its grammar")
        self._parsers, self._masks = _below(self._parsers, path), _below(self._masks, path)

    def allowed(self, paths: Paths) -> Tensor:
        """[n, V] bool. After a path that the grammar forbids every token is: nobody gets there."""
        masks = [np.unpackbits(self._mask(tuple(path)), count=self._vocab, bitorder="little") for path in paths]
        return torch.from_numpy(np.stack(masks).view(np.bool_))

    def _mask(self, path: Tokens) -> NDArray[np.uint8]:
        """A bit for each token, perhaps of fewer than V: those beyond are not allowed."""
        if self._ended or not self._eos.isdisjoint(path):
            return self._end
        if path not in self._masks:
            parser = self._parser(path)
            if parser is None:
                return np.full(-(-self._vocab // 8), 255, np.uint8)
            self._masks[path] = np.frombuffer(parser.compute_bitmask(), np.uint8)
            _check(parser)
        return self._masks[path]

    def _parser(self, path: Tokens) -> Any:
        """The one that has read a path without an end; None where the grammar forbids it."""
        if path not in self._parsers:
            above, parser = self._parser(path[:-1]), None
            if above is not None and path[-1] < self._known:
                parser = above.deep_copy()
                read = parser.try_consume_tokens([path[-1]])
                _check(parser)
                parser = parser if read else None
            self._parsers[path] = parser
        return self._parsers[path]


def _below(found: dict[Tokens, T], path: Tokens) -> dict[Tokens, T]:
    """What is known of paths from this one on."""
    return {known[len(path) :]: value for known, value in found.items() if known[: len(path)] == path}


def _check(parser: Any) -> None:
    """Raises TooComplex where a parser has met its limits."""
    if parser.is_error():
        raise TooComplex(f"the grammar cannot be followed any further: {_reason(parser.get_error())}")


def _reason(error: object) -> str:
    """The beginning of an error, in one line."""
    return " ".join(str(error).split())[:200]
