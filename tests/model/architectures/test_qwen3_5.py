"""Qwen3.5 and Qwen3-Next, hybrids of delta layers and attention: the text of transformers and of autoregressive
decoding in every mode, and what does not support delta layers yet says so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.exactness.__main__ import main
from swiftspec.backends.cpu import cpu
from swiftspec.backends.reference import reference
from swiftspec.builder.memory_estimate import MemoryEstimate
from swiftspec.config import EngineConfig
from swiftspec.errors import UserError
from swiftspec.lab.quantize import quantize
from swiftspec.llm_engine import LLMEngine
from swiftspec.model.checkpoint_files import Tensors, open_tensors, read_config
from swiftspec.model.formats import format_of
from swiftspec.model.loader import load_model
from swiftspec.model.shard import Shard
from swiftspec.model.spec import AttentionSpec
from swiftspec.params import SamplingParams
from tests.model.architectures.test_families import expected, logits, new_cache
from tests.support.cases import fast_first
from tests.support.ranks import Pool
from tests.support.roles import drafter_of, make_runner, verifier_of
from tests.support.thread_group import on_ranks
from tests.support.tiny_checkpoints import HYBRIDS, chain, make_checkpoint, make_pair
from tests.support.token_constraints import OneHalf
from tests.support.toy_pair import byte_level_tokenizer, write_tokenizer
from tests.support.workers import client_on_workers, started

FAMILY = "qwen3_5_text"
PROMPT = [5, 17, 3, 29, 11, 8, 2]
GREEDY = SamplingParams(temperature=0, max_tokens=110, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9, seed=3)
GUIDED = replace(SEEDED, guidance_scale=1.5, negative_prompt_ids=(4, 9, 11, 3))
OPTIONS: dict[str, Any] = {"dtype": torch.float64, "max_model_len": 160}
OTHERS = [family for family in HYBRIDS if family != FAMILY]
Texts = dict[SamplingParams, list[int]]
NATIVE = pytest.mark.skipif(cpu.level() == "none", reason="there are no native operators here")


@pytest.fixture(scope="module", params=fast_first([FAMILY, *OTHERS], 1))
def pair(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Path, Path]:
    seed = 5 if request.param == "qwen3_5_moe_text" else 1  # a pair that often agrees
    return make_pair(tmp_path_factory.mktemp("pair"), family=request.param, seed=seed)


@pytest.fixture(scope="module")
def texts(pair: tuple[Path, Path]) -> Texts:
    """Texts of autoregressive decoding."""
    llm = LLMEngine(pair[0], **OPTIONS)
    return {sampling: llm.generate(PROMPT, sampling).token_ids for sampling in (GREEDY, SEEDED, GUIDED)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("chunks", [[150], [*range(7, 150, 13), 150], [63, 64, 65, 95, 96, 97, 150], [*range(1, 151)]])
def test_logits_equal_those_of_transformers_however_a_text_is_cut(tmp_path: Path, chunks: list[int]) -> None:
    theirs = make_checkpoint(tmp_path, family=FAMILY, dtype=torch.float64)
    tokens = [(7 * i * i + i) % 64 for i in range(150)]
    model = load_model(tmp_path, dtype=torch.float64, ops=reference, max_positions=160)
    cache, rows, first = new_cache(model, reference, 160), list[Tensor](), 0
    for last in chunks:
        cache.append_prefix(last - first)
        out = model.forward(chain(tokens[first:last], first), cache).logits
        assert out is not None
        rows.append(out)
        first = last
    torch.testing.assert_close(torch.cat(rows), expected(theirs, tokens), rtol=0, atol=1e-9)


@pytest.mark.parametrize("family", fast_first(HYBRIDS, 1))
def test_greedy_text_equals_that_of_transformers(tmp_path: Path, family: str) -> None:
    theirs = make_checkpoint(tmp_path, family=family, dtype=torch.float64, seed=1)
    got = LLMEngine(tmp_path, **OPTIONS).generate(PROMPT, GREEDY).token_ids
    want = expected(theirs, [*PROMPT, *got]).argmax(-1).tolist()  # a greedy text predicts itself
    assert got == want[len(PROMPT) - 1 : -1] and len(set(got)) > 20


PLANS: dict[str, dict[str, Any]] = {
    "default": {},
    "deep": {"draft_leaves": 1, "draft_steps": 8},
    "wide": {"verify_batch": 16, "draft_leaves": 6, "draft_steps": 2},
}
# every family, and every plan
DRAFTS = [(FAMILY, "default"), (FAMILY, "deep"), (FAMILY, "wide"), *((other, "default") for other in OTHERS)]


@pytest.mark.slow
@pytest.mark.parametrize(("pair", "plan"), fast_first(DRAFTS, 1, unpack=True), indirect=["pair"])
def test_a_draft_does_not_change_the_text(pair: tuple[Path, Path], texts: Texts, plan: str) -> None:
    assert all(len({*text}) > 20 for text in texts.values())
    llm = LLMEngine(*pair, EngineConfig("serial", **PLANS[plan]), **OPTIONS)
    for sampling, want in texts.items():
        answer = llm.generate(PROMPT, sampling)
        assert answer.token_ids == want and answer.stats.accepted > 15


@pytest.mark.slow
@pytest.mark.parametrize("pair", [FAMILY], indirect=True)
def test_a_draft_that_is_always_rejected(tmp_path: Path, pair: tuple[Path, Path], texts: Texts) -> None:
    make_checkpoint(tmp_path, family=FAMILY, dtype=torch.float64, seed=9)
    for sampling, want in texts.items():
        answer = LLMEngine(pair[0], tmp_path, EngineConfig("serial"), **OPTIONS).generate(PROMPT, sampling)
        assert answer.token_ids == want and answer.stats.accepted < 20


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", FAMILY])
def test_one_model_may_be_a_hybrid_and_the_other_not(tmp_path: Path, family: str) -> None:
    other = FAMILY if family == "qwen3" else "qwen3"
    make_checkpoint(tmp_path / "target", family=family, dtype=torch.float64, seed=1)
    make_checkpoint(tmp_path / "draft", family=other, dtype=torch.float64, seed=2)
    want = LLMEngine(tmp_path / "target", **OPTIONS).generate(PROMPT, SEEDED).token_ids
    answer = LLMEngine(tmp_path / "target", tmp_path / "draft", EngineConfig("serial"), **OPTIONS).generate(
        PROMPT, SEEDED
    )
    assert answer.token_ids == want


@pytest.mark.slow
@pytest.mark.parametrize("pair", [FAMILY], indirect=True)
def test_the_last_token_of_the_context(pair: tuple[Path, Path]) -> None:
    for length in (63, 64, 65, 97):
        options: dict[str, Any] = OPTIONS | {"max_model_len": length}
        sampling = replace(SEEDED, max_tokens=None)
        want = LLMEngine(pair[0], **options).generate(PROMPT, sampling)
        answer = LLMEngine(*pair, EngineConfig("serial"), **options).generate(PROMPT, sampling)
        assert answer.token_ids == want.token_ids and len(want.token_ids) == length - len(PROMPT)


@pytest.mark.slow
def test_a_batch_of_requests(pair: tuple[Path, Path], texts: Texts) -> None:
    """Requests that start and end at different times; cache sequences are used again."""
    llm = LLMEngine(*pair, EngineConfig("serial", max_num_seqs=3), **OPTIONS)
    whole = [GREEDY, SEEDED, GUIDED, replace(GREEDY, max_tokens=40), SEEDED]
    for kinds in (whole, [GUIDED, GREEDY]):
        answers = llm.generate_batch([PROMPT] * len(kinds), kinds)
        for sampling, answer in zip(kinds, answers, strict=True):
            want = texts[GREEDY][:40] if sampling.max_tokens == 40 else texts[sampling]
            assert answer.token_ids == want


@pytest.mark.parametrize(
    "plan",
    [
        {"mode": "async", "target_tp": 1, "draft_tp": 1},
        pytest.param({"mode": "async", "target_tp": 2, "draft_tp": 1}, marks=pytest.mark.slow),
        pytest.param({"mode": "async", "target_tp": 1, "draft_tp": 2}, marks=pytest.mark.long),
        pytest.param({"mode": "serial", "target_tp": 2}, marks=pytest.mark.long),
    ],
    ids=lambda plan: "-".join(map(str, plan.values())),
)
def test_ranks(pool: Pool, pair: tuple[Path, Path], texts: Texts, plan: dict[str, Any]) -> None:
    kinds = (GREEDY, SEEDED)
    values = [
        {"temperature": kind.temperature, "seed": kind.seed, "max_tokens": 110, "ignore_eos": True} for kind in kinds
    ]
    ranks = plan["target_tp"] + plan.get("draft_tp", 0)
    answers = pool.run(
        ranks, "decode", target=str(pair[0]), draft=str(pair[1]), plan=plan, max_model_len=160,
        requests=[(PROMPT, each) for each in values],
    )[0]  # fmt: skip
    assert [answer["tokens"] for answer in answers] == [texts[kind] for kind in kinds]
    assert all(answer["lost"] is None and answer["rounds"] < 100 for answer in answers)


@pytest.mark.slow
def test_prefixes_of_batches_and_particles(pair: tuple[Path, Path], texts: Texts) -> None:
    """A sequence of a scheduler is reused only where its folded state allows it."""
    llm, prompt = LLMEngine(*pair, EngineConfig("serial", max_num_seqs=2), **OPTIONS), [*PROMPT, *texts[GREEDY][:70]]
    found = list[int]()
    for text in (prompt, prompt[:60], [*prompt, *texts[GREEDY][70:75]], prompt):
        answer = llm.generate(text, replace(GREEDY, max_tokens=9))
        first = len(text) - len(PROMPT)
        assert answer.token_ids == texts[GREEDY][first : first + 9]
        found.append(answer.stats.cached_tokens)
    assert found[:2] == [0, 0] and found[2] >= len(prompt) and found[3] == len(prompt) - 1


@pytest.mark.parametrize("family", HYBRIDS)
def test_weights_of_multi_token_prediction_are_not_read(tmp_path: Path, family: str) -> None:
    theirs = make_checkpoint(tmp_path, family=family, dtype=torch.float64)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    unused = ("mtp.fc.weight", "mtp.layers.0.mlp.experts.0.gate_proj.weight", "mtp.layers.0.input_layernorm.weight")
    save_file(tensors | {name: torch.zeros(3) for name in unused}, file)
    model = load_model(tmp_path, dtype=torch.float64, ops=reference, max_positions=16)
    ours = model.forward(chain(PROMPT), new_cache(model, reference, 16)).logits
    torch.testing.assert_close(ours, expected(theirs, PROMPT), rtol=0, atol=1e-9)
    save_file(tensors | {"model.layers.0.linear_attn.more.weight": torch.zeros(3)}, file)
    with pytest.raises(UserError, match=r"linear_attn\.more\.weight is not part of the architecture"):
        load_model(tmp_path, dtype=torch.float64, ops=reference, max_positions=16)


def test_every_fourth_layer_has_attention_by_default(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family=FAMILY, layers=4)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["layer_types"]
    for count, period, attention in ((8, None, [3, 7]), (6, 3, [2, 5])):
        fields = {"num_hidden_layers": count} | ({} if period is None else {"full_attention_interval": period})
        (tmp_path / "config.json").write_text(json.dumps(config | fields))
        mixers = [layer.mixer for layer in read_config(tmp_path).spec.layers]
        assert [index for index, mixer in enumerate(mixers) if isinstance(mixer, AttentionSpec)] == attention


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "without a layer of type full_attention"),
        ({"layer_types": ["full_attention", "mamba"] * 2}, "layer type 'mamba'"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 4 layers"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads 3 is not a multiple of linear_num_key_heads 2"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    make_checkpoint(tmp_path, family=FAMILY)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(UserError, match=message):
        read_config(tmp_path)


def test_key_heads_are_divided_equally(pair: tuple[Path, Path]) -> None:
    with pytest.raises(UserError, match="2 key heads of the delta layers cannot be sharded over 3 ranks"):
        Shard.of(read_config(pair[0]), 0, 3)


INT4_SHAPE: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}  # fmt: skip
EXPERT_SHAPE = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", HYBRIDS)
def test_int4_weights_are_those_of_the_checkpoint(tmp_path: Path, family: str) -> None:
    """Rows that are reordered, of queries with their gates, of a delta layer and of a shard, keep their codes."""
    more = {} if family == FAMILY else EXPERT_SHAPE
    make_checkpoint(tmp_path / "dense", family=family, **INT4_SHAPE, **more)
    quantize(tmp_path / "dense", tmp_path / "int4", 32)
    tensors, layout = open_tensors(tmp_path / "int4"), format_of(read_config(tmp_path / "int4"))
    assert isinstance(tensors, Tensors) and layout is not None
    expanded = dict[str, Tensor]()
    for name, shape in tensors.shapes().items():
        module, _, kind = name.rpartition(".")
        if kind == "qweight":
            weight = layout.linear(tensors, module, shape[1] * 8, shape[0], None)
            expanded[f"{module}.weight"] = weight.dequantize(torch.float64)
        elif kind not in ("qzeros", "scales"):
            expanded[name] = tensors.take(name, *shape)
    save_file(expanded, tmp_path / "dense" / "model.safetensors")
    want, ours = (logits(tmp_path / name, reference) for name in ("dense", "int4"))
    torch.testing.assert_close(ours, want, rtol=0, atol=1e-9)
    one, two = on_ranks(2, lambda group: logits(tmp_path / "int4", reference, group))
    assert torch.equal(one, two)
    torch.testing.assert_close(one, want, rtol=0, atol=1e-9)


def test_the_estimated_size_of_the_caches(pair: tuple[Path, Path]) -> None:
    model = load_model(pair[0], dtype=torch.bfloat16, ops=reference, max_positions=400)
    cache = make_runner(model, reference, context=380, tree_slots=20).cache
    delta = cache.delta
    assert delta is not None
    buffers = (cache.kv.k, cache.kv.v, delta.state, delta.keys, delta.updates, delta.decays, delta.inputs)
    need = MemoryEstimate(read_config(pair[0]), torch.bfloat16, 400, tree_slots=20, ops=reference)
    assert need.cache == sum(buffer.nbytes for buffer in buffers)


@pytest.mark.long
@NATIVE
def test_20_000_tokens_in_bfloat16_on_the_native_operators(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"head_dim": 16, "linear_key_head_dim": 16, "max_position_embeddings": 20_480}
    pair = make_pair(tmp_path, family=FAMILY, tie=False, **shape)
    options: dict[str, Any] = {"dtype": "bfloat16"}
    sampling = SamplingParams(temperature=0.9, seed=5, max_tokens=20_000, ignore_eos=True)
    want = LLMEngine(pair[0], **options).generate(PROMPT, sampling).token_ids
    answer = LLMEngine(*pair, EngineConfig("serial"), **options).generate(PROMPT, sampling)
    assert answer.token_ids == want and answer.stats.accepted > 2_000


@pytest.mark.slow
@NATIVE
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batches_on_the_native_operators(tmp_path: Path, dtype: str) -> None:
    pair = make_pair(tmp_path, family=FAMILY, head_dim=16, linear_key_head_dim=16, tie=False)
    options: dict[str, Any] = {"dtype": dtype, "max_model_len": 160}
    one, kinds = LLMEngine(pair[0], **options), [GREEDY, SEEDED, GUIDED, replace(SEEDED, seed=8)]
    want = [one.generate(PROMPT, kind).token_ids for kind in kinds]
    llm = LLMEngine(*pair, EngineConfig("serial", max_num_seqs=3), **options)
    assert [answer.token_ids for answer in llm.generate_batch([PROMPT] * len(kinds), kinds)] == want


@pytest.mark.slow
@pytest.mark.parametrize("native", [False, pytest.param(True, marks=[NATIVE, pytest.mark.slow])])
def test_a_grammar_that_forbids_every_draft(tmp_path: Path, native: bool) -> None:
    """The draft proposes only tokens that the target's grammar forbids: no state of a rejected node remains."""
    pair = make_pair(tmp_path, family=FAMILY, vocab=300, head_dim=16, linear_key_head_dim=16, tie=False)
    write_tokenizer(pair[0], byte_level_tokenizer())
    options: dict[str, Any] = OPTIONS | ({"dtype": "bfloat16"} if native else {})
    sampling = replace(SEEDED, grammar="start: /[a-z]*/")  # in its place OneHalf
    plain, tree = LLMEngine(pair[0], **options), LLMEngine(*pair, EngineConfig("serial", self_switch=False), **options)
    for llm in (plain, tree):
        verifier_of(llm).runner.make_constraint = lambda grammar: OneHalf(upper=True)
    drafter_of(tree).runner.make_constraint = lambda grammar: OneHalf(upper=False)
    answer = tree.generate(PROMPT, sampling)
    assert answer.token_ids == plain.generate(PROMPT, sampling).token_ids and min(answer.token_ids) >= 150
    assert answer.stats.accepted == 0 and answer.stats.drafted > 100


@pytest.mark.slow
@pytest.mark.parametrize("pair", [FAMILY], indirect=True)
@pytest.mark.parametrize("mode", ["serial", pytest.param("async", marks=pytest.mark.slow)])
def test_workers(pair: tuple[Path, Path], texts: Texts, mode: str) -> None:
    with (
        started("target", pair[0]) as target,
        started("draft", pair[1]) as draft,
        client_on_workers(target.client_address(), draft.client_address(), mode=mode) as running,
    ):
        for sampling in (replace(GREEDY, max_tokens=80), replace(SEEDED, max_tokens=80)):
            answer = running.generate(PROMPT, sampling)
            assert answer.token_ids == texts[replace(sampling, max_tokens=110)][:80]
            assert answer.stats.drafter_lost is None and answer.stats.accepted > 10


@pytest.mark.slow
def test_the_exactness_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, draft = make_pair(tmp_path, family=FAMILY, vocab=300, head_dim=16, linear_key_head_dim=16)
    for folder in (target, draft):
        write_tokenizer(folder, byte_level_tokenizer())
    flags = ["--model", str(target), "--draft-model", str(draft), "--raw", "--temperature", "0.7", "--top-k", "4"]
    assert main([*flags, "--samples", "60", "--greedy-tokens", "90"]) == 0
    out = capsys.readouterr().out
    assert "greedy: 8 of 8 answers are identical" in out and "no difference found" in out
