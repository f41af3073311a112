"""The population: no host work in a round, the same answer for any slot layout, real models, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from swiftspec.backends.reference import reference
from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.errors import UserError
from swiftspec.llm_engine import LLMEngine
from swiftspec.model.loader import load_model
from swiftspec.params import SamplingParams
from swiftspec.runtime.runner import PREFILL_CHUNK_TOKENS
from swiftspec.smc.decoding import decode_groups
from tests.support.cases import fast_first
from tests.support.history_models import HistoryModel, make_worker
from tests.support.history_models import run as decode
from tests.support.roles import make_runner, make_scheduler, request_start, scheduler_of
from tests.support.tiny_checkpoints import make_checkpoint

WARM = SamplingParams(temperature=0.8, seed=5)
PLANS = [
    PopulationConfig(4, 3),
    PopulationConfig(4, 3, 1.0, 2.0),
    PopulationConfig(4, 3, 0.5, 2.0, 2),
    PopulationConfig(1, 1, 0.5, 1.0, 1),
]
FILTERS: list[dict[str, Any]] = [{}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}]


class Shapes(TorchDispatchMode):
    """Records every operator and its output shapes; refuses those that read a value or whose shape depends on one."""

    READS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "item")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        assert not name.startswith(self.READS), f"{name} waits for the device"
        if name in ("index", "index_put_", "index_put", "_index_put_impl_"):
            assert all(index is None or index.dtype != torch.bool for index in args[1]), "boolean indexing"
        out = func(*args, **(kwargs or {}))
        self.seen += [(name, tuple(t.shape)) for t in (out if isinstance(out, tuple | list) else (out,))]
        return out


@pytest.mark.sampled(3)
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_round_has_constant_shapes_and_no_host_reads(plan: PopulationConfig, filters: dict[str, Any]) -> None:
    """Other tokens, weights, resamplings and finished rows: the same operators on the same shapes."""
    shapes = []
    worker = make_worker(HistoryModel(6, 1), HistoryModel(6, 2), plan)
    for seed, stops in ((1, set()), (2, {0}), (3, {0, 1, 2}), (4, set(range(6)))):
        worker.open(request_start([1, 2], replace(WARM, seed=seed, **filters)), stops, 12)
        for _ in range(2):
            with Shapes() as mode:
                worker.round(48, 1)
            shapes.append(mode.seen)
    assert all(seen == shapes[0] for seen in shapes) and len(shapes[0]) > 100


@pytest.mark.sampled(3)
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_round_runs_on_meta_tensors(plan: PopulationConfig, filters: dict[str, Any]) -> None:
    """On meta tensors `.tolist()`, `.item()` and `if tensor:` raise."""
    worker = make_worker(HistoryModel(6, 1, device="meta"), HistoryModel(6, 2, device="meta"), plan)
    worker.open(request_start([1, 2], replace(WARM, **filters)), (), 12)
    head = worker.round(48, 1)
    assert head.shape == (1, worker.round.header_len + 48)
    with pytest.raises(RuntimeError):
        head.tolist()


def test_the_guards_detect_what_they_forbid() -> None:
    x = torch.arange(3)
    reads = (lambda: x.sum().item(), lambda: x[x > 1], lambda: bool(x.any()), lambda: x.nonzero())
    for read in (*reads, lambda: torch.where(x > 1)[0]):
        with pytest.raises(AssertionError), Shapes():
            read()


@pytest.mark.slow
@pytest.mark.parametrize(("exact", "filters"), fast_first([(2, {}), (0, {}), (0, FILTERS[1])], 1, unpack=True), ids=str)
def test_slot_layout_and_host_lag_do_not_change_the_answer(exact: int, filters: dict[str, Any]) -> None:
    """A region with room for few rounds is compacted repeatedly; the tokens are those of a large one."""
    plan, target, draft = PopulationConfig(3, 3, 0.7, 1.0, exact), HistoryModel(3, 1), HistoryModel(3, 2)
    roomy = make_worker(target, draft, plan, max_tokens=20, slots=400)
    tight = make_worker(target, draft, plan, max_tokens=20, slots=75)
    late = make_worker(target, draft, plan, max_tokens=20, slots=90, lag=1)
    compactions = 0
    for seed in range(12):
        sampling = replace(WARM, seed=seed, **filters)
        for worker in (roomy, tight, late):
            decode(worker, [0, 1, 2], sampling, {1} if seed % 2 else set(), 16)
        want, answer = roomy.answer(), tight.answer()
        assert not (want.full or answer.full or late.answer().full)
        assert answer.tokens == want.tokens == late.answer().tokens
        assert answer.log_z == pytest.approx(want.log_z)
        compactions += answer.compactions + late.answer().compactions
        assert torch.equal(*(each.particles.tokens[..., : len(want.tokens)] for each in (tight, roomy)))
    assert compactions > 8


def test_streaming_returns_the_common_prefix_and_the_rest_at_the_end() -> None:
    worker = make_worker(HistoryModel(3, 1), HistoryModel(3, 2), PopulationConfig(3, 1, 1.0))
    early = 0
    for seed in range(16):
        worker.open(request_start([0, 1], replace(WARM, seed=seed)), {1}, 14)
        streamed: list[int] = []
        for group, tokens in decode_groups(worker):
            if group.answer is None:
                streamed += tokens
                rows, lengths = worker.particles.tokens[0].tolist(), worker.particles.length[0].tolist()
                assert all(
                    row[: len(streamed)] == streamed and len(streamed) <= n
                    for row, n in zip(rows, lengths, strict=True)
                )
                early += len(tokens)
            else:
                assert streamed + list(tokens) == group.answer.tokens
    assert early > 8


def test_particles_without_a_common_prefix_fill_the_cache_and_end_the_request() -> None:
    model = HistoryModel(5, 1)
    worker = make_worker(model, model, PopulationConfig(4, 2), max_tokens=16, slots=70)
    decode(worker, [0, 1], replace(WARM, temperature=1.0), set(), 16)
    answer = worker.answer()
    assert answer.full and answer.resample_rate == 0 and not answer.stopped
    assert answer.tokens and all(0 <= token < 5 for token in answer.tokens) and worker.group.region.used_slots <= 70


def test_rows_are_processed_in_chunks() -> None:
    plan = PopulationConfig(96, 3)
    target = HistoryModel(3, 1)
    whole = make_worker(target, HistoryModel(3, 2), plan, slots=2000)
    decode(whole, [0, 1], WARM, set(), 8)
    assert 96 * 4 > PREFILL_CHUNK_TOKENS == max(target.forwards) and sum(target.forwards) == 1 + 2 * 96 * 4


# Real models.

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target, draft = (tmp_path_factory.mktemp(name) for name in ("target", "draft"))
    make_checkpoint(target, vocab=40, dtype=torch.float64, seed=3, max_position_embeddings=2048)
    make_checkpoint(draft, vocab=40, layers=1, dtype=torch.float64, seed=4, max_position_embeddings=2048)
    return target, draft


def llm(pair: tuple[Path, Path], **population: Any) -> LLMEngine:
    return LLMEngine(*pair, EngineConfig("smc", population=PopulationConfig(**population)), dtype=torch.float64)


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Models with delta layers before the attention layer, whose KV depends on them."""
    target, draft = (tmp_path_factory.mktemp(name) for name in ("target", "draft"))
    for path, seed in ((target, 3), (draft, 4)):
        make_checkpoint(path, family="qwen3_5_text", vocab=40, dtype=torch.float64, seed=seed)
    return target, draft


# every kind of model, and both kinds of round
POPULATIONS = [
    ("pair", 0, 0),
    ("hybrids", 50, 2),
    ("pair", 0, 2),
    ("hybrids", 0, 0),
    ("hybrids", 0, 2),
    ("hybrids", 50, 0),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("models", "before", "exact"), fast_first(POPULATIONS, 2, unpack=True))
def test_every_live_slot_holds_the_kv_of_its_path(
    request: pytest.FixtureRequest, models: str, before: int, exact: int
) -> None:
    """`before`: tokens before the prompt, so that the states of a hybrid are folded in rounds."""
    runners, oracles, prompt = [], [], [5, 7, 1] * (before // 3) + PROMPT
    for path in request.getfixturevalue(models):
        model = load_model(path, dtype=torch.float64, ops=reference, max_positions=400)
        runners.append(make_runner(model, reference, context=128, tree_slots=128))
        oracles.append(make_runner(model, reference, context=128, tree_slots=128))
    worker = make_scheduler(runners[0], runners[1], PopulationConfig(4, 2, 0.8, 1.0, exact), max_tokens=40)
    worker.open(request_start(prompt, replace(WARM, temperature=0.5, seed=9)), {7}, 30)
    checked = 0
    while worker.launch():
        worker.collect()
        p = worker.particles
        for row in range(p.count):
            slots = p.mask[0, row].nonzero().flatten().tolist()
            if not slots:
                continue
            prefix = worker.target.cache.prefix_len[0]
            tokens = [*prompt, *p.tokens[0, row, : int(p.length[0, row])].tolist()]
            assert prefix + len(slots) == len(tokens)
            for runner, oracle, lacking in zip(runners, oracles, (1, 2), strict=True):
                oracle.cache.reset()
                oracle.prefill(tokens)
                places = torch.tensor([*range(prefix), *(prefix + slot for slot in slots)])[: len(tokens) - lacking]
                for mine, true in ((runner.cache.kv.k, oracle.cache.kv.k), (runner.cache.kv.v, oracle.cache.kv.v)):
                    got, want = mine[:, 0, :, places], true[:, 0, :, : len(places)]
                    torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9)
                checked += len(places)
    assert worker.group.region.compactions > 0 and checked > 400


def test_a_draft_equal_to_its_target_keeps_the_weights_flat(pair: tuple[Path, Path]) -> None:
    stats = (
        llm((pair[0], pair[0]), particles=6, smc_draft_tokens=3, ess_threshold=0.9)
        .generate(PROMPT, SamplingParams(temperature=0.7, max_tokens=24, ignore_eos=True))
        .stats
    )
    assert stats.population is not None and stats.tokens == 24 and stats.rounds == 6
    assert stats.population.ess_mean == pytest.approx(6) and stats.population.resample_rate == 0
    assert stats.population.log_z == pytest.approx(0, abs=1e-9)


def test_requests_have_the_usual_stop_criteria(pair: tuple[Path, Path]) -> None:
    engine = llm(pair, particles=3, smc_draft_tokens=3)
    for budget in (1, 2, 5, 30):
        answer = engine.generate(PROMPT, SamplingParams(temperature=0.7, max_tokens=budget, ignore_eos=True))
        assert len(answer.token_ids) == budget and answer.finish_reason == "length"
    stops = tuple(range(0, 40, 4))
    stopped = engine.generate(PROMPT, SamplingParams(temperature=0.7, stop_token_ids=stops, ignore_eos=True))
    assert stopped.finish_reason == "stop"
    assert [token in stops for token in stopped.token_ids] == [False] * (len(stopped.token_ids) - 1) + [True]
    again = engine.generate(PROMPT, SamplingParams(temperature=0.7, max_tokens=30, ignore_eos=True))
    assert again.token_ids == answer.token_ids, "the seed decides"
    for prompt in ([7], [7] * 300):
        answer = engine.generate(prompt, SamplingParams(temperature=0.7, max_tokens=9, ignore_eos=True))
        assert len(answer.token_ids) == 9


def test_a_stream_closed_midway_does_not_affect_the_next_request(pair: tuple[Path, Path]) -> None:
    engine, sampling = llm(pair, particles=3), SamplingParams(temperature=0.7, max_tokens=20, ignore_eos=True)
    want = engine.generate(PROMPT, sampling).token_ids
    stream = engine.stream([9, 9, 9], sampling)
    next(stream)
    stream.close()
    assert engine.stats.population is not None and engine.generate(PROMPT, sampling).token_ids == want


def test_a_long_prompt_is_shared(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """64 particles over 1,000 tokens: only new tokens use slots, and fan-out and resampling move no KV."""
    engine = llm(pair, particles=64, smc_draft_tokens=3)
    smc = scheduler_of(engine)
    moves: list[int] = []
    cache = smc.target.cache
    move = cache.kv.move
    monkeypatch.setattr(cache.kv, "move", lambda s, slots, first: (moves.append(len(slots)), move(s, slots, first))[1])
    group = smc.admit(request_start([i % 40 for i in range(1000)], WARM), (), 24)
    assert cache.prefix_len[0] + group.region.used_slots == 1000 and not moves
    rounds = []
    while smc.launch():
        smc.collect()
        rounds.append((cache.prefix_len[0] + group.region.used_slots - 1000, sum(moves)))
    assert all(added <= 64 * 4 * (i + 1) for i, (added, _) in enumerate(rounds))
    assert int(smc.round.particles.resampled) > group.region.compactions and sum(moves) == group.region.moved_slots
    assert rounds[-1][0] < 64 * 24, "lineages coalesce"
    assert 1000 + rounds[-1][0] < 64 * 1000 / 20, "a copy for each particle would take 64,000 slots"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"particles": 0}, "particles must lie in 1..1024"),
        ({"smc_draft_tokens": 65}, "smc_draft_tokens must lie in 1..64"),
        ({"ess_threshold": 1.1}, "ess_threshold must lie in 0..1"),
        ({"ess_threshold": float("nan")}, "ess_threshold"),
        ({"power": 0.0}, "power must be above 0"),
        ({"smc_exact": 5}, "smc_exact must lie in 0..4"),
    ],
)
def test_invalid_populations_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        PopulationConfig(**values)


def test_a_population_runs_on_one_group() -> None:
    assert (EngineConfig("smc").num_ranks, EngineConfig("smc").draft_tp) == (1, 1)
    assert (EngineConfig("smc", target_tp=3).num_ranks, EngineConfig("smc", target_tp=3).draft_tp) == (3, 3)
    with pytest.raises(UserError, match="draft_tp must be 3 in mode smc, not 1"):
        EngineConfig("smc", target_tp=3, draft_tp=1)
