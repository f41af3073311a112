"""The messages that draft and target exchange. Each packs into flat words, and `unpack` raises ValueError on words that
are none."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import NDArray

from swiftspec.errors import UserError
from swiftspec.params import SamplingParams

Words = list[int]  # flat; each is a 32-bit integer


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """What the children of a proposal were drawn from, without replacement and in the order of their nodes: a row for
    each node that has children, in the order of the nodes. Tokens that a row does not name were never drawn."""

    tokens: NDArray[np.int32]  # [rows, width]
    probs: NDArray[np.float32]  # [rows, width]; where it is 0, the token means nothing

    def flat(self) -> Words:
        """Tokens, then probabilities by their bits."""
        return [*self.tokens.ravel().tolist(), *self.probs.view(np.int32).ravel().tolist()]

    @staticmethod
    def read(flat: Words, rows: int) -> Drawn:
        """The inverse of `flat`. Raises ValueError on what is no distribution."""
        if rows == 0 or len(flat) % (2 * rows) != 0:
            raise ValueError(f"{len(flat)} words do not hold the distributions of {rows} nodes")
        tokens, bits = np.array(flat, np.int32).reshape(2, rows, -1)
        probs = bits.view(np.float32)
        if not (np.isfinite(probs).all() and (probs >= 0).all() and (probs > 0).any(-1).all() and (tokens >= 0).all()):
            raise ValueError("a proposal's nodes were drawn from no distribution")
        return Drawn(tokens, probs)


@dataclass(frozen=True, slots=True)
class Proposal:
    """The sub-tree sent to be verified, in topological order. Node 0 is the root: the last verified token.

    `prefix_len` counts the verified tokens before the root, so the root stands at that absolute position.
    """

    request: int
    round: int
    prefix_len: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]  # parents[0] == -1, parents[i] < i
    drawn: Drawn | None = None  # where children were drawn and will be verified by rejection

    def pack(self) -> Words:
        """request, round, prefix_len, count, tokens, parents; then what they were drawn from, where that is told."""
        words = [self.request, self.round, self.prefix_len, len(self.tokens), *self.tokens, *self.parents]
        return words if self.drawn is None else words + self.drawn.flat()

    @staticmethod
    def unpack(flat: Words) -> Proposal:
        """The inverse of `pack`."""
        request, round_, prefix_len, count, *body = _at_least(4, flat, "proposal")
        if count < 1 or len(body) < 2 * count:
            raise ValueError(f"a proposal of {len(flat)} words does not hold the {count} nodes it names")
        parents = tuple(body[count : 2 * count])
        if parents[0] != -1 or any(not 0 <= p < i for i, p in enumerate(parents[1:], 1)):
            raise ValueError("a proposal's nodes are not in topological order")
        drawn = None if len(body) == 2 * count else Drawn.read(flat[4 + 2 * count :], len({*parents[1:]}))
        return Proposal(request, round_, prefix_len, tuple(body[:count]), parents, drawn)

    @staticmethod
    def root_only(request: int, round_: int, prefix_len: int, token: int) -> Proposal:
        """What plain decoding sends: nothing but the root."""
        return Proposal(request, round_, prefix_len, (token,), (-1,))


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What the target made of a proposal: the accepted path and the tokens it sampled along it.

    `tokens` are the path's tokens without the root, then the bonus token; `prefix_len` is the proposal's, so the next
    root stands at prefix_len + len(tokens).
    """

    request: int
    round: int
    prefix_len: int
    path: tuple[int, ...]  # accepted proposal nodes, the root first
    tokens: tuple[int, ...]  # len(path) of them
    overlaps: tuple[float, ...] = field(default=(), compare=False)  # see Judged.overlap; stays here: no drafter asks

    def pack(self) -> Words:
        """request, round, prefix_len, count, path, tokens."""
        return [self.request, self.round, self.prefix_len, len(self.path), *self.path, *self.tokens]

    @staticmethod
    def unpack(flat: Words) -> VerifyResult:
        """The inverse of `pack`."""
        request, round_, prefix_len, count, *body = _at_least(4, flat, "result")
        if count < 1 or len(body) != 2 * count:
            raise ValueError(f"a result of {len(flat)} words does not hold the {count} nodes it names")
        return VerifyResult(request, round_, prefix_len, tuple(body[:count]), tuple(body[count:]))


@dataclass(frozen=True, slots=True)
class Opening:
    """What opens a request: its verified tokens, of which those from `prompt_len` on are output, and how to sample.

    The last token is the root. `steps` names the kind of steps that run the request, which the leader of a group
    chooses for all its ranks; empty where nobody has chosen yet.
    """

    request: int
    tokens: tuple[int, ...]
    sampling: SamplingParams
    prompt_len: int
    steps: str = ""

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.tokens[: self.prompt_len]

    @property
    def output(self) -> tuple[int, ...]:
        return self.tokens[self.prompt_len :]

    def pack(self) -> Words:
        """request, prompt_len, count, tokens, then the rest as JSON bytes: length, four to a word."""
        text = json.dumps({"steps": self.steps, "sampling": asdict(self.sampling)}).encode()
        return [self.request, self.prompt_len, len(self.tokens), *self.tokens, len(text), *bytes_to_words(text)]

    @staticmethod
    def unpack(flat: Words) -> Opening:
        """The inverse of `pack`."""
        request, prompt_len, count = _at_least(4, flat, "opening")[:3]
        tokens, rest = flat[3 : 3 + count], flat[3 + count :]
        if count < 1 or not 1 <= prompt_len <= count or not rest or 4 * len(rest) < 4 + rest[0] or rest[0] < 2:
            raise ValueError(f"an opening of {len(flat)} words does not hold the {count} tokens it names")
        try:
            told = json.loads(words_to_bytes(rest[1:])[: rest[0]])
            steps, sampling = str(told["steps"]), SamplingParams.from_json(told["sampling"])
        except (ValueError, TypeError, KeyError, AttributeError, UserError) as error:
            raise ValueError(f"an opening's sampling parameters make no sense ({error})") from None
        return Opening(request, tuple(tokens), sampling, prompt_len, steps)


def bytes_to_words(data: bytes) -> Words:
    """Four to a word, filled up with blanks."""
    return np.frombuffer(data.ljust(-(-len(data) // 4) * 4), np.int32).tolist()


def words_to_bytes(words: Words) -> bytes:
    """The inverse of `bytes_to_words`, blanks and all."""
    return np.array(words, np.int32).tobytes()


def _at_least(count: int, flat: Words, what: str) -> Words:
    if len(flat) < count:
        raise ValueError(f"a {what} of {len(flat)} words is too short")
    return flat
