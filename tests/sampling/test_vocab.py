"""A sampler on a sharded vocabulary gives the same results on every rank as one on the whole vocabulary."""

from __future__ import annotations

import itertools
import math
from threading import Barrier
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swiftspec.params import SamplingParams
from swiftspec.sampling.sampler import Sampler
from swiftspec.sampling.vocab import VocabShard
from tests.support.cases import examples
from tests.support.thread_group import ThreadGroup, on_ranks

PAD = 1e9  # in the rows of the head beyond the base vocabulary
ROWS = 3

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 5, 64, 90]),
    top_p=st.sampled_from([1.0, 1.0, 0.913, 0.537, 0.0113]),
    min_p=st.sampled_from([0.0, 0.0, 0.003, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.4]),
    frequency_penalty=st.sampled_from([0.0, -0.2]),
    logit_bias=st.sampled_from([{}, {0: 1.5}]),
    seed=st.integers(0, 9),
)
vocabularies = st.one_of(st.integers(1, 12), st.integers(13, 700))
KINDS = ["ties", "flat", "peaked"]


def draw_logits(kind: str, vocab: int, seed: int, dtype: torch.dtype) -> Tensor:
    noise = torch.Generator().manual_seed(seed)
    if kind == "ties":
        return torch.randint(-2, 3, (ROWS, vocab), generator=noise).to(dtype)
    return torch.randn(ROWS, vocab, generator=noise, dtype=dtype) * (0.01 if kind == "flat" else 4)


def piece(logits: Tensor, group: ThreadGroup, extra: int) -> Tensor:
    """The logits of this rank's shard: `extra` rows beyond the base vocabulary, and padding to equal widths."""
    width = math.ceil((logits.shape[1] + extra) / group.size)
    padded = F.pad(logits, (0, width * group.size - logits.shape[1]), value=PAD)
    return padded[:, group.rank * width :][:, :width]


def samplers(p: SamplingParams, vocab: int, group: ThreadGroup | None, extra: int = 0) -> Sampler:
    shard = None if group is None else VocabShard(group, math.ceil((vocab + extra) / group.size), vocab)
    sampler = Sampler(p, [vocab - 1, 0], vocab, "cpu", shard=shard)
    sampler.observe([vocab // 2, 0, vocab // 2])
    return sampler


cases = given(
    st.sampled_from(KINDS),
    vocabularies,
    st.integers(1, 7),
    st.integers(0, 9),
    params,
    st.integers(0, 999),
    st.sampled_from([torch.float32, torch.float64]),
)


@cases
@settings(max_examples=examples(100))
def test_draws(kind: str, vocab: int, size: int, extra: int, p: SamplingParams, seed: int, dtype: torch.dtype) -> None:
    logits, positions = draw_logits(kind, vocab, seed, dtype), torch.tensor([7, 9, 40])
    paths = [[vocab - 1], [], [0, vocab // 2]]
    want = samplers(p, vocab, None).draw(logits, paths, positions)
    for got in on_ranks(size, lambda g: samplers(p, vocab, g, extra).draw(piece(logits, g, extra), paths, positions)):
        assert torch.equal(got, want) and got.dtype == want.dtype


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_filters(kind: str, size: int) -> None:
    """Every rank keeps exactly the tokens and logits that the whole vocabulary gives: each filter combined with each
    other."""
    vocab, paths = 700, [[699], [], [0, 350]]
    logits = draw_logits(kind, vocab, size, torch.float64)
    some = [
        SamplingParams(temperature=0.8, top_k=k, top_p=p, min_p=m)
        for k, p, m in itertools.product((0, 3, 64, 90), (1.0, 0.913, 0.0113), (0.0, 0.003, 0.2))
    ]
    want = [samplers(p, vocab, None).process_logits(logits, paths) for p in some]
    ranks = on_ranks(size, lambda g: [samplers(p, vocab, g).process_logits(piece(logits, g, 0), paths) for p in some])
    for i, whole in enumerate(want):
        assert torch.equal(torch.cat([rank[i] for rank in ranks], 1), whole), some[i]


@cases
@settings(max_examples=examples(60))
def test_children(
    kind: str, vocab: int, size: int, extra: int, p: SamplingParams, seed: int, dtype: torch.dtype
) -> None:
    logits = draw_logits(kind, vocab, seed, dtype)
    paths = [[vocab - 1], [], [0, vocab // 2]]
    coupled = seed % 2 == 0

    def children(group: ThreadGroup | None, k: int = 8) -> tuple[Tensor, Tensor]:
        own = logits if group is None else piece(logits, group, extra)
        return samplers(p, vocab, group, extra).children(
            own, paths, torch.tensor([7, 9, 40]), k=k, coupled=coupled, tau=0.7
        )

    tokens, logprobs = children(None)
    order, values = children(None, vocab)
    every = torch.full_like(values, -math.inf).scatter_(1, order, values)
    found = on_ranks(size, children)
    for got, values in found:
        assert torch.equal(got, found[0][0]) and torch.equal(values, found[0][1])
        assert got.shape == tokens.shape and values.dtype == logprobs.dtype and (values <= 0).all()
        torch.testing.assert_close(values, logprobs, rtol=1e-4, atol=1e-5)
        for row, (own, value) in enumerate(zip(got, values)):  # the order of equal ones is unspecified
            alive = value > -math.inf
            assert len(set(own[alive].tolist())) == int(alive.sum()), "a token comes once"
            torch.testing.assert_close(every[row, own[alive]], value[alive], rtol=1e-4, atol=1e-5)


def test_of_equally_likely_tokens_the_lowest_is_drawn() -> None:
    logits = torch.zeros(ROWS, 20)
    logits[1, [7, 19]] = 1
    logits[2] = -math.inf
    greedy = SamplingParams(temperature=0)
    for got in on_ranks(3, lambda g: samplers(greedy, 20, g).draw(piece(logits, g, 0), None, torch.arange(ROWS))):
        assert got.tolist() == [0, 7, -1]


def test_a_draft_with_nan_logits_has_dead_children() -> None:
    logits = torch.zeros(ROWS, 20)
    logits[1, 17] = float("nan")  # in one shard only
    greedy = SamplingParams(temperature=0)
    ask: dict[str, Any] = {"k": 4}
    for _, values in on_ranks(
        3, lambda g: samplers(greedy, 20, g).children(piece(logits, g, 0), None, torch.arange(ROWS), **ask)
    ):
        assert (values[1] == -math.inf).all() and values[0].isfinite().all()


class Counting(ThreadGroup):
    """Records the number of columns of each message."""

    def __init__(self, group: ThreadGroup) -> None:
        self.__dict__ = dict(group.__dict__)
        self.columns: list[int] = []

    def all_gather(self, x: Tensor) -> Tensor:
        self.columns.append(x.shape[-1])
        return super().all_gather(x)


@pytest.mark.parametrize(
    ("kind", "filters", "messages"),
    [
        ("peaked", {}, [2]),
        ("peaked", {"temperature": 0.0, "top_k": 5}, [2]),
        ("peaked", {"top_k": 50}, [65, 2]),
        ("peaked", {"top_p": 0.9}, [65, 2]),
        ("peaked", {"top_k": 50, "top_p": 0.9, "min_p": 0.01}, [65, 2]),
        ("flat", {"top_p": 0.9}, [65, 300, 2]),
        ("peaked", {"top_k": 250}, [65, 300, 2]),
        ("ties", {"top_k": 3}, [65, 300, 2]),
    ],
)
def test_all_logits_are_gathered_only_if_a_filter_needs_them(
    kind: str, filters: dict[str, Any], messages: list[int]
) -> None:
    logits = draw_logits(kind, 900, 1, torch.float64)

    def draw(group: ThreadGroup) -> list[int]:
        counting = Counting(group)
        samplers(SamplingParams(**filters), 900, counting).draw(piece(logits, group, 0), None, torch.arange(ROWS))
        return counting.columns

    assert on_ranks(3, draw) == [messages] * 3


def test_more_ranks_than_tokens() -> None:
    shards = [VocabShard(ThreadGroup(rank, 7, Barrier(7), []), 2, 5) for rank in range(7)]
    assert [list(shard.tokens) for shard in shards] == [[0, 1], [2, 3], [4], [], [], [], []]
