"""The profile command on a pair of random models: on one rank, on two ranks, interrupted, and how serve uses its
result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftspec.cli.arguments import parse_command
from swiftspec.cli.terminal import StartupProgress
from swiftspec.errors import UserError
from swiftspec.lab import calibration, measurement, profile, sweep_runs
from swiftspec.lab import sweep as sweeps
from swiftspec.lab.measurement import RequestProgress
from swiftspec.lab.profile import main
from swiftspec.lab.worker_pool import EngineBuild, Pair, RankPool
from swiftspec.llm_engine import LLMEngine
from swiftspec.startup import model_resolution as serve_found
from swiftspec.text.codec import TextCodec
from tests.support.ranks import Pool
from tests.support.toy_pair import make_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The flags of a pair of models."""
    target, draft = make_pair(tmp_path_factory.mktemp("pair"))
    return ["--model", str(target), "--draft-model", str(draft), "--dtype", "float32", "--threads", "1"]


@pytest.fixture
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The flags of a short sweep with a separate working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep_runs, "PARTICLES", {"particles": (2,), "smc_groups": (2,)})
    monkeypatch.setattr(sweep_runs, "BATCHES", (4, 8))
    monkeypatch.setattr(calibration, "MIN_CHOICES", 5)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def add(a"}\n{"prompt": "class"}\n')
    prompts = ["--prompts", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "profiles")]
    return [*prompts, "--max-tokens", "8", "--repeats", "2", "--budget", "1m"]


def read(folder: Path, ending: str = "[!l].json") -> dict[str, Any]:
    (file,) = folder.glob(f"profiles/*{ending}")
    return json.loads(file.read_text())


@pytest.mark.slow
def test_on_one_rank(pair: list[str], short: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*pair, *short]) == 0
    found = read(tmp_path)
    modes = {run["plan"]["mode"]: run for run in found["runs"]}
    assert set(modes) == {"ar", "serial", "smc"}
    shapes = [(r["plan"]["particles"], r["plan"]["smc_groups"]) for r in found["runs"] if r["plan"]["mode"] == "smc"]
    assert shapes == [(4, 1), (2, 1), (4, 2)]
    assert all(run["speeds"] for run in found["runs"])
    assert modes["ar"]["tokens_per_round"] == 1
    assert {(step["side"], step["tp"]) for step in found["steps"]} == {("target", 1), ("draft", 1)}
    assert all(
        len(run["sampled_speeds"]) == len(run["speeds"]) * (run["plan"]["mode"] != "smc") for run in found["runs"]
    )
    assert [each["temperature"] for each in found["settings"]["samplings"]] == [0, 1]
    deep = {r["plan"]["draft_steps"]: r["rounds"] for r in found["rounds"] if r["plan"]["verify_batch"] == 8}
    assert set(deep) >= {1, 2, 3, 4, 6}
    assert all(critical == d for d, rounds in deep.items() for _, critical in rounds)
    fitted = [run["plan"]["calibration"] for run in found["runs"] if "calibration" in run["plan"]]
    assert len(fitted) <= 1 and all(calibration.LEAST <= c <= calibration.MOST for c in fitted), "none in mode ar"
    assert found["stopped"] is None
    assert {path.suffix for path in (tmp_path / "profiles").iterdir()} == {".json", ".csv", ".yaml"}
    assert "tok/round" in capsys.readouterr().out


@pytest.mark.slow
def test_on_two_ranks_that_form_groups_repeatedly(
    pair: list[str], short: list[str], tmp_path: Path, pool: Pool
) -> None:
    slow = ["--emulate", "target=6ms,draft=2ms", "--limit", "1", "--modes", "serial,async,ar", "--repeats", "1"]
    assert pool.run(2, "profile", argv=[*pair, *short, *slow]) == [0, 0]
    found = read(tmp_path)
    places = {(r["plan"]["mode"], r["plan"]["target_tp"]) for r in found["runs"] if r["speeds"]}
    assert places >= {("ar", 1), ("ar", 2), ("serial", 1), ("serial", 2), ("async", 1)}
    assert {(step["side"], step["tp"]) for step in found["steps"]} == {
        (s, x) for s in ("target", "draft") for x in (1, 2)
    }
    assert all(second >= 6e-3 for step in found["steps"] if step["side"] == "target" for second in step["seconds"])
    ahead = next(run for run in found["runs"] if run["plan"]["mode"] == "async")
    assert ahead["steps"][0] >= 6e-3 and ahead["steps"][1] >= 2e-3
    assert {line["round"] for line in found["lanes"]} and set(found["around"]) == {
        "verify", "settle", "expand", "answer", "link",
    }  # fmt: skip
    assert 0 < found["orchestration"]["share"] < 1
    assert pool.run(2, "profile", argv=[*pair, *short, "--dry-run"]) == [0, 0]


@pytest.mark.slow
def test_an_interrupted_sweep_resumes_without_repetition(
    pair: list[str], short: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[tuple[str, int, str]] = []
    engine, decode_all = RankPool.engine, measurement.decode_all

    def counting(self: RankPool, order: EngineBuild) -> Any:
        if len(built) == stop_at:
            raise KeyboardInterrupt
        built.append((order.plan.mode, order.plan.initial_draft_steps, str(order.alone)))
        return engine(self, order)

    def by_rounds(llm: LLMEngine, *args: Any) -> measurement.Run:
        """Replaces the clock by one that counts rounds, since the repetitions and variations of a sweep depend on
        measured speeds."""
        run = decode_all(llm, *args)
        run.seconds = run.rounds * (1 + llm.config.initial_draft_steps * 0.1 * (llm.config.mode == "serial"))
        return run

    monkeypatch.setattr(sweep_runs, "SERIAL_STEPS", (1, 2, 4))
    monkeypatch.setattr(RankPool, "engine", counting)
    monkeypatch.setattr(measurement, "decode_all", by_rounds)
    args = [*pair, *short, "--modes", "ar,serial", "--budget", "10m"]  # which a busy machine does not spend
    stop_at = -1
    assert main(args) == 0
    whole, built[:] = list(built), []
    (tmp_path / "profiles" / next((tmp_path / "profiles").glob("*[!l].json")).name).unlink()
    stop_at = 4
    assert main(args) == 130
    first, built[:] = list(built), []
    assert len(first) == 4
    assert not list((tmp_path / "profiles").glob("*[!l].json"))
    stop_at = -1
    assert main([*args, "--resume"]) == 0
    assert first == whole[:4]
    assert built == whole[4:]  # the fifth was interrupted before it began
    assert all(len(run["speeds"]) <= 2 for run in read(tmp_path)["runs"])
    assert not list((tmp_path / "profiles").glob("*.partial.json"))
    assert main([*args, "--resume"]) == 1  # nothing left to resume


@pytest.mark.slow
def test_a_sweep_killed_between_two_d_resumes_with_the_next(
    pair: list[str], short: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is cleaned up: the file contains what was finished."""
    decoded: list[int] = []
    decode_all = measurement.decode_all

    def counting(llm: LLMEngine, prompts: Any, max_tokens: int, deadline: float, sampling: Any) -> measurement.Run:
        if max_tokens == 8:
            if len(decoded) == killed_at:
                raise KeyboardInterrupt
            decoded.append(measurement.tree_roles(llm).drafter.draft_steps)
        return decode_all(llm, prompts, max_tokens, deadline, sampling)

    monkeypatch.setattr(measurement, "decode_all", counting)
    args = [*pair, *short, "--modes", "serial", "--repeats", "1"]
    killed_at = 2
    assert main(args) == 130
    killed_at = -1
    monkeypatch.setattr("swiftspec.lab.sweep.Sweep._lanes", interrupted)
    assert main([*args, "--resume"]) == 130
    assert decoded == [d for d in (1, 2, 3, 4, 6) for _ in ("greedy", "sampled")]


def interrupted(*args: object) -> None:
    raise KeyboardInterrupt


def test_the_first_round_of_a_request_is_not_measured() -> None:
    run = measurement.Run()
    run.add(RequestProgress(3, 1, 0.5, 0.4), RequestProgress(9, 4, 2.0, 1.3))
    assert (run.tokens, run.rounds, run.speed, run.busy) == (6, 3, 4.0, pytest.approx(0.9))
    run.add(RequestProgress(2, 1, 0.5, 0.4), RequestProgress(2, 1, 0.5, 0.4))
    assert (run.tokens, run.rounds) == (8, 4), "unless there is no other"


@pytest.mark.slow
def test_another_sweep_is_not_resumed(
    pair: list[str], short: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("swiftspec.lab.sweep.Sweep._step_times", interrupted)
    assert main([*pair, *short, "--modes", "ar"]) == 130
    assert main([*pair, *short, "--modes", "ar", "--resume", "--max-tokens", "9"]) == 1
    assert "its settings differ" in capsys.readouterr().err


@pytest.mark.slow
def test_a_budget_too_small_for_one_measurement(
    pair: list[str], short: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*pair, *short, "--budget", "0.01s"]) == 1
    err = capsys.readouterr().err.strip().splitlines()[-1]
    spent = "the budget of 0.01 s is spent; raise it with --budget"
    assert err == f"swiftspec: error: nothing could be measured: {spent}"
    assert main([*pair, *short, "--splits", "3+1"]) == 1
    assert "--splits requires several ranks" in capsys.readouterr().err
    assert not list((tmp_path / "profiles").glob("*[!l].json"))


def test_suffix_lookup_has_nothing_to_profile(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*pair[:2], "--draft-model", "suffix"]) == 1
    [line] = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("swiftspec: error: suffix lookup is not supported by a sweep of profiles, ")


@pytest.mark.slow
def test_serve_uses_the_plan_and_prints_a_line(
    pair: list[str], short: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*pair, *short, "--modes", "serial", "--budget", "10s"]) == 0
    capsys.readouterr()
    phases = StartupProgress()
    found = serve_found.ResolvedModels.resolve(parse_command(pair).settings, 1, phases)
    assert found.plan.mode == "serial" and found.plan.draft_steps is not None
    assert "plan: serial 1" in capsys.readouterr().err
    fixed = serve_found.ResolvedModels.resolve(parse_command([*pair, "--draft-steps", "6"]).settings, 1, phases)
    assert fixed.plan.draft_steps == 6
    assert (
        serve_found.ResolvedModels.resolve(
            parse_command([*pair, "--plan", "none"]).settings, 1, phases
        ).plan.draft_steps
        is None
    )
    (file,) = (tmp_path / "profiles").glob("*[!l].json")
    other = [*pair, "--plan", str(file), "--dtype", "float64"]
    with pytest.raises(
        UserError, match=r"cannot be used: it was measured with a different value of dtype \(float32, not float64\)"
    ):
        serve_found.ResolvedModels.resolve(parse_command(other).settings, 1, phases)
    data = json.loads(file.read_text())
    data["key"]["hardware"]["name"] = "a faster one"
    file.write_text(json.dumps(data))
    assert serve_found.ResolvedModels.resolve(parse_command(pair).settings, 1, phases).plan.draft_steps is None
    assert "is not used: it was measured on another machine" in capsys.readouterr().err


@pytest.mark.slow
def test_one_gpu_runs_both_models_asynchronously_and_its_ablation_is_captured(
    pair: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A sweep on one GPU, as far as that is possible without one: what it would measure."""
    (Path(pair[1]) / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9, "top_k": 20}')
    try:
        args = profile.build_profile_parser().parse_args([*pair, "--limit", "6"])
        settings = parse_command(pair).settings
        found = serve_found.ResolvedModels.resolve(settings, 1, StartupProgress(quiet=True))
        asked = Pair(Path(pair[1]), Path(pair[3]), {})

        def request(device: str) -> sweep_runs.SweepRequest:
            monkeypatch.setattr("swiftspec.builder.hardware.resolve_device", lambda name: torch.device(device))
            return profile._request(args, settings, 1, asked, found)

        gpu = request("cuda")
        monkeypatch.setattr(profile, "encode_prompts", lambda *texts, chat: [[1]])
        here = request("cpu")
    finally:
        (Path(pair[1]) / "generation_config.json").unlink()
    assert "async" not in here.modes and (here.base_ops, here.draft_leaves) == ("reference", 4)
    assert "async" in gpu.modes and (gpu.pairs, gpu.base_ops, gpu.draft_leaves) == ([(1, 0)], "unfused", 8)
    made = {trial.mode: trial for trial in sweep_runs.initial_trials(gpu, 1)}
    assert made["async"].plan(2).overlap_on_one_gpu and made["async"].steps == made["serial"].steps
    assert {made[mode].draft_leaves for mode in ("async", "serial")} == {8}
    greedy, sampled = gpu.samplings
    assert greedy.greedy and (sampled.temperature, sampled.top_p, sampled.top_k) == (0.6, 0.9, 20)
    lines = sweeps.describe_trials(gpu, 1)
    assert "6 prompts, each greedy and sampled with temperature 0.6, top_p 0.9, top_k 20" in lines
    assert "the best serial and async runs with unfused operators" in lines
    codec = TextCodec(Path(pair[1]))
    texts = [str(codec.tokenizer.decode(ids)) for ids in gpu.prompts]
    assert len(texts) == 6 and all(text.startswith("<|user|>") and text.endswith("<|bot|>") for text in texts)


@pytest.mark.slow
def test_a_deadline_ends_a_run(pair: list[str]) -> None:
    ranks = RankPool(Pair(Path(pair[1]), Path(pair[3]), {"dtype": torch.float32}), None)
    from swiftspec.config import EngineConfig

    with ranks.engine(EngineBuild(EngineConfig("serial"))) as llm, pytest.raises(measurement.OutOfTime):
        measurement.decode_all(llm, [[1, 2, 3]], 8, deadline=0.0)
    order = EngineBuild(EngineConfig("serial", draft_steps=2), alone="draft", trace="t", context=40)
    assert EngineBuild.unpack(order.pack()) == order
