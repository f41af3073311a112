"""Prefix cache on real ranks: however prompts are edited, cut off or lost in between, every text equals that of a fresh
prefill."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swiftspec.llm_engine import LLMEngine
from tests.support.rank_jobs import Json, sampling_from
from tests.support.ranks import Pool
from tests.support.tiny_checkpoints import make_checkpoint

GREEDY = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
WARM = {"temperature": 0.9, "seed": 4, "presence_penalty": 0.3, "max_tokens": 20, "ignore_eos": True}
GUIDED = GREEDY | {"guidance_scale": 2.0, "negative_prompt_ids": [*range(50, 10, -1)]}
A, B = list(range(1, 51)), [*range(1, 11), *range(60, 20, -1)]
SPLITS: dict[str, tuple[int, Json]] = {
    "serial on 2": (2, {"mode": "serial", "target_tp": 2}),
    "async 1 + 1": (2, {"mode": "async", "target_tp": 1, "draft_tp": 1, "draft_steps": 2}),
    "async 2 + 1": (3, {"mode": "async", "target_tp": 2, "draft_tp": 1, "draft_steps": 2}),
    "async 1 + 2": (3, {"mode": "async", "target_tp": 1, "draft_tp": 2, "draft_steps": 2}),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("pair")
    shape: dict[str, Any] = {"vocab": 64, "dtype": torch.float64, "num_key_value_heads": 4}
    make_checkpoint(folder / "target", seed=1, layers=2, **shape)
    make_checkpoint(folder / "draft", seed=2, layers=1, **shape)
    return str(folder / "target"), str(folder / "draft")


@pytest.fixture(scope="module")
def requests(pair: tuple[str, str]) -> list[tuple[list[int], Json, list[int], int]]:
    """Prompt, parameters, the answer after a fresh prefill, and the number of cached tokens."""
    fresh, texts = LLMEngine(pair[0], dtype=torch.float64, prefix_cache_memory=0), {"a": A, "b": B, "edited": A[:40]}
    turns = [
        ("a", GREEDY, 0), ("b", WARM, len(A[:10])), ("a", WARM, 70), ("b", GREEDY | {"cut": 2}, 70), ("a", GUIDED, 91),
        ("edited", GUIDED, 40), ("b", GREEDY, 70), ("edited", WARM, 60),
    ]  # fmt: skip
    made = []
    for turn, (name, values, cached) in enumerate(turns):
        prompt = [*texts[name], 63 - turn, 3]
        plain = {name: value for name, value in values.items() if name != "cut"}
        answer = fresh.generate(prompt, sampling_from(plain)).token_ids
        texts[name] = prompt + (answer[:1] if "cut" in values else answer)
        made.append((prompt, values, answer, cached))
    return made


@pytest.mark.parametrize(
    "split", ["async 1 + 1", *(pytest.param(name, marks=pytest.mark.slow) for name in SPLITS if name != "async 1 + 1")]
)
def test_texts_equal_those_of_a_fresh_prefill(pool: Pool, pair: tuple[str, str], requests: Any, split: str) -> None:
    ranks, plan = SPLITS[split]
    sent = [(prompt, values) for prompt, values, _, _ in requests]
    answers = pool.run(ranks, "decode", target=pair[0], draft=pair[1], plan=plan, requests=sent)[0]
    for answer, (_, values, want, cached) in zip(answers, requests, strict=True):
        assert answer["tokens"] == (want[: len(answer["tokens"])] if "cut" in values else want)
        assert answer["lost"] is None and answer["kept"] >= cached


def test_a_recovered_draft_prefills_only_missing_tokens(pool: Pool, pair: tuple[str, str], requests: Any) -> None:
    """It fails in the middle of the third answer; the target continues with its cached tokens."""
    sent = [(prompt, values) for prompt, values, _, _ in requests]
    _, plan = SPLITS["async 1 + 1"]
    arguments = {"target": pair[0], "draft": pair[1], "plan": plan, "requests": sent, "draft_fails_at": 90}
    answers = pool.run(2, "decode", **arguments)[0]
    assert sum(answer["lost"] is not None for answer in answers) == 1
    for answer, (_, values, want, cached) in zip(answers, requests, strict=True):
        assert answer["tokens"] == (want[: len(answer["tokens"])] if "cut" in values else want)
        assert answer["kept"] >= cached


@pytest.mark.slow
def test_gloo_and_a_draft_of_the_same_machine(pool: Pool, pair: tuple[str, str], requests: Any) -> None:
    """Ranks that are configured as if on different machines communicate over TCP."""
    ranks, plan = SPLITS["async 2 + 1"]
    sent = [(prompt, values) for prompt, values, _, _ in requests]
    answers = pool.run(ranks, "decode", apart=True, target=pair[0], draft=pair[1], plan=plan, requests=sent)[0]
    assert [answer["kept"] >= cached for answer, (*_, cached) in zip(answers, requests, strict=True)] == [True] * 8
    for answer, (_, values, want, _) in zip(answers, requests, strict=True):
        assert answer["tokens"] == (want[: len(answer["tokens"])] if "cut" in values else want)
