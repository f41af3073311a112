"""The GPU benchmark of single operators without a GPU: shapes, calls, and handling of failures."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.baselines import kernels as rivals
from bench.baselines.kernels import BaselineKernels
from bench.gpu import kernels, shapes, targets, timing
from bench.gpu.cases import SPLITS, Case, Maker, cases
from bench.gpu.kernels import Findings, Run
from bench.gpu.shapes import RankShape
from bench.gpu.timing import Call, GpuLost
from bench.gpu.watchdog import watch
from tests.bench.baselines import fakes

MAKE = Maker("cpu", BaselineKernels())
ON = targets.Constants.of(None, 1000.0)


def test_every_model_at_every_size_of_the_tables() -> None:
    llama = [name for name in shapes.MODELS if name.startswith("Llama")]
    assert set(product(llama, (1, 2, 4, 6, 8))) <= set(SPLITS) and len(set(SPLITS)) == len(SPLITS)
    names = [case.name for case in cases(MAKE, (8, 1, 16, 32, 4))]
    assert len(set(names)) == len(names) == 5 * len(SPLITS) * 8 + 2 + 2 + 8
    assert names[:6:5] == ["Llama-3-70B TP4 qkv x8", "Llama-3-70B TP4 attention 1000 x8"]
    assert names.index("Llama-3-8B TP1 qkv x8") < names.index("Llama-3-70B TP4 qkv x16") < len(names) // 8


def test_six_ranks_have_the_shards_of_the_model() -> None:
    """Two query heads more than a sixth of 64, in units of the query heads of a key-value head; the MLP's columns in
    groups of 128."""
    sixth = RankShape.of("Llama-3-70B", 6)
    assert (sixth.heads, sixth.kv_heads, sixth.inner, sixth.vocab) == (12, 3, 4864, 21376)
    assert sixth.projection("qkv") == (18 * 128, 8192, 128) and sixth.projection("o") == (8192, 12 * 128, 128)
    assert RankShape.of("Qwen2-72B", 6).inner == 4992
    assert RankShape.of("Llama-3.2-1B", 4).projection("o") == (2048, 512, 64), "heads of 64 cut a group of 128"
    assert RankShape.of("Llama-3.2-1B", 1).projection("o") == (2048, 2048, 128)


def test_operators_run_on_the_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variant's calls are made once, on a small model; FlashInfer and Marlin are fakes."""
    monkeypatch.setitem(shapes.MODELS, "small", (256, 4, 2, 64, 512, 128))
    fakes.install(monkeypatch, fakes.vllm() | fakes.flashinfer())
    others = BaselineKernels(rivals.marlin(), {"flashinfer": rivals.flashinfer()})
    make = Maker("cpu", others, cold=1)
    made = [make.linear("small", 1, op, 3) for op in ("qkv", "o", "swiglu", "down", "head")]
    made += [make.attention("small", 2, 40, 3), make.particles("small", 1, 2)]
    made += [make.sampling("small", op, 3) for op in ("draw", "children")] + [make.resampling(5)]

    def timer(calls: list[Call]) -> float:
        first = [call() for call in calls]
        assert len(calls) >= 4 and all(part.isfinite().all() for out in first for part in _tensors(out))
        return 10.0

    whole = {"unfused"}
    products, attention = whole | {"torch int4", "cublas bf16", "marlin"}, whole | {"sdpa", "flashinfer"}
    kinds = {"head": whole | {"cublas bf16"}, "draw": whole, "children": whole, "resample": whole}
    with torch.inference_mode():
        for case in made:
            found = [kernels.measure(case, name, calls, ON, timer) for name, calls in case.variants.items()]
            known = attention if case.op.startswith("attention") else kinds.get(case.op, products)
            assert {result.competitor for result in found} == known
            assert all(result.over_floor < 10 and result.gigabytes > 0 and result.of_copy > 0 for result in found)


def _tensors(out: Any) -> tuple[torch.Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def run(file: Path, timer: Any = lambda calls: 5.0, until: float = float("inf")) -> Run:
    return Run(file, Findings.read(file), ON, timer, until)


def case(op: str, variants: dict[str, Any], rows: int = 8) -> Case:
    return replace(MAKE.linear("Llama-3-70B", 4, op, rows), variants=variants)


def fails(error: Exception) -> Any:
    def make() -> list[Call]:
        raise error

    return make


def test_a_failed_capture_ends_the_process_and_the_next_one_continues(tmp_path: Path) -> None:
    """Captures after it would be measured wrongly although the device works, so a new process measures the rest."""
    file = tmp_path / "found.json"
    several = [case("o", {"marlin": list}), case("qkv", {"swiftspec": list})]

    def timer(calls: list[Call]) -> float:
        raise GpuLost("operation not permitted when stream is capturing")

    with pytest.raises(GpuLost):
        run(file, timer).all(iter(several))
    run(file).all(iter(several))
    found = Findings.read(file)
    assert [r["op"] for r in found.results] == ["qkv"] and len(found.rivals) == 1 and found.failed == []


def test_a_time_is_the_median_replay_over_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake clock instead of the GPU: three calls alternate, 200 calls per graph, as many replays as fit into 100
    ms."""
    calls, clock = Counter[int](), [0.0]
    took = iter([9e3, *([20.0] * 4), 90.0, *([20.0] * 99)])

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock[0]

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    def replay(graph: object) -> None:
        clock[0] += next(took)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", type("Graph", (), {"replay": replay}))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    assert timing.graph_timer([partial(calls.update, [i]) for i in range(3)]) == 1000 * 20 / 200
    assert calls == {0: 68, 1: 68, 2: 67}, "each once before"
    assert clock[0] == 9e3 + 4 * 20 + 90, "the first is not counted, and five are enough"


WORKER = """
import json, os, pathlib, sys, time
file = pathlib.Path(sys.argv[1])
found = json.loads(file.read_text()) if file.exists() else {"done": [], "at": None}
for what in ("a", "dies", "b", "hangs", "c"):
    if what in found["done"]: continue
    found["at"] = what
    file.write_text(json.dumps(found))
    if what == "dies": os.abort()
    if what == "hangs": time.sleep(60)
    found["done"].append(what)
found["at"] = None
file.write_text(json.dumps(found))
"""


@pytest.mark.slow
def test_measurement_continues_after_a_crash_and_a_hang(tmp_path: Path) -> None:
    file, log = tmp_path / "found.json", list[str]()

    def give_up(where: Path, why: str) -> bool:
        found = json.loads(where.read_text())
        log.append(f"{found['at']}: {why}")
        where.write_text(json.dumps(found | {"done": [*found["done"], found["at"]]}))
        return True

    assert watch([sys.executable, "-c", WORKER, str(file)], file, 30.0, 1.5, give_up) == 0
    assert log == ["dies: ended the process (-6)", "hangs: hung"]
    assert json.loads(file.read_text())["done"] == ["a", "dies", "b", "hangs", "c"]


@pytest.mark.slow
def test_a_process_that_fails_to_start_is_not_restarted_for_ever(tmp_path: Path) -> None:
    code = "import os; os.abort()"
    assert watch([sys.executable, "-c", code], tmp_path / "none.json", 30.0, 5.0, kernels.give_up) == 1


def test_a_crash_is_recorded_with_the_operator_that_was_measured(tmp_path: Path) -> None:
    """A crash in a SwiftSpec operator is a failure; one in a baseline is a line of the report, and that baseline is
    skipped afterwards."""
    file = tmp_path / "found.json"
    for at in ("x TP4 o x8 swiftspec", "x TP4 o x8 marlin", kernels.PACKAGES):
        found = Findings.read(file)
        found.at = at
        found.write(file)
        assert kernels.give_up(file, "hung") and kernels.give_up(file, "hung"), "twice is once"
    found = Findings.read(file)
    assert found.failed == ["x TP4 o x8 swiftspec: hung"] and len(found.rivals) == 2 and len(found.done) == 3
    assert run(file).given_up("marlin") and not run(file).given_up("flashinfer")
    assert kernels.find_baseline_kernels(found, file) == BaselineKernels(), "importing them hung: it goes on without"


def test_a_lost_gpu_ends_the_process_after_all_results_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "alive", lambda: False)
    file = tmp_path / "found.json"
    variants = {"unfused": list, "swiftspec": fails(RuntimeError("an illegal memory access")), "cublas bf16": list}
    with pytest.raises(kernels.GpuLost):
        run(file).all(iter([case("o", variants)]))
    monkeypatch.undo()
    run(file).all(iter([case("o", variants)]))
    found = Findings.read(file)
    assert [r["competitor"] for r in found.results] == ["unfused", "cublas bf16"]
    assert found.failed == ["Llama-3-70B TP4 o x8 swiftspec: an illegal memory access"]
