"""Request features on real ranks: a grammar, log-probabilities, and cancellation during the prefill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from swiftspec.llm_engine import LLMEngine
from swiftspec.runtime.runner import PREFILL_CHUNK_TOKENS
from tests.support.rank_jobs import Json, answer, sampling_from
from tests.support.ranks import Pool
from tests.support.tiny_checkpoints import make_checkpoint
from tests.support.toy_pair import make_pair

LIST = 'start: "[" item ("," item)* "]"\nitem: /[a-c]{1,5}/ | start'
LONG = [(5 * i + i // 7) % 60 for i in range(2 * PREFILL_CHUNK_TOKENS + 9)]  # three chunks
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
SPLITS: dict[str, tuple[int, Json]] = {
    "async 2 + 1": (3, {"mode": "async", "target_tp": 2, "draft_tp": 1, "draft_steps": 2}),
    "async 1 + 2": (3, {"mode": "async", "target_tp": 1, "draft_tp": 2, "draft_steps": 2}),
    "serial on 2": (2, {"mode": "serial", "target_tp": 2}),
    "ar on 3": (3, {"mode": "ar", "target_tp": 3}),
}
SLOW = [name for name in SPLITS if name != "async 2 + 1"]
EVERY = pytest.mark.parametrize(
    "split", ["async 2 + 1", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("spoken"))


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("long")
    shape: dict[str, Any] = {"layers": 1, "dtype": torch.float64, "num_key_value_heads": 4}
    for name, seed in (("target", 1), ("draft", 2)):
        make_checkpoint(folder / name, seed=seed, max_position_embeddings=1024, **shape)
    return folder / "target", folder / "draft"


def answers(
    pool: Pool, split: str, pair: tuple[Path, Path], requests: list[tuple[list[int], Json]], **more: Any
) -> list[Json]:
    ranks, plan = SPLITS[split][0], SPLITS[split][1] | more
    draft = None if plan["mode"] == "ar" else str(pair[1])
    return pool.run(ranks, "decode", target=str(pair[0]), draft=draft, plan=plan, requests=requests)[0]


@EVERY
def test_grammars_and_log_probabilities(pool: Pool, spoken: tuple[Path, Path], split: str) -> None:
    """A request that fails on the way leaves the ranks consistent."""
    prompt = [5, 60, 70, *range(10, 60)]
    requests: list[tuple[list[int], Json]] = [
        (prompt, {"temperature": 0, "grammar": LIST, "max_tokens": 60}),
        (prompt, {"temperature": 1.1, "seed": 3, "grammar": LIST, "max_tokens": 60, "logprobs": 2}),
        (prompt, {**GREEDY, "logprobs": 3, "prompt_logprobs": 2}),
        ([44], {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5, "logprobs": 0, "max_tokens": 15}),
        (prompt, {**GREEDY, "prompt_logprobs": 0}),
    ]
    alone = LLMEngine(spoken[0], dtype=torch.float64)
    for (prompt, values), got in zip(requests, answers(pool, split, spoken, requests), strict=True):
        want = answer(alone, prompt, dict(values))
        assert (got["tokens"], got["reason"], got["lost"]) == (want["tokens"], want["reason"], None)
        assert len(got["likelihoods"]) == len(want["likelihoods"])
        for ours, theirs in zip(got["likelihoods"], want["likelihoods"]):
            assert ours[0] == pytest.approx(theirs[0], abs=1e-9)
            assert [token for token, _ in ours[1:]] == [token for token, _ in theirs[1:]]


@EVERY
def test_a_cancelled_prefill_does_not_affect_the_next_request(pool: Pool, long: tuple[Path, Path], split: str) -> None:
    other = [*LONG[:300], 7, *LONG[301:]]
    turns = ((LONG, 1), (other, None), (LONG, 0), (other, 2), (LONG, None), (other, 4), (other, None))
    requests = [(prompt, GREEDY if polls is None else {**GREEDY, "looks": polls}) for prompt, polls in turns]
    alone = LLMEngine(long[0], dtype=torch.float64, prefix_cache_memory=0)
    want = {tuple(prompt): alone.generate(prompt, sampling_from(GREEDY)).token_ids for prompt in (LONG, other)}
    got = answers(pool, split, long, requests)
    assert got[0]["tokens"] == got[2]["tokens"] == [] and got[0]["looks"] == 2
    for (prompt, polls), each in zip(turns, got, strict=True):
        if polls is None:
            assert each["tokens"] == want[tuple(prompt)] and each["lost"] is None
        else:
            assert each["tokens"] in ([], want[tuple(prompt)])


@EVERY
@pytest.mark.parametrize("decides", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_requests_that_set_bs_and_d(pool: Pool, long: tuple[Path, Path], split: str, decides: bool) -> None:
    """Each has the same text, and ordinary requests between them have their usual rounds."""
    shapes: list[Json] = [{"verify_batch": 1}, {"verify_batch": 3}, {"draft_steps": 1}]
    if SPLITS[split][1]["mode"] == "ar":
        shapes = shapes[:1]
    values = {**GREEDY, "temperature": 0.9, "seed": 4, "max_tokens": 20}
    requests = [(LONG[:50], {**values, **shape}) for each in shapes for shape in ({}, each)]
    requests.append((LONG[:50], values))
    alone = LLMEngine(long[0], dtype=torch.float64).generate(LONG[:50], sampling_from(values)).token_ids
    got = answers(pool, split, long, requests, **({"self_switch": True, "adapt_batch": True} if decides else {}))
    for (_, shaped), each in zip(requests, got, strict=True):
        assert (each["tokens"], each["lost"]) == (alone, None)
        if shaped.get("verify_batch") == 1:
            assert each["rounds"] == len(alone) and each["draft_busy"] == 0
    assert decides or len({each["rounds"] for each in got[::2]}) == 1
