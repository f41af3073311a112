"""Target logits that are not finite end the request with a one-line error, in every mode and on every rank, and only
that request; those of the draft only cost speed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from swiftspec.backends.cpu import cpu as host
from swiftspec.backends.reference import reference
from swiftspec.backends.reference.sampling import Scores
from swiftspec.backends.unfused import unfused
from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.errors import NonFiniteLogits
from swiftspec.llm_engine import LLMEngine
from swiftspec.params import SamplingParams
from tests.support.cases import fast_first
from tests.support.ranks import Pool
from tests.support.tiny_checkpoints import make_checkpoint

BAD_TOKEN = 7  # whose embedding is damaged
GOOD, BAD = [5, 17, 3, 29], [5, BAD_TOKEN, 3, 29]
VALID = SamplingParams(seed=3, max_tokens=12, ignore_eos=True, logit_bias={BAD_TOKEN: -1e9})
REQUESTS = {
    "sampled": VALID,
    "greedy": replace(VALID, temperature=0.0),
    "filtered": replace(VALID, top_k=20, top_p=0.9, min_p=0.01),
    "top-p": replace(VALID, top_p=0.9),
    "penalised": replace(VALID, repetition_penalty=1.2, frequency_penalty=0.1),
    "guided": replace(VALID, guidance_scale=1.5, negative_prompt_ids=(9, 4)),
}
PLANS: dict[str, dict[str, Any]] = {
    "ar": {"mode": "ar"},
    "serial": {"mode": "serial"},
    "reject": {"mode": "serial", "verify": "reject"},
}


def damage(path: Path, tensor: str, change: Callable[[Tensor], Any]) -> None:
    weights = load_file(path / "model.safetensors")
    change(weights[tensor])
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def a_token_is_nan(path: Path) -> None:
    damage(path, "model.embed_tokens.weight", lambda rows: rows[BAD_TOKEN].fill_(math.nan))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a draft, and both with one token whose embedding is NaN."""
    folder = tmp_path_factory.mktemp("not_finite")
    for name, seed in (("target", 0), ("draft", 1)):
        for kind in ("sound", "damaged"):
            shape = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
            make_checkpoint(folder / kind / name, seed=seed, layers=1, **shape)
        a_token_is_nan(folder / "damaged" / name)
    return folder


def engine(folder: Path, kind: str, plan: dict[str, Any], dtype: torch.dtype, draft_kind: str = "sound") -> LLMEngine:
    draft = None if plan["mode"] == "ar" else folder / draft_kind / "draft"
    return LLMEngine(folder / kind / "target", draft, EngineConfig(**plan), dtype=dtype)


def one_fails_the_next_is_sound(damaged: LLMEngine, sound: LLMEngine, sampling: SamplingParams) -> None:
    want = sound.generate(GOOD, sampling).token_ids
    for _ in range(2):
        with pytest.raises(NonFiniteLogits, match="logits are not finite"):
            damaged.generate(BAD, sampling)
        assert damaged.generate(GOOD, sampling).token_ids == want


@pytest.mark.sampled(3)
@pytest.mark.parametrize("request_", fast_first(REQUESTS.values(), 1), ids=list(REQUESTS))
@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["plain torch", "native"])
def test_logits_that_are_not_finite_end_only_that_request(
    models: Path, plan: dict[str, Any], request_: SamplingParams, dtype: torch.dtype
) -> None:
    if plan.get("verify") == "reject" and request_.greedy:
        pytest.skip("proposal sample needs a temperature")
    sound, damaged = (engine(models, kind, plan, dtype) for kind in ("sound", "damaged"))
    one_fails_the_next_is_sound(damaged, sound, request_)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("exact", [0, 2])
@pytest.mark.parametrize("side", ["target", "draft"])
def test_logits_that_are_not_finite_end_a_population(models: Path, exact: int, side: str) -> None:
    plan = {"mode": "smc", "population": PopulationConfig(smc_exact=exact)}
    kinds = ("damaged", "sound") if side == "target" else ("sound", "damaged")
    damaged = engine(models, kinds[0], plan, torch.float64, kinds[1])
    one_fails_the_next_is_sound(damaged, engine(models, "sound", plan, torch.float64), VALID)
    filtered = replace(VALID, top_k=20)
    with pytest.raises(NonFiniteLogits):
        damaged.generate(BAD, filtered)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["plain torch", "native"])
@pytest.mark.parametrize("plan", [PLANS["serial"], PLANS["reject"]], ids=["match", "reject"])
def test_a_broken_draft_costs_speed_only(models: Path, plan: dict[str, Any], dtype: torch.dtype) -> None:
    broken = engine(models, "sound", plan, dtype, "damaged")
    plain = engine(models, "sound", PLANS["ar"], dtype)
    sampling = replace(VALID, temperature=1.0)
    for prompt in (BAD, GOOD):
        answer = broken.generate(prompt, sampling)
        assert len(answer.token_ids) == 12
        if plan is PLANS["serial"]:
            assert answer.token_ids == plain.generate(prompt, sampling).token_ids


DAMAGE: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "one row of the head": ("lm_head.weight", lambda rows: rows[60].fill_(math.nan)),
    "infinite row of the head": ("lm_head.weight", lambda rows: rows[60].fill_(math.inf)),
    "the norm": ("model.norm.weight", lambda row: row[3].fill_(math.nan)),
    "a layer": ("model.layers.0.mlp.down_proj.weight", lambda rows: rows[0].fill_(math.inf)),
}


@pytest.mark.parametrize("where", DAMAGE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["plain torch", "native"])
def test_weights_that_are_not_finite_are_detected_in_any_tensor(tmp_path: Path, where: str, dtype: torch.dtype) -> None:
    make_checkpoint(tmp_path, hidden_size=64, intermediate_size=64, num_attention_heads=2, layers=1)
    damage(tmp_path, *DAMAGE[where])
    llm = LLMEngine(tmp_path, None, EngineConfig(mode="ar"), dtype=dtype)
    for sampling in (REQUESTS["sampled"], REQUESTS["greedy"], REQUESTS["top-p"]):
        with pytest.raises(NonFiniteLogits):
            llm.generate(GOOD, sampling)


RANKS: dict[str, tuple[int, dict[str, Any], str]] = {
    "serial": (2, {"mode": "serial", "target_tp": 2}, "float64"),
    "native serial": (2, {"mode": "serial", "target_tp": 2}, "bfloat16"),
    "reject": (2, {"mode": "serial", "target_tp": 2, "verify": "reject"}, "float64"),
    "smc": (2, {"mode": "smc", "target_tp": 2, "population": {}}, "float64"),
    "async": (3, {"mode": "async", "target_tp": 2, "draft_tp": 1}, "float64"),
}


@pytest.mark.parametrize("case", fast_first(RANKS.values(), 2), ids=list(RANKS))
def test_all_ranks_agree_on_logits_that_are_not_finite(
    models: Path, pool: Pool, case: tuple[int, dict[str, Any], str]
) -> None:
    """The job continues: the ranks agree on the next request."""
    count, plan, dtype = case
    names = ("sampled",) if plan["mode"] == "smc" or "verify" in plan else ("sampled", "filtered", "greedy")
    requests = []
    for name in names:
        sampling = REQUESTS[name]
        values = {
            "seed": 3, "max_tokens": 12, "ignore_eos": True, "logit_bias": {BAD_TOKEN: -1e9}, "top_k": sampling.top_k,
            "top_p": sampling.top_p, "min_p": sampling.min_p, "temperature": sampling.temperature,
        }  # fmt: skip
        requests += [(BAD, values), (GOOD, values), (BAD, values), (GOOD, values)]
    draft = str(models / "sound" / "draft")
    got = pool.run(count, "decode", target=str(models / "damaged" / "target"), draft=draft, plan=plan,
                   requests=requests, dtype=dtype)[0]  # fmt: skip
    want = pool.run(count, "decode", target=str(models / "sound" / "target"), draft=draft, plan=plan,
                    requests=requests[1::2], dtype=dtype)[0]  # fmt: skip
    assert all("not finite" in answer["refused"] for answer in got[::2])
    assert [answer["tokens"] for answer in got[1::2]] == [answer["tokens"] for answer in want]


@pytest.mark.parametrize("ops", [reference, unfused, host], ids=["reference", "unfused", "native"])
def test_sampling_detects_values_that_are_not_finite(ops: Any) -> None:
    """At any position of a row; other rows keep their tokens."""
    chance = random.Random(0)
    for columns in (1, 15, 16, 17, 100):
        for value in (math.nan, math.inf):
            logits = torch.randn(3, columns, generator=torch.Generator().manual_seed(columns))
            want = logits.argmax(-1)
            logits[1, chance.randrange(columns)] = value
            assert ops.draw(logits, columns).tolist() == [want[0], -1, want[2]]
            noise, rows = torch.zeros(1, columns), torch.zeros(3, dtype=torch.int64)
            assert ops.draw(logits, columns, Scores(0.5, None, noise, rows)).tolist() == [want[0], -1, want[2]]
    nothing = torch.full((1, 20), -math.inf)
    assert ops.draw(nothing, 20).tolist() == [-1]
    nothing[0, 13] = -5.0
    assert ops.draw(nothing, 20).tolist() == [13], "what a filter forbids is -inf"
    beyond = torch.tensor([[1.0, 2.0, math.nan]])
    assert ops.draw(beyond, 2).tolist() == [1], "columns beyond the vocabulary do not count"
