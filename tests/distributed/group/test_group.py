"""Invariants 1 and 5 on real ranks: for every split the text equals that of autoregressive decoding, token by token."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from swiftspec import _C
from swiftspec.config import DEFAULT_DRAFT_STEPS, EngineConfig
from swiftspec.llm_engine import LLMEngine
from swiftspec.tree.tree import EXPANSION_YIELD
from tests.model.architectures.test_gemma4 import NATIVE as GEMMA4_E
from tests.model.test_loader import quantise
from tests.support import slow_reference
from tests.support.rank_jobs import sampling_from
from tests.support.ranks import Pool
from tests.support.roles import drafter_of, make_drafter, replace_roles
from tests.support.tiny_checkpoints import make_checkpoint, make_pair

PROMPT = [5, 17, 3, 29, 11, 8, 2, 30]
GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
SAMPLED = {
    "temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.2, "logit_bias": {"7": 1.5},
    "seed": 1234, "max_tokens": 40, "ignore_eos": True,
}  # fmt: skip
GUIDED = {"guidance_scale": 2.0, "negative_prompt_ids": [9, 4, 40]}
REQUESTS = [
    (PROMPT, GREEDY), (PROMPT, SAMPLED), ([9, 4, 40], {**SAMPLED, "seed": 7, "top_p": 1.0, "top_k": 5}),
    (PROMPT, GREEDY | GUIDED), (PROMPT, SAMPLED | GUIDED),
]  # fmt: skip
FEW = REQUESTS[:2]  # the parameters are irrelevant where the property is about ranks
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64},
    "qwen2": {"family": "qwen2", "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48, "tie": True},
    "moe": {"family": "qwen3_moe", "num_attention_heads": 8, "hidden_size": 64},
    "gpt_oss": {"family": "gpt_oss", "num_attention_heads": 6, "head_dim": 8},
    "shared expert": {"family": "qwen2_moe", "num_attention_heads": 8, "hidden_size": 64},
}
Pairs = dict[str, tuple[Path, Path]]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """By kind: a target, and the same model with noise on its weights. The last target is int4."""
    folder = tmp_path_factory.mktemp("pairs")
    pairs = {name: make_pair(folder / name, **shape) for name, shape in SHAPES.items()}
    pairs["awq"] = make_pair(folder / "awq", **SHAPES["llama"], intermediate_size=64)
    quantise(pairs["awq"][0], "awq")
    return pairs


@functools.cache
def plain(target: Path) -> list[list[int]]:
    llm = LLMEngine(target, dtype=torch.float64)
    return [llm.generate(prompt, sampling_from(values)).token_ids for prompt, values in REQUESTS]


def decode(pool: Pool, pair: tuple[Path, Path], plan: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    ranks = plan["target_tp"] + (plan["draft_tp"] if plan["mode"] == "async" else 0)
    arguments = {"target": str(pair[0]), "draft": str(pair[1]), "plan": plan, "requests": REQUESTS} | more
    return pool.run(ranks, "decode", **arguments)[0]


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def long(*values: Any) -> Any:
    """A combination of a pair and a split that is covered separately by other cases."""
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("kind", "x", "y"),
    [
        *[("llama", 1, 1), slow("llama", 2, 1), slow("llama", 3, 1), slow("llama", 2, 2), slow("llama", 1, 3)],
        *[long("qwen2", 1, 1), long("qwen2", 2, 1), slow("qwen2", 3, 1), long("qwen2", 2, 2), long("qwen2", 1, 3)],
        *[slow("awq", 1, 1), long("awq", 2, 1), long("awq", 3, 1), slow("awq", 2, 2), long("awq", 1, 3)],
        *[slow("moe", 1, 1), slow("moe", 2, 1), slow("gpt_oss", 1, 1), slow("gpt_oss", 2, 1)],
        *[slow("shared expert", 1, 1), slow("shared expert", 2, 1)],
    ],
)
def test_async_equals_ar(pool: Pool, pairs: Pairs, kind: str, x: int, y: int) -> None:
    pair = pairs[kind]
    plan = {"mode": "async", "target_tp": x, "draft_tp": y, "draft_steps": 3}
    answers = decode(pool, pair, plan)
    assert [answer["tokens"] for answer in answers] == plain(pair[0])
    assert all(answer["lost"] is None for answer in answers)
    assert answers[0]["rounds"] < 34 and answers[0]["draft_busy"] > 0


@pytest.mark.parametrize(
    ("kind", "mode", "x", "y"),
    [
        *[("llama", "serial", 2, -1), slow("llama", "serial", 3, -1), slow("llama", "ar", 3, -1)],
        *[long("qwen2", "serial", 2, -1), slow("qwen2", "serial", 3, -1), long("qwen2", "ar", 3, -1)],
        *[slow("awq", "serial", 2, -1), long("awq", "serial", 3, -1), slow("awq", "ar", 3, -1)],
        *[slow("moe", "serial", 2, -1), slow("gpt_oss", "serial", 3, -1), slow("shared expert", "serial", 2, -1)],
    ],
)
def test_one_group_equals_ar(pool: Pool, pairs: Pairs, kind: str, mode: str, x: int, y: int) -> None:
    pair = pairs[kind]
    answers = decode(pool, pair, {"mode": mode, "target_tp": x, "draft_tp": y})
    assert [answer["tokens"] for answer in answers] == plain(pair[0])


@pytest.mark.parametrize(("size", "filters"), [(2, {}), slow(3, {"top_k": 9, "top_p": 0.9})])
def test_a_population_on_a_group_equals_one_rank(pool: Pool, pairs: Pairs, size: int, filters: Any) -> None:
    """Some particles end at a stop token; then the next request follows."""
    pair = pairs["llama"]
    values = {"temperature": 0.8, "max_tokens": 40, "stop_token_ids": [3, 7], "logit_bias": {"3": -1.0}, **filters}
    requests = [(PROMPT, {**values, "seed": seed}) for seed in (1, 2)]
    shape = {"particles": 3, "smc_draft_tokens": 2, "power": 1.5}
    alone, group = (
        decode(pool, pair, {"mode": "smc", "target_tp": ranks, "population": shape}, requests=requests)
        for ranks in (1, size)
    )
    results = [(answer["tokens"], answer["reason"], answer["rounds"]) for answer in group]
    assert results == [(answer["tokens"], answer["reason"], answer["rounds"]) for answer in alone]
    assert any(len(tokens) > 10 for tokens, _, _ in results)


@pytest.mark.parametrize(
    ("size", "plan"),
    [
        (2, {"mode": "smc", "population": {"particles": 3, "smc_draft_tokens": 2, "power": 1.5, "smc_groups": 3}}),
        slow(3, {"mode": "serial", "draft_steps": 3, "max_num_seqs": 3}),
        slow(2, {"mode": "serial", "draft_steps": 3, "max_num_seqs": 3, "verify": "reject"}),
    ],
)
def test_several_requests_on_a_group_equal_one_rank(pool: Pool, pairs: Pairs, size: int, plan: Any) -> None:
    """Requests are admitted and released while others continue: some end at a stop token, one is cancelled, and one
    takes the sequence of another."""
    warm = {"temperature": 0.8, "stop_token_ids": [3, 7], "logit_bias": {"3": -1.0}}
    cut = {"max_tokens": 60, "cut": 4, "stop_token_ids": [], "ignore_eos": True}
    shapes: list[Any] = [{"max_tokens": 40}, {"max_tokens": 9}, cut, {"top_k": 9}, {"top_p": 0.9}]
    if plan["mode"] == "serial":
        shapes.append({"guidance_scale": 2.0, "negative_prompt_ids": [5, 6, 7, 8]})
    requests = [
        (PROMPT[: 3 + seed], {"max_tokens": 30, **warm, **shape, "seed": seed}) for seed, shape in enumerate(shapes)
    ]
    alone, group = (
        decode(pool, pairs["llama"], plan | {"target_tp": ranks}, requests=requests, together=True)
        for ranks in (1, size)
    )
    for answer, other in zip(group, alone, strict=True):
        assert answer["reason"] == other["reason"]
        length = min(len(answer["tokens"]), len(other["tokens"])) if answer["reason"] == "abort" else None
        assert answer["tokens"][:length] == other["tokens"][:length]
    assert group[2]["reason"] == "abort" and any(len(answer["tokens"]) > 10 for answer in group)


@pytest.mark.skipif(_C.level() == "none", reason="this CPU has no AVX2")
@pytest.mark.parametrize(("x", "y"), [(1, 1), slow(2, 1), slow(1, 2), slow(2, 2)])
def test_native_operators_in_bfloat16(pool: Pool, tmp_path: Path, x: int, y: int) -> None:
    """bfloat16 has many near-ties, and a group rounds partial sums: the reference is autoregressive decoding on the
    same number of target ranks."""
    pair = make_pair(tmp_path, **SHAPES["llama"], head_dim=16, intermediate_size=64)
    quantise(pair[0], "awq")
    split = {"target_tp": x, "draft_tp": y, "draft_steps": 3}
    wanted = decode(pool, pair, {"mode": "ar", "target_tp": x}, dtype="bfloat16")
    for mode in ("async", "serial"):
        plan = {"mode": mode, **split} if mode == "async" else {"mode": mode, "target_tp": x}
        answers = decode(pool, pair, plan, dtype="bfloat16")
        assert [answer["tokens"] for answer in answers] == [answer["tokens"] for answer in wanted]
        assert answers[0]["rounds"] < wanted[0]["rounds"]


@pytest.mark.skipif(_C.level() == "none", reason="this CPU has no AVX2")
@pytest.mark.slow
def test_native_ranks_with_shared_kv_layers_and_per_layer_embeddings(pool: Pool, tmp_path: Path) -> None:
    """The matrices of per-layer embeddings are whole on every rank: their products must not be summed."""
    pair = make_pair(tmp_path, tie=False, **GEMMA4_E)
    wanted = plain(pair[0])
    for mode in ("ar", "serial"):
        answers = decode(pool, pair, {"mode": mode, "target_tp": 2}, dtype="float32")
        assert [answer["tokens"] for answer in answers] == wanted


@pytest.mark.parametrize(
    ("mode", "x", "y"), [slow("async", 1, 1), slow("async", 1, 2), slow("async", 2, 1), slow("serial", 2, 2)]
)
def test_pausing_and_resuming_the_draft_changes_no_token(pool: Pool, pairs: Pairs, mode: str, x: int, y: int) -> None:
    plan = {"mode": mode, "target_tp": x, "draft_tp": y, "draft_steps": 3, "self_switch": True}
    answers = decode(pool, pairs["llama"], plan, by_dice=0.2)
    assert [answer["tokens"] for answer in answers] == plain(pairs["llama"][0])
    assert all(answer["lost"] is None and answer["plain_rounds"] > 2 for answer in answers)


REJECT = {"verify": "reject", "verify_batch": 8, "draft_leaves": 8}  # defaults depend on the mode


@pytest.mark.parametrize(
    ("mode", "x", "y", "how"),
    [
        ("async", 1, 1, REJECT),
        slow("async", 1, 2, {"calibration": 1.3}),
        *(slow(mode, x, y, REJECT) for mode, x, y in (("async", 2, 1), ("serial", 2, 2), ("async", 2, 2))),
    ],
)
def test_rounds_are_the_same_in_groups(
    pool: Pool, pairs: Pairs, mode: str, x: int, y: int, how: dict[str, Any]
) -> None:
    """For a fixed d the tree depends on nothing else; neither does the text of rejection sampling."""
    pair = pairs["llama"]
    shape: dict[str, Any] = {"draft_steps": 3, **how}
    alone = LLMEngine(*pair, EngineConfig(**shape), dtype=torch.float64)
    if mode == "async":
        replace_roles(alone, make_drafter(drafter_of(alone).runner, alone.config, ahead=True))
    sampled = [(prompt, values) for prompt, values in REQUESTS if values["temperature"] > 0]
    expected = [alone.generate(prompt, sampling_from(values)) for prompt, values in sampled]
    answers = decode(pool, pair, {"mode": mode, "target_tp": x, "draft_tp": y, **shape}, requests=sampled)
    assert [(a["tokens"], a["rounds"]) for a in answers] == [(e.token_ids, e.stats.rounds) for e in expected]
    assert all(a["lost"] is None and a["rounds"] < 34 for a in answers)


@functools.cache
def logprobs(path: Path) -> slow_reference.LogProbs:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)

    @functools.cache
    def of(context: tuple[int, ...]) -> list[float]:
        with torch.no_grad():
            return model(torch.tensor([context])).logits[0, -1].log_softmax(-1).tolist()

    return lambda context: of(tuple(context))


@pytest.mark.parametrize("catch_up", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize(("bs", "w", "d"), [slow(8, 8, 4), slow(4, 2, 9), slow(4, 2, 3), slow(6, 1, 1)])
def test_rounds_equal_the_reference_algorithm_one_round_late(
    pool: Pool, pairs: Pairs, bs: int, w: int, d: int, catch_up: bool
) -> None:
    pair = pairs["llama"]
    worth = EXPANSION_YIELD if catch_up else None
    distributions = logprobs(pair[0]), logprobs(pair[1])
    text, count = slow_reference.rounds(*distributions, PROMPT, 40, bs=bs, w=w, d=d, ahead=True, worth=worth)
    plan = {"mode": "async", "verify_batch": bs, "draft_leaves": w, "draft_steps": d, "calibration": 1.0}
    plan["catch_up"] = catch_up
    for draft_tp in (1, 2):
        split = {"target_tp": 1, "draft_tp": draft_tp}
        answer = decode(pool, pair, plan | split, requests=[(PROMPT, GREEDY)])[0]
        assert (answer["tokens"], answer["rounds"]) == (text, count)


@pytest.mark.parametrize("call", [1, slow(3), 4, slow(5), slow(20)])
def test_a_draft_group_that_fails_costs_speed_only(pool: Pool, pairs: Pairs, call: int) -> None:
    pair = pairs["llama"]
    plan = {"mode": "async", "target_tp": 1, "draft_tp": 1, "draft_steps": 3}
    answers = decode(pool, pair, plan, requests=FEW, draft_fails_at=call)
    assert [answer["tokens"] for answer in answers] == plain(pair[0])[:2]
    assert [answer["lost"] for answer in answers] == ["the draft model broke", None]
    assert answers[0]["rounds"] > answers[1]["rounds"] * 0.9


def test_d_follows_from_the_measured_times(pool: Pool, pairs: Pairs) -> None:
    pair = pairs["llama"]
    answers = decode(pool, pair, {"mode": "async", "target_tp": 1, "draft_tp": 1}, requests=FEW)
    assert 1 <= answers[0]["steps"] <= 16
    assert [answer["tokens"] for answer in answers] == plain(pair[0])[:2]


def test_a_draft_that_fails_while_d_is_measured_is_retried(pool: Pool, pairs: Pairs) -> None:
    plan = {"mode": "async", "target_tp": 1, "draft_tp": 1}
    answers = decode(pool, pairs["llama"], plan, requests=FEW, draft_fails_at=1)
    assert [answer["tokens"] for answer in answers] == plain(pairs["llama"][0])[:2]
    assert answers[0]["steps"] == DEFAULT_DRAFT_STEPS and answers[0]["lost"] is None


def test_an_inconsistent_draft_group_is_lost_and_the_job_continues(pool: Pool, pairs: Pairs) -> None:
    plan = {"mode": "async", "target_tp": 1, "draft_tp": 2, "draft_steps": 3}
    answers = decode(pool, pairs["llama"], plan, requests=FEW, draft_fails_at=8)
    assert [answer["tokens"] for answer in answers] == plain(pairs["llama"][0])[:2]
    assert all("the draft model broke" in answer["lost"] for answer in answers)


def test_a_short_context(pool: Pool, pairs: Pairs) -> None:
    requests = [(PROMPT, {"temperature": 0, "ignore_eos": True})]
    plan = {"mode": "async", "target_tp": 1, "draft_tp": 1}
    answer = decode(pool, pairs["llama"], plan, requests=requests, max_model_len=12)[0]
    assert answer["tokens"] == plain(pairs["llama"][0])[0][:4]


def test_the_same_ranks_may_form_one_engine_after_another(pool: Pool, pairs: Pairs) -> None:
    plan = {"mode": "async", "target_tp": 2, "draft_tp": 1, "draft_steps": 2}
    answers = decode(pool, pairs["llama"], plan, requests=FEW, engines=3)
    assert [answer["tokens"] for answer in answers] == plain(pairs["llama"][0])[:2]


@pytest.mark.slow
def test_ranks_of_several_machines(pool: Pool, pairs: Pairs) -> None:
    """Over torch.distributed (gloo) and TCP."""
    plan = {"mode": "async", "target_tp": 2, "draft_tp": 1, "draft_steps": 2}
    answers = decode(pool, pairs["llama"], plan, apart=True)
    assert [answer["tokens"] for answer in answers] == plain(pairs["llama"][0])


@pytest.mark.parametrize("count", [slow(60), long(1000)])
def test_hundreds_of_requests_in_a_row(pool: Pool, pairs: Pairs, count: int) -> None:
    """Random lengths and stop criteria, on 1 + 1 ranks: the answers equal those of one process, and memory does not
    grow."""
    pair = pairs["llama"]
    draw = random.Random(5)
    requests: list[tuple[list[int], dict[str, Any]]] = []
    for seed in range(count):
        prompt = [draw.randrange(64) for _ in range(draw.choice((1, 2, 7, 40, 300)))]
        values: dict[str, Any] = {
            "temperature": draw.choice((0, 0.7, 1)),
            "seed": seed,
            "max_tokens": draw.randint(1, 25),
        }
        if draw.random() < 0.5:
            values["stop_token_ids"] = [draw.randrange(64) for _ in range(3)]
        requests.append((prompt, values | {"ignore_eos": draw.random() < 0.5}))
    plan = {"mode": "async", "target_tp": 1, "draft_tp": 1, "draft_steps": 2}
    answers = decode(pool, pair, plan, requests=requests, prefix_cache_memory=1)
    llm = LLMEngine(pair[0], dtype=torch.float64)
    for (prompt, values), answer in zip(requests, answers, strict=True):
        alone = llm.generate(prompt, sampling_from(values))
        assert (answer["tokens"], answer["reason"], answer["lost"]) == (alone.token_ids, alone.finish_reason, None)
    assert answers[-1]["megabytes"] < answers[count // 3]["megabytes"] + (2 if count < 1000 else 5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"target_tp": 2, "draft_tp": 1}, "requires 3 ranks, not 2"),
        ({"mode": "serial", "target_tp": 2, "max_model_len": 9999}, "max_model_len must lie in"),
        ({"device": "cuda"}, "device cuda: PyTorch finds no NVIDIA GPU"),
    ],
)
def test_invalid_configurations_are_refused(pool: Pool, pairs: Pairs, values: dict[str, Any], message: str) -> None:
    options = {name: values.pop(name) for name in ("max_model_len", "device") if name in values}
    plan = {"mode": "async"} | values
    target, draft = map(str, pairs["llama"])
    answers = pool.run(2, "decode", target=target, draft=draft, plan=plan, requests=[], **options)
    assert message in answers[0][0]["refused"]


def test_more_ranks_than_heads_are_refused(pool: Pool, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, num_attention_heads=2, num_key_value_heads=2, dtype=torch.float64)
    plan = {"mode": "ar", "target_tp": 3}
    answers = pool.run(3, "decode", target=str(tmp_path), draft=None, plan=plan, requests=[])
    assert "use at most 2" in answers[0][0]["refused"] and answers[1:] == [None, None]


def test_unequal_model_directories_are_refused(pool: Pool, tmp_path: Path) -> None:
    for rank in range(2):
        make_checkpoint(tmp_path / str(rank), dtype=torch.float64, intermediate_size=48 + 16 * rank)
    plan = {"mode": "ar", "target_tp": 2}
    answers = pool.run(2, "decode", target=str(tmp_path / "{rank}"), draft=None, plan=plan, requests=[])
    assert {answer[0]["refused"] for answer in answers} == {
        "rank 1 and rank 0 have different files of the target model: use the same model directories on all ranks"
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen2", "awq"])
def test_any_size_gives_the_logits_of_one_rank(tmp_path: Path, kind: str) -> None:
    """Sizes 1 to 7 on real ranks: equal to one rank within rounding, and bitwise identical on all ranks of a group."""
    shape = {"family": kind.replace("awq", "llama"), "num_attention_heads": 8, "num_key_value_heads": 2}
    make_checkpoint(tmp_path / "model", dtype=torch.float64, hidden_size=64, intermediate_size=96, vocab=67, **shape)
    if kind == "awq":
        quantise(tmp_path / "model", "awq", ("o_proj",))
    pool = Pool(7)
    try:
        ranks = [pool.run(size, "logits", model=str(tmp_path / "model"), tokens=PROMPT) for size in range(1, 8)]
    finally:
        pool.close()
    one = torch.tensor(ranks[0][0]["values"], dtype=torch.float64)
    for group in ranks[1:]:
        assert {rank["bits"] for rank in group} == {group[0]["bits"]}
        torch.testing.assert_close(torch.tensor(group[0]["values"], dtype=torch.float64), one, atol=1e-9, rtol=1e-9)
