"""bench/large.py: which runs it makes, that it reports the ones it skips, and how it evaluates the figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import large, startup, width_expanded
from bench.large import Bench, arguments
from bench.large_report import Row
from bench.width_expanded import Model, pad_tokenizer, warm
from bench.workload import Measured, Task, Work
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


def test_this_version_has_all_settings_of_the_option_sets() -> None:
    assert {name for one in large.OUR_OPTIONS for name in one.settings} <= SETTINGS.keys()


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
