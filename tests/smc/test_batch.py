"""Batches through the public API: each request equals itself alone, ends independently, and is refused with one
line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftspec import _C
from swiftspec.backends.cpu import cpu
from swiftspec.backends.reference import reference
from swiftspec.batching.batch_request import BatchRequest
from swiftspec.cache.model_cache import ModelCache
from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.engine import Stats, StopCriteria
from swiftspec.errors import NonFiniteLogits, UserError
from swiftspec.llm_engine import LLMEngine
from swiftspec.model.batch import Batch, ForwardOutput
from swiftspec.params import SamplingParams
from swiftspec.smc.decoding import PopulationDecoding
from tests.model.test_loader import quantise
from tests.support.history_models import HistoryModel, make_worker
from tests.support.roles import request_start, scheduler_of
from tests.support.tiny_checkpoints import make_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"), head_dim=16, intermediate_size=64)


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    made = make_pair(tmp_path_factory.mktemp("int4"), head_dim=16, intermediate_size=64)
    quantise(made[0], "awq")
    return made


def llm(pair: tuple[Path, Path], groups: int, **options: Any) -> LLMEngine:
    plan = PopulationConfig(3, 3, 0.7, smc_groups=groups)
    return LLMEngine(*pair, EngineConfig("smc", population=plan), max_model_len=96, **options)


def requests_of(count: int) -> Iterator[tuple[list[int], SamplingParams]]:
    """Prompts of different lengths, up to the context."""
    for i in range(count):
        prompt = [3 + i * j % 61 for j in range(1 + 31 * (i + 3) % 95)]
        yield prompt, SamplingParams(0.7 if i % 3 else 0.9, seed=i, max_tokens=3 + 7 * i % 40, ignore_eos=i % 2 > 0)


NATIVE = pytest.mark.skipif(_C.level() == "none", reason="this CPU has no AVX2")


@pytest.mark.parametrize(
    ("models", "dtype", "count", "groups"),
    [
        ("pair", torch.float64, 4, 3),
        pytest.param("pair", torch.bfloat16, 4, 4, marks=NATIVE),
        pytest.param("pair", torch.bfloat16, 16, 16, marks=(NATIVE, pytest.mark.long)),
        pytest.param("int4", torch.bfloat16, 16, 16, marks=(NATIVE, pytest.mark.slow)),
    ],
)
def test_each_request_of_a_batch_equals_itself_alone(
    request: pytest.FixtureRequest, models: str, dtype: torch.dtype, count: int, groups: int
) -> None:
    """Native operators in bfloat16, whose rows are bitwise independent; reference operators in float64."""
    pair = request.getfixturevalue(models)
    several, one = llm(pair, groups, dtype=dtype), llm(pair, 1, dtype=dtype)
    assert scheduler_of(several).target.ops is (cpu if dtype == torch.bfloat16 else reference)
    prompts, sampling = zip(*requests_of(count), strict=True)
    assert max(map(len, prompts)) > 90 and min(map(len, prompts)) < 40
    found = several.generate_batch(prompts, sampling)
    wanted = [one.generate(*each) for each in zip(prompts, sampling, strict=True)]
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in wanted]
    assert [answer.finish_reason for answer in found] == [answer.finish_reason for answer in wanted]
    assert [answer.stats.rounds for answer in found] == [answer.stats.rounds for answer in wanted]
    assert several.generate(prompts[-1], sampling[-1]).token_ids == wanted[-1].token_ids, "a batch of one"


def test_a_cancelled_request_does_not_affect_others(pair: tuple[Path, Path]) -> None:
    engine = llm(pair, 2, dtype=torch.float64)
    sampling = [SamplingParams(0.7, seed=i, max_tokens=30, ignore_eos=True) for i in range(3)]
    wanted = [answer.token_ids for answer in engine.generate_batch([[7, 8]] * 3, sampling)]
    outputs: list[list[int]] = [[], [], []]
    reasons = dict[int, str | None]()
    for index, chunk in engine.stream_batch([[7, 8]] * 3, sampling, lambda index: index == 1 and 1 in reasons):
        outputs[index] += chunk.token_ids
        reasons[index] = chunk.finish_reason
    assert (outputs[0], outputs[2]) == (wanted[0], wanted[2]) and reasons == {0: "length", 1: "abort", 2: "length"}
    assert not scheduler_of(engine).groups
    left = engine.stream_batch([[7, 8]] * 3, sampling)
    next(left)
    left.close()
    assert not scheduler_of(engine).groups and engine.generate([7, 8], sampling[0]).token_ids == wanted[0]


def test_a_batch_runs_sequentially_if_only_one_fits(pair: tuple[Path, Path]) -> None:
    engine = LLMEngine(*pair, max_model_len=96, dtype=torch.float64)
    prompts, sampling = zip(*requests_of(3), strict=True)
    wanted = [engine.generate(*each).token_ids for each in zip(prompts, sampling, strict=True)]
    found = engine.generate_batch(prompts, sampling)
    assert [answer.token_ids for answer in found] == wanted
    assert [answer.stats.prompt_tokens for answer in found] == [*map(len, prompts)]
    ended = {index: chunk.finish_reason for index, chunk in engine.stream_batch(prompts, sampling, lambda i: i == 1)}
    assert ended == {0: found[0].finish_reason, 1: "abort", 2: found[2].finish_reason}


class NonFiniteModel(HistoryModel):
    """A model whose logits after one token, at any position, are not finite."""

    def forward(self, batch: Batch, cache: ModelCache, *, head: bool = True) -> ForwardOutput:
        found = super().forward(batch, cache, head=head).logits
        assert found is not None
        return ForwardOutput(torch.where((batch.tokens == self.vocab - 1)[:, None], torch.nan, found), None)


@pytest.mark.parametrize("lag", [0, 1])
def test_logits_that_are_not_finite_end_only_their_request(lag: int) -> None:
    """A prompt may end with that token; the other requests avoid it."""
    plan = PopulationConfig(3, 2, smc_groups=3)
    worker = make_worker(NonFiniteModel(4, 1), HistoryModel(4, 2), plan, max_tokens=12, slots=64, lag=lag)
    decoding = PopulationDecoding(worker)
    bias = {3: -1e9}  # no request generates it
    ends = StopCriteria(9, ())
    requests = [
        BatchRequest(
            request_start((1, 3 if i == 1 else 2), SamplingParams(0.8, seed=i, logit_bias=bias), request=i),
            ends,
            Stats(),
        )
        for i in range(4)
    ]

    def run(batch: Sequence[BatchRequest]) -> dict[int, list[int]]:
        waiting, outputs = iter(batch), dict[int, list[int]]()
        for request, chunk in decoding.batch(lambda: next(waiting, None), lambda request: False):
            outputs.setdefault(request.number, []).extend(chunk.token_ids)
        return outputs

    found = run(requests)
    assert {n: found[n] for n in (0, 2, 3)} == {n: run([requests[n]])[n] for n in (0, 2, 3)}
    assert [request.stats.finish_reason for request in requests] == ["length", "error", "length", "length"]
    assert isinstance(requests[1].error, NonFiniteLogits) and found[1] == [] and not worker.groups


def test_each_capture_counts_for_one_request_of_the_batch() -> None:
    worker = make_worker(HistoryModel(4, 1), HistoryModel(4, 2), PopulationConfig(2, 2, smc_groups=2), max_tokens=6)
    captured, step = [5], worker.step  # 5: at startup

    def step_and_capture() -> bool:
        captured[0] += 1
        return step()

    worker.step = step_and_capture
    requests = [
        BatchRequest(
            request_start((1, 2), SamplingParams(0.8, seed=i), request=i), StopCriteria(4 + i, ()), Stats()
        ) for i in range(3)
    ]  # fmt: skip
    waiting = iter(requests)
    decoding = PopulationDecoding(worker, captured_graphs=lambda: captured[0])
    assert [*decoding.batch(lambda: next(waiting, None), lambda request: False)]
    found = [request.stats.graph_captures for request in requests]
    assert sum(found) == captured[0] - 5 > 2 and found[0] > 0


def test_an_invalid_batch_is_refused(pair: tuple[Path, Path]) -> None:
    engine, warm = llm(pair, 2), SamplingParams(max_tokens=3)
    assert engine.generate_batch([]) == []
    refused: list[tuple[Any, Any, str]] = [
        ([[1], []], warm, "request 1 of the batch: the prompt is empty"),
        ([[1] * 96], warm, "request 0 of the batch: the prompt of 96 tokens does not fit"),
        ([[1], [2]], [warm], "got 1 SamplingParams for 2 prompts"),
        ([[1]], {"seed": 1}, "sampling must be SamplingParams"),
        ([[1]], SamplingParams(0), "request 0 of the batch: temperature 0 is not supported in mode smc"),
    ]
    for prompts, sampling, message in refused:
        with pytest.raises(UserError, match=message):
            engine.generate_batch(prompts, sampling)
    assert len(engine.generate_batch([[1], [2]], warm)) == 2
