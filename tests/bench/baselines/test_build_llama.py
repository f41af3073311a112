"""bench/baselines/build_llama.py: the options for a CPU, and how a report names a build. Nothing is built."""

from __future__ import annotations

from bench.baselines import build_llama
from bench.baselines.build_llama import (
    instruction_flags,
)

AVX2 = frozenset({"sse4_2", "avx", "avx2", "fma", "f16c", "bmi2"})
SAPPHIRE_RAPIDS = AVX2 | {"avx512f", "avx512vbmi", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_int8"}


def test_options_have_the_instructions_of_the_cpu_except_amx() -> None:
    flags = instruction_flags(SAPPHIRE_RAPIDS)
    assert {name for name, value in flags.items() if value == "OFF"} == {"GGML_NATIVE", *build_llama.AMX}
    assert instruction_flags(AVX2)["GGML_AVX512"] == "OFF" and instruction_flags(AVX2)["GGML_AVX2"] == "ON"
