"""Grammar constraints: the allowed tokens after each path of a tree. Uses llguidance, which is imported on first use.

The mask is a function of the preceding tokens, so target rows and draft children are masked identically on every rank,
and the output equals that of autoregressive decoding under the grammar. Letters: n paths, V tokens of the base
vocabulary.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftspec.errors import RequestFailed, UserError
from swiftspec.sampling import grammar_process
from swiftspec.sampling.sampler import Paths
from swiftspec.settings_schema import require

T = TypeVar("T")
Tokens = tuple[int, ...]

MAX_GRAMMAR_CHARS = 2**18  # characters
MAX_COMPILED_GRAMMARS = 4  # compiled grammars in the LRU cache
# These limit compilation to a few seconds, a mask to about 10 ms (as measured by the library), and memory to 100 MB.
PARSER_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 25_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}


class GrammarTooComplex(RequestFailed):
    """Raised if the parser exceeds its limits or cannot continue. All ranks raise it at the same token, because they
    read the same tokens."""


def check_untrusted_grammar(text: str) -> None:
    """Compiles the grammar of a client in a process with limits on time, memory and depth of recursion. Raises
    ValueError with a one-line message if it is invalid or exceeds them."""
    if len(text) > MAX_GRAMMAR_CHARS:
        raise ValueError(f"a grammar of {len(text)} characters exceeds the limit of {MAX_GRAMMAR_CHARS}")
    try:
        run = subprocess.run(
            grammar_process.COMMAND,
            input=grammar_process.encode_request("converted", text),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=grammar_process.TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"invalid grammar: {grammar_process.TIMEOUT_MESSAGE}") from None
    try:
        grammar_process.decode_reply(run.stdout)
    except ValueError as error:
        raise ValueError(f"invalid grammar: {error}") from None


class GrammarCompiler:
    """Grammar compiler for the target's tokenizer, with an LRU cache of compiled grammars."""

    def __init__(
        self, folder: Path, eos: Sequence[int], vocab: int, tokenizer: Callable[[], str] | None = None
    ) -> None:
        """`folder`: the target's model folder. `eos`: its end-of-text tokens. `vocab`: size of the base vocabulary.
        `tokenizer`: returns the text of tokenizer.json; None: that of the file in `folder`."""
        self._folder, self.eos_token_ids, self._vocab = folder, tuple(eos), vocab
        self._tokenizer_text = tokenizer
        self._tokenizer: Any = None
        self._ready: dict[str, Any] = {}  # parsers in their initial state, least recently used first

    def compile(self, text: str) -> GrammarConstraint:
        """Returns the token constraint for one request. Raises UserError if the grammar is invalid or too long, or if
        the target has no tokenizer or end-of-text token that llguidance can use."""
        parser = self._ready.pop(text, None) or self._compile(text)
        self._ready[text] = parser
        if len(self._ready) > MAX_COMPILED_GRAMMARS:
            del self._ready[next(iter(self._ready))]
        return GrammarConstraint(parser.deep_copy(), self.eos_token_ids, self._vocab, self._read_tokenizer().vocab_size)

    def _compile(self, text: str) -> Any:
        require(
            len(text) <= MAX_GRAMMAR_CHARS,
            f"a grammar of {len(text)} characters exceeds the limit of {MAX_GRAMMAR_CHARS}",
        )
        from llguidance import LLMatcher, LLParserLimits

        parser = LLMatcher(self._read_tokenizer(), text, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
        require(not parser.is_error(), f"invalid grammar: {_reason(parser.get_error())}")
        return parser

    def _read_tokenizer(self) -> Any:
        from llguidance import LLTokenizer

        if self._tokenizer is None:
            require(bool(self.eos_token_ids), "a grammar needs an end-of-text token, but the target's files name none")
            file = self._folder / "tokenizer.json"
            if self._tokenizer_text is None:
                require(file.is_file(), "a grammar needs the target's tokenizer.json, which the model does not have")
            text = str(file) if self._tokenizer_text is None else self._tokenizer_text()
            try:
                self._tokenizer = LLTokenizer(text, eos_token=list(self.eos_token_ids))
            except Exception as error:  # the type depends on the contents of the file
                raise UserError(f"the tokenizer cannot be used for grammars: {_reason(error)}") from None
        return self._tokenizer


class GrammarConstraint:
    """Token constraint (`sampler.TokenConstraint`) by which the output of one request follows a grammar. After an
    end-of-text token only end-of-text tokens are allowed."""

    def __init__(self, parser: Any, eos: Sequence[int], vocab: int, known: int) -> None:
        """`parser`: llguidance parser of this request, in its initial state. `known`: size of the parser's vocabulary,
        which may differ from `vocab`."""
        self._parser, self._eos, self._vocab, self._known = parser, frozenset(eos), vocab, known
        self._at: Tokens = ()  # tokens after the last verified one that the parser has consumed
        self._masks: dict[Tokens, NDArray[np.uint8]] = {}  # computed bitmasks, by path
        self._ended = False
        end = np.zeros(vocab, np.bool_)
        end[[token for token in eos if token < vocab]] = True
        self._end = np.packbits(end, bitorder="little")

    def observe(self, tokens: Sequence[int]) -> None:
        path = tuple(tokens)
        self._ended = self._ended or not self._eos.isdisjoint(path)
        if not self._ended and not self._follow(path):
            raise GrammarTooComplex("the text does not match its grammar")
        self._at, self._masks = (), _below(self._masks, path)

    def allowed_mask(self, paths: Paths) -> Tensor:
        """Returns the allowed tokens after each path, [n, V] bool. After a path that the grammar forbids, all tokens
        are allowed, because such a path is never accepted."""
        every = np.unpackbits(self.bitmask(paths), axis=-1, count=self._vocab, bitorder="little")
        return torch.from_numpy(every.view(np.bool_))

    def bitmask(self, paths: Paths) -> NDArray[np.uint8]:
        """Returns `allowed_mask` as uint8 bitmasks [n, bytes], the lowest bit of each byte first."""
        return np.stack([self._mask(tuple(path)) for path in paths])

    def _mask(self, path: Tokens) -> NDArray[np.uint8]:
        if self._ended or not self._eos.isdisjoint(path):
            return self._end
        if path not in self._masks:
            if not self._follow(path):
                return np.full_like(self._end, 255)
            found = np.frombuffer(self._parser.compute_bitmask(), np.uint8)
            self._check()
            if not found.any():  # the tokenizer has no token that the grammar allows
                raise GrammarTooComplex("the grammar cannot be continued: no token matches")
            mask = self._masks[path] = np.zeros_like(self._end)  # ids beyond the tokenizer's vocabulary are not allowed
            mask[: len(found)] = found[: len(mask)]
        return self._masks[path]

    def _follow(self, path: Tokens) -> bool:
        """Moves the parser along a path, which must not contain an end-of-text token. Returns False if the grammar
        forbids the path."""
        same = next((i for i, (a, b) in enumerate(zip(self._at, path)) if a != b), min(len(self._at), len(path)))
        if same < len(self._at):
            self._parser.rollback(len(self._at) - same)
            # llguidance 1.9 may omit allowed tokens from the next masks without this call
            self._parser.compute_bitmask()
        rest = [*takewhile(lambda token: token < self._known, path[same:])]
        read = self._parser.try_consume_tokens(rest) if rest else 0
        self._at = path[: same + read]
        self._check()
        return len(self._at) == len(path)

    def _check(self) -> None:
        """Raises GrammarTooComplex if the parser has exceeded its limits."""
        if self._parser.is_error():
            raise GrammarTooComplex(f"the grammar cannot be continued: {_reason(self._parser.get_error())}")


def _below(found: dict[Tokens, T], path: Tokens) -> dict[Tokens, T]:
    """Returns the entries of `found` whose key begins with `path`, with `path` removed from the keys."""
    return {known[len(path) :]: value for known, value in found.items() if known[: len(path)] == path}


def _reason(error: object) -> str:
    """Returns the first 200 characters of an error message, in one line."""
    return " ".join(str(error).split())[:200]
