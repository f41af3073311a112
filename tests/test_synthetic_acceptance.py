"""Synthetic acceptance: rounds have the tokens of the schedule in every mode with a draft tree, and what promises the
target's text refuses it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftspec import _C
from swiftspec.config import EngineConfig
from swiftspec.engine import Completion
from swiftspec.errors import UserError
from swiftspec.llm_engine import LLMEngine
from swiftspec.params import SamplingParams
from swiftspec.runtime.overlapped import ThreadedVerifier
from swiftspec.settings.rank_plan import synthetic_advice
from swiftspec.tree.synthetic_acceptance import AcceptanceSchedule
from tests.support.roles import drafter_of, make_drafter, replace_roles, restrict_executors, verifier_of
from tests.support.tiny_checkpoints import make_pair

PROMPT = [5, 17, 3, 29, 11, 8, 2, 30]
TOKENS = 60
NARROW: dict[str, Any] = {"verify_batch": 2, "draft_leaves": 1, "draft_steps": 3}  # one node deep in every mode
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "seed": 3},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "seed": 5, "frequency_penalty": 0.4},
    "guided": {"temperature": 0.8, "seed": 2, "guidance_scale": 2.0, "negative_prompt_ids": (9, 4, 40)},
}
Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target, and the same model with noise on its weights."""
    return make_pair(tmp_path_factory.mktemp("pair"), head_dim=16)


def sampling(name: str = "greedy", **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": TOKENS, "ignore_eos": True, **REQUESTS[name], **more})


def made(pair: Pair, length: float | None, dtype: torch.dtype = torch.float64, **more: Any) -> LLMEngine:
    config = EngineConfig(**{"draft_steps": 6, "calibration": 0.1, "synthetic_acceptance_length": length, **more})
    return LLMEngine(*pair, config, dtype=dtype, max_model_len=128)


def counts(answer: Completion) -> list[int]:
    """Accepted nodes of the rounds, except the last one, which the token limit may cut."""
    return [len(each.path) - 1 for each in answer.stats.verified][:-1]


def scheduled(length: float, answer: Completion, params: SamplingParams) -> list[int]:
    schedule = AcceptanceSchedule(length, params.seed)
    return [schedule.num_accepted(round_) for round_ in range(len(answer.stats.verified) - 1)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("request_", "length"), [*zip(REQUESTS, (1.0, 2.0, 2.7))])
def test_rounds_have_the_tokens_of_the_schedule(pair: Pair, request_: str, length: float) -> None:
    params = sampling(request_)
    answer = made(pair, length).generate(PROMPT, params)
    assert counts(answer) == scheduled(length, answer, params)
    assert answer.stats.synthetic_acceptance_length == length and len(answer.token_ids) == TOKENS


def test_a_shallow_proposal_is_accepted_to_its_leaf(pair: Pair) -> None:
    answer = made(pair, 4.0, verify_batch=4, draft_steps=1).generate(PROMPT, sampling())
    deepest = [max(depths(each.parents)) for each in answer.stats.verified][:-1]
    assert min(deepest) == 1 and all(count <= most for count, most in zip(counts(answer), deepest, strict=True))


def depths(parents: tuple[int, ...]) -> list[int]:
    found = [0]
    for parent in parents[1:]:
        found.append(found[parent] + 1)
    return found


def test_the_bonus_token_is_the_targets(pair: Pair) -> None:
    """After the text so far, the target alone decodes the token at the end of each round."""
    answer, alone = (
        made(pair, 2.0).generate(PROMPT, sampling()),
        LLMEngine(pair[0], dtype=torch.float64, max_model_len=128),
    )
    assert answer.token_ids != alone.generate(PROMPT, sampling()).token_ids
    for end in range(2, 20, 2):
        text = [*PROMPT, *answer.token_ids[: end - 1]]
        assert alone.generate(text, sampling(max_tokens=1)).token_ids == [answer.token_ids[end - 1]]


@pytest.mark.skipif(_C.level() == "none", reason="this CPU has no AVX2")
@pytest.mark.parametrize("request_", REQUESTS)
def test_executors_and_modes_give_the_same_text(pair: Pair, request_: str) -> None:
    """The native executor is the one that runs unless another one is requested."""
    params, texts = sampling(request_), []
    for name in ("native", "eager", "async"):
        llm = made(pair, 1.7, torch.float32, **NARROW)
        if name == "eager":
            restrict_executors(verifier_of(llm), "eager")
        if name == "async":
            drafter = make_drafter(drafter_of(llm).runner, llm.config, ahead=True)
            replace_roles(llm, drafter, ThreadedVerifier(verifier_of(llm)))
        answer = llm.generate(PROMPT, params)
        assert name == "async" or verifier_of(llm).executor.name == name
        texts.append((answer.token_ids, counts(answer)))
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize(
    "split", [("async", 1, 1), ("serial", 2, 2), pytest.param(("async", 2, 1), marks=pytest.mark.slow)]
)
def test_ranks_give_the_text_of_one_process(pair: Pair, pool: Any, split: tuple[str, int, int]) -> None:
    mode, target_tp, draft_tp = split
    plan = {"mode": mode, "target_tp": target_tp, "draft_tp": draft_tp, "synthetic_acceptance_length": 1.7}
    shape = {**NARROW, "calibration": 0.1}
    requests = [
        (PROMPT, {"max_tokens": TOKENS, "ignore_eos": True, **REQUESTS[name]}) for name in ("greedy", "sampled")
    ]
    ranks = target_tp + (draft_tp if mode == "async" else 0)
    answers = pool.run(
        ranks, "decode", target=str(pair[0]), draft=str(pair[1]), plan={**plan, **shape}, requests=requests
    )[0]
    alone = made(pair, 1.7, **NARROW)
    for answer, name in zip(answers, ("greedy", "sampled"), strict=True):
        expected = alone.generate(PROMPT, sampling(name))
        assert (answer["tokens"], answer["rounds"]) == (expected.token_ids, expected.stats.rounds)


def test_drafters_with_suffix_lookup(pair: Pair) -> None:
    """Lookup may propose only the root, so that only its rounds with nodes are longer."""
    repeated = PROMPT * 4
    grafted = made(pair, 2.0, drafter="model+suffix").generate(repeated, sampling())
    assert {*counts(grafted)} == {1}
    lookup = LLMEngine(pair[0], "suffix", EngineConfig(synthetic_acceptance_length=2.0), dtype=torch.float64)
    answer = lookup.generate(repeated, sampling(max_tokens=20))
    assert [len(each.path) for each in answer.stats.verified][:-1] == [
        min(len(each.parents), 2) for each in answer.stats.verified
    ][:-1]


def test_log_probabilities_are_the_targets_of_the_output(pair: Pair) -> None:
    llm, params = made(pair, 2.0), sampling(logprobs=0, max_tokens=8)
    chunks = [*llm.stream(PROMPT, params)]
    found = [each for chunk in chunks for each in chunk.logprobs or ()]
    text = [token for chunk in chunks for token in chunk.token_ids]
    whole = llm.stream([*PROMPT, *text], sampling(verify_batch=1, prompt_logprobs=0, max_tokens=1))
    wanted = next(iter(whole)).prompt_logprobs
    assert wanted is not None
    assert [each.logprob for each in found] == pytest.approx([each.logprob for each in wanted[-len(text) :]])
    assert any(each.rank > 1 for each in found), "the draft's tokens are not always the target's"


def test_a_request_without_the_draft_has_the_targets_text(pair: Pair) -> None:
    llm, alone = made(pair, 2.0), LLMEngine(pair[0], dtype=torch.float64, max_model_len=128)
    answer = llm.generate(PROMPT, sampling(verify_batch=1))
    assert answer.token_ids == alone.generate(PROMPT, sampling()).token_ids
    assert answer.stats.synthetic_acceptance_length is None
    assert llm.config.for_request(sampling(verify_batch=1)).synthetic_acceptance_length is None
    assert llm.generate(PROMPT, sampling(verify_batch=2)).stats.synthetic_acceptance_length == 2.0


def test_requests_that_are_refused(pair: Pair) -> None:
    llm = made(pair, 3.0)
    rules: list[dict[str, Any]] = [
        {"grammar": 'start: "a"'}, {"allowed_token_ids": (1, 2)}, {"bad_words_ids": ((3,),)},
        {"bad_words_ids": ((3, 4),)}, {"min_tokens": 2},
    ]  # fmt: skip
    for rule in rules:
        with pytest.raises(UserError, match="not supported with synthetic_acceptance_length, since"):
            llm.stream(PROMPT, sampling(**rule))
    with pytest.raises(UserError, match="must be 1 or at least the synthetic_acceptance_length 3, not 2"):
        llm.stream(PROMPT, sampling(verify_batch=2))


def test_the_length_is_at_most_bs(pair: Pair) -> None:
    assert EngineConfig(verify_batch=16, synthetic_acceptance_length=16).synthetic_acceptance_length == 16.0
    for length, shown in ((9, "9"), (0.5, "0.5"), (65, "65")):
        with pytest.raises(
            UserError, match=rf"synthetic_acceptance_length must lie in 1\.\.8 \(verify_batch\), not {shown}"
        ):
            EngineConfig(synthetic_acceptance_length=length)
    with pytest.raises(UserError, match="finite"):
        EngineConfig(synthetic_acceptance_length=float("nan"))
    with pytest.raises(UserError, match="mode ar, which has no draft tree"):
        LLMEngine(pair[0], None, EngineConfig(synthetic_acceptance_length=2))


def test_a_warning_states_what_limits_the_rounds() -> None:
    assert synthetic_advice(EngineConfig("serial")) is None
    short = synthetic_advice(EngineConfig("serial", synthetic_acceptance_length=3.5))
    assert short is not None and "answers are not the target's" in short and "draft_steps" not in short
    deep = synthetic_advice(EngineConfig("serial", synthetic_acceptance_length=4.5))
    assert deep is not None and deep.endswith("raise it to 4")


def test_a_trace_states_the_length(pair: Pair, tmp_path: Path) -> None:
    for length in (2.0, None):
        config = EngineConfig(synthetic_acceptance_length=length)
        LLMEngine(*pair, config, dtype=torch.float64, trace=tmp_path / "trace").close()
        head = json.loads((tmp_path / "trace").read_text().splitlines()[0])
        assert head.get("synthetic_acceptance_length") == length
