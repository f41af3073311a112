"""bench/large.py: which runs it makes, that it reports the ones it skips, and how it evaluates the figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import large, startup, width_expanded
from bench.baselines import build_llama
from bench.large import Bench, Options, arguments
from bench.large_report import Row, agreement, builds, table, verdicts
from bench.width_expanded import Model, check_room, pad_tokenizer, warm
from bench.workload import Measured, Task, Work
from swiftspec.errors import UserError
from swiftspec.settings.flags import SETTINGS

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "max_position_embeddings": 2048, "torch_dtype": "bfloat16", "vocab_size": 4608,
    "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 128,
    "intermediate_size": 1024, "tie_word_embeddings": False,
}  # fmt: skip
SMALL = SHAPE | {"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
                 "intermediate_size": 512, "tie_word_embeddings": True}  # fmt: skip
WORK = Work(long=[[3] * 20], short=[[1, 2], [4, 5]], tokens=4)


def model(folder: Path, side: str = "target") -> Model:
    (folder / "tiny.json").write_text(json.dumps(SHAPE if side == "target" else SMALL))
    return Model.of(folder, side, str(folder / "tiny.json"))


def bench(folder: Path, *flags: str) -> Bench:
    return Bench(arguments(list(flags)), model(folder), model(folder, "draft"), WORK, folder, None)


def row(system: str, name: str, kind: str, rates: list[float], **found: object) -> Row:
    return Row(system, name, kind, Measured(1.0, load=0.5, rates=rates, **found))  # pyright: ignore[reportArgumentType]


def test_each_missing_baseline_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = bench(tmp_path, "--only", "llama,server")
    run.args.llama_python = None
    run.run()
    run.print()
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("skipped")] == [f"skipped: {line}" for line in run.skipped]
    assert [line.partition(":")[0] for line in run.skipped] == ["llama.cpp plain", "llama.cpp with its draft"]
    assert sum(line.startswith("not measured") for line in lines) == 10


def test_settings_unknown_to_a_version_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "OUR_OPTIONS", (Options("odd", "ar", {"mode": "ar", "twist": "x", "turn": "y"}),))
    run = bench(tmp_path, "--only", "decode")
    run.run()
    assert run.skipped == ["swiftspec odd: this version has no --twist and no --turn"] and not run.rows


def test_this_version_has_all_settings_of_the_option_sets() -> None:
    assert {name for one in large.OUR_OPTIONS for name in one.settings} <= SETTINGS.keys()


@pytest.mark.slow
def test_a_failed_run_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The remaining runs continue."""
    (tmp_path / "python").write_text("#!/bin/sh\necho reading >&2; echo no memory >&2; exit 3\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    run = bench(tmp_path, "--only", "decode")
    run.run()
    failed = [line for line in run.skipped if "this version" not in line]
    assert failed[0] == "swiftspec ar: failed with code 3: no memory" and len(failed) >= 2 and not run.rows


@pytest.mark.slow
def test_a_crash_of_llama_cpp_on_a_cpu_with_amx_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a signal indicates the crash; other failures keep their message."""
    python = tmp_path / "python"
    monkeypatch.setattr(build_llama, "cpu_features", lambda: frozenset({"amx_int8"}))
    for last, code in (("kill -ILL $$", -4), ("exit 3", 3)):
        python.write_text(f"#!/bin/sh\necho no reason >&2\n{last}\n")
        python.chmod(0o755)
        run = bench(tmp_path, "--only", "llama", "--llama-python", str(python), "--threads", "1")
        for kind in large.KINDS:
            run.target.gguf(kind).touch()
        run.run()
        assert len(run.skipped) == 2
        for line in run.skipped:
            assert f"failed with code {code}: no reason" in line
            assert ("build it without: python -m bench.baselines.build_llama DIR" in line) == (code < 0)


def test_builds_of_llama_cpp_are_reported_once() -> None:
    rows = [row("llama.cpp", name, "plain", [1.0], notes={"version": "0.3.36, built without AMX"}) for name in "ab"]
    assert builds([row("swiftspec", "ar", "ar", [1.0]), *rows]) == ["0.3.36, built without AMX"]


@pytest.mark.parametrize(
    "flags",
    [["--shapes", "8b"], ["--only", "all"], ["--requests", "0"], ["--prompt", "2000"], ["--drafts", "2,0"]],
)
def test_invalid_flags_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        arguments(flags)
    assert error.value.code == 2 and "error: --" in capsys.readouterr().err


def test_an_invalid_shape_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"bench.large: 5b: expected .* or the path of a config.json"):
        large.main(["--folder", str(tmp_path), "--shapes", "5b,1b"])


def test_one_start_serves_the_whole_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo models, opened as the command does."""
    Task({"settings": {"mode": "serial"}, "cache": None, "sampled": True}, WORK).write(tmp_path / "task.json")
    monkeypatch.setattr(sys, "argv", ["one_start", str(tmp_path / "task.json")])
    answers: list[Measured] = []
    monkeypatch.setattr(startup, "answer", answers.append)
    startup.main()
    found = answers[0]
    assert [len(text) for text in found.texts] == [4, 4] and len(found.rates) == 2 and len(found.prompts) == 1
    assert found.load is not None and 0 < found.load < found.start and found.peak > 2**26
    assert 0 < found.rounds <= found.decoded
    assert len(found.sampled_rates) == 2 and 0 < found.sampled_rounds <= found.sampled_decoded == found.decoded


def test_files_that_appear_and_disappear_are_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "part").write_text("x")
    (tmp_path / "lost").symlink_to(tmp_path / "nowhere")
    assert [Path(name).name for name, _, _ in startup.state(tmp_path)] == ["part"]


def test_the_prompts_of_a_workload_are_distinct() -> None:
    texts = [list(range(100 * i, 100 * i + 90)) for i in range(8)]
    work = Work.of(texts, long=3, short=64, length=512, requests=20, tokens=8)
    assert {len(prompt) for prompt in work.long} == {512} and {len(prompt) for prompt in work.short} == {64}
    assert len({prompt[0] for prompt in work.long + work.short}) == 23
    assert work.less(2).short == work.short[:2]


def test_targets_that_are_met_and_missed() -> None:
    rows = [
        row("swiftspec", "first start", "start", [9.0], peak=8_000_000_000),
        row("swiftspec", "ar", "ar", [11.0, 12.0], prompts=[80.0], texts=[[1, 2, 3], [4, 5]]),
        row("swiftspec", "ar, head int8", "head int8", [11.4, 13.0]),
        row("swiftspec", "serial", "tree", [18.0, 20.0, 22.0], prompts=[60.0], decoded=30, rounds=10),
        row("llama.cpp", "q4_1, 2 threads", "plain", [9.0, 10.0], prompts=[39.0], texts=[[1, 2, 4], [4, 5]]),
        row("llama.cpp", "q4_1, draft of 4", "draft", [8.0], prompts=[31.0], drafted=10, accepted=7),
    ]
    found = {verdict.what.partition(",")[0].partition(" /")[0]: verdict for verdict in verdicts(rows, 6_000_000_000)}
    assert found["best mode's median"].found == 2.0 and found["best mode's median"].holds
    assert found["every plain request with --head int8"].found == pytest.approx(1.14)
    assert found["every plain request with --head int8"].holds is False
    lines = [verdict.line() for verdict in verdicts(rows, 6_000_000_000)]
    assert [line.split()[0] for line in lines] == ["holds", "missed", "holds", "missed", *["holds"] * 2, "missed",
                                                   *["not"] * 3]  # fmt: skip
    assert agreement(rows) == ["llama.cpp q4_1, 2 threads: 2, 2"]
    rows[3].measured.sampled_rates, rows[3].measured.sampled_decoded, rows[3].measured.sampled_rounds = [17.0], 20, 10
    assert table(rows).splitlines()[4].split()[-4:] == ["3", "-", "17", "2"]
    assert table(rows).splitlines()[-1].split()[-3:] == ["0.7", "-", "-"]


def test_too_little_disk_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    with pytest.raises(UserError, match="GB are needed; specify a larger disk with --folder"):
        check_room(tmp_path, 10**18, log.append)
    assert "will be written" in log[0]


def test_complete_results_are_reused_and_failed_ones_are_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, log = model(tmp_path), list[str]()

    def write(_: object, __: object, ___: object, out: Path) -> None:
        out.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(width_expanded, "write", write)
    with pytest.raises(KeyboardInterrupt):
        tiny.make((), log.append)
    assert not list(tmp_path.glob("target*")) and tiny.bytes_missing(("q4_1",)) > 0
    tiny.folder.mkdir()
    tiny.gguf("q4_1").touch()
    tiny.make(("q4_1",), log.append)
    assert log == ["target-tiny: expanding", "target-tiny: reused", "target-tiny.q4_1.gguf: reused"]
    assert tiny.bytes_missing(("q4_1",)) == 0
    warm([tiny.gguf("q4_1")])


def test_a_padded_vocabulary(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<end>"}]}))
    pad_tokenizer(file, 5)
    vocab = json.loads(file.read_text())["model"]["vocab"]
    assert sorted(vocab.values()) == [0, 1, 3, 4] and vocab["a"] == 0


@pytest.mark.long
def test_a_run_without_baselines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Width-expands, starts, measures and reports, with two option sets; the second run reuses the expanded models."""
    monkeypatch.setattr(large, "OUR_OPTIONS", [one for one in large.OUR_OPTIONS if one.name in ("ar", "serial")])
    (tmp_path / "target.json").write_text(json.dumps(SHAPE))
    (tmp_path / "draft.json").write_text(json.dumps(SMALL))
    flags = ["--shapes", f"{tmp_path}/target.json,{tmp_path}/draft.json", "--tokens", "8", "--prompt", "40"]
    flags += ["--requests", "2", "--folder", str(tmp_path / "kept"), "--json", str(tmp_path / "out.json")]
    flags += ["--llama-bin", str(tmp_path), "--only", "starts,decode,server"]
    large.main(flags)
    large.main([*flags, "--json", str(tmp_path / "again.json"), "--only", "server"])
    found = json.loads((tmp_path / "out.json").read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert {"first start", "second start", "ar", "serial"} <= rows.keys()
    assert rows["serial"]["texts"] == rows["ar"]["texts"], "the tree changes no text"
    assert rows["serial"]["decoded"] > rows["serial"]["rounds"] and rows["ar"]["peak"] > 0
    assert found["weights_gb"] > 0 and found["machine"]["cores"] > 0
    assert any("llama.cpp with its draft" in line for line in found["skipped"])
