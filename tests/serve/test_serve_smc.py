"""Mode smc on the command line: its flags, messages and errors."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from swiftspec.answer_stats import population_stats, summary_line
from swiftspec.backends.cpu import cpu as host
from swiftspec.cli.config_sources import load_settings
from swiftspec.cli.terminal import StartupProgress
from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.engine import Stats
from swiftspec.errors import UserError
from swiftspec.serve.__main__ import main
from swiftspec.settings.settings import Settings, UsageError, env_name
from swiftspec.smc.group_result import GroupResult
from swiftspec.startup.session import open_session
from tests.support.toy_pair import make_pair

ASK = ["--prompt", "def add(a, b):\n", "--threads", "1", "--temperature", "0.8"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    target, draft = make_pair(tmp_path_factory.mktemp("pair"))
    return ["--model", str(target), "--draft-model", str(draft), *ASK]


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in map(env_name, Settings.model_fields):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def test_a_population_reports_its_shape(capsys: pytest.CaptureFixture[str], pair: list[str]) -> None:
    flags = ["--mode", "smc", "--particles", "3", "--smc-draft-tokens", "2", "--max-tokens", "20", "--ignore-eos"]
    result = answer(capsys, *pair, *flags)
    assert result["exact"] is False and result["particles"] == 3 and result["cache_full"] is False
    assert 1 <= result["ess_mean"] <= 3 and 0 <= result["resample_rate"] <= 1
    assert 0 <= result["coalesced_prefix"] <= 20 == len(result["token_ids"])
    assert isinstance(result["log_z"], float)
    metrics = result["metrics"]
    assert metrics["mode"] == "smc" and metrics["speculative_decoding"] is None
    assert "draft_n" not in result["timings"] and metrics["time_to_first_token_ms"] > 0
    assert answer(capsys, *pair, *flags)["token_ids"] == result["token_ids"]
    exact = answer(capsys, *pair, *flags, "--speculative-config.smc_exact", "2")
    assert exact["ess_mean"] == pytest.approx(3) and exact["log_z"] == 0


def test_text_and_footer(capsys: pytest.CaptureFixture[str], pair: list[str]) -> None:
    result = answer(capsys, *pair, "--mode", "smc", "--max-tokens", "15")
    assert main([*pair, "--mode", "smc", "--max-tokens", "15"]) == 0
    output = capsys.readouterr()
    assert output.out.removesuffix("\n") == result["text"].removesuffix("\n")
    assert output.err.rstrip().endswith("approximate")


def test_a_full_cache_is_reported_as_the_reason() -> None:
    end = GroupResult(
        tokens=[7, 8], stopped=False, full=True, compactions=0, moved_slots=0,
        coalesced_prefix=1, ess_mean=2.0, resample_rate=0.0, log_z=0.0,
    )  # fmt: skip
    stats = Stats(prompt_tokens=3, tokens=2, rounds=1, decode_time=0.1, population=end)
    assert population_stats(EngineConfig("smc"), stats)["cache_full"] is True
    assert "approximate, ended because the KV cache has no room for another round" in summary_line(stats, 2)


def test_a_chat_starts_with_a_warm_up(pair: list[str]) -> None:
    settings = load_settings({"model": pair[1], "draft_model": pair[3], "mode": "smc", "threads": 1})
    llm = open_session(settings, StartupProgress(quiet=True), warm_up=True).llm
    assert llm.stats.tokens == 2 and llm.stats.population is not None


def test_other_modes_do_not_mention_populations(capsys: pytest.CaptureFixture[str], pair: list[str]) -> None:
    assert "particles" not in answer(capsys, *pair, "--max-tokens", "4")


def test_reference_operators_can_be_requested(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, pair: list[str]
) -> None:
    requested: list[object] = []

    def refuse(*about: object) -> None:
        requested.append(about)
        raise UserError("refused")

    monkeypatch.setattr(host, "check_supported", refuse)
    answer(capsys, *pair, "--max-tokens", "4")
    assert requested
    monkeypatch.setattr(host, "check_supported", lambda *about: pytest.fail("nobody wants native operators"))
    assert answer(capsys, *pair, "--max-tokens", "4", "--ops", "reference")["token_ids"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mode": "smc", "verify_batch": 4}, "--verify-batch is not supported in mode smc, which has no draft tree"),
        ({"mode": "smc", "proposal": "top"}, "--speculative-config.proposal is not supported in mode smc"),
        ({"particles": 4}, "--particles is not supported in mode serial, which has no population"),
        (
            {"mode": "ar", "power": 2.0},
            "--speculative-config.power is not supported in mode ar, which has no population",
        ),
    ],
    ids=str,
)
def test_settings_that_the_mode_does_not_use(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_settings(given).make_plan(has_draft=True)


def test_settings_determine_the_plan() -> None:
    plan = load_settings({"mode": "smc", "particles": 7, "power": 1.5, "smc_exact": 1}).make_plan(has_draft=True)
    assert plan.mode == "smc" and plan.population == PopulationConfig(7, power=1.5, smc_exact=1)
    assert load_settings({"mode": "smc"}).make_plan(has_draft=True, ranks=2).target_tp == 2
    with pytest.raises(UserError, match="not supported without a draft model"):
        load_settings({"mode": "smc"}).make_plan(has_draft=False)
    with pytest.raises(UsageError, match=r"--speculative-config.smc_exact must lie in 0\.\.2"):
        load_settings({"mode": "smc", "smc_draft_tokens": 2, "smc_exact": 3})


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--temperature", "0"], 1, "temperature 0 is not supported in mode smc"),
        (["--guidance-scale", "2", "--negative-prompt", "a"], 1, "guidance is not supported in mode smc"),
        (["--draft-leaves", "2"], 2, "--draft-leaves is not supported in mode smc"),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused(
    capsys: pytest.CaptureFixture[str], pair: list[str], flags: list[str], code: int, message: str
) -> None:
    assert main([*pair, "--mode", "smc", "--json", *flags]) == code
    output = capsys.readouterr()
    assert not output.out and output.err.startswith("swiftspec: error: ") and output.err.count("\n") == 1
    assert message in output.err
