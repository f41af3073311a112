"""Row times: their measurement on a simulated clock, their file, and the shapes that follow from them before the first
round."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swiftspec.builder.rules import resolve_config
from swiftspec.config import MAX_ADAPTED_NODES, EngineConfig
from swiftspec.control import row_times
from swiftspec.control.cost_model import CostModel
from swiftspec.control.draft_budget import INITIAL_SAVINGS, DraftBudget
from swiftspec.control.measurement_file import MeasurementFile
from swiftspec.control.policy import FIRST_DECISION_ROUNDS, decide, initial_stats
from swiftspec.control.round_stats import NO_SPECULATION, RoundSample, RoundStats
from swiftspec.control.row_times import (
    PairTimes,
    RowTimes,
    draft_proposals,
    measure_pair_times,
    measure_row_times,
)
from swiftspec.drafter_kinds import SUFFIX_LOOKUP
from swiftspec.llm_engine import LLMEngine
from swiftspec.params import SamplingParams
from swiftspec.runtime.suffix_drafter import SuffixDrafter
from tests.control.test_controller import chain, run, serial_round
from tests.support.roles import drafter_of, tree_of, verifier_of
from tests.support.tiny_checkpoints import make_checkpoint

ADAPTIVE = resolve_config(
    EngineConfig(mode="serial", self_switch=True, adapt_steps=True, adapt_batch=True), "draft", "cpu"
)
PROMPT = [3, 1, 4, 1, 5]


def pair_times(target: Callable[[int], float], expansion: float) -> PairTimes:
    rows = (1, 4, 8, 16, 32)
    return PairTimes(RowTimes(rows, tuple(map(target, rows))), RowTimes((1, 4), (expansion, expansion)))


class FakeModel:
    """Forwards that take the given seconds on a simulated clock, the first one three times as long."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.seconds, self.now, self.forwards = seconds, 0.0, list[int]()

    def forward(self, rows: int) -> float:
        spent = self.seconds(rows) * (1 if self.forwards else 3)
        self.forwards.append(rows)
        self.now += spent
        return spent

    def measure(self, counts: Sequence[int], budget: float) -> RowTimes | None:
        return measure_row_times(self.forward, counts, budget, lambda: self.now)


def test_a_fast_model_is_measured_repeatedly() -> None:
    model = FakeModel(lambda rows: 1e-4 * rows)
    assert model.measure((1, 8, 32), 1.0) == RowTimes((1, 8, 32), (1e-4, 8e-4, 32e-4))
    assert len(model.forwards) == 1 + 3 * row_times.MAX_REPEATS
    slower = FakeModel(lambda rows: 9e-3)
    slower.measure((1, 8, 32), 1.0)
    assert len(slower.forwards) == 1 + 3 * row_times.REPEATS + 3, "until 0.1 s have passed"


def test_a_slow_model_is_measured_within_the_budget() -> None:
    """The measurement ends before the forward that would exceed the budget."""
    model = FakeModel(lambda rows: 0.16 + 0.01 * rows)
    times = model.measure((1, 8, 32, 16, 4), 1.1)
    assert model.forwards == [1, 1, 8, 32] and model.now < 1.1 + 3 * 0.17
    assert times is not None and times.rows == (1, 8, 32) and times.seconds == pytest.approx((0.17, 0.24, 0.48))
    assert FakeModel(lambda rows: 0.5).measure((1, 8), 0.9) is None, "a single number of rows is no table"
    assert FakeModel(lambda rows: 0.4 + 0.1 * rows).measure((1, 8, 32), 1.1) == RowTimes(
        (1, 8), (0.5, 1.2000000000000002)
    )


def test_times_do_not_fall_with_the_number_of_rows() -> None:
    times = RowTimes.of({4: 3.0, 1: 5.0, 8: 2.0, 16: 6.0})
    assert times == RowTimes((1, 4, 8, 16), (2.0, 2.0, 2.0, 6.0))
    assert [times.at(rows) for rows in (1, 6, 12, 16, 20)] == [2.0, 2.0, 4.0, 6.0, 8.0]
    assert RowTimes.of({4: 3.0}).at(9) == 3.0


@given(st.dictionaries(st.integers(1, 64), st.floats(1e-6, 1e3), min_size=1))
def test_the_file_returns_what_was_written(measured: dict[int, float]) -> None:
    times = PairTimes(RowTimes.of(measured), RowTimes.of(measured))
    assert PairTimes.from_json(json.loads(json.dumps(times.to_json()))) == times


def test_the_times_are_kept_by_their_facts(tmp_path: Path) -> None:
    times, folder = pair_times(float, 0.5), tmp_path / "packed"
    file = MeasurementFile.of(folder, {"threads": 2}, PairTimes)
    assert file.read() is None
    file.write(times)
    assert file.read() == times and [*folder.iterdir()] == [file.path], "no temporary file is left"
    assert MeasurementFile.of(folder, {"threads": 1}, PairTimes).read() is None
    for text in (
        "", "{", "[]", "null", "[" * 10_000, '{"target": {"1": 1.0}}', '{"target": {"x": 1.0}, "draft": {"1": 1.0}}',
        '{"target": {"1": -1.0}, "draft": {"1": 1.0}}', '{"target": {"0": 1.0}, "draft": {"1": 1.0}}',
        '{"target": {"1": Infinity}, "draft": {"1": 1.0}}', '{"target": {}, "draft": {"1": 1.0}}',
        '{"target": {"1": true}, "draft": {"1": 1.0}}',
    ):  # fmt: skip
        file.path.write_text(text)
        assert file.read() is None, text
    (tmp_path / "file").touch()
    MeasurementFile.of(tmp_path / "file", {}, PairTimes).write(times)  # not a folder: nothing is written
    alone = MeasurementFile.of(folder, {"threads": 2, "models": 1}, RowTimes)
    alone.write(times.target)
    assert alone.read() == times.target


def test_the_first_request_begins_with_the_shape_for_the_row_times() -> None:
    """Cheap rows and a cheap draft: a large tree. Expensive rows: a small one."""
    cheap = initial_stats(ADAPTIVE, pair_times(lambda rows: 1.0 + 0.001 * rows, 0.02))
    assert cheap.nodes >= 24 and cheap.steps >= 6 and cheap.batch_sizes == [2, 4, 8, 12, 16, 24, 32]
    steep = initial_stats(ADAPTIVE, pair_times(lambda rows: 0.1 + rows, 0.2))
    assert steep.nodes == 2 and steep.steps <= 2 and steep.batch_sizes == [2, 4, 8]
    fixed = initial_stats(EngineConfig("serial", draft_steps=5, self_switch=True), pair_times(float, 1.0))
    assert (fixed.steps, fixed.nodes) == (5, 8)
    assert initial_stats(ADAPTIVE, None).current == (3, 8, True)


def test_row_times_are_the_reference_until_autoregressive_rounds_are_measured() -> None:
    """These follow after the first rounds, because the comparison decides on the draft."""
    times = pair_times(lambda rows: 1.0 + 0.01 * rows, 0.1)
    m = initial_stats(ADAPTIVE, times)
    for round_ in range(FIRST_DECISION_ROUNDS):
        assert decide(m) == m.current and m.reference_time == pytest.approx(1.01)
        m.add(serial_round(m, round_, chain(0.9, 0.8, 0.7, 0.6), 0.1, times.target.at))
    assert decide(m) == NO_SPECULATION
    m.apply(decide(m))
    m.add(RoundSample(0.9, 0.9, 0.0, 1, ()))
    assert m.reference_time == 0.9


def test_speculation_that_does_not_pay_ends_without_a_measurement_of_autoregressive_rounds() -> None:
    """Nothing is accepted, and a round takes longer than an autoregressive one in the row times."""
    m = initial_stats(ADAPTIVE, pair_times(lambda rows: 1.0 + 0.1 * rows, 0.3))
    lost = seconds = 0.0
    while m.speculating:
        seconds = m.steps * 0.3 + 1.0 + 0.1 * m.nodes
        lost += seconds / 1.1 - 1
        m.add(RoundSample(seconds, 1.0 + 0.1 * m.nodes, m.steps * 0.3, 1, ()))
        m.settle(seconds, 1)
        m.apply(decide(m)) if decide(m) != m.current else None
    assert lost < INITIAL_SAVINGS + seconds / 1.1 and not m.ar_seconds


def test_a_draft_that_cannot_pay_at_a_typical_acceptance_rate_is_not_used_at_first() -> None:
    m = initial_stats(ADAPTIVE, pair_times(lambda rows: 1.0 + 0.1 * rows, 0.8))
    assert m.current == NO_SPECULATION and m.missed_round is not None and not m.budget.may_start(m.missed_round, None)
    earlier = DraftBudget()
    assert initial_stats(ADAPTIVE, m.row_times, earlier).speculating, "it paid in an earlier start"


def test_measured_rounds_scale_the_row_times() -> None:
    """Other load doubles all times: so do the predictions for shapes that were not measured."""
    table = pair_times(lambda rows: 1.0 + 0.1 * rows, 0.1)
    m = initial_stats(ADAPTIVE, table)
    before = CostModel(m)
    for _ in range(FIRST_DECISION_ROUNDS):
        target, draft = 2 * table.target.at(m.nodes), 2 * 0.1 * m.steps
        m.add(RoundSample(target + draft, target, draft, 1, ()))
    after = CostModel(m)
    for d, bs in ((1, 2), (3, 8), (6, 32), (16, 24)):
        assert after.round_time(d, bs) == pytest.approx(2 * before.round_time(d, bs))
    m.verify_times[32] = table.target.at(32)
    assert CostModel(m).round_time(1, 32) == pytest.approx(table.target.at(32) + 0.2)


@pytest.mark.parametrize(("row", "low", "high"), [(0.002, 16, 32), (0.5, 2, 4)])
def test_bs_exceeds_the_configured_value_where_rows_are_cheap_and_wide_trees_are_accepted(
    row: float, low: int, high: int
) -> None:
    """The text is often among nodes of a low rank."""
    times = pair_times(lambda rows: 1.0 + row * rows, 0.02)

    def hits(round_: int) -> tuple[int, ...]:
        return ((1, 9, 17, 25), (1, 3, 11, 20), (2, 6, 12, 28), (1, 2, 4, 7))[round_ % 4]

    m = initial_stats(ADAPTIVE, times)
    shapes = run(m, 200, lambda m, r: serial_round(m, r, hits, 0.02, times.target.at))
    assert {low <= bs <= high for _, bs in shapes} == {True}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_one_process_measures_row_times(device: str) -> None:
    plain = EngineConfig("serial", self_switch=True, adapt_steps=True, adapt_batch=True)
    assert (plain.time_rows, plain.max_nodes) == (False, 8)
    timed = resolve_config(plain, "draft", device)
    assert (timed.time_rows, timed.max_nodes, timed.children_per_leaf) == (True, MAX_ADAPTED_NODES, 8)
    assert not resolve_config(EngineConfig("serial"), "draft", device).time_rows, "nothing is adaptive"
    fixed = resolve_config(EngineConfig("serial", self_switch=True), "draft", device)
    assert (fixed.time_rows, fixed.max_nodes) == (True, 8)
    for values in ({"mode": "async"}, {"target_tp": 2}, {"draft_remote": True}, {"target_remote": True}):
        config = EngineConfig(**{"mode": "serial", "self_switch": True, **values})  # pyright: ignore[reportArgumentType]
        assert not resolve_config(config, "draft", device).time_rows, values


def test_cheap_rows_of_a_gpu_make_trees_of_16_nodes() -> None:
    """Forwards as an H100 took them with 1 and 8 rows (profiles/h100-step.json), 16 rows at 5 % more."""
    plan = resolve_config(ADAPTIVE, "draft", "cuda")
    for small, draft in ((3.0, 0.93), (19.8, 1.0)):
        factors = {1: 1.0, 4: 1.03, 8: 1.07, 12: 1.12, 16: 1.12, 24: 1.6, 32: 1.6}
        target = RowTimes.of({rows: small * factor for rows, factor in factors.items()})
        m = initial_stats(plan, PairTimes(target, RowTimes((1, 8), (draft, draft))))
        assert m.nodes == 16 and 4 <= m.steps <= 8


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target, draft = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    make_checkpoint(target, vocab=64, layers=2, dtype=torch.float32, seed=1)
    make_checkpoint(draft, vocab=64, layers=1, dtype=torch.float32, seed=1)
    return target, draft


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[RoundStats]:
    """The measurements with which the controllers of the test begin."""
    made: list[RoundStats] = []

    def record(config: EngineConfig, times: PairTimes | None, budget: DraftBudget | None) -> RoundStats:
        made.append(initial_stats(config, times, budget))
        return made[-1]

    monkeypatch.setattr("swiftspec.control.shared_stats.initial_stats", record)
    return made


def test_slow_models_are_not_checked_at_every_start() -> None:
    assert RowTimes((1,), (0.2,)).slowed_down(lambda: 0.1) and not RowTimes((1,), (0.2,)).slowed_down(lambda: 0.19)
    assert not RowTimes((1,), (2.0,)).slowed_down(lambda: pytest.fail("a forward takes seconds"))


def test_a_later_start_reads_the_times_of_an_earlier_one(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts: list[RoundStats]
) -> None:
    def times_of_a_start() -> PairTimes | None:
        LLMEngine(*pair, ADAPTIVE, dtype=torch.float32, device="cpu", packed_cache=tmp_path)
        return starts[-1].row_times

    measured = times_of_a_start()
    assert measured is not None and measured.target.rows == (1, 4, 8, 16, 32) and measured.draft.rows == (1, 4)
    monkeypatch.setattr("swiftspec.builder.models.measure_pair_times", lambda *_: pytest.fail("measured again"))
    monkeypatch.setattr("swiftspec.builder.models.one_row_seconds", lambda _: measured.target.at(1))
    assert times_of_a_start() == measured
    for file in tmp_path.rglob("row-times-*"):
        file.write_text("{}")
    monkeypatch.setattr("swiftspec.builder.models.measure_pair_times", lambda *_: None)
    assert times_of_a_start() is None


def test_a_later_start_with_suffix_lookup_reads_the_times_of_the_target(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def times_of_a_start() -> list[float]:
        llm = LLMEngine(pair[0], SUFFIX_LOOKUP, ADAPTIVE, dtype=torch.float32, device="cpu", packed_cache=tmp_path)
        drafter = tree_of(llm).drafter
        assert isinstance(drafter, SuffixDrafter)
        return [drafter.row_seconds(rows) for rows in range(1, MAX_ADAPTED_NODES + 1)]

    measured = times_of_a_start()
    assert [*tmp_path.rglob("row-times-*")] and sorted(measured) == measured
    now, again = measured[0], RowTimes((1, 8), (measured[0] / 2, measured[0]))
    monkeypatch.setattr("swiftspec.builder.models.one_row_seconds", lambda _: now)
    monkeypatch.setattr("swiftspec.builder.models.measure_target_times", lambda *_: again)
    assert times_of_a_start() == measured
    now = again.at(1)  # another process slowed the first measurement down
    assert times_of_a_start()[0] == again.at(1)
    now = measured[0]  # another process runs now
    assert times_of_a_start()[0] == again.at(1), "the better measurement is kept"


@pytest.mark.parametrize(("temperature", "row"), [(0.0, 0.5), (0.9, 0.001)])
def test_row_times_do_not_change_the_text(
    pair: tuple[Path, Path], temperature: float, row: float, monkeypatch: pytest.MonkeyPatch, starts: list[RoundStats]
) -> None:
    """Rounds of up to 32 nodes, and of few."""
    sampling = SamplingParams(temperature=temperature, seed=5, max_tokens=100, ignore_eos=True)
    plain = LLMEngine(pair[0], dtype=torch.float32, device="cpu").generate(PROMPT, sampling).token_ids
    times = pair_times(lambda rows: 1.0 + row * rows, 0.01)
    monkeypatch.setattr("swiftspec.builder.models.measure_pair_times", lambda *_: times)
    llm = LLMEngine(*pair, ADAPTIVE, dtype=torch.float32, device="cpu")
    assert (starts[0].nodes > 8) == (row < 0.1) and drafter_of(llm).max_nodes == max(starts[0].batch_sizes)
    for _ in range(2):
        assert llm.generate(PROMPT, sampling).token_ids == plain


def test_the_measured_rows_are_proposals_of_the_draft(pair: tuple[Path, Path]) -> None:
    """With different tokens, which a mixture of experts routes to different experts."""
    llm = LLMEngine(*pair, EngineConfig(verify_batch=8), dtype=torch.float32, device="cpu")
    found = draft_proposals(drafter_of(llm), (1, 4, 8))
    assert {count: len(proposal.tokens) for count, proposal in found.items()} == {1: 1, 4: 4, 8: 8}
    assert len({*found[8].tokens}) > 3 and [*found[8].parents][:2] == [-1, 0]


def test_a_measurement_leaves_no_request_open(pair: tuple[Path, Path]) -> None:
    """The next request is as that of a new engine, although the measurement verified tokens of the same prompt."""
    sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    config = EngineConfig(verify_batch=8)
    fresh = LLMEngine(*pair, config, dtype=torch.float32, device="cpu").generate([0, 0, 0, 0], sampling)
    llm = LLMEngine(*pair, config, dtype=torch.float32, device="cpu")
    times = measure_pair_times(verifier_of(llm), drafter_of(llm), 4, 8)
    assert times is not None and times.target.rows == (1, 4, 8)
    answer = llm.generate([0, 0, 0, 0], sampling)
    assert answer.token_ids == fresh.token_ids
    assert (answer.stats.rounds, answer.stats.cached_tokens) == (fresh.stats.rounds, fresh.stats.cached_tokens)
