"""Grammars: which tokens may follow each path of a tree. llguidance reads them, and is imported when one comes.

The answer of a parser is a function of the tokens before, so a target's rows and a draft's children are masked alike on
every rank, and the text under a grammar is plain decoding's. Letters: n paths, V tokens of the base vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftspec.errors import RequestEnds, UserError
from swiftspec.sampling.sampler import Paths
from swiftspec.setting import require

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
        reason = " ".join(parser.get_error().split())[:300]
        require(not parser.is_error(), f"the grammar cannot be read: {reason}")
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
                reason = " ".join(str(error).split())[:200]
                raise UserError(f"{file} is no tokenizer that a grammar can use: {reason}") from None
        return self._tokenizer


class GrammarRules:
    """One grammar along one request's text, as `sampler.Rules`. Tokens that end the text end it: after one of them
    nothing but these may follow."""

    def __init__(self, parser: Any, eos: Sequence[int], vocab: int, known: int) -> None:
        """`parser`: at the start of the text; it knows tokens below `known`."""
        self._parser, self._eos, self._vocab, self._known = parser, frozenset(eos), vocab, known
        self._at: list[int] = []  # what the parser has read below the last verified token
        self._ended = False
        every = np.zeros(vocab, np.bool_)
        every[[token for token in eos if token < vocab]] = True
        self._end = np.packbits(every, bitorder="little")

    def observe(self, tokens: Sequence[int]) -> None:
        self._ended = self._ended or not self._eos.isdisjoint(tokens)
        if not self._ended and not self._follow(tokens):
            raise self._failed()
        self._at = []

    def allowed(self, paths: Paths) -> Tensor:
        """[n, V] bool. After a path that the grammar forbids every token is: nobody gets there."""
        allowed = np.stack([np.unpackbits(self._bits(path), count=self._vocab, bitorder="little") for path in paths])
        return torch.from_numpy(allowed.view(np.bool_))

    def _bits(self, path: Sequence[int]) -> NDArray[np.uint8]:
        """A bit for each token, which may be fewer than V: those beyond the tokenizer's are not allowed."""
        if self._ended or not self._eos.isdisjoint(path):
            return self._end
        if not self._follow(path):
            return np.full(-(-self._vocab // 8), 255, np.uint8)
        bits = self._parser.compute_bitmask()
        if self._parser.is_error():
            raise self._failed()
        return np.frombuffer(bits, np.uint8)

    def _follow(self, path: Sequence[int]) -> bool:
        """Moves the parser to a path; False where the grammar forbids it."""
        same = next((i for i, (a, b) in enumerate(zip(self._at, path)) if a != b), min(len(self._at), len(path)))
        if same < len(self._at):
            self._parser.rollback(len(self._at) - same)
        rest = [*takewhile(lambda token: token < self._known, path[same:])]
        read = self._parser.try_consume_tokens(rest) if rest else 0
        self._at = list(path[: same + read])
        if self._parser.is_error():
            raise self._failed()
        return len(self._at) == len(path)

    def _failed(self) -> TooComplex:
        reason = " ".join(self._parser.get_error().split())[:200] or "the text does not follow it"
        return TooComplex(f"the grammar cannot be followed any further: {reason}")
