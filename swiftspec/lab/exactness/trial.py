"""Exactness trials: the same requests with and without speculation, and the comparison of their answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from swiftspec.engine import Completion
from swiftspec.lab.exactness.statistics import Comparison, compare, holm
from swiftspec.params import SamplingParams

SIGNIFICANCE_LEVEL = 0.001  # probability that the test of an exact engine fails
Tick = Callable[[], None]


class GeneratingEngine(Protocol):
    """Protocol of an engine that answers requests."""

    def generate(self, prompt: Sequence[int], sampling: SamplingParams | None = None) -> Completion: ...


@dataclass(slots=True)
class CountingEngine:
    """Wraps an engine and counts its accepted draft tokens. Without any, the trial has not tested speculation."""

    engine: GeneratingEngine
    rounds: int = 0
    accepted: int = 0
    lost: str | None = None  # why the draft was not used in some request

    def generate(self, prompt: Sequence[int], sampling: SamplingParams | None = None) -> Completion:
        """Generates with the wrapped engine and adds up its statistics."""
        answer = self.engine.generate(prompt, sampling)
        self.rounds += answer.stats.rounds
        self.accepted += answer.stats.accepted
        self.lost = answer.stats.drafter_lost or self.lost
        return answer

    @property
    def idle(self) -> str | None:
        """Returns the reason why the answers did not exercise speculation, or None if they did."""
        if self.lost is not None:
            return f"the drafter was lost ({self.lost})"
        return None if self.accepted else "no draft token was accepted"


@dataclass(frozen=True, slots=True)
class SampleVerdict:
    """Result of all comparisons of samples. `corrected` holds their p-values after Holm correction."""

    comparisons: list[Comparison]
    corrected: list[float]

    @property
    def same(self) -> bool:
        return min(self.corrected, default=1.0) >= SIGNIFICANCE_LEVEL


@dataclass(frozen=True, slots=True)
class TextComparison:
    """Comparison of answers that must be equal token by token.

    `parted` holds the position of the first difference of each pair that differs.
    """

    name: str
    requests: int
    parted: list[int]


def compare_samples(
    plain: GeneratingEngine,
    tree: GeneratingEngine,
    prompt: Sequence[int],
    sampling: SamplingParams,
    samples: int,
    tick: Tick,
) -> SampleVerdict:
    """Draws `samples` continuations with each engine and compares each next token and each pair of successive tokens.

    No seed is used twice. `sampling.max_tokens` is the length of a continuation, at least 1. `tick` is called after
    each request.
    """
    sampling = replace(sampling, ignore_eos=True, stop=(), stop_token_ids=())
    texts: list[list[list[int]]] = []
    for engine, first in ((plain, sampling.seed), (tree, sampling.seed + samples)):
        texts.append([])
        for seed in range(first, first + samples):
            texts[-1].append(engine.generate(prompt, replace(sampling, seed=seed % 2**64)).token_ids)
            tick()
    length = min(len(text) for kind in texts for text in kind)
    views = [(f"token {i + 1}", slice(i, i + 1)) for i in range(length)]
    views += [(f"tokens {i + 1}, {i + 2}", slice(i, i + 2)) for i in range(length - 1)]
    found = []
    for name, part in views:
        one, other = ([tuple(text[part]) for text in kind] for kind in texts)
        found.append(compare(name, one, other))
    return SampleVerdict(found, holm([comparison.p for comparison in found]))


def compare_texts(
    name: str,
    plain: GeneratingEngine,
    tree: GeneratingEngine,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    tick: Tick,
) -> TextComparison:
    """Answers every prompt with both engines. Prompt i uses the seed `sampling.seed` + i."""
    parted = []
    for i, prompt in enumerate(prompts):
        asked = replace(sampling, seed=(sampling.seed + i) % 2**64)
        one, other = (engine.generate(prompt, asked).token_ids for engine in (plain, tree))
        if one != other:
            parted.append(next((at for at, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other))))
        tick()
    return TextComparison(name, len(prompts), parted)
