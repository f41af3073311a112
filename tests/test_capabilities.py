"""The capability table against the engine: what it does not refuse decodes as autoregressive decoding does, on every
kind of executor; what it refuses is refused with the text of the table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftspec import _C
from swiftspec.backends.cpu import cpu
from swiftspec.backends.reference import reference
from swiftspec.backends.unfused import unfused
from swiftspec.builder.load_options import select_operators
from swiftspec.builder.rules import resolve_config
from swiftspec.capabilities import (
    COMMAND_FEATURES,
    FEATURES,
    MACHINE_FEATURES,
    MODEL_FEATURES,
    REQUEST_FEATURES,
    TABLE,
    Conflict,
    Features,
    NotSupported,
    check_features,
    conflict_text,
    conflicts,
)
from swiftspec.cli.config_sources import load_settings
from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.decode import decode
from swiftspec.drafter_kinds import GRAFTED, SUFFIX_LOOKUP
from swiftspec.llm_engine import LLMEngine
from swiftspec.model.checkpoint_files import read_config
from swiftspec.model.loader import load_model
from swiftspec.model.spec import traits
from swiftspec.params import SamplingParams, StructuredOutputsParams
from swiftspec.runtime.drafter import NoDrafter
from swiftspec.settings.flags import flag_name
from swiftspec.settings.settings import UsageError
from tests.support.draft_heads import make_eagle3
from tests.support.fake_cuda_graphs import Recorder
from tests.support.ranks import Pool
from tests.support.roles import drafter_of, make_drafter, make_runner, make_verifier, request_start
from tests.support.tiny_checkpoints import make_checkpoint, make_pair
from tests.support.token_constraints import DiceRules
from tests.support.toy_pair import byte_level_tokenizer, write_tokenizer
from tools import execution_paths
from tools.execution_paths import HEAD

VOCAB = 300
PROMPT = [5, 17, 3, 29, 11, 8, 2, 30] * 2
TOKENS = 6
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 4, "max_tokens": TOKENS, "ignore_eos": True}
# by feature: fields of SamplingParams
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {},
    "logit bias": {"logit_bias": {7: 3.0, 9: -4.0}},
    "filters": {"top_k": 20, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5},
    "guidance": {"guidance_scale": 1.5, "negative_prompt_ids": (3, 4)},
    "grammar": {"grammar": "start: /[a-z]+/"},
    "excluded tokens": {"allowed_token_ids": tuple(range(0, VOCAB, 2))},
    "path rules": {"min_tokens": 4},
    "bad sequences": {"bad_words_ids": ((7, 8), (11, 12))},
    "log-probabilities": {"logprobs": 2},
    "prompt log-probabilities": {"prompt_logprobs": 1},
    "listed log-probabilities": {"logprobs": 0, "logprob_token_ids": (3, 4)},
    "request shape": {"verify_batch": 1},
    "request draft": {"verify_batch": 3, "draft_steps": 2},
}
OF_TEXT: dict[str, dict[str, Any]] = {  # without effect on token ids
    "no log-probabilities": {"logprobs": None},
    "stop strings": {"stop": "a"},
    "no text": {"detokenize": False},
    "structured outputs": {"structured_outputs": StructuredOutputsParams(regex="a")},
}
# by feature: fields of EngineConfig
ENGINES: dict[str, dict[str, Any]] = {
    "mode ar": {"mode": "ar"},
    "mode serial": {"mode": "serial"},
    "mode async": {"mode": "async", "target_tp": 1, "draft_tp": 1},
    "mode smc": {"mode": "smc", "population": PopulationConfig(particles=2, smc_draft_tokens=2)},
    "several requests": {"max_num_seqs": 2},
    "verify reject": {"verify": "reject"},
    "proposal top": {"proposal": "top"},
    "proposal coupled": {"proposal": "coupled"},
    "proposal sample": {"proposal": "sample"},
    "self-switch": {"self_switch": True},
    "adapted shape": {"adapt_steps": True},
    "synthetic acceptance": {"synthetic_acceptance_length": 3.0},
    "suffix lookup": {"drafter": SUFFIX_LOOKUP},
    "grafting": {"drafter": GRAFTED},
    "target worker": {"target_remote": True},
    "draft worker": {"draft_remote": True},
}
# by feature: settings of a command
SETTINGS: dict[str, dict[str, Any]] = {
    **{f"mode {mode}": {"mode": mode} for mode in ("ar", "serial", "async", "smc")},
    "no draft": {},
    "several requests": {"max_num_seqs": 2},
    "verify reject": {"verify": "reject"},
    "suffix lookup": {"draft_model": SUFFIX_LOOKUP},
    "grafting": {"graft_suffix": True},
    "target worker": {"target_url": "host:7070"},
    "draft worker": {"draft_url": "host:7070"},
    "local target": {"model": "a"},
    "local draft": {"draft_model": "a"},
    "several ranks": {},
    "one rank": {},
    "draft": {"draft_model": "a"},
    "draft tree": {"verify_batch": 4},
    "tree that grows during a verification": {"catch_up": True},
    "population": {"particles": 4},
    "draft forwards": {"draft_steps": 2},
    "draft group": {"draft_tp": 2},
    "profile": {"plan": "profile.json"},
    "adaptation": {"adapt": True},
    "given shape": {"draft_steps": 2, "verify_batch": 4},
    "target group": {"target_tp": 4},
    "server": {"port": 0},
    "KV events": {"kv_events_config": {"enable_kv_cache_events": True}},
    "no prefix cache": {"prefix_cache_memory": 0},
}
# features of the machine, of models and of commands, which only the tests of their own modules have
ELSEWHERE = {
    *MACHINE_FEATURES, *MODEL_FEATURES, *COMMAND_FEATURES, "best_of", "draft head", "overlap",
    "stream", "suffix", "truncation", "population choices", "top log-probabilities", "echoed log-probabilities",
    "revision", "no guidance", "negative prompt", "company",
    "shared GPUs", "rounded activations", "exact activations", "int8 head", "float8 cache",
}  # fmt: skip


def sampling(name: str, **more: Any) -> SamplingParams:
    return SamplingParams(**{**SAMPLED, **REQUESTS[name], **more})


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    # native operators need heads of 16
    models = make_pair(folder, vocab=VOCAB, tie=False, layers=3, hidden_size=64)
    write_tokenizer(models[0], byte_level_tokenizer())
    make_eagle3(folder / "head", layers=(1, 2, 3), vocab=VOCAB, draft_vocab=VOCAB, target_hidden=64, hidden=64)
    return models


@pytest.fixture(scope="module")
def plain(pair: tuple[Path, Path]) -> Iterator[LLMEngine]:
    yield LLMEngine(pair[0], dtype=torch.float64, ops="reference", max_model_len=64)


def refusal(found: frozenset[str]) -> str | None:
    """The message for the first combination of features that the table refuses."""
    refused = (each for each in conflicts(found) if not each[2].ignored)
    return next((str(NotSupported(row, col, conflict_text(row, col, why))) for row, col, why in refused), None)


# name: fields of EngineConfig, draft, whether the tokens are those of mode ar
DECODING: dict[str, tuple[dict[str, Any], str, bool]] = {
    "serial": ({"mode": "serial"}, "draft", True),
    "top": ({"mode": "serial", "proposal": "top"}, "draft", True),
    "sample": ({"mode": "serial", "proposal": "sample"}, "draft", True),
    "adaptive": ({"mode": "serial", "self_switch": True, "adapt_steps": True, "drafter": "model"}, "draft", True),
    "suffix": ({"mode": "serial"}, "suffix", True),
    "grafted": ({"mode": "serial", "drafter": GRAFTED}, "draft", True),
    "head": ({"mode": "serial"}, "head", True),
    "several requests": ({"mode": "serial", "max_num_seqs": 2}, "draft", True),
    "reject": ({"mode": "serial", "verify": "reject"}, "draft", False),
    "reject, several requests": ({"mode": "serial", "verify": "reject", "max_num_seqs": 2}, "draft", False),
    "synthetic": ({"mode": "serial", "synthetic_acceptance_length": 3.0}, "draft", False),
    "smc": (ENGINES["mode smc"], "draft", False),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", DECODING)
def test_a_request_decodes_or_is_refused(pair: tuple[Path, Path], plain: LLMEngine, name: str) -> None:
    fields, draft, same = DECODING[name]
    path: Any = {"draft": pair[1], "head": pair[0].parent / "head"}.get(draft, draft)
    llm = LLMEngine(pair[0], path, EngineConfig(**fields), dtype=torch.float64, ops="reference", max_model_len=64)
    for feature in REQUESTS:
        request = sampling(feature)
        without = {"synthetic acceptance"} if request.verify_batch == 1 else set[str]()  # decoded without the draft
        why = refusal((llm.config.features | request.features) - without)
        if why is not None:
            with pytest.raises(NotSupported) as error:
                llm.generate(PROMPT, request)
            assert str(error.value) == why
        elif same:
            want = plain.generate(PROMPT, replace(request, verify_batch=None, draft_steps=None)).token_ids
            assert llm.generate(PROMPT, request).token_ids == want, feature
            if draft == "head":
                expected = execution_paths.level(execution_paths.expansion, execution_paths.MACHINES[0], HEAD)
                assert drafter_of(llm).executor.name == expected
        else:
            assert 0 < len(llm.generate(PROMPT, request).token_ids) <= TOKENS, feature
    assert {*REQUESTS, *OF_TEXT, *ELSEWHERE, "deep top-k"} >= {*REQUEST_FEATURES}


# name: as in DECODING, on two ranks; the split of mode async is (1, 1)
ON_TWO_RANKS: dict[str, tuple[dict[str, Any], str | None, bool]] = {
    "ar": ({"mode": "ar", "target_tp": 2}, None, True),
    "serial": ({"mode": "serial", "target_tp": 2}, "draft", True),
    "async": ({"mode": "async"}, "draft", True),
    "suffix": ({"mode": "serial", "target_tp": 2}, "suffix", True),
    "grafted": ({"mode": "serial", "target_tp": 2, "drafter": GRAFTED}, "draft", True),
    "head": ({"mode": "serial", "target_tp": 2}, "head", True),
    "several requests": ({"mode": "serial", "target_tp": 2, "max_num_seqs": 2}, "draft", True),
    "reject": ({"mode": "serial", "target_tp": 2, "verify": "reject"}, "draft", False),
}


@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_two_ranks_decode_what_is_not_refused(pair: tuple[Path, Path], plain: LLMEngine, pool: Pool, name: str) -> None:
    plan, draft, same = ON_TWO_RANKS[name]
    path: Any = {"draft": str(pair[1]), "head": str(pair[0].parent / "head")}.get(draft or "", draft)
    engine = resolve_config(EngineConfig(**plan), path)
    traits = engine.features | ({"draft head"} if draft == "head" else set())
    features = [feature for feature in REQUESTS if refusal(traits | sampling(feature).features) is None]
    values = [SAMPLED | REQUESTS[feature] for feature in features]
    answers = pool.run(
        2, "decode", target=str(pair[0]), draft=path, plan=plan, requests=[(PROMPT, each) for each in values],
        ops="reference", max_model_len=64,
    )[0]  # fmt: skip
    for feature, answer in zip(features, answers, strict=True):
        request = replace(sampling(feature), verify_batch=None, draft_steps=None)
        if same:
            assert answer["tokens"] == plain.generate(PROMPT, request).token_ids, feature
        else:
            assert 0 < len(answer["tokens"]) <= TOKENS, feature


KINDS: dict[str, tuple[Any, Any, torch.dtype]] = {
    "eager": (reference, None, torch.float64),
    "native": (cpu, None, torch.float32),
    "graph": (unfused, Recorder, torch.float64),
}


class Rounds:
    """Target and draft on one kind of executor, without an engine."""

    def __init__(self, kind: str, models: Sequence[Any], ops: Any, *, ahead: bool = False) -> None:
        self.models, self.ops, self.capture, self.ahead = models, ops, KINDS[kind][1], ahead

    def decode(self, request: SamplingParams, verify: str, proposal: str | None) -> tuple[list[int], str, str]:
        """Tokens of a request, and the names of the executors of the target and of the draft. `proposal` None: without
        a draft."""
        drafter: Any = NoDrafter()
        runner = make_runner(self.models[0], self.ops, VOCAB, context=64, tree_slots=16)
        graphs = self.capture and self.capture()
        verifier = make_verifier(runner, verify, graphs)
        runner.make_constraint = lambda grammar: DiceRules(VOCAB)
        if proposal is not None:
            small = make_runner(self.models[1], self.ops, VOCAB, context=64, tree_slots=200)
            small.make_constraint = lambda grammar: DiceRules(VOCAB)
            config = EngineConfig("serial", verify_batch=6, verify=verify, proposal=proposal)
            drafter = make_drafter(small, config, graphs, ahead=self.ahead)
        start = request_start(PROMPT, request)
        verifier.open(start)
        drafter.open(start)
        tokens: list[int] = []
        for _, result in decode(drafter, verifier):
            tokens += result.tokens
            if len(tokens) >= TOKENS:
                break
        names = verifier.executor.name, "" if proposal is None else drafter.executor.name
        drafter.close()
        verifier.close()
        return tokens[:TOKENS], *names


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ahead", [False, True], ids=["serial", "async"])
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one", "every"])
def test_every_kind_of_executor_decodes_every_request(
    pair: tuple[Path, Path], kind: str, ahead: bool, every: bool
) -> None:
    """With one proposal method after the other, or every request with every method."""
    ops, _, dtype = KINDS[kind]
    if ops is cpu and _C.level() == "none":
        pytest.skip("this CPU has no AVX2")
    models = [load_model(path, dtype=dtype, ops=ops, max_positions=256) for path in pair]
    rounds = Rounds(kind, models, ops, ahead=ahead)
    for number, feature in enumerate(REQUESTS, ahead):
        request = sampling(feature, negative_prompt_ids=(3, 4))
        if request.grammar is not None:
            request = replace(request, grammar="dice")
        methods = [("match", "coupled"), ("match", "top")]
        if not request.greedy and not ahead:
            methods += [("match", "sample"), ("reject", "sample")]
        if not every:
            methods = [methods[number % len(methods)]]
        want = rounds.decode(request, "match", None)[0] if ("reject", "sample") not in methods[:1] else []
        for verify, proposal in methods:
            tokens = rounds.decode(request, verify, proposal)[0]
            assert len(tokens) == TOKENS if verify == "reject" else tokens == want, (feature, proposal)


# family: its fields in config.json, and the traits that it is here for
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "gemma4_text": (
        {
            "layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
            "attention_k_eq_v": False, "global_head_dim": 32, "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB,
        },
        "per_layer_size shares_kv v_norm window scale output_scale embedding_multiplier logit_softcap norms",
    ),
    "qwen3_next": (
        {"linear_key_head_dim": 16},
        "gated_delta experts shared_intermediate_size output_gate norm_unit_offset qk_norm",
    ),
    "arcee": ({}, "activation=relu"),
    "olmo2": ({}, "norms=after qk_norm=projection"),
    "glm4_moe": ({}, "sigmoid"),
    "gpt_oss": ({"intermediate_size": 64}, "sinks activation"),
    "gemma2": ({}, "softcap"),
    "granite": ({}, "residual_multiplier logit_multiplier"),
    "ministral3": ({}, "query_scale_beta"),
    "hunyuan_v1_dense": ({}, "norm_after_rope"),
}  # fmt: skip
KIND_OF_MACHINE = {"eager": "everything else", "graph": "one GPU, `--ops unfused`"}


def machine_of(kind: str, found: Features) -> execution_paths.Machine:
    """The machine that an executor kind of KINDS stands for."""
    if kind == "native":
        return execution_paths.machine_for("CPU", found)
    return next(each for each in execution_paths.MACHINES if each.name == KIND_OF_MACHINE[kind])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_decodes_on_the_executors_of_its_traits(tmp_path: Path, family: str) -> None:
    fields, own = FAMILIES[family]
    paths = make_pair(tmp_path, family=family, vocab=VOCAB, hidden_size=64, head_dim=16, **fields)
    spec = read_config(paths[0]).spec
    found = frozenset(traits(spec))
    assert found >= {*own.split()}
    case, request = execution_paths.RequestCase(family, SamplingParams(), traits=found), sampling("sampled")
    for kind, (ops, _, dtype) in KINDS.items():
        machine = machine_of(kind, found)
        if kind == "native":
            if _C.level() == "none":
                continue
            ops = select_operators("auto", spec, dtype, torch.device("cpu"))
            assert ops is (cpu if machine.operators else reference)
        models = [load_model(path, dtype=dtype, ops=ops, max_positions=64) for path in paths]
        rounds = Rounds(kind, models, ops)
        steps = execution_paths.verification, execution_paths.expansion
        names = tuple(execution_paths.level(step, machine, case) for step in steps)
        assert rounds.decode(request, "match", "coupled") == (rounds.decode(request, "match", None)[0], *names), kind


def test_the_families_have_every_trait() -> None:
    named = {name for _, own in FAMILIES.values() for name in own.split()}
    assert named | {"draft_head"} == {*MODEL_FEATURES}


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_and_another_vocabulary_change_no_executor(
    pair: tuple[Path, Path], tmp_path: Path, kind: str
) -> None:
    if kind == "native" and _C.level() == "none":
        pytest.skip("this CPU has no AVX2")
    ops, _, dtype = KINDS[kind]
    make_checkpoint(tmp_path, vocab=VOCAB + 20, hidden_size=64, dtype=torch.float64)
    target = load_model(pair[0], dtype=dtype, ops=ops, max_positions=64, hidden_layers=(0, 2))
    draft = load_model(tmp_path, dtype=dtype, ops=ops, max_positions=64).with_masked_tokens([7, VOCAB - 1])
    rounds, request = Rounds(kind, (target, draft), ops), sampling("sampled")
    machine = machine_of(kind, frozenset())
    cases = (execution_paths.verification, execution_paths.HIDDEN), (execution_paths.expansion, execution_paths.OTHER)
    names = tuple(execution_paths.level(step, machine, case) for step, case in cases)
    assert rounds.decode(request, "match", "coupled") == (rounds.decode(request, "match", None)[0], *names)


def entries() -> list[tuple[str, str, Conflict]]:
    return [(row, column, conflict) for column, rows in TABLE.items() for row, conflict in rows.items()]


@pytest.mark.parametrize(("row", "column", "conflict"), entries(), ids=lambda each: each if type(each) is str else "")
def test_every_entry_of_the_table_is_reported(row: str, column: str, conflict: Conflict) -> None:
    requests = REQUESTS | OF_TEXT
    if {row, column} & ELSEWHERE:
        assert {row, column} <= {*FEATURES}
    elif row in requests and column in requests:
        with pytest.raises(NotSupported, match=" not supported "):
            SamplingParams(**(requests[row] | requests[column]))
    elif row in requests:
        with pytest.raises(NotSupported, match=" not supported "):
            EngineConfig(**ENGINES[column]).check_request(SamplingParams(**requests[row]))
    elif {row, column} <= {*ENGINES} and not ENGINES[row].keys() & ENGINES[column].keys():
        with pytest.raises(NotSupported, match=" not supported "):
            EngineConfig(**(ENGINES[column] | ENGINES[row]))
    elif (row, column) == ("grafting", "no draft"):
        with pytest.raises(NotSupported, match=" not supported "):
            resolve_config(EngineConfig(**ENGINES[row]), None)
    elif conflict.ignored:
        (name, *_), settings = SETTINGS[row], load_settings(SETTINGS[column] | SETTINGS[row])
        notes = settings.ignored_settings(settings.mode or "serial")
        assert any(flag_name(name) in note and " no effect " in note for note in notes)
    elif "chains" in (row, column):
        settings, drafts = load_settings(SETTINGS[column] | SETTINGS[row]), "no draft" not in (row, column)
        with pytest.raises(NotSupported, match=" not supported "):
            check_features(settings.features("serial" if drafts else "ar", has_draft=drafts, device="cuda"))
    else:
        settings = load_settings(SETTINGS[column] | SETTINGS[row])
        several = settings.mode == "async" or column == "several ranks"
        ranks = 3 if row == "draft group" else 2 if several and row != "one rank" else 1
        with pytest.raises(UsageError, match=" not supported ") as error:
            settings.make_plan("no draft" not in (row, column), ranks)
        assert "\n" not in str(error.value) and "{" not in str(error.value)
