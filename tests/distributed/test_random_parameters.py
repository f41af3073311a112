"""For any request parameters and any split the text equals that of autoregressive decoding, token by token."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Pool
from tests.support.requests import VOCAB, a_request, a_shape
from tests.support.tiny_checkpoints import make_checkpoint

CONTEXT = 96
SPLITS: dict[str, tuple[int, dict[str, Any]]] = {
    "serial": (1, {"mode": "serial"}),
    "serial, 2 ranks": (2, {"mode": "serial", "target_tp": 2}),
    "async 1 + 1": (2, {"mode": "async", "target_tp": 1, "draft_tp": 1}),
    "async 2 + 1": (3, {"mode": "async", "target_tp": 2, "draft_tp": 1}),
    "async 1 + 2": (3, {"mode": "async", "target_tp": 1, "draft_tp": 2}),
    "async 2 + 2": (4, {"mode": "async", "target_tp": 2, "draft_tp": 2}),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    make_checkpoint(folder / "target", vocab=VOCAB, seed=0, max_position_embeddings=CONTEXT)
    make_checkpoint(folder / "draft", vocab=VOCAB, seed=1, layers=1, max_position_embeddings=CONTEXT)
    return folder / "target", folder / "draft"


def differ(pool: Pool, pair: tuple[Path, Path], split: str, sets: int, each: int, seed: int) -> list[str]:
    """The parameter sets whose text differs from that of autoregressive decoding; `each` of them with one tree
    shape."""
    dice, found = random.Random(seed), list[str]()
    target, draft = map(str, pair)
    for _ in range(0, sets, each):
        ranks, plan = SPLITS[split]
        shape, requests = a_shape(dice), [a_request(dice) for _ in range(each)]
        want = pool.run(1, "decode", target=target, draft=None, plan={"mode": "ar"}, requests=requests)[0]
        got = pool.run(ranks, "decode", target=target, draft=draft, plan=plan | shape, requests=requests)[0]
        for request, ours, plain in zip(requests, got, want, strict=True):
            if (ours["tokens"], ours["reason"]) != (plain["tokens"], plain["reason"]):
                found.append(f"{split}, {shape}, {request}: {ours['tokens']}, not {plain['tokens']}")
    return found


@pytest.mark.parametrize("split", [*SPLITS][:4])
def test_a_few_random_parameter_sets(pool: Pool, pair: tuple[Path, Path], split: str) -> None:
    assert differ(pool, pair, split, sets=6, each=6, seed=1) == []


@pytest.mark.parametrize("sets", [pytest.param(24, marks=pytest.mark.slow), pytest.param(96, marks=pytest.mark.long)])
@pytest.mark.parametrize("split", SPLITS)
def test_many_random_parameter_sets(pool: Pool, pair: tuple[Path, Path], split: str, sets: int) -> None:
    assert differ(pool, pair, split, sets, each=8, seed=2) == []
