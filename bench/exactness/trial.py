"""Exactness trials: run the same requests with and without speculation and compare the answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from bench.exactness.statistics import Comparison, compare, holm
from swiftspec.engine import Completion
from swiftspec.messages import NodeSource
from swiftspec.observe.acceptance_stats import Acceptance
from swiftspec.params import SamplingParams

SIGNIFICANCE_LEVEL = 0.001  # probability that the statistical test rejects an exact engine
Tick = Callable[[], None]


class GeneratingEngine(Protocol):
    """Protocol of an engine that decodes whole requests."""

    def generate(self, prompt: Sequence[int], sampling: SamplingParams | None = None) -> Completion: ...


@dataclass(slots=True)
class CountingEngine:
    """Engine wrapper that counts rounds and accepted draft tokens, to find out whether speculation was tested."""

    engine: GeneratingEngine
    rounds: int = 0
    accepted: int = 0
    by_source: Counter[NodeSource] = field(default_factory=Counter[NodeSource])  # accepted tokens
    lost: str | None = None  # reason why the drafter was lost, of the last request in which it was

    def generate(self, prompt: Sequence[int], sampling: SamplingParams | None = None) -> Completion:
        """Generates with the wrapped engine and adds up its statistics."""
        answer = self.engine.generate(prompt, sampling)
        self.rounds += answer.stats.rounds
        self.accepted += answer.stats.accepted
        self.by_source += Acceptance.from_rounds(answer.stats.verified).accepted_by_source
        self.lost = answer.stats.drafter_lost or self.lost
        return answer

    @property
    def idle(self) -> str | None:
        """Reason why the answers did not test speculation, or None if they did."""
        if self.lost is not None:
            return f"the drafter was lost ({self.lost})"
        return None if self.accepted else "no draft token was accepted"


@dataclass(frozen=True, slots=True)
class SampleVerdict:
    """Result of comparing samples. `corrected`: p-value of each comparison after Holm correction."""

    comparisons: list[Comparison]
    corrected: list[float]

    @property
    def same(self) -> bool:
        return min(self.corrected, default=1.0) >= SIGNIFICANCE_LEVEL


@dataclass(frozen=True, slots=True)
class TextComparison:
    """Comparison of pairs of answers that must be equal token by token.

    `requests`: number of pairs.
    `parted`: index of the first token that differs, for each pair that differs.
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
    """Draws `samples` continuations of `prompt` with each engine, and compares the distributions of the token at each
    position and of each two successive tokens.

    Every continuation has a seed of its own, from `sampling.seed` on.

    `plain`, `tree`: the engines without and with speculation.
    `sampling`: its `max_tokens` is the length of a continuation, at least 1.
    `tick`: called after each request.
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
    """Answers every prompt with both engines and compares the tokens. Prompt i has the seed `sampling.seed + i`.

    `name`: name of the comparison.
    `tick`: called after each prompt.
    """
    parted = []
    for i, prompt in enumerate(prompts):
        asked = replace(sampling, seed=(sampling.seed + i) % 2**64)
        one, other = (engine.generate(prompt, asked).token_ids for engine in (plain, tree))
        if one != other:
            parted.append(next((at for at, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other))))
        tick()
    return TextComparison(name, len(prompts), parted)
