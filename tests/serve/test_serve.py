"""The command, from its flags to its output."""

import io
import json
import math
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from swiftspec import answer_stats
from swiftspec.cli import generate
from swiftspec.cli.arguments import parse_command
from swiftspec.config import EngineConfig
from swiftspec.engine import Stats
from swiftspec.serve.__main__ import main
from swiftspec.settings.settings import Settings, env_name
from swiftspec.startup.built_in_models import DEMO_MODELS
from swiftspec.text.template import TemplateRenderer
from tests.support.toy_pair import (
    CONTEXT,
    byte_level_tokenizer,
    make_pair,
    random_weights,
    write_model,
    write_tokenizer,
)

PROMPT = "def add(a, b):\n"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The flags that name a pair."""
    target, draft = make_pair(tmp_path_factory.mktemp("pair"))
    return ["--model", str(target), "--draft-model", str(draft), "--threads", "1"]


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", *map(env_name, Settings.model_fields)):
        monkeypatch.delenv(name, raising=False)


class Command:
    """Runs main() in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch

    def __call__(self, *argv: str, stdin: bytes | None = None) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        self._capsys.readouterr()
        self._monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin or b"")))
        code = main(argv)
        output = self._capsys.readouterr()
        return code, output.out, output.err

    def json(self, *argv: str, stdin: bytes | None = None) -> dict[str, Any]:
        code, out, err = self(*argv, "--json", stdin=stdin)
        assert (code, err) == (0, "")
        assert out.count("\n") == 1
        return json.loads(out, parse_constant=pytest.fail)

    def refuses(self, *argv: str, code: int = 2, stdin: bytes | None = None) -> str:
        """Checks that there is one line on stderr and nothing on stdout; returns the message."""
        got, out, err = self(*argv, "--json", stdin=stdin)
        assert (got, out) == (code, "")
        assert err.startswith("swiftspec: error: ")
        assert err.count("\n") == 1
        return err.removeprefix("swiftspec: error: ").strip()


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(capsys, monkeypatch)


def test_one_answer_as_text(command: Command, pair: list[str]) -> None:
    fixed = ["--no-adapt"]  # whose decisions depend on the clock and would be printed
    code, out, err = command(*pair, *fixed, "--prompt", PROMPT, "--max-tokens", "30", "--temperature", "0")
    assert code == 0
    assert out.endswith("\n")
    reason = "runs on torch's own operators: the CPU operators need"
    progress = [line for line in err.splitlines() if reason not in line]
    assert progress[:4] == [f"swiftspec: {w}" for w in ("libraries", "tokenizers", "target weights", "draft weights")]
    assert err.count(reason) == 2, "the heads of both models are narrower than the native operators support"
    assert "swiftspec: ready in " in err
    assert err.splitlines()[-1].startswith("swiftspec: 30 tok, ")
    assert err.splitlines()[-1].endswith(" tok/round")


def check_invariants(result: dict[str, Any], bs: int) -> None:
    usage, timings, metrics = result["usage"], result["timings"], result["metrics"]
    spec = metrics["speculative_decoding"]
    assert usage["prompt_tokens"] == len(result["prompt_token_ids"]) == timings["prompt_n"] and timings["cache_n"] == 0
    assert usage["completion_tokens"] == len(result["token_ids"]) == timings["predicted_n"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert timings["load_ms"] > 0
    assert timings["predicted_per_second"] == metrics["tokens_per_second"] > 0
    assert timings["draft_n"] == spec["num_draft_tokens"]
    assert timings["draft_n_accepted"] == spec["num_accepted_draft_tokens"]
    histogram = spec["acceptance_histogram"]
    assert len(histogram) == spec["num_spec_tokens"] + 1 == bs
    assert sum(histogram) == spec["num_spec_steps"]
    assert sum(j * n for j, n in enumerate(histogram)) == spec["num_accepted_draft_tokens"]
    chances, accepted = (spec[f"num_{what}_per_pos"] for what in ("chances", "accepted_tokens"))
    assert accepted == [sum(histogram[depth:]) for depth in range(1, bs)]
    assert all(few <= many for few, many in zip(accepted, chances, strict=True))
    assert sum(spec["num_accepted_tokens_per_child"]) == sum(accepted)
    mean = 1 + spec["num_accepted_draft_tokens"] / spec["num_spec_steps"]
    assert spec["mean_acceptance_length"] == round(mean, 3)
    assert 0 <= spec["draft_acceptance_rate"] <= 1
    assert 0 < metrics["target_busy"] <= 1
    assert metrics["time_to_first_token_ms"] > 0


def test_one_answer_as_json(command: Command, pair: list[str]) -> None:
    flags = [*pair, "--prompt", PROMPT, "--max-tokens", "40", "--seed", "3", "--top-p", "0.9", "--ignore-eos"]
    serial = command.json(*flags, "--verify-batch", "6", "--draft-leaves", "4", "--draft-steps", "3")
    assert list(serial) == [
        "model", "draft_model", "text", "token_ids", "prompt_token_ids", "finish_reason", "usage", "timings", "metrics",
    ]  # fmt: skip
    check_invariants(serial, bs=6)
    assert (serial["model"], serial["draft_model"]) == (pair[1], pair[3])
    assert serial["finish_reason"] == "length"
    assert serial["metrics"]["mode"] == "serial"
    assert serial["metrics"]["split"] == {"target_tp": 1, "draft_tp": 1}
    assert serial["metrics"]["drafter_lost"] is None
    assert serial["metrics"]["policy"]["plain_rounds"] >= 0
    fixed = command.json(*flags, "--no-adapt")
    assert fixed["metrics"]["policy"] is None and fixed["text"] == serial["text"]
    assert fixed["metrics"]["speculative_decoding"]["mean_acceptance_length"] > 1.2  # high acceptance
    plain = command.json(*flags, "--mode", "ar")
    check_invariants(plain, bs=1)
    assert (plain["metrics"]["mode"], plain["draft_model"]) == ("ar", None)
    assert plain["metrics"]["split"] == {"target_tp": 1, "draft_tp": 0}
    assert (plain["text"], plain["token_ids"]) == (serial["text"], serial["token_ids"])
    assert command.json(*flags, "--seed", "4")["text"] != serial["text"]


def test_synthetic_acceptance(command: Command, pair: list[str]) -> None:
    """The flag turns adaptation off, and every output of the command states it."""
    flags = [*pair, "--prompt", PROMPT, "--max-tokens", "40", "--ignore-eos", "--draft-steps", "5"]
    flags += ["--speculative-config.synthetic_acceptance_length", "2.5"]
    answer = json.loads(command(*flags, "--speculative-config.calibration", "0.1", "--json")[1])
    assert answer["exact"] is False and answer["synthetic_acceptance_length"] == 2.5
    assert answer["metrics"]["policy"] is None
    assert answer["metrics"]["speculative_decoding"]["mean_acceptance_length"] == pytest.approx(2.5, abs=0.15)
    code, _, err = command(*flags)
    assert code == 0 and "warning: synthetic acceptance length 2.5: answers are not the target's" in err
    assert "synthetic acceptance length 2.5: the text is not the target's" in err.splitlines()[-1]
    for more in (["--adapt"], ["--verify", "reject"], ["--mode", "ar"], ["--verify-batch", "2"]):
        assert re.search("synthetic[-_]acceptance[-_]length (is not supp|must lie)", command.refuses(*flags, *more))


def test_a_target_alone_runs_without_a_draft(command: Command, pair: list[str]) -> None:
    assert command.json(*pair[:2], "--prompt", "a", "--max-tokens", "3")["metrics"]["mode"] == "ar"
    assert "not supported without a draft model" in command.refuses(*pair[:2], "--prompt", "a", "--mode", "serial")


def test_the_process_of_the_template(command: Command, pair: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts while the libraries load, only if it is needed, and leaves nothing behind."""
    started: list[subprocess.Popen[Any]] = []
    popen: Any = subprocess.Popen

    def noted(*args: Any, **options: Any) -> Any:
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr("swiftspec.text.template.subprocess.Popen", noted)
    monkeypatch.setattr("swiftspec.text.codec.TemplateRenderer", TemplateRenderer)
    command.json(*pair, "--raw", "--prompt", "a", "--max-tokens", "1")
    assert not started
    command.json(*pair, "--prompt", "a", "--max-tokens", "1")
    assert len(started) == 1 and started[0].returncode is not None
    command.refuses(*pair, "--draft-model", str(Path(pair[1]) / "nowhere"), "--prompt", "a", code=1)
    assert all(process.returncode is not None for process in started)


def test_a_system_prompt_and_a_chat_template(command: Command, pair: list[str], tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{% for m in messages %}{{ m.role + '=' + m.content + ';' }}{% endfor %}")
    flags = ["--chat-template", str(file), "--system-prompt", "s", "--prompt", "a", "--max-tokens", "1"]
    tokens = command.json(*pair, *flags)["prompt_token_ids"]
    assert byte_level_tokenizer().decode(tokens) == "system=s;user=a;"


def test_prompts_from_all_sources(command: Command, pair: list[str], tmp_path: Path) -> None:
    file = tmp_path / "prompt"
    file.write_bytes(PROMPT.encode())  # ends in a newline
    flags = [*pair, "--max-tokens", "4", "--temperature", "0"]
    bare, whole = (command.json(*flags, "--prompt", text) for text in (PROMPT.removesuffix("\n"), PROMPT))
    assert bare["prompt_token_ids"] != whole["prompt_token_ids"]
    for result in (command.json(*flags, stdin=PROMPT.encode()), command.json(*flags, "--prompt-file", str(file))):
        assert (result["prompt_token_ids"], result["text"]) == (bare["prompt_token_ids"], bare["text"])
    tokens = byte_level_tokenizer().encode(PROMPT, add_special_tokens=False).ids
    assert whole["prompt_token_ids"] == [1, *tokens, 0, 2]
    for result in (
        command.json(*flags, "--raw", "--prompt", PROMPT),
        command.json(*flags, "--raw", stdin=PROMPT.encode()),
        command.json(*flags, "--raw", "--prompt-file", str(file)),
    ):
        assert result["prompt_token_ids"] == tokens


def test_settings_reach_the_engine(command: Command, pair: list[str], tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(
        f"model: {pair[1]}\ndraft-model: {pair[3]}\nthreads: 1\nmax-tokens: 3\nverify_batch: 3\ndraft-steps: 2\n"
    )
    result = command.json("--config", str(file), "--prompt", "a", "--max-tokens", "7", "--verify-batch", "4")
    assert result["usage"]["completion_tokens"] == 7
    assert result["metrics"]["speculative_decoding"]["num_spec_tokens"] == 3


def test_stop_criteria(command: Command, pair: list[str]) -> None:
    flags = [*pair, "--prompt", PROMPT, "--temperature", "0", "--max-tokens", "40", "--ignore-eos"]
    whole = command.json(*flags)
    stop = whole["text"][10:13]
    cut = command.json(*flags, "--stop", "nowhere to be found", "--stop", stop)
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert cut["finish_reason"] == "stop"
    assert whole["token_ids"][: len(cut["token_ids"])] == cut["token_ids"] != whole["token_ids"]
    assert stop in byte_level_tokenizer().decode(cut["token_ids"])
    token = whole["token_ids"][7]
    by_token = command.json(*flags, "--override-generation-config.stop_token_ids", str(token))
    assert by_token["token_ids"] == whole["token_ids"][: whole["token_ids"].index(token) + 1]
    assert by_token["finish_reason"] == "stop"
    never = command.json(*flags, "--override-generation-config.logit_bias", json.dumps({token: -1e9}))
    assert token not in never["token_ids"]


def test_generation_continues_to_the_end_of_the_context(command: Command, pair: list[str]) -> None:
    result = command.json(*pair, "--prompt", PROMPT, "--ignore-eos", "--max-model-len", "60")
    assert result["usage"]["total_tokens"] == 60
    assert result["finish_reason"] == "length"
    assert "max_model_len must lie in 2..256" in command.refuses(
        *pair, "--prompt", "a", "--max-model-len", "257", code=1
    )


def test_empty_and_unreadable_prompts(command: Command, pair: list[str], tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"\n")
    assert "prompt is empty" in command.refuses(*pair, "--prompt", "")
    assert "prompt is empty" in command.refuses(*pair)
    assert "prompt is empty" in command.refuses(*pair, stdin=b"\n")
    assert "prompt is empty" in command.refuses(*pair, "--prompt-file", str(tmp_path / "empty"))
    assert "cannot be read: No such file" in command.refuses(*pair, "--prompt-file", str(tmp_path / "none"))
    assert "cannot be read: Is a directory" in command.refuses(*pair, "--prompt-file", str(tmp_path))
    assert "not valid UTF-8 (byte 1)" in command.refuses(*pair, stdin=b"a\xff")
    assert "not valid UTF-8" in command.refuses(*pair, "--prompt", "a\udcff", code=1)


def test_prompts_that_do_not_fit(command: Command, pair: list[str]) -> None:
    message = command.refuses(*pair, "--prompt", "x" * 2 * CONTEXT, code=1)
    assert f"does not fit the context of {CONTEXT}" in message
    assert "contains a token outside" in command.refuses(
        *pair, "--prompt", "a", "--override-generation-config.logit_bias", '{"999": 1}', code=1
    )


def test_invalid_flags_are_refused(command: Command) -> None:
    assert command.refuses("--top-p", "3", "--prompt", "a") == "--top-p must be above 0 and at most 1, not 3.0"
    assert command.refuses("--frobnicate") == "unrecognized arguments: --frobnicate (--help lists the flags)"


def bad_models(folder: Path) -> Iterator[tuple[Path, str]]:
    """Invalid model directories, and a part of each error message."""
    tokenizer, weights = byte_level_tokenizer(), random_weights(0)
    (folder / "nothing").mkdir()
    yield folder / "nothing", "no config.json"
    path = write_tokenizer(write_model(folder / "weightless", weights), tokenizer)
    (path / "model.safetensors").unlink()
    yield path, "no weights"
    path = write_tokenizer(write_model(folder / "pickle", weights), tokenizer)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    yield path, "pickle weights"
    path = write_tokenizer(write_model(folder / "gguf", weights), tokenizer)
    (path / "model.safetensors").rename(path / "model.gguf")
    yield path, "name the file instead of its directory"
    yield path / "model.gguf", "model.gguf: not a GGUF file"
    path = write_tokenizer(write_model(folder / "cut", weights), tokenizer)
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])
    yield path, "damaged or truncated"
    alien = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
    yield (
        write_tokenizer(write_model(folder / "alien", weights, **alien), tokenizer),
        "'GPT2LMHeadModel' is not supported",
    )
    path = write_tokenizer(write_model(folder / "garbled", weights), tokenizer)
    (path / "config.json").write_text("{")
    yield path, "not valid JSON"
    yield write_model(folder / "mute", weights), "no tokenizer; expected tokenizer.json or tokenizer.model"
    path = write_tokenizer(write_model(folder / "hot", weights), tokenizer)
    (path / "generation_config.json").write_text('{"temperature": -1}')
    yield path, "temperature must be 0"
    yield folder / "nowhere", "no such directory"


def test_invalid_models(command: Command, pair: list[str], tmp_path: Path) -> None:
    for path, words in bad_models(tmp_path):
        message = command.refuses("--model", str(path), "--prompt", "a", code=1)
        assert words in message, path
    cut = tmp_path / "cut"
    assert "damaged" in command.refuses(*pair[:2], "--draft-model", str(cut), "--prompt", "a", code=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_missing_gpu(command: Command, pair: list[str]) -> None:
    message = command.refuses(*pair, "--device", "cuda", "--prompt", "a", code=1)
    assert "PyTorch finds no NVIDIA GPU" in message


def test_models_that_do_not_match(command: Command, pair: list[str], tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", random_weights(2))
    write_tokenizer(other, byte_level_tokenizer(("<|end|>", "<|bot|>")))
    message = command.refuses(*pair[:2], "--draft-model", str(other), "--prompt", "a", code=1)
    assert "have different tokenizers (" in message and "heterogeneous vocabulary" in message
    assert "id 2 is the added token '<|bot|>' in the target's, '!' in the draft's" in message
    small = write_model(tmp_path / "small", random_weights(2))
    table = load_file(small / "model.safetensors")
    rows = {name: table[name][:200].clone() for name in ("lm_head.weight", "model.embed_tokens.weight")}
    write_model(small, {**table, **rows}, vocab_size=200)
    message = command.refuses(*pair[:2], "--draft-model", str(small), "--prompt", "a", code=1)
    assert f"but the LM head of {small} has only 200 rows" in message, "a draft without tokenizer"
    base = write_model(tmp_path / "base", random_weights(2))
    write_tokenizer(base, byte_level_tokenizer(), None)
    assert "use --raw to continue plain text" in command.refuses("--model", str(base), "--prompt", "a", code=1)
    assert command.json("--model", str(base), "--prompt", "a", "--raw", "--max-tokens", "2")["text"]


def test_special_tokens_may_differ_in_name(command: Command, pair: list[str], tmp_path: Path) -> None:
    """The target's meaning holds, and one line reports what the draft never proposes."""
    other = write_model(tmp_path / "other", random_weights(2))
    write_tokenizer(other, byte_level_tokenizer(("<|end|>", "<|bot|>", "<|user|>")))
    flags = ["--prompt", "def add(a", "--max-tokens", "12", "--ignore-eos", "--seed", "3"]
    code, out, err = command(*pair[:2], "--draft-model", str(other), *flags)
    line = "the draft never proposes 2 special tokens on which the tokenizers differ, such as id 1: <|user|> in the"
    assert code == 0 and line in err
    assert out == command(*pair[:2], *flags)[1]


def test_the_demo_models_may_be_missing(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing = replace(DEMO_MODELS, target=tmp_path)
    monkeypatch.setattr("swiftspec.startup.built_in_models.DEMO_MODELS", missing)
    assert "the demo models are missing" in command.refuses("--prompt", "a", code=1)


def test_an_incomplete_launcher_environment(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "start several ranks with torchrun" in command.refuses("--prompt", "a", code=1)


def test_a_rank_without_a_world_is_rank_0(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    assert command.json("--prompt", "a", "--max-tokens", "2")["text"]
    monkeypatch.setenv("WORLD_SIZE", "-1")
    assert "WORLD_SIZE must be a whole number" in command.refuses("--prompt", "a", code=1)


def test_mode_async_needs_ranks(command: Command) -> None:
    message = command.refuses("--prompt", "a", "--mode", "async", code=2)
    assert "one rank is not supported in mode async; start it with torchrun" in message


def test_the_prompt_decides_between_chat_and_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("sys.stdout", Terminal())
    assert generate.read_prompt(parse_command([])) is None
    assert generate.read_prompt(parse_command(["--prompt", "a"])) == "a"
    with pytest.raises(generate.UsageError, match="no prompt"):
        generate.read_prompt(parse_command(["--json"]))
    monkeypatch.setattr("sys.stdout", io.StringIO())
    with pytest.raises(generate.UsageError, match="no prompt"):
        generate.read_prompt(parse_command([]))
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(generate.UsageError, match="no prompt"):
        generate.read_prompt(parse_command([]))


def test_no_number_is_nan() -> None:
    empty = answer_stats.metrics(EngineConfig("serial"), Stats(), 0)
    assert empty["speculative_decoding"]["mean_acceptance_length"] == 0
    numbers = json.dumps([empty, answer_stats.timings(Stats(decode_time=5e-324), 9, 0.0)], allow_nan=False)
    assert math.isfinite(len(numbers))
    lost = Stats(tokens=312, rounds=91, accepted=221, drafter_lost="it fell")
    lost.decode_time, lost.first_token_time = 0.897, 0.041
    line = (
        "312 tok, 348 tok/s, TTFT 41 ms, 3.4 tok/round, the drafter was lost (it fell); decoding continued without it"
    )
    assert answer_stats.summary_line(lost, 312) == line
