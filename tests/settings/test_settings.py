"""The sources of settings and their precedence, and the errors for invalid ones."""

import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftspec.cli import generate
from swiftspec.cli.arguments import HELP_PAGES, build_parser, parse_command
from swiftspec.cli.config_sources import load_settings, unknown_variable_warnings
from swiftspec.cli.terminal import StartupProgress
from swiftspec.config import EngineConfig
from swiftspec.drafter_kinds import GRAFTED
from swiftspec.errors import UserError
from swiftspec.settings.flags import FLAGS, SETTINGS, flag_name
from swiftspec.settings.other_flags import OTHER_FLAGS, flag_hint
from swiftspec.settings.settings import Settings, UsageError, env_name
from swiftspec.startup.model_resolution import ResolvedModels, generation_defaults


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.delenv(env_name(name), raising=False)


def test_flag_over_environment_over_file_over_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("port: 1\nhost: a\nseed: 1\nmodel:\n")
    monkeypatch.setenv("SWIFTSPEC_PORT", "2")
    monkeypatch.setenv("SWIFTSPEC_HOST", "b")
    monkeypatch.setenv("SWIFTSPEC_TOKEN", "")  # empty counts as unset
    settings = parse_command(["--config", str(file), "--port", "3"]).settings
    assert (settings.port, settings.host, settings.seed, settings.token) == (3, "b", 1, None)
    assert (settings.model, settings.verify_batch, settings.proposal) == (None, 8, None)


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_one_gpu_runs_both_models_in_mode_async(monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    """Also if --device is not set; without a GPU the mode requires two ranks."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    plan = Settings(mode="async", device=device).make_plan(True)
    assert (plan.target_tp, plan.draft_tp, plan.overlap_on_one_gpu) == (1, 0, True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if device == "auto":
        with pytest.raises(UsageError, match="one rank is not supported in mode async"):
            Settings(mode="async").make_plan(True)


def test_lists_and_objects_from_every_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(
        "stop: END\noverride-generation-config: {stop_token_ids: [3, 4], logit_bias: {5: -1}}\n"
        "speculative-config: {proposal: top, num_speculative_tokens: 4, method: suffix}\n"
    )
    settings = parse_command(["--config", str(file)]).settings
    assert (settings.stop, settings.stop_token_ids, settings.logit_bias) == (["END"], [3, 4], {5: -1.0})
    assert settings.proposal == "top"
    assert (settings.verify_batch, settings.draft_model) == (5, "suffix")
    monkeypatch.setenv("SWIFTSPEC_API_KEY", '["a", "b"]')
    assert parse_command([]).settings.api_key == ["a", "b"]
    monkeypatch.setenv("SWIFTSPEC_API_KEY", "123")
    assert parse_command([]).settings.api_key == ["123"]
    fields = ["--override-generation-config.stop_token_ids", "1,2", "--override-generation-config.max_new_tokens=7"]
    settings = parse_command(["--stop", "x,y", "--stop", "\n", *fields, "--speculative-config.power", "2"]).settings
    assert (settings.stop, settings.stop_token_ids, settings.max_tokens) == (["x,y", "\n"], [1, 2], 7)
    assert settings.power == 2


def test_the_split_of_mode_serial() -> None:
    """All ranks share both models."""
    for flags in ([], ["--draft-tp", "3"]):
        plan = parse_command(["--mode", "serial", *flags]).settings.make_plan(True, ranks=3)
        assert (plan.target_tp, plan.draft_tp, plan.num_ranks) == (3, 3, 3)
    with pytest.raises(UserError, match="--draft-tp is not supported in mode serial"):
        parse_command(["--mode", "serial", "--draft-tp", "1"]).settings.make_plan(True, ranks=3)
    with pytest.raises(UserError, match="draft_tp must be 3 in mode serial, not 1"):
        EngineConfig("serial", target_tp=3, draft_tp=1)


GRAFT, NO_GRAFT = (["--speculative-config.graft_suffix", value] for value in ("true", "false"))
NO_SWITCH = ["--speculative-config.self_switch", "false"]
BAD = [
    (["--top-p", "3"], "--top-p must be above 0 and at most 1, not 3"),
    (["--top-p", "much"], "--top-p must be a number, not 'much'"),
    (["--temperature", "nan"], "--temperature must be a finite number"),
    (["--temperature=-1"], "--temperature must be 0 (greedy) or lie in"),
    (["--repetition-penalty", "0"], "--repetition-penalty must lie in 0.01..100"),
    (["--guidance-scale", "-1"], "--guidance-scale must lie in 0..100 (1: off), not -1"),
    (["--guidance-scale", "nan"], "--guidance-scale must be a finite number"),
    (["--seed", "-1"], "--seed must lie in 0..2^64-1"),
    (["--max-tokens", "0"], "--max-tokens must lie in 1..2147483647, not 0"),
    (["--verify-batch", "65"], "--verify-batch must lie in 1..64"),
    (["--speculative-config.calibration", "much"], "--speculative-config.calibration must be a number, not 'much'"),
    (["--speculative-config", '{"calibration": 0}'], "--speculative-config.calibration must lie in 0.05..20, not 0"),
    (["--speculative-config.calibration"], "--speculative-config.calibration needs a value"),
    (["--speculative-config.powr", "1"], "speculative_config: unknown field 'powr'; known are calibration, catch_up"),
    (["--speculative-config", "["], "speculative_config is not valid JSON"),
    (["--override-generation-config", "[]"], "override_generation_config must be a JSON object, not []"),
    (["--override-generation-config.temp", "1"], "override_generation_config: unknown field 'temp'; known are"),
    (["--top-p", "1", "--override-generation-config.top_p", "1"], "override_generation_config and top_p set the same"),
    (["--calibration", "0.8"], "unrecognized arguments: --calibration 0.8 (it is now --speculative-config.calib"),
    (["--no-self-switch"], "unrecognized arguments: --no-self-switch (it is now --speculative-config.self_switch)"),
    (["--gpu-trial=off"], "unrecognized arguments: --gpu-trial=off (it is now an option of swiftspec.LLM: gpu_trial)"),
    (["--drain_timeout", "3"], "unrecognized arguments: --drain_timeout 3 (running requests have 20 s to finish)"),
    (["--particles", "0"], "--particles must lie in 1..1024, not 0"),
    (["--smc-draft-tokens", "65"], "--smc-draft-tokens must lie in 1..64, not 65"),
    (["--speculative-config.smc_exact", "5"], "--speculative-config.smc_exact must lie in 0..4 (smc_draft_tokens), no"),
    (["--draft-steps", "1.5"], "--draft-steps must be a whole number, not '1.5'"),
    (["--threads", "0"], "--threads must lie in 1..1024, not 0"),
    (["--request-timeout", "nan"], "--request-timeout must lie in 0.1..86400, not nan"),
    (["--mode", "fast"], "--mode must be one of ar, serial, async, smc, not 'fast'"),
    (["--dtype", "int8"], "--dtype must be one of auto, float32"),
    (["--override-generation-config.logit_bias", "[1]"], "--override-generation-config.logit_bias must be a JSON obj"),
    (["--stop", ""], "--stop: a stop string must not be empty"),
    (["--prompt"], "--prompt needs a value"),
    (["--prompt", "a", "--prompt-file", "b"], "--prompt and --prompt-file are mutually exclusive"),
    (["--top", "0.9"], "unrecognized arguments: --top 0.9"),
    (["stray", "other"], "unrecognized arguments: stray other (--help lists the flags)"),
    (["stray", "--tp", "2"], "unrecognized arguments: stray --tp 2 (did you mean --target-tp?)"),
    (["a", "--model", "b"], "a and --model b specify the same; remove one of them"),
    (["Write a poem"], "'Write a poem' is not a model; specify a prompt with --prompt"),
    (["--temprature", "1"], "unrecognized arguments: --temprature 1 (did you mean --temperature?)"),
    (["--tensor-parallel-size=2"], "unrecognized arguments: --tensor-parallel-size=2 (did you mean --target-tp?)"),
    (["--gpu_memory_utilization", "0.9"], "unrecognized arguments: --gpu_memory_utilization 0.9 (memory follows from"),
    (["-hf", "a/b"], "unrecognized arguments: -hf (did you mean --model?)"),
    (["-ngl", "9", "-c", "9"], "unrecognized arguments: -ngl 9 -c 9 (-ngl: all layers run on --device; -c: did you"),
    (["--kept_memory", "3"], "unrecognized arguments: --kept_memory 3 (it is now --prefix-cache-memory)"),
    (["--raw", "--system-prompt", "x"], "--system-prompt is not supported with --raw"),
    (["--config", "/nowhere.yaml"], "--config /nowhere.yaml cannot be read: No such file"),
]


@pytest.mark.parametrize(("argv", "message"), BAD, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_bad_flags(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_command(argv)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("topp: 0.9", "unknown key 'topp' (did you mean top-p?)"),
        ("ctx_size: 9", "unknown key 'ctx_size' (did you mean max-model-len?)"),
        ("prompt: hi", "unknown key 'prompt'"),
        ("top-p: 7", "top-p in {file} must be above 0"),
        ("verify-batch: many", "verify-batch in {file} must be a whole number, not 'many'"),
        ("model: [a]", "model in {file} must be text, not ['a']"),
        ("stop: {a: 1}", "stop in {file} must be a list"),
        ("just words", "must contain `flag: value` lines"),
        ("max-tokens: yes", "max-tokens in {file} must be a whole number, not 'yes'"),
        ("max-tokens: 1:30", "max-tokens in {file} must be a whole number, not '1:30'"),
        ("max-tokens: 0x10", "max-tokens in {file} must be a whole number, not '0x10'"),
        ("max-tokens: " + "9" * 5000, "max-tokens in {file} must be a whole number, not '9999"),
        ("seed: 1\nseed: 2", "contains 'seed' twice: remove one of them"),
        ("top_p: 0.5\ntop-p: 0.6", "top-p is given twice"),
        ("speculative-config: {power: 1, power: 2}", "contains 'power' twice"),
        ("calibration: 1", "unknown key 'calibration' (it is now speculative-config.calibration)"),
        ("stop: [a, [b]]", "stop in {file} must be text, not ['b']"),
        ("stop: " + "[" * 100_000, "is nested too deeply"),
        ("[" * 100_000, "is nested too deeply"),
        ("[seed]", "must contain `flag: value` lines, not a list"),
        ("{a: b}: c", "is not YAML: while constructing a mapping"),
        ("\x00", "is not YAML: unacceptable character"),
        ("seed: &a 1", "contains an anchor, an alias or a tag"),
        ("seed: *a", "contains an anchor, an alias or a tag"),
        ("seed: !!int 1", "contains an anchor, an alias or a tag"),
        ("? [seed]\n", "found unhashable key"),
        ("unknown: ~", "unknown key 'unknown'"),
        ("seed: 1\n---\nseed: 2", "expected a single document"),
        ("x" * 500 + ": 1", "unknown key 'xxxx"),
        (b"seed: 1\n" + b"#" * (1 << 20), "is larger than 1 MiB"),
        ("top-p: [0.9", "is not YAML"),
        (b"\xff\xfe\x00", "is not valid UTF-8 (byte 0)"),
    ],
)
def test_bad_files(tmp_path: Path, content: str | bytes, message: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError) as caught:
        parse_command(["--config", str(file)])
    assert message.format(file=file) in str(caught.value)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 600


def test_yaml_values_are_taken_as_text(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(
        "max-tokens: 010\nignore-eos: on\nadapt: No\nstop: yes\nrevision: 2020-01-01\nmodel: ~\ntrace: null\n"
        "override-generation-config: '{\"stop_token_ids\": [3, \"4,5\"]}'\ntop-p: .5\nnegative-prompt: 'null'\n"
    )
    found = parse_command(["--config", str(file)]).settings
    assert (found.max_tokens, found.ignore_eos, found.adapt, found.stop) == (10, True, False, ["yes"])
    assert (found.revision, found.model, found.trace) == ("2020-01-01", None, None)
    assert (found.stop_token_ids, found.top_p, found.negative_prompt) == ([3, 4, 5], 0.5, "null")


def test_flags_accept_underscores() -> None:
    settings = parse_command(["--top_p", "0.5", "--draft_steps=3", "--no-public_metrics", "--stop", "--a b"]).settings
    assert (settings.top_p, settings.draft_steps, settings.public_metrics) == (0.5, 3, False)
    assert settings.stop == ["--a b"]


@pytest.mark.parametrize("argv", [["org/name"], ["org/name", "--port", "1"], ["--port", "1", "org/name", "--raw"]])
def test_the_model_needs_no_flag(argv: list[str]) -> None:
    assert parse_command(argv).settings.model == "org/name"


def test_hints_name_existing_flags() -> None:
    known = build_parser()._option_string_actions
    assert not OTHER_FLAGS.keys() & known.keys()
    for other in OTHER_FLAGS:
        hint = flag_hint(other, known)
        assert hint is not None and all(flag in known for flag in re.findall(r"--[a-z-]+", hint))
        assert flag_hint(other, ["--splits"]) is None or not OTHER_FLAGS[other].startswith("--")


def test_an_old_name_names_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.yaml"
    for key in ("kept-memory", "kept_memory"):
        file.write_text(f"{key}: 3")
        with pytest.raises(UsageError, match=rf"unknown key '{key}' \(it is now prefix-cache-memory\)$"):
            parse_command(["--config", str(file)])
    for name, instead in (
        ("KEPT_MEMORY", "it is now --prefix-cache-memory"),
        ("TOP_P", "use --top-p, or top-p in a --config file"),
        ("POWER", "it is now --speculative-config.power"),
    ):
        monkeypatch.setenv(f"SWIFTSPEC_{name}", "3")
        with pytest.raises(UsageError, match=rf"SWIFTSPEC_{name} is no setting any more: {instead}$"):
            parse_command([])
        assert unknown_variable_warnings() == []  # the error is sufficient
        monkeypatch.delenv(f"SWIFTSPEC_{name}")


@pytest.mark.parametrize("text", ["", "---\n", "# nothing\n", "null\n", "{}\n"])
def test_a_file_without_settings(tmp_path: Path, text: str) -> None:
    (tmp_path / "settings.yaml").write_text(text)
    assert parse_command(["--config", str(tmp_path / "settings.yaml")]).settings == Settings()


def test_a_pipe_of_settings_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="it is a pipe"):
        parse_command(["--config", str(tmp_path / "pipe")])


@pytest.mark.parametrize(
    "name", ["--max-tokens", "--seed", "--draft-steps", "--threads", "variable", "--kv-events-config"]
)
def test_long_values_are_truncated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name != "variable":
        with pytest.raises(UsageError) as caught:
            parse_command([name, "9" * 5000])
    else:
        monkeypatch.setenv("SWIFTSPEC_PORT", "[" * 100_000)
        with pytest.raises(UsageError) as caught:
            parse_command([])
    assert len(str(caught.value)) < 200


def test_bad_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWIFTSPEC_PORT", "perhaps")
    with pytest.raises(UsageError, match=r"^SWIFTSPEC_PORT must be a whole number, not 'perhaps'$"):
        parse_command([])
    assert parse_command(["--port", "1"]).settings.port == 1  # a flag takes precedence over an invalid value


def test_help_names_every_flag_of_its_command() -> None:
    assert len(FLAGS) < 64
    seen = set[str]()
    for page in HELP_PAGES.values():
        text = build_parser(page).format_help()
        solid = "".join(text.split())  # lines also break at hyphens
        shown = {*re.findall("^  (--[a-z-]+)", text, re.MULTILINE)} & {*map(flag_name, FLAGS)}
        assert len(shown) < 60
        seen |= shown
        for name, flag in FLAGS.items():
            here = flag_name(name) in shown
            assert ("".join(str(flag.setting.help).split()) in solid) == here
            assert (f"[env:{env_name(name)}]" in solid) == (here and flag.setting.variable)
    assert seen == {*map(flag_name, FLAGS)}


def test_unset_values_come_from_the_model_then_from_vllm(tmp_path: Path) -> None:
    config = tmp_path / "generation_config.json"
    config.write_text('{"temperature": 0.6, "top_p": 0.9, "top_k": null, "do_sample": true, "max_new_tokens": 3}')
    defaults = generation_defaults(tmp_path)
    sampling = load_settings({"top_p": "0.5", "presence_penalty": "1", "stop": ["x"]}).sampling_params(defaults)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.presence_penalty) == (0.6, 0.5, 0, 1.0)
    assert (sampling.stop, sampling.max_tokens) == (("x",), 3)
    assert load_settings({"max_tokens": "7"}).sampling_params(defaults).max_tokens == 7
    config.write_text('{"do_sample": false, "top_p": 0.9}')
    assert load_settings({}).sampling_params(generation_defaults(tmp_path)).greedy
    assert load_settings({"temperature": "1"}).sampling_params(generation_defaults(tmp_path)).temperature == 1
    config.unlink()
    assert load_settings({}).sampling_params(generation_defaults(tmp_path)).temperature == 1


@pytest.mark.parametrize("content", ['{"top_p": 5}', '{"temperature": "warm"}', "[]", "{", '{"top_k": {}}'])
def test_a_bad_generation_config_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(UserError, match=r"generation_config\.json") as caught:
        generation_defaults(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_mode_follows_the_draft() -> None:
    assert load_settings({"adapt": False}).make_plan(has_draft=True) == EngineConfig("serial", drafter="model")
    assert load_settings({}).make_plan(has_draft=False).mode == "ar"
    assert load_settings({"mode": "ar"}).make_plan(has_draft=True).mode == "ar"
    with pytest.raises(UserError, match="without a draft model; specify one with --draft-model, or use --mode ar"):
        load_settings({"mode": "serial"}).make_plan(has_draft=False)


def test_suffix_lookup_runs_in_mode_serial_on_any_number_of_ranks() -> None:
    lookup = load_settings({"draft_model": "suffix"})
    for ranks in (1, 2):
        plan = lookup.make_plan(True, ranks)
        assert (plan.mode, plan.target_tp, plan.drafter) == ("serial", ranks, "suffix")
    assert load_settings({"draft_model": "suffix", "mode": "ar"}).make_plan(True).drafter == "model"
    with pytest.raises(UserError, match="not supported in mode async; use --mode serial"):
        load_settings({"draft_model": "suffix", "mode": "async"}).make_plan(True, 2)
    grafted = load_settings({"draft_model": "a", "graft_suffix": True})
    assert {grafted.make_plan(True, ranks).drafter for ranks in (1, 2)} == {"model+suffix"}
    with pytest.raises(UsageError, match=r"\(--speculative-config.graft_suffix\) is not supported with suffix lookup"):
        load_settings({"draft_model": "suffix", "graft_suffix": True}).make_plan(True)
    assert lookup.model_copy(update={"graft_suffix": False}).make_plan(True).drafter == "suffix"
    steps = load_settings({"draft_model": "suffix", "draft_steps": 2})
    (note,) = steps.ignored_settings("serial")
    assert note == "--draft-steps has no effect with suffix lookup, which has no draft forwards"


@pytest.mark.parametrize(
    ("given", "steps", "batch"),
    [({}, True, True), ({"draft_steps": 3}, False, True), ({"verify_batch": 8}, True, False),
     ({"mode": "async"}, True, True), ({"adapt": False}, False, False), ({"mode": "ar"}, False, False),
     ({"verify": "reject"}, False, False)],
)  # fmt: skip
def test_values_set_by_the_user_are_not_adapted(given: dict[str, Any], steps: bool, batch: bool) -> None:
    plan = load_settings(given).make_plan(has_draft=True, ranks=2)
    assert (plan.adapt_steps, plan.adapt_batch) == (steps, batch)


@pytest.mark.parametrize(
    ("flags", "drafter"),
    [
        ([], GRAFTED), (NO_GRAFT, "model"), (NO_SWITCH, GRAFTED), (["--no-adapt"], "model"),
        (["--no-adapt", "--speculative-config.self_switch", "true"], GRAFTED),
        (["--draft-steps", "3", "--verify-batch", "8"], GRAFTED),
        ([*NO_SWITCH, "--draft-steps", "3", "--verify-batch", "8"], "model"),
        (["--verify", "reject"], "model"), (["--max-num-seqs", "2"], GRAFTED), (["--mode", "smc"], "model"),
        (["--mode", "ar"], "model"), (["--draft-url", "127.0.0.1:7071", "--mode", "serial"], "model"),
        (["--no-adapt", *GRAFT], GRAFTED),
    ],
)  # fmt: skip
def test_suffix_lookup_is_grafted_by_default_where_rounds_are_adapted(flags: list[str], drafter: str) -> None:
    assert parse_command(flags).settings.make_plan(has_draft=True).drafter == drafter


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        (["--verify", "reject"], "verify reject"), (["--mode", "smc"], "mode smc"),
        (["--draft-url", "127.0.0.1:7071"], "--draft-url"),
    ],
)  # fmt: skip
def test_grafting_is_refused_only_if_it_is_given(flags: list[str], cause: str) -> None:
    parse_command(flags).settings.make_plan(has_draft=True)
    with pytest.raises(UsageError, match=cause) as caught:
        parse_command([*flags, *GRAFT]).settings.make_plan(has_draft=True)
    assert "\n" not in str(caught.value)


def test_rejection_sampling_is_deterministic_unless_adaptation_is_requested() -> None:
    for given, switches in (
        ({}, True),
        ({"verify": "reject"}, False),
        ({"verify": "reject", "self_switch": True}, True),
    ):
        assert load_settings(given).make_plan(has_draft=True).self_switch is switches


def test_a_later_change_of_a_setting_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings({})
    settings.stop_token_ids = "4,5"  # type: ignore[assignment]
    assert settings.stop_token_ids == [4, 5]
    with pytest.raises(ValueError, match="top_p must be above 0"):
        settings.top_p = 2
    assert settings.top_p is None


def test_a_generation_config_may_write_whole_numbers_as_floats(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text('{"top_k": 50.0, "max_new_tokens": 20, "temperature": 1, "top_p": null, "do_sample": true}')
    found = generation_defaults(tmp_path)
    assert found == {"top_k": 50, "max_tokens": 20, "temperature": 1.0} and type(found["top_k"]) is int
    for bad in (
        '{"top_k": "50"}',
        '{"top_k": 2.5}',
        '{"do_sample": "no"}',
        '{"temperature": 1e999}',
        '{"top_p": true}',
    ):
        file.write_text(bad)
        with pytest.raises(UserError, match=r"generation_config\.json"):
            generation_defaults(tmp_path)


def test_invalid_settings_are_refused_before_a_model_is_searched() -> None:
    settings = Settings(model="/nowhere", emulate="target=much")
    with pytest.raises(UserError, match="'much' is not a valid step time"):
        ResolvedModels.resolve(settings, 1, StartupProgress(quiet=True))
    with pytest.raises(UserError, match="no such user"):
        ResolvedModels.resolve(Settings(model="~nosuchuser/x"), 1, StartupProgress(quiet=True))


def test_a_prompt_from_a_pipe_has_a_maximum_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_text("hello\n"))
    writer.start()
    assert generate.read_prompt(parse_command(["--prompt-file", str(tmp_path / "pipe")])) == "hello"
    writer.join()
    monkeypatch.setattr(generate, "MAX_TEXT_BYTES", 1000)
    for file, reason in (
        ("/dev/zero", "is larger than 1000 bytes"),
        (str(tmp_path), "Is a directory"),
        ("a\0b", "null"),
    ):
        with pytest.raises(UsageError, match=reason):
            generate.read_prompt(parse_command(["--prompt-file", file]))


def test_several_names_of_the_model() -> None:
    """In the forms of vLLM and of repeated flags; a name for each."""
    for arguments in (["--served-model-name", "a", "b"], ["--served-model-name=a", "--served-model-name=b"]):
        assert parse_command(arguments).settings.served_model_name == ["a", "b"]
