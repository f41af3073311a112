"""Device, dtype and threads: the same for `LLMEngine` and for the commands."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftspec.backends.cpu import cpu
from swiftspec.backends.reference import reference
from swiftspec.builder import hardware
from swiftspec.builder.rules import resolve_config
from swiftspec.cli.terminal import StartupProgress
from swiftspec.config import EngineConfig
from swiftspec.drafter_kinds import GRAFTED, SUFFIX_LOOKUP
from swiftspec.errors import UserError
from swiftspec.llm_engine import LLMEngine
from swiftspec.settings.settings import Settings
from swiftspec.startup.built_in_models import DEMO_DIR
from swiftspec.startup.session import open_session
from tests.support.roles import drafter_of, verifier_of
from tests.support.toy_pair import make_pair

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"))


def test_the_context_fits_the_memory_of_the_machine(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model whose config.json names ten million positions: so do cache and RoPE tables, with the same bits."""
    target, draft = (Path(shutil.copytree(path, tmp_path / path.name)) for path in pair)
    for path in (target, draft):
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 10_000_000}))
    notes: list[str] = []
    monkeypatch.setattr(hardware, "memory_bytes", lambda: 64 << 20)
    options: dict[str, Any] = {"device": "cpu", "note": notes.append}
    limited = LLMEngine(target, draft, EngineConfig("serial"), **options)
    assert 2048 <= limited.max_model_len < 100_000 and limited.max_model_len % 256 == 0
    assert any(f"limited to {limited.max_model_len} of 10000000 tokens" in note for note in notes)
    short = LLMEngine(target, draft, EngineConfig("serial"), max_model_len=512, **options)
    tables = [verifier_of(llm).runner.model.stack.attention[0] for llm in (limited, short)]
    assert limited.max_model_len < len(tables[0].cos) < limited.max_model_len + 1024
    count = len(tables[1].cos)
    assert torch.equal(tables[0].cos[:count], tables[1].cos) and torch.equal(tables[0].sin[:count], tables[1].sin)
    monkeypatch.setattr(hardware, "memory_bytes", lambda: 1)
    assert LLMEngine(target, draft, EngineConfig("serial"), **options).max_model_len == 2048


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("dtype", "draft"), [("auto", DEMO_DIR / "draft"), ("auto", None), ("float16", None)], ids=["pair", "alone", "fp16"]
)
def test_python_and_the_command_choose_the_same(
    dtype: Any, draft: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dtype in config.json is float16, as in AutoAWQ's checkpoints; the native operators do not support it."""
    monkeypatch.setattr(hardware, "physical_cores", lambda: 3)
    target = DEMO_DIR / "target"

    def chosen(llm: LLMEngine) -> dict[str, Any]:
        runners = [verifier_of(llm).runner, *([drafter_of(llm).runner] if draft else [])]
        return {
            "mode": llm.config.mode,
            "operators": [runner.ops for runner in runners],
            "dtypes": [llm.dtype, *(runner.model.dtype for runner in runners)],
            "threads": (llm.threads, torch.get_num_threads()),
        }

    ours = chosen(LLMEngine(target, draft) if dtype == "auto" else LLMEngine(target, draft, dtype=dtype))
    torch.set_num_threads(1)
    settings = Settings(model=str(target), draft_model=draft and str(draft), device="cpu", dtype=dtype)
    session = open_session(settings, StartupProgress(quiet=True))
    assert isinstance(session.llm, LLMEngine) and chosen(session.llm) == ours
    assert ours["threads"][0] == 3
    if cpu.level() != "none":
        native = dtype != "float16"
        assert set(ours["operators"]) == {cpu if native else reference}
        assert ours["threads"][1] == (1 if native else 3)
        assert ours["dtypes"][0] == (torch.bfloat16 if dtype == "auto" else getattr(torch, dtype))


def test_torchs_threads_can_stay_unchanged(pair: tuple[Path, Path]) -> None:
    torch.set_num_threads(2)
    assert LLMEngine(pair[0], threads=5, set_torch_threads=False).threads == 5
    assert torch.get_num_threads() == 2


def test_torchs_own_operators_are_reported(pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    """To the logger, or to the function `note`."""
    with caplog.at_level(logging.WARNING, "swiftspec"):
        LLMEngine(DEMO_DIR / "target")
        assert cpu.level() == "none" or not caplog.records
        LLMEngine(pair[0], dtype="float16")
    [record] = caplog.records[-1:]
    assert record.getMessage().startswith("the target runs on torch's own operators: ")
    lines: list[str] = []
    LLMEngine(pair[0], dtype="float16", note=lines.append)
    assert lines == [record.getMessage()] and caplog.records[-1] is record


@pytest.mark.parametrize("threads", [0, 2000, "two", True, 1.5], ids=str)
def test_invalid_thread_counts_are_refused(pair: tuple[Path, Path], threads: Any) -> None:
    with pytest.raises(UserError, match=r"threads must lie in 1\.\.1024, not"):
        LLMEngine(pair[0], threads=threads)


@pytest.mark.parametrize("dtype", ["bf16", "int8", torch.int8, 16, "float16 "], ids=str)
def test_unknown_dtypes_are_refused(pair: tuple[Path, Path], dtype: Any) -> None:
    with pytest.raises(UserError, match="dtype must be auto or one of bfloat16, float16, float32, float64, not"):
        LLMEngine(pair[0], dtype=dtype)


@pytest.mark.parametrize("device", ["gpu", "mps", "cpu:x", 3.5, None], ids=str)
def test_unknown_devices_are_refused(pair: tuple[Path, Path], device: Any) -> None:
    with pytest.raises(UserError, match="device must be auto, cpu or cuda, not"):
        LLMEngine(pair[0], device=device)


def test_dtypes_are_resolved_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    assert hardware.resolve_dtype("auto", "float16", "auto", cuda) == torch.bfloat16
    assert hardware.resolve_dtype(None, "float32", "auto", cuda) == torch.float32
    assert hardware.resolve_dtype("torch.float16", "float32", "auto", CPU) == torch.float16
    monkeypatch.setattr(hardware, "_cpu_has_bf16", lambda: False)
    assert hardware.resolve_dtype("auto", "float16", "reference", CPU) == torch.float16


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ("processor\t: 0\nmodel name\t: AMD EPYC 7313\n\nmodel name\t: other\n", "AMD EPYC 7313"),
        (
            "BogoMIPS\t: 243.75\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n\nCPU part\t: 0xd40\n",
            "aarch64, CPU implementer 0x41, CPU part 0xd0c",
        ),
        ("", "aarch64"),
    ],
    ids=["x86", "aarch64", "unknown"],
)
def test_the_name_of_the_cpu(lines: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path, encoding: lines)
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert hardware.cpu_name() == name


def test_mode_auto_is_resolved_once() -> None:
    auto = EngineConfig(draft_steps=4)
    assert resolve_config(auto, None) == EngineConfig("ar", draft_steps=4, drafter="model")
    assert resolve_config(auto, "draft") == EngineConfig("serial", draft_steps=4, drafter="model")
    assert resolve_config(EngineConfig("async"), "draft") == EngineConfig("async", drafter="model")
    assert resolve_config(EngineConfig(target_tp=2), None).draft_tp == 0


@pytest.mark.parametrize(
    ("values", "drafter"),
    [
        ({}, "model"), ({"self_switch": True}, GRAFTED), ({"adapt_steps": True}, GRAFTED),
        ({"adapt_batch": True, "mode": "serial", "target_tp": 2}, GRAFTED),
        ({"self_switch": True, "mode": "async"}, "model"), ({"self_switch": True, "mode": "ar"}, "model"),
        ({"self_switch": True, "mode": "smc"}, "model"), ({"self_switch": True, "verify": "reject"}, "model"),
        ({"self_switch": True, "draft_remote": True}, "model"), ({"self_switch": True, "target_remote": True}, "model"),
        ({"self_switch": True, "drafter": "model"}, "model"), ({"drafter": GRAFTED}, GRAFTED),
        ({"max_num_seqs": 2}, "model"),
    ],
)  # fmt: skip
def test_drafter_auto_grafts_where_rounds_depend_on_the_clock(values: dict[str, Any], drafter: str) -> None:
    assert resolve_config(EngineConfig(**values), "draft").drafter == drafter
    assert resolve_config(EngineConfig(self_switch=True), SUFFIX_LOOKUP).drafter == SUFFIX_LOOKUP
