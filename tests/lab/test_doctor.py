"""`swiftspec doctor`: the facts of this machine, and findings on machines that are simulated."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swiftspec.__main__ import main
from swiftspec.backends.cpu import cpu
from swiftspec.errors import UserError
from swiftspec.extras import EXTRAS, install_hint
from swiftspec.lab import doctor, machine
from swiftspec.lab.machine import MemorySizes


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "READ_BYTES", 1 << 20)


def test_the_command_shows_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    facts = dict(line.split(maxsplit=1) for line in out.partition("\n\n")[0].splitlines())
    assert [*facts] == ["swiftspec", "python", "torch", "cpu", "memory", "pages", "gpus", "extras"]
    assert torch.__version__ in facts["torch"] and f"operators: {cpu.level()}" in facts["cpu"]
    assert "GB/s" in facts["memory"] and "KiB, transparent huge pages" in facts["pages"]
    assert main(["doctor", "--fast"]) == 2
    assert "unrecognized arguments: --fast" in capsys.readouterr().err


def patched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **values: Any) -> list[str]:
    """The findings on a machine without problems, except for `values`."""
    usual: dict[str, Any] = {
        "level": "avx512_bf16", "cores": (8, 8, 8), "quota": None, "load": 0.0, "shm": tmp_path, "tiles_refused": False,
        "memory": MemorySizes(int(64e9), int(60e9), None), "extras": True,
    }  # fmt: skip
    given = usual | values
    monkeypatch.setattr(cpu, "level", lambda: given["level"])
    monkeypatch.setattr(doctor, "matrix_tiles_refused", lambda: given["tiles_refused"])
    monkeypatch.setattr(machine, "describe_cores", lambda: given["cores"])
    monkeypatch.setattr(machine, "cpu_quota", lambda: given["quota"])
    monkeypatch.setattr(machine, "memory_sizes", lambda: given["memory"])
    monkeypatch.setattr("os.getloadavg", lambda: (given["load"],) * 3)
    monkeypatch.setattr(doctor, "SHM", given["shm"])
    monkeypatch.setattr(doctor, "has_extra", lambda name: given["extras"])
    monkeypatch.setattr(doctor, "NVIDIA_DEVICE", given.get("device", tmp_path / "none"))
    report = doctor.examine()
    assert all("\n" not in str(finding) for finding in report.findings)
    assert ("nothing here would be slow" in str(report)) == (not report.findings)
    return [str(finding) for finding in report.findings]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_the_plan_names_what_has_set_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "demo", "--device", "cpu", "--draft-steps", "3", "--no-adapt", "--max-num-seqs", "2"]
    assert doctor.main(["--plan", *flags]) == 0
    lines = {line.split()[0]: line.split(None, 2)[1:] for line in capsys.readouterr().out.splitlines()}
    assert lines["draft_steps"] == ["3", "given"] and lines["device"] == ["cpu", "given"]
    assert lines["max_num_seqs"] == ["2", "given"] and lines["verify"] == ["match", "default"]
    assert lines["mode"] == ["serial", "shared ranks: draft and target run alternately"]
    assert lines["adapt_batch"] == ["off", "no adaptation: adapt is off"]
    assert lines["drafter"][0] == "model" and lines["drafter"][1].startswith("draft model: ")
    assert {*map(str.lower, lines)} >= {"dtype", "threads", "max_model_len", "target", "draft"}
    assert doctor.main(["--plan", "--model", "demo", "--mode", "async"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, None),
        ({"level": "neon_dotprod"}, None),
        ({"level": "none"}, "x86-64 with AVX2, or aarch64, so plain torch runs; use such a CPU, or a GPU"),
        ({"level": "avx2"}, "level avx2, below AVX-512 BF16; use 4-bit weights"),
        ({"level": "neon"}, "level neon, without dot products of bytes; use 4-bit weights"),
        ({"tiles_refused": True}, "refuses this CPU's matrix tiles (AMX); allow arch_prctl"),
        ({"quota": 2.5}, "may use 2.5 CPUs, but 8 cores are visible; pass --threads 2"),
        ({"load": 6.0}, "the load average of the last minute is 6.0 with 8 CPUs"),
        ({"memory": MemorySizes(int(64e9), int(1e9), None)}, "only 1.0 GB of memory are available"),
        ({"memory": MemorySizes(int(64e9), int(60e9), int(1.5e9))}, "only 1.5 GB of memory are available"),
        ({"shm": Path("/nonexistent")}, "several ranks: /nonexistent does not exist"),
        ({"device": Path("/dev/null")}, "the GPU: PyTorch cannot use it; "),
    ],
)
def test_each_problem_has_one_line_with_its_fix(
    values: dict[str, Any], words: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = patched(monkeypatch, tmp_path, **values)
    assert len(found) == (words is not None) and (words is None or words in found[0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = patched(monkeypatch, tmp_path, extras=False)
    assert f"workers: gRPC is not installed; {install_hint('network')}" in found and len(found) == len(EXTRAS)


def test_problems_of_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = SimpleNamespace(name="NVIDIA H200", total_memory=141e9, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: data)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: False)
    monkeypatch.setattr(doctor, "nccl_version", lambda: None)

    def refuse(device: str) -> torch.device:
        if device == "cuda:1":
            raise UserError("built for sm_80; reinstall swiftspec")
        return torch.device(device)

    monkeypatch.setattr(doctor, "require_usable", refuse)
    found = patched(monkeypatch, tmp_path)
    assert len(found) == 3
    assert "GPU 1: torch's own operators run in place of the CUDA operators (built for sm_80); reinstall" in found[0]
    assert "GPUs 0 and 1 cannot access each other's memory" in found[1] and "has no NCCL" in found[2]
    assert "NVIDIA H200 (141 GB, compute capability 9.0)" in dict(doctor.examine().facts)["gpus"]


def test_limits_of_a_control_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    assert machine.cpu_quota() is None
    for text, wanted in (("max 100000", None), ("250000 100000", 2.5), ("junk", None)):
        (tmp_path / "cpu.max").write_text(text)
        assert machine.cpu_quota() == wanted
    (tmp_path / "memory.max").write_text("1000000\n")
    sizes = machine.memory_sizes()
    assert sizes is None or sizes.limit == 1_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert sizes is None or (machine.memory_sizes() or sizes).limit is None
