"""Traces: one line per round with both timelines, the summary made of them, and no overhead without tracing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import timeline
from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.errors import UserError
from swiftspec.lab import round_costs
from swiftspec.lab.measurement import rounds_of
from swiftspec.lab.round_costs import Trace
from swiftspec.llm_engine import LLMEngine
from swiftspec.messages import RequestStart
from swiftspec.observe.recorder import Recorder
from swiftspec.observe.rpc_latency import RpcLog, RpcRecord
from swiftspec.observe.trace import TreeTrace
from swiftspec.observe.trace_file import TraceFile
from swiftspec.params import SamplingParams
from tests.support.cases import fast_first
from tests.support.ranks import Pool
from tests.support.roles import drafter_of, verifier_of
from tests.support.tiny_checkpoints import make_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPT = [5, 6, 7, 8, 9]


DEMO = Path(__file__).parents[2] / "swiftspec" / "demo"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    make_checkpoint(folder / "target", seed=1)
    make_checkpoint(folder / "draft", layers=1, seed=1)
    return folder / "target", folder / "draft"


def traced(
    pair: tuple[Path, Path], plan: EngineConfig, file: Path, requests: int = 1, dtype: torch.dtype = torch.float64
) -> list[list[int]]:
    draft = None if plan.mode == "ar" else pair[1]
    llm = LLMEngine(pair[0], draft, plan, dtype=dtype, trace=file)
    sampling = GREEDY if plan.mode != "smc" else SamplingParams(max_tokens=24, ignore_eos=True)
    answers = [llm.generate(PROMPT, sampling).token_ids for _ in range(requests)]
    llm.close()
    return answers


@pytest.mark.parametrize("mode", ["ar", "serial", "smc"])
def test_every_round_of_one_process_is_a_line(mode: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    plan = EngineConfig(mode, population=PopulationConfig(particles=2, smc_draft_tokens=2))
    answers = traced(pair, plan, tmp_path / "t.jsonl", requests=2)
    trace = Trace.read(tmp_path / "t.jsonl")
    assert trace.head["mode"] == mode
    for request, answer in enumerate(answers, 1):
        lines = [line for line in trace.rounds if line["request"] == request]
        assert [line["round"] for line in lines] == list(range(len(lines)))
        tokens = [token for line in lines for token in line["tokens"]]
        assert tokens[: len(answer)] == answer


def check_lanes(trace: Trace, steps: int) -> None:
    """Both timelines are complete and ordered, and the KV counts of the draft are correct."""
    for line in trace.rounds:
        assert line["target"]["verify"][0] <= line["target"]["verify"][1]
        assert 0 < line["target"]["forward"] <= line["target"]["verify"][1] - line["target"]["verify"][0]
        assert 1 <= len(line["draft"]["forwards"]) <= steps + 2
        assert line["draft"]["reused"] >= 0
        accepted = [line["proposal"]["tokens"][node] for node in line["path"][1:]]
        assert accepted == line["tokens"][:-1]
    for this, after in trace.successive():
        assert after["draft"]["reused"] + after["draft"]["wasted"] == this["draft"]["expanded"]


@pytest.mark.parametrize("native", [False, True])
def test_the_timeline_of_a_serial_draft(native: bool, pair: tuple[Path, Path], tmp_path: Path) -> None:
    pair, dtype = ((DEMO / "target", DEMO / "draft"), torch.bfloat16) if native else (pair, torch.float64)
    traced(pair, EngineConfig("serial", draft_steps=2), tmp_path / "t.jsonl", dtype=dtype)
    trace = Trace.read(tmp_path / "t.jsonl")
    check_lanes(trace, 2)
    assert rounds_of(trace) == [(len(line["path"]) - 1, 2) for line in trace.rounds if line["round"] > 0]
    assert all(cost.critical == 2 and cost.expansions == 0 for cost in round_costs.costs(trace))


def test_the_timeline_of_a_draft_in_another_process(pair: tuple[Path, Path], pool: Pool, tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    requests = [(PROMPT, {"temperature": 0, "max_tokens": 24, "ignore_eos": True})] * 2
    job = {"target": str(pair[0]), "draft": str(pair[1]), "requests": requests}
    plan = {"mode": "async", "draft_steps": 2, "verify_batch": 4, "draft_leaves": 2}
    answers = pool.run(2, "decode", plan=plan, trace=str(file), **job)[0]
    trace = Trace.read(file)
    check_lanes(trace, 2)
    assert {line["request"] for line in trace.rounds} == {1, 2}
    assert len(trace.rounds) == sum(answer["rounds"] for answer in answers)
    plain = pool.run(2, "decode", plan=plan, **job)[0]
    assert [a["tokens"] for a in plain] == [a["tokens"] for a in answers]


def test_a_recorded_request_has_only_its_own_rpcs() -> None:
    rpcs = RpcLog()
    rpcs.add(RpcRecord("draft", 7, 1, 2, 255, 3, 4, 5, 6), b"")
    trace = TreeTrace(Recorder(None), lambda: 0.0, lambda: True, lambda tokens, parents: None, rpcs=rpcs.drain)
    trace.handlers["opening"](RequestStart(2, tuple(PROMPT), GREEDY, len(PROMPT)))
    assert rpcs.drain() == []


def test_without_a_trace_nothing_is_recorded(pair: tuple[Path, Path]) -> None:
    llm = LLMEngine(*pair, EngineConfig("serial"), dtype=torch.float64)
    assert drafter_of(llm).runner.hooks == verifier_of(llm).runner.hooks == []
    llm.generate(PROMPT, GREEDY)
    assert drafter_of(llm).runner.hooks == verifier_of(llm).runner.hooks == []


def lines(*costs: tuple[float, float, float]) -> list[dict[str, Any]]:
    """Asynchronous rounds by hand: a verification of 10 s each, expansions that end `late` seconds after it, an
    expansion of `short` seconds in the answer, `rest` seconds for everything else."""
    now, made = 0.0, []
    wait, propose, forwards = (0.0, 0.0), (0.0, 0.0), []
    for number, (late, short, rest) in enumerate([*costs, (0.0, 0.0, 0.0)]):
        grow = [now, now + 10 + late]
        draft = {"propose": propose, "grow": grow, "nodes": 9, "expanded": 4, "reused": 1, "wasted": 3}
        draft["forwards"] = [*forwards, [now, now + 5, 8], [now + 5, now + 10, 8]]
        made.append(
            {
                "request": 1, "round": number, "wait": wait, "tokens": [1, 2], "path": [0, 1], "draft": draft,
                "target": {"verify": [now, now + 10], "forward": 9.0},
                "proposal": {"tokens": [5, 1], "parents": [-1, 0]},
            }
        )  # fmt: skip
        requested_at = now + 10
        propose = (requested_at + late, requested_at + late + short)
        forwards = [[requested_at + late, requested_at + late + short, 8]] if short else []
        now = requested_at + late + short + rest
        wait = (requested_at, now)
    return made


HEAD = {
    "swiftspec_trace": 1, "mode": "async", "target_tp": 1, "draft_tp": 1, "verify_batch": 8, "draft_leaves": 8,
    "draft_steps": 2, "emulate": {"target": None, "draft": None},
}  # fmt: skip


def test_the_summary_lists_waits_and_their_reasons() -> None:
    trace = Trace(HEAD, lines((0, 0, 0.5), (2, 0, 0.5), (0, 3, 0.5)))
    found = round_costs.costs(trace)  # the first round of a request is not counted
    assert [(c.length, c.late, c.short, c.critical, c.expansions) for c in found] == [
        (pytest.approx(12.5), pytest.approx(2), 0, 0, 2),
        (pytest.approx(13.5), 0, pytest.approx(3), 1, 2),
    ]
    assert round_costs.host_overhead(found, 10, 5) == [pytest.approx(2.5), pytest.approx(-1.5)]
    assert round_costs.host_overhead(found, 10, 3) == [pytest.approx(2.5), pytest.approx(0.5)]
    text = timeline.summary(trace)
    assert "duration of a round 13000.000 ms" in text
    assert "still expanding                1000.000 ms, in 1 rounds" in text
    assert "expanding before proposing     1500.000 ms, in 1 rounds, 1 expansions" in text
    assert "4 nodes reused, 12 wasted (75%)" in text
    assert text.startswith("mode async, split 1+1, bs 8, w 8, d 2: 4 rounds, 8 tokens (2.00 per round)\n")
    assert timeline.summary(Trace({**HEAD, "mode": "ar"}, [])).startswith("mode ar, split 1: 0 rounds, 0 tokens\n")
    plain = lines((0, 0, 0.5), (0, 0, 0.5))
    del plain[1]["wait"], plain[1]["draft"]
    assert "3 rounds (1 of them without the draft), 6 tokens" in timeline.summary(Trace(HEAD, plain))
    assert rounds_of(trace) == [(1, 0), (1, 0), (1, 1)]  # the first round includes the prefill


def test_the_timeline_is_in_chrome_trace_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in [HEAD, *lines((0, 0, 1))]) + '\n{"cut off')
    assert timeline.main([str(file)]) == 0
    events = json.loads((tmp_path / "t.trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["tid"] for event in spans} == {1, 2}
    assert min(event["ts"] for event in spans) == 0
    assert any(event["name"] == "verify 2, accept 1" and event["dur"] == 10e6 for event in spans)
    assert "2 rounds, 4 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "{}", "[1]", "nonsense", '{"swiftspec_trace": 99}'])
def test_an_invalid_trace_is_refused_in_one_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.jsonl").write_text(text)
    assert timeline.main([str(tmp_path / "t.jsonl")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_an_unwritable_trace_file_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        traced(pair, EngineConfig("ar"), tmp_path / "nowhere" / "t.jsonl")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("mode", fast_first(["serial", "ar", "smc"], 1))
def test_a_full_disk_does_not_affect_the_answer(pair: tuple[Path, Path], mode: str, tmp_path: Path) -> None:
    plan = EngineConfig(mode, self_switch=False)
    assert traced(pair, plan, Path("/dev/full"), requests=3) == traced(pair, plan, tmp_path / "trace", requests=3)
    log = TraceFile(Path("/dev/full"))
    log.write([{"who": "me"}])
    assert log.error == "No space left on device"
    log.write([{"who": "me"}])
    log.close()


def test_a_pipe(tmp_path: Path) -> None:
    """With a reader it works like a file; without one, opening does not block. A reader may disconnect."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UserError, match="pipe cannot be written: the pipe has no reader; start the reader first"):
        TraceFile(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    log = TraceFile(pipe)
    log.write([{"who": "me"}])
    assert json.loads(os.read(reader, 1000)) == {"who": "me"}
    os.close(reader)
    log.write([{"who": "me"}])
    assert log.error == "Broken pipe"
    log.close()
