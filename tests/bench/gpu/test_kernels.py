"""The GPU benchmark of single operators without a GPU: shapes, calls, and handling of failures."""

from __future__ import annotations

import contextlib
import json
import sys
from argparse import Namespace
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
from swiftspec.lab import latency_model
from tests.bench.baselines import fakes

MAKE = Maker("cpu", BaselineKernels())
ON = targets.Constants.of(None, 1000.0)


def test_every_model_at_every_size_of_the_tables() -> None:
    llama = [name for name in shapes.MODELS if name.startswith("Llama")]
    assert set(product(llama, (1, 2, 4, 6, 8))) <= set(SPLITS) and len(set(SPLITS)) == len(SPLITS)
    names = [case.name for case in cases(MAKE, (8, 1, 16, 32, 4))]
    assert len(set(names)) == len(names) == 5 * len(SPLITS) * 8 + 2 + 8
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
    made += [make.sampling("small", op, 3) for op in ("draw", "children")]

    def timer(calls: list[Call]) -> float:
        first = [call() for call in calls]
        assert len(calls) >= 4 and all(part.isfinite().all() for out in first for part in _tensors(out))
        return 10.0

    whole = {"unfused"}
    products, attention = whole | {"torch int4", "cublas bf16", "marlin"}, whole | {"sdpa", "flashinfer"}
    kinds = {"head": whole | {"cublas bf16"}, "draw": whole, "children": whole}
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


def test_a_failing_baseline_is_named_and_does_not_fail_the_run(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    variants = {
        "marlin": fails(ValueError("result differs from torch")),
        "unfused": fails(RuntimeError("out of memory\nand more")),
        "swiftspec": list,
    }
    one = run(file)
    one.all(iter([case("o", variants), case("qkv", variants), case("down", variants), case("swiglu", variants)]))
    found = Findings.read(file)
    assert found.failed[0] == "Llama-3-70B TP4 o x8 unfused: out of memory" and len(found.failed) == 4
    assert found.rivals[0] == "Llama-3-70B TP4 o x8 marlin: result differs from torch"
    assert found.rivals[3:] == ["marlin: skipped after 3 failures"]
    assert [r["op"] for r in found.results] == ["o", "qkv", "down", "swiglu"] and found.at is None
    assert found.results[0]["quoted"] == {"SwiftSpec": 11.72, "vLLM": 16.9, "TensorRT-LLM": 15.5, "Table 3": 22.8}


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


def test_recorded_results_are_not_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    several = [case("o", {"swiftspec": list}), case("qkv", {"swiftspec": list})]
    run(file).all(iter(several[:1]))
    run(file, until=0.0).all(iter(several))
    assert Findings.read(file).left_out == [several[0].name, several[1].name]
    run(file).all(iter(several))
    found = Findings.read(file)
    assert [r["op"] for r in found.results] == ["o", "qkv"] and found.left_out == []


def test_a_slow_baseline_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit counts the time that its cases take beyond the usual one."""
    monkeypatch.setattr(kernels, "SLOW_START", 0.0)
    for ordinary, measured, messages in ((1.0, 4, []), (0.0, 3, ["flexattention: skipped after 0 s of compiling"])):
        monkeypatch.setattr(kernels, "ORDINARY", ordinary)
        one = run(tmp_path / f"{ordinary}.json")
        one.all(iter([case(op, {"flexattention": list, "swiftspec": list}) for op in ("o", "down")]))
        assert one.found.rivals == messages and len(one.found.results) == measured


def test_the_predictor_reads_what_the_bench_writes(tmp_path: Path) -> None:
    """SwiftSpec's own operators at 8 rows, under `points`."""
    file, times = tmp_path / "h200-kernels.json", iter([10.0, 20.0, 30.0, 99.0, 99.0])
    sizes = [case(op, {"swiftspec": list}) for op in ("o", "qkv", "swiglu")]
    more = [case("down", {"swiftspec": list}, rows=1), case("down", {"unfused": list})]
    run(file, lambda calls: next(times)).all(iter([*sizes, *more]))
    assert len(Findings.read(file).points) == 3
    slow, _ = latency_model.fitted(file, latency_model.GPUS["h200"])
    assert slow.origin == "measured"


def test_the_lines_of_the_table(tmp_path: Path) -> None:
    result = kernels.measure(case("qkv", {}), "swiftspec", list, ON, lambda calls: 12.5)
    numbers = "12.50 885 0.89 1.43 18.38 15.37"
    assert " ".join(kernels.line(result).split()) == f"Llama-3-70B TP4 qkv x8 swiftspec {numbers} Table 3 16.9"
    more = kernels.measure(case("qkv", {}, rows=16), "swiftspec", list, ON, lambda calls: 12.5)
    assert not more.quoted, "the paper's are for 8 rows"
    assert "quoted" in kernels.head()
    for op in ("draw", "attention of 8 particles"):
        wanted = kernels.target_of(replace(case("o", {}), op=op), ON)
        assert (wanted is None) == ("particles" in op)


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


def test_a_complete_run_in_two_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU under a GPU's name: what is printed and written, with measured constants, in two runs."""
    fakes.install(monkeypatch, fakes.flashinfer())
    monkeypatch.setitem(shapes.MODELS, "small", (256, 4, 2, 64, 512, 128))
    small = Maker("cpu", BaselineKernels(), cold=1)
    several = [small.linear("small", 2, "o", 8), small.attention("small", 1, 40, 8)]
    monkeypatch.setattr(kernels, "cases", lambda make, rows, contexts: iter(several))
    monkeypatch.setattr(kernels, "copy_speed", lambda device: 4000.0)
    monkeypatch.setattr(kernels, "graph_timer", lambda calls: 5.0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    file, constants = tmp_path / "found.json", tmp_path / "constants.json"
    constants.write_text(json.dumps({"constants": {"gap": 2.85, "read": 4300.0}}))
    args = Namespace(json=file, only="", rows="8", budget=60.0, constants=constants)
    args.device, args.contexts, args.competitors = "cuda", "1000", []
    assert kernels.work(args) == 0
    found = Findings.read(file)
    assert found.machine["copy GB/s"] == 4000.0 and "H800" in found.machine["quoted"]
    assert {r["competitor"] for r in found.results} == {"unfused", "cublas bf16", "torch int4", "sdpa"}
    assert found.results[0]["accept"] == pytest.approx(3.5 + 2.0, abs=0.1), (
        "two more microseconds from launch to launch"
    )
    assert len([line for line in found.rivals if line.startswith(("marlin: ", "flashinfer: ", "flexattention: "))]) == 3
    printed = capsys.readouterr().out
    assert "copy bandwidth 4000 GB/s" in printed and "small TP2 o x8" in printed and "0 cases skipped" in printed
    assert kernels.work(args) == 0 and len(Findings.read(file).results) == len(found.results)


def test_the_command_restarts_or_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, seen = tmp_path / "found.json", list[tuple[list[str], bool]]()

    def watched(command: list[str], where: Path, budget: float, timeout_s: float, give_up: object) -> int:
        seen.append((command, where.exists()))
        return 0

    monkeypatch.setattr(kernels, "watch", watched)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for more in ([], ["--resume"]):
        file.write_text("{}")
        monkeypatch.setattr(sys, "argv", ["kernels", "--json", str(file), "--only", "70B", *more])
        assert kernels.main() == 0
    assert [there for _, there in seen] == [False, True]
    assert "--worker" in seen[0][0] and seen[0][0][-2:] == ["--json", str(file)] and "70B" in seen[0][0]
