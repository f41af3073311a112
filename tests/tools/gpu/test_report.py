"""The report of measured GPU figures and targets, from recorded results."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from bench.baselines.kernels import BaselineKernels
from bench.gpu import kernels as bench
from bench.gpu.all_reduce import SumTime
from bench.gpu.cases import Maker
from bench.gpu.targets import ASSUMED
from tools.gpu.report import lines, report

MAKE = Maker("cpu", BaselineKernels())


def result(op: str, rows: int, competitor: str, us: float, model: str = "Llama-3-70B", tp: int = 4) -> dict[str, Any]:
    if op.startswith("attention of"):
        case = MAKE.particles(model, tp, rows)
    elif op.startswith("attention"):
        case = MAKE.attention(model, tp, int(op.split()[1]), rows)
    else:
        case = MAKE.linear(model, tp, op, rows)
    return asdict(bench.measure(case, competitor, list, ASSUMED, lambda calls: us))


def kernels(*results: dict[str, Any]) -> dict[str, Any]:
    baselines = ["flashinfer: not importable"]
    return {"machine": {"copy GB/s": 4300.0}, "results": list(results), "rivals": baselines, "failed": []}


def verdicts(decodes: list[dict[str, Any]], found: dict[str, Any] | None) -> dict[str, str]:
    return {line.what: str(line).split()[-1] for line in lines(decodes, found, None)}


RATES = {"tok/s": 200.0, "tok/round": 3.0}
DECODED = {
    "step": "decode big", "pair": "Llama-3-70B,Llama-3.2-3B", "ops": ["cuda", "cuda"], "serial": RATES, "ar": RATES,
    "same text": 1.0, "step ms": {"Llama-3-70B": 11.0, "Llama-3.2-3B": 2.0}, "async": RATES | {"tok/s": 170.0},
}  # fmt: skip


def test_the_table_names_every_miss(capsys: pytest.CaptureFixture[str]) -> None:
    recorded = kernels(
        result("qkv", 8, "swiftspec", 6.0),  # accept 7.0, goal 5.5
        result("qkv", 8, "cublas bf16", 9.0),  # 1.5 times as long: 2.3 wanted
        result("qkv", 8, "marlin", 9.0),  # 1.5 times: 1.4 wanted
        result("o", 8, "swiftspec", 6.0),
        result("o", 8, "swiftspec, summed", 8.0),  # 2 more: accept 2.5, goal 1.5
        result("down", 8, "swiftspec", 14.0),  # accept 13.1; Marlin would take 18
        result("down", 1, "swiftspec", 99.0),  # figures are for 8 rows
        result("down", 16, "swiftspec", 15.0),  # 1.07 times what 8 rows take
        result("attention 1000", 8, "swiftspec", 5.0),
        result("attention 1000", 8, "sdpa", 10.0),  # twice as long: 2.5 wanted
    )
    slower: list[dict[str, Any]] = [
        {"ops": ["unfused", "unfused"]},
        {"early starts": False, "step": "decode big, nothing early"},
        {"context": 32000},
    ]
    table = [DECODED, *(DECODED | other for other in slower)]
    assert verdicts(table, recorded) == {
        "Llama-3-70B TP4 qkv x8": "ok",
        "Llama-3-70B TP4 qkv x8 against cublas bf16": "MISS",
        "Llama-3-70B TP4 qkv x8 against marlin": "ok",
        "Llama-3-70B TP4 o x8": "ok",
        "Llama-3-70B TP4 o x8, added by the all-reduce": "ok",
        "Llama-3-70B TP4 down x8": "MISS",
        "Llama-3-70B TP4 down x8 against Marlin's published (quoted)": "MISS",
        "Llama-3-70B TP4 down x16 against x8": "goal",
        "Llama-3-70B TP4 attention 1000 x8": "ok",
        "Llama-3-70B TP4 attention 1000 x8 against sdpa": "MISS",
        "step Llama-3-70B": "goal",
        "step Llama-3.2-3B": "MISS",
        "decode Llama-3-70B,Llama-3.2-3B": "ok",
        "decode Llama-3-70B,Llama-3.2-3B async": "MISS",
    }
    report({"steps": [], "decodes": table}, recorded, None)
    printed = capsys.readouterr().out
    assert "big, nothing early on cuda and cuda: " in printed, "shown, but held against nothing"
    assert "6 of 14 targets missed" in printed and "flashinfer: not importable" in printed
    report({"steps": [], "decodes": []}, None, None)  # no results


def test_sums_over_several_gpus_are_compared_with_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    def took(competitor: str, us: float) -> dict[str, Any]:
        return asdict(SumTime("Llama-3-70B", 4, "o", 8, competitor, us, {}))

    rivals = {"swiftspec": 10.0, "product": 8.0, "product + nccl": 30.0, "product + one-shot": 9.0}
    sums = {"results": [took(*each) for each in rivals.items()], "failed": ["no symmetric memory"]}
    split = DECODED | {"split": [6, 2]}
    name = "Llama-3-70B over 4 GPUs o x8, all-reduced, against product +"
    assert {line.what: str(line).split()[-1] for line in lines([split], None, None, [sums])} == {
        f"{name} nccl": "goal", f"{name} one-shot": "MISS",
    }  # fmt: skip
    report({"steps": [], "decodes": [split]}, None, None, [sums])
    assert "no symmetric memory" in capsys.readouterr().out


def test_a_decode_that_ended_early_counts_its_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    early = {name: DECODED[name] for name in ("step", "pair", "ops", "serial")}
    assert verdicts([early], None) == {"decode Llama-3-70B,Llama-3.2-3B": "ok"}
    report({"steps": [], "decodes": [early, {"step": "decode x", "pair": "x", "ops": ["cuda"]}]}, None, None)
    assert "serial 200 tok/s" in capsys.readouterr().out


def test_long_contexts_and_populations() -> None:
    ours = "swiftspec"
    recorded = kernels(
        result("attention 500", 8, ours, 5.0), result("attention 4000", 8, ours, 9.0),
        result("attention of", 8, ours, 9.0, "Llama-3-8B", 1), result("attention of", 64, ours, 20.0, "Llama-3-8B", 1),
    )  # fmt: skip
    found = verdicts([], recorded)
    assert found["Llama-3-70B TP4 attention 4000 x8 against context 500"] == "MISS"
    assert found["Llama-3-8B TP1 attention of 64 particles x320 against 8 particles"] == "goal"
