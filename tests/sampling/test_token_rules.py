"""min_tokens, allowed tokens and bad words exclude tokens by the output so far: the text equals that of autoregressive
decoding, which equals a direct computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.errors import UserError
from swiftspec.llm_engine import LLMEngine
from swiftspec.params import SamplingParams
from swiftspec.sampling.sampler import Sampler
from swiftspec.sampling.token_rules import TokenRules
from tests.support.roles import make_drafter, replace_roles, tree_of, verifier_of
from tests.support.tiny_checkpoints import make_checkpoint
from tests.support.token_constraints import DiceRules

VOCAB, EOS = 64, 2
PROMPT = [5, 17, 3, 29, 11, 8, 2, 30]
GREEDY = SamplingParams(temperature=0, max_tokens=30)
Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target, and the same model as a draft, so that rounds are long."""
    folder = tmp_path_factory.mktemp("pair")
    for name in ("target", "draft"):
        make_checkpoint(folder / name, seed=3, vocab=VOCAB, dtype=torch.float64)
    return folder / "target", folder / "draft"


def engine(pair: Pair, mode: str, dtype: torch.dtype = torch.float64) -> LLMEngine:
    """An engine; mode "ahead" has a lookahead drafter in the same process, mode "batch" two sequences."""
    config = EngineConfig("ar" if mode == "ar" else "serial", max_num_seqs=2 if mode == "batch" else 1)
    llm = LLMEngine(pair[0], None if mode == "ar" else pair[1], config, dtype=dtype, max_model_len=128)
    if mode == "ahead":
        drafter: Any = tree_of(llm).drafter
        replace_roles(llm, make_drafter(drafter.runner, config, ahead=True))
    return llm


def follows_rules(tokens: Sequence[int], params: SamplingParams) -> bool:
    """Whether an output follows the rules, by a search in the whole output."""
    ends = {EOS, *params.stop_token_ids}
    early = ends.isdisjoint(tokens[: params.min_tokens])
    allowed = params.allowed_token_ids is None or set(tokens) <= {*params.allowed_token_ids}
    words = [list(word) for word in params.bad_words_ids]
    spelled = any(list(tokens[at : at + len(word)]) == word for word in words for at in range(len(tokens)))
    return early and allowed and not spelled


def rules_of(llm: LLMEngine) -> dict[str, SamplingParams]:
    """Rules that change the text, made from the text without them."""
    text = llm.generate(PROMPT, replace(GREEDY, ignore_eos=True)).token_ids
    shaped = SamplingParams(temperature=0.9, seed=4, top_p=0.95, presence_penalty=0.5, max_tokens=30)
    pairs = tuple(zip(text[3::4], text[4::4]))
    odd = tuple(range(1, VOCAB, 2))
    return {
        "min_tokens": replace(GREEDY, min_tokens=14, stop_token_ids=tuple(text[1:6])),
        "min_tokens, sampled": replace(shaped, min_tokens=21, stop_token_ids=tuple(range(20))),
        "allowed": replace(GREEDY, allowed_token_ids=odd),
        "bad words": replace(GREEDY, bad_words_ids=((text[1],), *pairs, tuple(text[:3])), ignore_eos=True),
        "all": replace(
            shaped, min_tokens=9, allowed_token_ids=odd, bad_words_ids=((3,), (5, 7), (9, 11, 13), (1, 1)),
            logit_bias={7: 3.0, 9: 2.0, 11: 2.0, 1: 1.0}, stop_token_ids=(15, 17),
        ),
    }  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["serial", "ahead", "batch"])
def test_every_mode_gives_the_text_of_autoregressive_decoding(pair: Pair, mode: str) -> None:
    plain, other = engine(pair, "ar"), engine(pair, mode)
    rules = rules_of(plain)
    if mode == "batch":
        words = {name: tuple(word for word in each.bad_words_ids if len(word) == 1) for name, each in rules.items()}
        rules = {name: replace(each, bad_words_ids=words[name]) for name, each in rules.items()}
        found = other.generate_batch([PROMPT] * len(rules), list(rules.values()))
    else:
        found = [other.generate(PROMPT, each) for each in rules.values()]
    for (name, params), answer in zip(rules.items(), found, strict=True):
        want = plain.generate(PROMPT, params)
        assert (answer.token_ids, answer.finish_reason) == (want.token_ids, want.finish_reason), name
        assert follows_rules(want.token_ids, params), name
        bare = replace(params, min_tokens=0, allowed_token_ids=None, bad_words_ids=())
        assert plain.generate(PROMPT, bare).token_ids != want.token_ids, f"{name} changes nothing"
        assert answer.stats.rounds < 0.8 * len(want.token_ids), f"{name}: the draft has no part in it"


def test_the_text_equals_a_direct_computation(pair: Pair) -> None:
    """The most likely allowed token of a forward over the text so far."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float64)
    llm = engine(pair, "serial")
    for params in (each for each in rules_of(llm).values() if each.greedy):
        tokens, ends = list[int](), {*params.stop_token_ids, *([] if params.ignore_eos else [EOS])}
        while len(tokens) < 30 and ends.isdisjoint(tokens[-1:]):
            with torch.no_grad():
                order = model(torch.tensor([[*PROMPT, *tokens]])).logits[0, -1].argsort(descending=True).tolist()
            tokens.append(next(token for token in order if follows_rules([*tokens, token], params)))
        assert llm.generate(PROMPT, params).token_ids == tokens


@pytest.mark.parametrize("name", ["min_tokens, sampled", "all"])
def test_native_executors_give_the_same_text(pair: Pair, name: str) -> None:
    """In float32, in which the native executors run where the CPU has them."""
    params = replace(rules_of(engine(pair, "ar"))[name], top_p=1.0, presence_penalty=0.0)
    llm = engine(pair, "serial", torch.float32)
    assert verifier_of(llm).required_features(params) >= {"path rules"}
    found = llm.generate(PROMPT, params).token_ids
    assert found == engine(pair, "ar", torch.float32).generate(PROMPT, params).token_ids
    assert follows_rules(found, params)


def test_a_population_follows_the_rules(pair: Pair) -> None:
    population = PopulationConfig(particles=4, smc_draft_tokens=3)
    llm = LLMEngine(*pair, EngineConfig("smc", population=population), dtype=torch.float64, max_model_len=128)
    params = SamplingParams(
        seed=4, max_tokens=30, min_tokens=12, stop_token_ids=tuple(range(0, 40, 2)), allowed_token_ids=tuple(range(40)),
        bad_words_ids=((3,), (5,)),
    )  # fmt: skip
    answer = llm.generate(PROMPT, params)
    assert len(answer.token_ids) > 12 and answer.finish_reason == "stop" and follows_rules(answer.token_ids, params)
    with pytest.raises(UserError, match="bad words of several tokens are not supported in mode smc"):
        llm.generate(PROMPT, replace(params, bad_words_ids=((3, 4),)))


def test_a_rule_that_leaves_no_token_is_not_applied() -> None:
    """With a constraint below it, such as a grammar, which allows some tokens only."""
    params = SamplingParams(
        grammar="dice", min_tokens=4, stop_token_ids=tuple(range(8)), allowed_token_ids=tuple(range(12)),
        bad_words_ids=((1,), (9, 2), (9, 3, 4)),
    )  # fmt: skip
    base, rules = DiceRules(16), TokenRules(params, 16, (0,), DiceRules(16))
    paths = [[], [9], [9, 3], [1, 2, 3], [1, 2, 3, 4]]
    for _ in range(8):
        for path, below, mask in zip(paths, base.allowed_mask(paths), rules.allowed_mask(paths), strict=True):
            text = [*base.text, *path]
            kept = {token for token in range(16) if below[token]}
            for excluded in (
                {*range(12, 16), 1},
                {word[-1] for word in params.bad_words_ids if len(word) > 1 and [*word[:-1]] == text[1 - len(word) :]},
                {*range(8)} if len(text) < 4 else set[int](),
            ):
                kept = kept - excluded or kept
            assert {token for token in range(16) if mask[token]} == kept
        base.observe([9])
        rules.observe([9])


def test_excluded_tokens_have_no_probability() -> None:
    params = SamplingParams(allowed_token_ids=(1, 2, 5), bad_words_ids=((2,), (5, 1)), logit_bias={1: 2.0, 3: 9.0})
    shaped = Sampler(params, (), 8, "cpu").process_logits(torch.zeros(1, 8), None)
    assert shaped.tolist() == [[-torch.inf, 2.0, *[-torch.inf] * 3, 0.0, *[-torch.inf] * 2]]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens 5 exceeds max_tokens 4"),
        ({"allowed_token_ids": ()}, "no token is left"),
        ({"allowed_token_ids": (4, 5), "bad_words_ids": ((4,), (5,))}, "no token is left"),
        ({"bad_words_ids": ((),)}, "must not be empty"),
        ({"min_tokens": 1, "allowed_token_ids": (EOS, 9), "stop_token_ids": (9,)}, "exclude every token"),
        ({"allowed_token_ids": (VOCAB,)}, "allowed_token_ids contains a token outside"),
        ({"bad_words_ids": ((3, -1),)}, "bad_words_ids contains a token outside"),
        ({"logprobs": 0, "logprob_token_ids": (VOCAB,)}, "logprob_token_ids contains a token outside"),
    ],
)
def test_contradictory_rules_are_refused(pair: Pair, values: dict[str, Any], message: str) -> None:
    llm = engine(pair, "ar")
    with pytest.raises(UserError, match=message):
        llm.generate(PROMPT, SamplingParams(**values))
