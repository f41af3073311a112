"""Enumerates all outcomes of sampling, through the drafters that choose a proposal, and the outcomes of a proposal by
definition.

The outcomes of a proposal are computed in plain Python; tests/tree/test_rejection.py proves that the engine's verifier
has the same, for whole trees.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from swiftspec.backends.reference import reference
from swiftspec.config import EngineConfig
from swiftspec.control.controller import Controller
from swiftspec.distributed.transport.codec import pack_message, unpack_proposal
from swiftspec.messages import Proposal, VerifyResult
from swiftspec.params import SamplingParams
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.tree import sampled_children
from swiftspec.tree.sampled_children import SampledChildren
from tests.support.history_models import HistoryModel, TextDistribution, distance, filtered, penalised
from tests.support.roles import make_drafter, make_runner, request_start

PROMPT = (1, 0)


class Choices:
    """Enumerates all runs of a program that samples: each run replays the choices so far and takes the next one."""

    def __init__(self) -> None:
        self._script: list[tuple[int, int]] = []  # option taken, options

    def runs(self) -> Iterator[None]:
        """Yields once for each run; `mass` is then the probability of that run."""
        while True:
            self.mass, self._at = 1.0, 0
            yield
            while self._script and self._script[-1][0] + 1 == self._script[-1][1]:
                self._script.pop()
            if not self._script:
                return
            option, count = self._script[-1]
            self._script[-1] = (option + 1, count)

    def choose(self, options: Sequence[tuple[Any, float]]) -> Any:
        """Chooses one of these values with their probabilities."""
        options = [option for option in options if option[1] > 0]
        if self._at == len(self._script):
            self._script.append((0, len(options)))
        value, chance = options[self._script[self._at][0]]
        self._at += 1
        self.mass *= chance
        return value


def orders(q: Sequence[float], k: int) -> Iterator[tuple[list[int], float]]:
    """All orders in which k values can be sampled without replacement, with their probabilities. Other values follow in
    ascending order."""
    support = [i for i, chance in enumerate(q) if chance > 0]
    for some in itertools.permutations(support, min(k, len(support))):
        chance, left = 1.0, sum(q)
        for i in some:
            chance *= q[i] / left
            left -= q[i]
        yield [*some, *(i for i in range(len(q)) if i not in some)], chance


def outcomes(proposal: Proposal, p: Callable[[tuple[int, ...]], Sequence[float]]) -> TextDistribution:
    """The distribution of the tokens after a proposal, by the definition of rejection sampling."""
    out: TextDistribution = {}

    def visit(node: int, text: tuple[int, ...], mass: float) -> None:
        target = list(p(text))
        children = [i for i, parent in enumerate(proposal.parents) if parent == node]
        q = [0.0] * len(target)
        if children:
            assert proposal.draft_probs is not None
            row = sorted(set(proposal.parents[1:])).index(node)
            for token, chance in zip(proposal.draft_probs.tokens[row], proposal.draft_probs.probs[row].tolist()):
                q[token] += chance
        for child in children:
            token, whole = proposal.tokens[child], sum(q)
            q = [chance / whole for chance in q]
            passes = min(1.0, target[token] / q[token])
            visit(child, (*text, token), mass * passes)
            mass *= 1 - passes
            if mass <= 0:
                return
            left = [max(0.0, a - b) for a, b in zip(target, q)]
            target = [chance / sum(left) for chance in left]
            q[token] = 0.0
        for token, chance in enumerate(target):
            if chance > 0:
                out[(*text, token)] = out.get((*text, token), 0.0) + mass * chance

    visit(0, (), 1.0)
    return out


def longest_branch(proposal: Proposal, p: Callable[[tuple[int, ...]], Sequence[float]]) -> TextDistribution:
    """The same for the rule of SpecSplit: an independent coin for every node, and the longest accepted branch."""
    out: TextDistribution = {}
    texts: list[tuple[int, ...]] = [()]
    chances, rows = [1.0], sorted(set(proposal.parents[1:]))
    for above, token in zip(proposal.parents[1:], proposal.tokens[1:], strict=True):
        assert proposal.draft_probs is not None
        row = rows.index(above)
        q = float(proposal.draft_probs.probs[row][proposal.draft_probs.tokens[row] == token].sum())
        texts.append((*texts[above], token))
        chances.append(min(1.0, p(texts[above])[token] / q))
    for uniforms in itertools.product((False, True), repeat=len(texts) - 1):
        accepted, mass = [True], 1.0
        for node, passes in enumerate(uniforms, 1):
            accepted.append(passes and accepted[proposal.parents[node]])
            mass *= chances[node] if passes else 1 - chances[node]
        text = max(itertools.compress(texts, accepted), key=len)
        for token, chance in enumerate(p(text)):
            out[(*text, token)] = out.get((*text, token), 0.0) + mass * chance
    return out


class Pair:
    """A target and a draft over a few tokens, their distributions by history, and a drafter of the draft."""

    def __init__(
        self, vocab: int, seed: int, plan: EngineConfig, sampling: SamplingParams, sharpness: float = 1.5
    ) -> None:
        self.target = HistoryModel(vocab, seed)
        draft = HistoryModel(vocab, seed + 100, sharpness)
        self.vocab, self.plan, self.sampling = vocab, plan, sampling
        slots = plan.leaves_per_expansion * (plan.initial_draft_steps + 1) * (sampled_children.MAX_REROOTS + 1)
        self.drafter = make_drafter(make_runner(draft, reference, context=24, tree_slots=slots), plan)
        self._laws: dict[tuple[int, ...], list[float]] = {}
        self.outcomes = outcomes
        self.around: Callable[[LocalDrafter], LocalDrafter | Controller] = lambda drafter: drafter

    def distribution(self, text: tuple[int, ...]) -> list[float]:
        if text not in self._laws:
            logits = penalised(self.target.after([*PROMPT, *text]), PROMPT, text, self.sampling)
            self._laws[text] = filtered(logits, self.sampling).tolist()
        return self._laws[text]

    def run(self, choices: Choices, rounds: int, tokens: int) -> tuple[int, ...]:
        """Up to `rounds` rounds, verified by `self.outcomes`, until there are `tokens` tokens."""
        text: tuple[int, ...] = ()
        drafter = self.around(self.drafter)
        drafter.open(request_start(PROMPT, self.sampling))
        for _ in range(rounds):
            proposal = unpack_proposal(pack_message(drafter.propose()))
            verified = text
            new = choices.choose(
                list(
                    self.outcomes(
                        proposal, lambda below, verified=verified: self.distribution((*verified, *below))
                    ).items()
                )
            )
            text = (*text, *new)
            if len(text) >= tokens:
                break
            drafter.grow()
            drafter.observe(VerifyResult(1, proposal.round, proposal.prefix_len, (0,) * len(new), new))
        return text

    def enumerate(self, monkeypatch: pytest.MonkeyPatch, rounds: int, tokens: int) -> tuple[float, int]:
        """The distance between the distribution of the first `tokens` tokens and the target's, and the number of
        runs."""
        choices, found, count = Choices(), {}, 0

        def order(children: SampledChildren, q: Tensor) -> Tensor:
            return torch.tensor([choices.choose(list(orders(row, self.plan.children_per_leaf))) for row in q.tolist()])

        monkeypatch.setattr(SampledChildren, "_sample_order", order)
        for _ in choices.runs():
            count += 1
            for text, mass in self.completed(self.run(choices, rounds, tokens)[:tokens], tokens):
                found[text] = found.get(text, 0.0) + mass * choices.mass
        assert sum(found.values()) == pytest.approx(1)
        return distance(found, dict(self.completed((), tokens))), count

    def completed(self, text: tuple[int, ...], tokens: int) -> Iterator[tuple[tuple[int, ...], float]]:
        """All continuations of the text to `tokens` tokens under the target, with their probabilities."""
        if len(text) == tokens:
            yield text, 1.0
            return
        for token, chance in enumerate(self.distribution(text)):
            for longer, mass in self.completed((*text, token), tokens):
                yield longer, chance * mass
