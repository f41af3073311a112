"""Grammars: along every path of a tree the mask equals that of a fresh parser; the text equals autoregressive decoding
and parses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llguidance
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from swiftspec.config import EngineConfig
from swiftspec.errors import UserError
from swiftspec.llm_engine import LLMEngine
from swiftspec.params import SamplingParams
from swiftspec.sampling.grammar import GrammarCompiler, GrammarConstraint, GrammarTooComplex
from tests.support.cases import examples, fast_first
from tests.support.proposals import draft_proposal
from tests.support.roles import drafter_of, make_drafter, replace_roles, verifier_of
from tests.support.toy_pair import VOCAB, make_pair

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "cd"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})
LIST = 'start: item ("," item)*\nitem: /[a-c]+/ | "[" start "]"'
EOS = 0
PARAMS = SamplingParams(temperature=0, max_tokens=80, grammar=JSON)
REQUESTS = {
    "greedy": PARAMS,
    "sampled": replace(PARAMS, temperature=0.9, seed=4),
    "shaped": replace(PARAMS, temperature=1.2, seed=2, top_k=9, repetition_penalty=1.2, logit_bias={40: 1.0}),
    "guided": replace(PARAMS, temperature=0.7, guidance_scale=1.5, negative_prompt_ids=(9, 8, 7)),
    "scored": replace(PARAMS, temperature=0.7, seed=11, logprobs=1),
}


# every request and every kind of proposal first; drawn proposals need a temperature
CASES = [
    ("serial", "greedy"), ("ahead", "sampled"), ("sample", "shaped"), ("serial", "guided"), ("ahead", "scored"),
    ("serial", "sampled"), ("ahead", "greedy"), ("serial", "shaped"), ("ahead", "guided"), ("sample", "sampled"),
    ("serial", "scored"), ("ahead", "shaped"), ("sample", "guided"), ("sample", "scored"),
]  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def plain(pair: tuple[Path, Path]) -> LLMEngine:
    return LLMEngine(pair[0], dtype=torch.float64)


@pytest.fixture(scope="module")
def tokenizer(pair: tuple[Path, Path]) -> Tokenizer:
    return Tokenizer.from_file(str(pair[0] / "tokenizer.json"))


@pytest.fixture(scope="module")
def grammars(pair: tuple[Path, Path]) -> GrammarCompiler:
    return GrammarCompiler(pair[0], (EOS,), VOCAB)


def allowed(rules: GrammarConstraint, *path: int) -> set[int]:
    return set(np.flatnonzero(rules.allowed_mask([path])[0].numpy()).tolist())


def walks(rules: GrammarConstraint, data: st.DataObject, length: int) -> Iterator[int]:
    """Successive tokens that the grammar allows."""
    path: list[int] = []
    for _ in range(length):
        path.append(data.draw(st.sampled_from(sorted(allowed(rules, *path)))))
        yield path[-1]


@settings(max_examples=examples(25))
@given(data=st.data(), text=st.sampled_from([JSON, LIST]))
def test_every_node_has_the_mask_of_a_fresh_parser(grammars: GrammarCompiler, data: st.DataObject, text: str) -> None:
    """For any order of the paths of a tree, and any verified text in between."""
    rules, verified = grammars.compile(text), list[int]()
    for _ in range(data.draw(st.integers(1, 3))):
        paths = [list(walks(rules, data, data.draw(st.integers(0, 5)))) for _ in range(4)]
        wild = data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=3))  # paths that no tree proposes
        order = data.draw(st.permutations([*paths, paths[0], wild]))
        masks = dict(zip(map(tuple, order), rules.allowed_mask(order), strict=True))
        for path in paths:
            fresh = grammars.compile(text)
            fresh.observe([*verified, *path])
            assert torch.equal(masks[tuple(path)], fresh.allowed_mask([[]])[0])
        verified += paths[0]
        rules.observe(paths[0])


def test_the_end_token_is_allowed_only_where_the_grammar_ends(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    rules = grammars.compile(LIST)
    a, comma = (tokenizer.encode(text).ids[0] for text in "a,")
    assert EOS not in allowed(rules) and EOS in allowed(rules, a) and EOS not in allowed(rules, a, comma)
    assert allowed(rules, a, EOS) == allowed(rules, a, EOS, a, EOS) == {EOS}
    rules.observe([a])
    assert EOS in allowed(rules)
    rules.observe([EOS])
    assert allowed(rules) == {EOS}


def test_a_parser_handles_a_large_chunk(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Such a chunk occurs after a long inactivity of the draft."""
    rules, words = grammars.compile(LIST), tokenizer.encode("a").ids + tokenizer.encode(",a").ids * 1000
    rules.observe(words)
    assert allowed(rules) == allowed(grammars.compile(LIST), *words) and EOS in allowed(rules)


def make(pair: tuple[Path, Path], kind: str) -> LLMEngine:
    config: dict[str, Any] = {"proposal": "sample"} if kind == "sample" else {}
    llm = LLMEngine(*pair, EngineConfig("serial", **config), dtype=torch.float64)
    if kind == "ahead":
        replace_roles(llm, make_drafter(drafter_of(llm).runner, llm.config, ahead=True))
    return llm


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kind", "name"), fast_first(CASES, len(CASES) // 2, unpack=True))
def test_the_text_equals_autoregressive_decoding_and_parses(
    pair: tuple[Path, Path], plain: LLMEngine, tokenizer: Tokenizer, kind: str, name: str
) -> None:
    llm, params = make(pair, kind), REQUESTS[name]
    for prompt in ([5, 60, 70], [44]):
        want, got = plain.generate(prompt, params), llm.generate(prompt, params)
        assert (got.token_ids, got.finish_reason) == (want.token_ids, want.finish_reason)
        assert got.finish_reason == "stop" and got.token_ids[-1] == EOS
        value = json.loads(tokenizer.decode(got.token_ids[:-1]))
        assert list(value) == ["name", "age", "tags"] and 0 <= value["age"] <= 999
        assert got.stats.rounds < len(got.token_ids) or name != "greedy", "the draft's guesses follow it, too"


def test_rejection_sampling_follows_a_grammar(pair: tuple[Path, Path], tokenizer: Tokenizer) -> None:
    llm = LLMEngine(*pair, EngineConfig("serial", verify="reject"), dtype=torch.float64)
    for seed in range(3):
        got = llm.generate([5, 60], replace(PARAMS, temperature=1.0, seed=seed))
        assert got.finish_reason == "stop" and json.loads(tokenizer.decode(got.token_ids[:-1]))


def test_an_answer_ends_with_its_grammar_for_any_parameters(plain: LLMEngine) -> None:
    got = plain.generate([5], replace(PARAMS, ignore_eos=True))
    assert got.finish_reason == "stop" and got.token_ids[-1] == EOS


def test_the_next_request_is_not_restricted_by_the_previous_grammar(pair: tuple[Path, Path], plain: LLMEngine) -> None:
    llm, free = make(pair, "serial"), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    want = plain.generate([5, 60], free).token_ids
    stream = llm.stream([5, 60], PARAMS)
    next(stream)
    stream.close()
    assert llm.generate([5, 60], free).token_ids == want


def test_a_proposal_that_the_grammar_forbids_is_not_accepted(pair: tuple[Path, Path], plain: LLMEngine) -> None:
    """A draft that has lost its own parser could make such a proposal."""
    llm = LLMEngine(pair[0], dtype=torch.float64)
    want = plain.generate([5, 60], PARAMS).token_ids
    stream = llm.stream([5, 60], PARAMS)
    assert next(stream).token_ids == (want[0],)
    forbidden = draft_proposal(1, 1, 2, (want[0], 7, 7, want[1]), (-1, 0, 1, 0))
    assert verifier_of(llm).verify(forbidden).tokens == tuple(want[1:3])


WRONG = {
    "start: foo": "unknown name",
    "": "invalid grammar",
    "start: " + "a" * 2**18: "exceeds the limit",
    '{"grammars": 5}': "invalid grammar",
    "start: /" + "a?" * 100_000 + "b/": "invalid grammar",  # would take minutes
    "start: " + "(" * 100_000 + '"a"' + ")" * 100_000: "invalid grammar",
}


@pytest.mark.parametrize("text", WRONG)
def test_an_invalid_grammar_is_reported_in_one_line(plain: LLMEngine, text: str) -> None:
    with pytest.raises(UserError, match=WRONG[text]) as error:
        plain.stream([5], replace(PARAMS, grammar=text))
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_a_target_without_a_tokenizer_or_end_token_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    for folder, eos, reason in ((tmp_path, (0,), "does not have"), (pair[0], (), "name none")):
        with pytest.raises(UserError, match=reason):
            GrammarCompiler(folder, eos, VOCAB).compile(LIST)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(UserError, match="cannot be used for grammars"):
        GrammarCompiler(tmp_path, (0,), VOCAB).compile(LIST)


def test_a_request_ends_if_no_token_is_allowed() -> None:
    parser: Any = SimpleNamespace(compute_bitmask=lambda: bytes(8), is_error=lambda: False)
    with pytest.raises(GrammarTooComplex, match="no token matches"):
        GrammarConstraint(parser, (EOS,), 64, 64).bitmask([()])


def test_a_parser_limit_ends_only_its_request(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    llm, failed = make(pair, "serial"), list[object]()
    compute = GrammarConstraint._mask

    def fail(self: Any, path: Any) -> Any:
        failed.append(path)
        if len(failed) > 20:
            raise GrammarTooComplex("the grammar cannot be continued: too complex")
        return compute(self, path)

    want = llm.generate([5], PARAMS).token_ids
    with monkeypatch.context() as patch:
        patch.setattr(GrammarConstraint, "_mask", fail)
        with pytest.raises(UserError, match="cannot be continued"):
            llm.generate([5], PARAMS)
    assert llm.generate([5], PARAMS).token_ids == want
