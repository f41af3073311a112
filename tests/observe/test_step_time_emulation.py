"""Emulated step times: interpolation, values of `--emulate`, and models that take as long without computing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from swiftspec.config import EngineConfig
from swiftspec.errors import UserError
from swiftspec.llm_engine import LLMEngine
from swiftspec.observe import step_time_emulation
from swiftspec.observe.step_time_emulation import StepTimeEmulation, StepTimes, wait_until
from swiftspec.params import SamplingParams
from swiftspec.profiles import emulation
from tests.support.tiny_checkpoints import make_checkpoint


def test_step_times_are_interpolated_and_extrapolated() -> None:
    times = StepTimes(((1, 8, 24.0), (1, 16, 32.0), (4, 8, 6.0)))
    assert times.at(1, 8) == 24.0
    assert times.at(1, 1) == 24.0
    assert times.at(1, 12) == 28.0
    assert times.at(1, 256) == 32.0
    assert times.at(2, 8) == pytest.approx(12.0)  # half way in the logarithms
    assert times.at(8, 8) == 6.0


def test_values_of_emulate(tmp_path: Path) -> None:
    both = emulation.parse_emulation("target=10.48ms,draft=3250us")
    assert both.target is not None and both.draft is not None
    assert (both.target.at(3, 8), both.draft.at(1, 8)) == (pytest.approx(10.48e-3), pytest.approx(3.25e-3))
    paper = emulation.parse_emulation("target=llama3-70b")
    assert paper.target is not None and paper.draft is None
    assert [paper.target.at(tp, 8) for tp in (1, 2, 4, 8)] == pytest.approx([24.78e-3, 15.9e-3, 11.86e-3, 11.22e-3])
    assert 11.86e-3 < paper.target.at(3, 8) < 15.9e-3
    (tmp_path / "t.json").write_text(json.dumps({"draft": {"1": {"8": 2.0, "16": 3.0}}}))
    assert emulation.parse_emulation(str(tmp_path / "t.json")) == StepTimeEmulation(
        None, StepTimes(((1, 8, 2e-3), (1, 16, 3e-3)))
    )


@pytest.mark.parametrize(
    "text", ["", "target", "target=", "target=3", "target=3m", "both=3ms", "target=1ms,target=2ms", "target=-1ms",
             "target=0ms", "target=1e9ms", "target=gpt5", "target=1.2.3ms", "nowhere.json"],
)  # fmt: skip
def test_invalid_values_of_emulate(text: str) -> None:
    with pytest.raises(UserError, match="--emulate") as caught:
        emulation.parse_emulation(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"both": {}}', '{"target": {}}', '{"target": {"0": {"8": 1}}}', '{"target": {"1": 3}}',
             '{"target": {"1": {"8": NaN}}}', '{"target": {"x": {"8": 1}}}'],
)  # fmt: skip
def test_an_invalid_table_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(UserError, match="--emulate"):
        emulation.parse_emulation(str(tmp_path / "t.json"))


@pytest.mark.parametrize(
    "text",
    [
        '{"target": {"1": {"8": NaN}}}', '{"target": {"1": {"8": "5"}}}', '{"target": {"1": {"8": 1e300}}}',
        '{"target": {"' + "9" * 5000 + '": {"8": 5}}}', '{"target": 5}', '{"target": {"1": 5}}', '{"target": {}}',
        "[" * 100_000, "5", '{"' + "x" * 5000 + '": {}}', '{"target": {"1": {"8": true}}}',
    ],
)  # fmt: skip
def test_a_hostile_table_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(UserError, match=r"^--emulate .*t\.json") as caught:
        emulation.parse_emulation(str(tmp_path / "t.json"))
    assert str(caught.value).isprintable() and len(str(caught.value)) < 600


def test_a_pipe_of_step_times_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t.json")
    with pytest.raises(UserError, match="it is a pipe"):
        emulation.parse_emulation(str(tmp_path / "t.json"))
    for text in ("target=" + "9" * 5000, "x" * 5000):
        with pytest.raises(UserError) as caught:
            emulation.parse_emulation(text)
        assert len(str(caught.value)) < 300


class FakeClock:
    """A clock that each reading advances by a microsecond."""

    def __init__(self) -> None:
        self.now, self.slept = 100.0, list[float]()

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_waiting_sleeps_first_and_spins_to_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr(step_time_emulation, "time", clock)
    wait_until(100.005)
    assert clock.slept == [pytest.approx(5e-3 - step_time_emulation.SPIN_S, abs=1e-5)]
    assert 100.005 <= clock.now < 100.005 + 2e-6
    wait_until(100.005)
    assert len(clock.slept) == 1, "no sleep for a moment in the past"


def test_forwards_take_the_emulated_time(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "target", seed=1)
    make_checkpoint(tmp_path / "draft", layers=1, seed=1)
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    slow = emulation.parse_emulation("target=8ms,draft=2ms")
    pair = (tmp_path / "target", tmp_path / "draft", EngineConfig("serial", draft_steps=2))
    answers = [LLMEngine(*pair, dtype=torch.float64, emulate=e).generate([3, 4, 5], sampling) for e in (None, slow)]
    stats = answers[1].stats
    assert answers[0].token_ids == answers[1].token_ids
    assert stats.target_busy_time >= 8e-3 * stats.rounds
    assert stats.draft_busy_time >= 2e-3 * 2 * (stats.rounds - 1)
