"""With workers every mode gives the target's own text, whatever happens to the workers meanwhile."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftspec.config import EngineConfig
from swiftspec.errors import UserError
from swiftspec.llm_engine import LLMEngine
from swiftspec.params import SamplingParams
from tests.support.cases import fast_first
from tests.support.tiny_checkpoints import make_checkpoint, make_pair
from tests.support.workers import OPTIONS, StartedWorker, client_on_workers, started

PROMPT = [5, 17, 3, 29, 11, 8, 2, 30]
TOKENS = 30
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(
    temperature=0.8, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.2, logit_bias={7: 1.5}, seed=1234,
    max_tokens=TOKENS, ignore_eos=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def target(pair: tuple[Path, Path]) -> Iterator[StartedWorker]:
    with started("target", pair[0]) as worker:
        yield worker


@pytest.fixture(scope="module")
def draft(pair: tuple[Path, Path]) -> Iterator[StartedWorker]:
    with started("draft", pair[1]) as worker:
        yield worker


REJECTION: dict[str, Any] = {
    "mode": "serial", "verify": "reject", "draft_steps": 3, "verify_batch": 6, "draft_leaves": 2,
}  # fmt: skip


@functools.cache
def plain(target: Path, sampling: str, verify: str = "match") -> list[int]:
    """The text of one process, by autoregressive decoding or, where the text depends on the tree, in serial mode."""
    params = GREEDY if sampling == "greedy" else SAMPLED
    if verify == "match":
        return LLMEngine(target, None, **OPTIONS).generate(PROMPT, params).token_ids
    config = EngineConfig(**REJECTION)
    return LLMEngine(target, target.parent / "draft", config, **OPTIONS).generate(PROMPT, params).token_ids


SHAPES: dict[str, dict[str, Any]] = {
    "serial": {"mode": "serial", "draft_steps": 3},
    "async": {"mode": "async", "draft_steps": 3},  # the worker sends its tree deltas, a replica proposes
    "as it comes": {"mode": "async"},
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("where", fast_first(["both", "target", "draft"], 1))
@pytest.mark.parametrize("shape", SHAPES)
def test_the_text_equals_that_of_one_process(
    pair: tuple[Path, Path], target: StartedWorker, draft: StartedWorker, shape: str, where: str
) -> None:
    target_model = target.client_address() if where != "draft" else pair[0]
    draft_model = draft.client_address() if where != "target" else pair[1]
    with client_on_workers(target_model, draft_model, **SHAPES[shape]) as running:
        for name, params in (("greedy", GREEDY), ("sampled", SAMPLED)):
            answer = running.generate(PROMPT, params)
            assert answer.token_ids == plain(pair[0], name) and answer.stats.drafter_lost is None
            assert answer.stats.accepted > 3 and answer.stats.draft_busy_time > 0 and answer.stats.target_busy_time > 0


def test_synthetic_acceptance_on_workers(pair: tuple[Path, Path], target: StartedWorker, draft: StartedWorker) -> None:
    """The session start has its length, and the rounds on a target worker equal those of one process."""
    shape: dict[str, Any] = {"mode": "serial", "draft_steps": 3, "synthetic_acceptance_length": 1.7}
    answers = []
    for models in ((target.client_address(), draft.client_address()), (target.client_address(), pair[1]), pair):
        with client_on_workers(*models, **shape) as running:
            answer = running.generate(PROMPT, SAMPLED)
        answers.append((answer.token_ids, [each.path for each in answer.stats.verified]))
        assert answer.stats.synthetic_acceptance_length == 1.7
    assert answers[0] == answers[1] == answers[2] and answers[0][0] != plain(pair[0], "sampled")
    counts = [len(path) for path in answers[0][1]][:-1]
    assert {*counts} == {1, 2} and abs(sum(counts) - 1.7 * len(counts)) < 1


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_the_sides_may_compute_in_different_dtypes(pair: tuple[Path, Path], target: StartedWorker, shape: str) -> None:
    """Like draft and target on different devices: a draft that rounds differently proposes different tokens."""
    with started("draft", pair[1], options={"dtype": torch.bfloat16}) as draft:
        for target_model in (target.client_address(), pair[0]):
            with client_on_workers(target_model, draft.client_address(), **SHAPES[shape]) as running:
                answer = running.generate(PROMPT, SAMPLED)
                assert answer.token_ids == plain(pair[0], "sampled") and answer.stats.accepted > 3


def test_a_request_without_a_tree_does_not_use_the_draft(
    pair: tuple[Path, Path], target: StartedWorker, draft: StartedWorker
) -> None:
    with client_on_workers(target.client_address(), draft.client_address()) as running:
        alone, helped = running.generate(PROMPT, replace(GREEDY, verify_batch=1)), running.generate(PROMPT, GREEDY)
    assert alone.token_ids == helped.token_ids == plain(pair[0], "greedy")
    assert alone.stats.accepted == 0 < helped.stats.accepted


def test_with_fixed_d_the_rounds_equal_those_of_a_local_draft(
    pair: tuple[Path, Path], target: StartedWorker, draft: StartedWorker
) -> None:
    rounds = []
    for drafting in (draft.client_address(), pair[1]):
        with client_on_workers(target.client_address(), drafting, draft_steps=3) as running:
            rounds.append([chunk.token_ids for chunk in running.stream(PROMPT, SAMPLED)])
    assert rounds[0] == rounds[1]


def test_a_request_that_sets_d_after_one_that_does_not(
    pair: tuple[Path, Path], target: StartedWorker, draft: StartedWorker
) -> None:
    with client_on_workers(target.client_address(), draft.client_address()) as running:
        answers = [running.generate(PROMPT, replace(GREEDY, draft_steps=steps)) for steps in (None, 3)]
    assert [answer.stats.drafter_lost for answer in answers] == [None, None]
    assert all(answer.token_ids == plain(pair[0], "greedy") for answer in answers)


def test_without_a_draft_and_with_guidance_and_scores(pair: tuple[Path, Path], target: StartedWorker) -> None:
    guided = replace(SAMPLED, guidance_scale=1.5, logprobs=2, max_tokens=8, repetition_penalty=1.0)
    scored = replace(GREEDY, logprobs=3, prompt_logprobs=1, max_tokens=8)
    with client_on_workers(target.client_address(), None) as running:
        local = LLMEngine(pair[0], None, **OPTIONS)
        for params in (guided, scored):
            assert [*running.stream(PROMPT, params)] == [*local.stream(PROMPT, params)]


def test_rejection_sampling_has_the_same_rounds(
    pair: tuple[Path, Path], target: StartedWorker, draft: StartedWorker
) -> None:
    """The draft probabilities are transferred bitwise."""
    with client_on_workers(target.client_address(), draft.client_address(), **REJECTION) as running:
        assert running.generate(PROMPT, SAMPLED).token_ids == plain(pair[0], "sampled", "reject")


@pytest.mark.slow
def test_sessions_are_independent(pair: tuple[Path, Path]) -> None:
    """Two clients alternate on workers with room for two sessions, then for one: then each round evicts the session of
    the other client, which is prefilled again."""
    for sessions in (2, 1):
        with started("target", pair[0], sessions=sessions) as target, started("draft", pair[1], sessions=2) as draft:
            with (
                client_on_workers(target.client_address(), draft.client_address(), draft_steps=2) as one,
                client_on_workers(
                    target.client_address(), draft.client_address(), mode="serial", draft_steps=2
                ) as other,
            ):
                streams = one.stream(PROMPT, GREEDY), other.stream(PROMPT, SAMPLED)
                texts: tuple[list[int], list[int]] = [], []
                open_ = [0, 1]
                while open_:
                    for i in tuple(open_):
                        chunk = next(streams[i], None)
                        if chunk is None:
                            open_.remove(i)
                        else:
                            texts[i].extend(chunk.token_ids)
                assert texts == (plain(pair[0], "greedy"), plain(pair[0], "sampled"))
                assert len(target.worker.sessions) == sessions
            assert len(target.worker.sessions) == len(draft.worker.sessions) == 0, "whoever leaves says so"


@pytest.mark.slow
def test_a_drafter_that_restarts_costs_speed_only(pair: tuple[Path, Path], target: StartedWorker) -> None:
    draft = StartedWorker("draft", pair[1]).start()
    params = replace(GREEDY, max_tokens=120)
    whole = LLMEngine(pair[0], None, **OPTIONS).generate(PROMPT, params).token_ids
    with client_on_workers(target.client_address(), draft.client_address(), draft_steps=3) as running:
        text: list[int] = []
        for count, chunk in enumerate(running.stream(PROMPT, params)):
            text += chunk.token_ids
            if count == 5:
                draft.stop()
            if count == 20:
                assert running.stats.drafter_lost is not None
                draft.start()
        assert text == whole and len(running.stats.outages) == 1
        again = running.generate(PROMPT, params)
        assert again.token_ids == whole and again.stats.drafter_lost is None
        draft.stop()


def test_a_drafter_that_never_starts_costs_speed_only(pair: tuple[Path, Path], target: StartedWorker) -> None:
    draft = StartedWorker("draft", pair[1]).start()
    draft.stop()
    with client_on_workers(target.client_address(), draft.client_address(), draft_steps=3) as running:
        answer = running.generate(PROMPT, GREEDY)
        assert answer.token_ids == plain(pair[0], "greedy") and "not been reached" in str(answer.stats.drafter_lost)


def test_decoding_continues_after_a_restart_of_the_target(pair: tuple[Path, Path], draft: StartedWorker) -> None:
    target = StartedWorker("target", pair[0]).start()
    with client_on_workers(target.client_address(), draft.client_address(), draft_steps=3) as running:
        stream = running.stream(PROMPT, SAMPLED)
        text = [*next(stream).token_ids]
        target.stop()
        target.start()
        assert [*text, *(token for chunk in stream for token in chunk.token_ids)] == plain(pair[0], "sampled")
        target.stop()


def test_a_lost_target_is_an_error_within_the_timeout(
    pair: tuple[Path, Path], draft: StartedWorker, tmp_path: Path
) -> None:
    """A worker with another model at the same address is an error too, since its text would differ."""
    target = StartedWorker("target", pair[0]).start()
    make_checkpoint(tmp_path, vocab=64, seed=9)
    with client_on_workers(target.client_address(timeout=0.5), draft.client_address(), draft_steps=3) as running:
        stream = running.stream(PROMPT, GREEDY)
        next(stream)
        target.stop()
        with pytest.raises(UserError, match=r"--target-url 127\.0\.0\.1:\d+ is unavailable"):
            next(stream)
        target.model = tmp_path
        target.start()
        with pytest.raises(UserError, match="model has changed"):
            running.generate(PROMPT, GREEDY)
        target.stop()
