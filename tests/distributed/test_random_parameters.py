"""Whatever a request asks for, and however it is split: the text is that of plain decoding, token for token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Pool
from tests.support.tiny import make_checkpoint

VOCAB, CONTEXT = 64, 96
SPLITS: dict[str, tuple[int, dict[str, Any]]] = {
    "serial": (1, {"mode": "serial"}),
    "serial, 2 ranks": (2, {"mode": "serial", "target_tp": 2}),
    "async 1 + 1": (2, {"mode": "async", "target_tp": 1, "draft_tp": 1}),
    "async 2 + 1": (3, {"mode": "async", "target_tp": 2, "draft_tp": 1}),
    "async 1 + 2": (3, {"mode": "async", "target_tp": 1, "draft_tp": 2}),
    "async 2 + 2": (4, {"mode": "async", "target_tp": 2, "draft_tp": 2}),
}
Json = dict[str, Any]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    make_checkpoint(folder / "target", seed=0, max_position_embeddings=CONTEXT)
    make_checkpoint(folder / "draft", seed=1, layers=1, max_position_embeddings=CONTEXT)
    return folder / "target", folder / "draft"


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    ranks = Pool(4)
    yield ranks
    ranks.close()


def a_request(dice: random.Random) -> tuple[list[int], Json]:
    """A prompt and sampling parameters; each of these is left alone more often than not."""

    def some(**values: Any) -> Json:
        return {name: value for name, value in values.items() if dice.random() < 0.35}

    def tokens(most: int) -> list[int]:
        return [dice.randrange(VOCAB) for _ in range(dice.randint(1, most))]

    sampling = {
        "seed": dice.randrange(2**64),
        "max_tokens": dice.randint(1, 30),
        **some(
            temperature=dice.choice([0, 0.001, 0.3, 1.0, 1.7, 100.0]),
            top_k=dice.choice([1, 2, 7, VOCAB]),
            top_p=dice.choice([1e-6, 0.1, 0.5, 0.95]),
            min_p=dice.choice([0.01, 0.3, 1.0]),
            repetition_penalty=dice.choice([0.5, 1.3, 100.0]),
            presence_penalty=dice.uniform(-2, 2),
            frequency_penalty=dice.uniform(-2, 2),
            logit_bias={token: dice.choice([-1e9, -3.0, 2.5]) for token in tokens(5)},
            guidance_scale=dice.choice([0.0, 0.5, 1.5, 7.0]),
            ignore_eos=True,
            stop_token_ids=tokens(3),
        ),
    }
    if "guidance_scale" in sampling:
        sampling |= some(negative_prompt_ids=tokens(8))
    return tokens(dice.choice([1, 5, 60])), sampling


def a_shape(dice: random.Random) -> Json:
    """A tree of any shape."""
    sizes = {name: dice.choice([1, 2, 5, 8, 16]) for name in ("verify_batch", "draft_leaves")}
    kind = {"proposal": dice.choice(["top", "coupled"]), "catch_up": dice.random() < 0.5}
    return {**sizes, **kind, "draft_steps": dice.randint(1, 5)}


def differ(pool: Pool, pair: tuple[Path, Path], split: str, sets: int, each: int, seed: int) -> list[str]:
    """The parameter sets whose text is another than plain decoding's, `each` of them with one shape of the tree."""
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


@pytest.mark.parametrize("split", SPLITS)
def test_some_sets(pool: Pool, pair: tuple[Path, Path], split: str) -> None:
    assert differ(pool, pair, split, sets=6, each=6, seed=1) == []


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_sixty_sets(pool: Pool, pair: tuple[Path, Path], split: str) -> None:
    assert differ(pool, pair, split, sets=60, each=10, seed=2) == []
