"""bench/baselines/build_llama.py: the options for a CPU, and how a report names a build. Nothing is built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.baselines import build_llama
from bench.baselines.build_llama import (
    cpu_features,
    crash_advice,
    describe_build,
    has_amx,
    instruction_flags,
    recorded_amx,
)

AVX2 = frozenset({"sse4_2", "avx", "avx2", "fma", "f16c", "bmi2"})
SAPPHIRE_RAPIDS = AVX2 | {"avx512f", "avx512vbmi", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_int8"}


def test_options_have_the_instructions_of_the_cpu_except_amx() -> None:
    flags = instruction_flags(SAPPHIRE_RAPIDS)
    assert {name for name, value in flags.items() if value == "OFF"} == {"GGML_NATIVE", *build_llama.AMX}
    assert instruction_flags(AVX2)["GGML_AVX512"] == "OFF" and instruction_flags(AVX2)["GGML_AVX2"] == "ON"


def test_flags_of_the_cpu(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nflags\t\t: avx2 amx_int8\n\nprocessor\t: 1\nflags\t\t: avx2\n")
    assert cpu_features(file) == {"avx2", "amx_int8"} and has_amx(cpu_features(file))
    assert cpu_features(tmp_path / "absent") == frozenset()


def test_a_build_is_named_by_its_record(tmp_path: Path) -> None:
    assert describe_build("0.3.36", True) == "0.3.36, built with AMX"
    assert describe_build("7 (abc)", recorded_amx(tmp_path)) == "7 (abc)"
    (tmp_path / "build.json").write_text(json.dumps({"flags": instruction_flags(SAPPHIRE_RAPIDS)}))
    assert describe_build("7 (abc)", recorded_amx(tmp_path)) == "7 (abc), built without AMX"


def test_advice_is_for_cpus_with_amx() -> None:
    assert "python -m bench.baselines.build_llama" in crash_advice(SAPPHIRE_RAPIDS)
    assert crash_advice(AVX2) == ""


@pytest.mark.slow
def test_a_failed_step_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "pip").chmod(0o755)
    monkeypatch.setattr(build_llama.sys, "executable", str(tmp_path / "pip"))
    with pytest.raises(SystemExit, match=r"build_llama: .*pip -m pip failed with code 3"):
        build_llama.main([str(tmp_path / "out")])
