"""tools/gpu_check.py and the benches behind it, as far as they go without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import kernels_cuda, step, targets
from bench.heldout import DEMO
from swiftspec.config import ModelConfig
from tools import gpu_check, grow
from tools.gpu_check import Step

FRONT = (
    "transformers",
    "tokenizers",
    "huggingface_hub",
    "pydantic",
    "pydantic_settings",
    "yaml",
    "rich",
    "prompt_toolkit",
)


def python(name: str, code: str, limit: float = 30.0, result: Path | None = None) -> Step:
    return Step(name, (sys.executable, "-c", code), limit, result)


def test_steps_fail_and_hang_each_for_itself(tmp_path: Path) -> None:
    """A failure, a hang with a child of its own, one without tests, one without a program: the next step still runs."""
    done, file = tmp_path / "done.json", tmp_path / "step.json"
    hang = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    steps = [
        python("bad", "print('the reason'); raise SystemExit(3)"),
        python("slow", f"print('begun', flush=True); {hang}", limit=1.0),
        python("none", "raise SystemExit(5)"),
        Step("missing", ("no-such-program-here",), 5.0),
        python("decode x", f"open({str(done)!r}, 'w').write('{{\"pair\": \"x\"}}')", result=done),
    ]
    began = time.monotonic()
    whole = gpu_check.run_all(steps, 40.0, file, {"gpu": "none"})
    assert time.monotonic() - began < 30
    states = {entry["name"]: entry["state"] for entry in whole["steps"]}
    assert list(states.values()) == ["failed", "out of time", "nothing to run", "failed", "ok"]
    assert "the reason" in whole["steps"][0]["tail"] and "begun" in whole["steps"][1]["tail"]
    assert whole["decodes"] == [{"pair": "x"}] and json.loads(file.read_text()) == whole


@pytest.mark.slow
def test_results_are_there_before_the_end_and_the_budget_holds(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    looks = f"import json; assert [s['state'] for s in json.load(open({str(file)!r}))['steps']] == ['ok']"
    steps = [
        python("one", "pass"),
        python("two", looks),
        python("long", "import time; time.sleep(60)"),
        python("last", ""),
    ]
    whole = gpu_check.run_all(steps, 5.0, file, {})
    assert [entry["state"] for entry in whole["steps"]] == ["ok", "ok", "out of time", "not begun"]


def test_all_steps_fit_the_nine_minutes() -> None:
    steps = gpu_check.plan(Path("k.json"), Path("scratch"))
    assert [step.name for step in steps[:4]] == ["build", "tests", "decode demo auto", "kernels"]
    assert all(step.limit < 530 for step in steps)
    names = {step.name for step in steps}
    assert {
        "memcheck",
        "racecheck",
        "decode Llama-3-70B,Llama-3.2-3B auto",
        "decode Llama-3-8B,Llama-3.2-1B auto",
    } <= names


def test_without_a_gpu_it_says_so_in_one_line() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    for arguments, code, where in (((), 2, 1), (("--dry-run",), 0, len(gpu_check.plan(Path(), Path())))):
        command = [sys.executable, "-m", "tools.gpu_check", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=gpu_check.ROOT)
        assert done.returncode == code and len((done.stdout + done.stderr).splitlines()) == where


def result(name: str, op: str, rows: int, competitor: str, us: float) -> dict[str, Any]:
    case = kernels_cuda.linear_case("Llama-3-70B", 4, op, rows, "cpu")
    found = next(kernels_cuda.measure(replace(case, variants={competitor: list}), 4300.0, lambda calls: us))
    assert isinstance(found, kernels_cuda.Result)
    return asdict(found) | {"name": name}


def test_the_table_names_every_miss(capsys: pytest.CaptureFixture[str]) -> None:
    results = [
        result("qkv", "qkv", 8, "swiftspec", 6.0),  # accept 7.0, goal 5.5
        result("qkv", "qkv", 8, "cublas bf16", 9.0),  # 1.5 times as long: 2.3 wanted
        result("down", "down", 8, "swiftspec", 14.0),  # accept 13.1
        result("down x1", "down", 1, "swiftspec", 99.0),  # figures are for 8 rows
        result("down x16", "down", 16, "swiftspec", 15.0),  # 1.07 times what 8 rows take
    ]
    rates = {"tok/s": 200.0, "tok/round": 3.0}
    decoded = {
        "pair": "Llama-3-70B,Llama-3.2-3B", "ops": ["cuda", "cuda"], "serial": rates, "ar": rates, "same text": 1.0,
        "step ms": {"Llama-3-70B": 11.0, "Llama-3.2-3B": 2.0}, "async": rates | {"tok/s": 170.0},
    }  # fmt: skip
    whole = {"steps": [], "decodes": [decoded, decoded | {"ops": ["unfused", "unfused"]}]}
    kernels = {"machine": {"copy GB/s": 4300.0}, "results": results}
    verdicts = {line.what: str(line).split()[-1] for line in gpu_check.lines(whole, kernels)}
    assert verdicts == {
        "qkv": "ok",
        "qkv against cublas bf16": "MISS",
        "down": "MISS",
        "down x16 against x8": "goal",
        "step Llama-3-70B": "goal",
        "step Llama-3.2-3B": "MISS",
        "decode Llama-3-70B,Llama-3.2-3B": "ok",
        "decode Llama-3-70B,Llama-3.2-3B at once": "MISS",
    }
    gpu_check.report(whole, kernels)
    assert "4 of 8 targets missed" in capsys.readouterr().out
    gpu_check.report({"steps": [], "decodes": []}, None)  # nothing came back


def test_targets_are_the_published_table() -> None:
    """Those of a 70B over four ranks at 8 rows; a slower card has longer."""
    want = {"qkv": (7.0, 5.5), "o": (6.3, 4.9), "swiglu": (22.7, 19.1), "down": (13.1, 10.8)}
    for op, (accept, goal) in want.items():
        moved = kernels_cuda.linear_case("Llama-3-70B", 4, op, 8, "cpu").moved
        target = targets.linear(moved, targets.H200)
        assert target.accept == pytest.approx(accept, abs=0.1) and target.goal == pytest.approx(goal, abs=0.1)
        assert targets.linear(moved, 3000).accept > target.accept
    moved = kernels_cuda.attention_case("Llama-3-8B", 1, 1000, 8, "cpu").moved
    assert targets.attention(moved, targets.H200).accept == pytest.approx(6.6, abs=0.1)


def test_operators_run_on_the_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variant's calls are made once, on a model small enough."""
    monkeypatch.setitem(kernels_cuda.MODELS, "small", (256, 4, 2, 64, 512))
    made = [kernels_cuda.linear_case("small", 1, op, 3, "cpu", cold=1) for op in ("qkv", "o", "swiglu", "down")]
    made.append(kernels_cuda.attention_case("small", 2, 40, 3, "cpu", cold=1))

    def timer(calls: list[kernels_cuda.Call]) -> float:
        assert len(calls) >= 4 and all(call().isfinite().all() for call in calls)
        return 10.0

    with torch.inference_mode():
        for case in made:
            found = [r for r in kernels_cuda.measure(case, 1000.0, timer) if isinstance(r, kernels_cuda.Result)]
            known = {"unfused"} if case.op.startswith("attention") else {"unfused", "torch int4", "cublas bf16"}
            assert {r.competitor for r in found} == known
            assert all(r.over_floor < 10 and r.gigabytes > 0 for r in found)


def test_the_most_telling_cases_come_first() -> None:
    names = [case.name for case in kernels_cuda.cases((8, 1, 16, 32), "cpu")]
    assert len(set(names)) == len(names) == 4 * 13 * 7
    assert names[:5:4] == ["Llama-3-70B TP4 qkv x8", "Llama-3-70B TP4 attention 1000 x8"]
    assert names.index("Llama-3-8B TP1 qkv x8") < names.index("Llama-3-70B TP4 qkv x16") < len(names) // 8


def test_one_competitor_that_fails_is_named() -> None:
    def fails() -> list[kernels_cuda.Call]:
        raise RuntimeError("out of memory\nand more")

    case = replace(kernels_cuda.linear_case("Llama-3-8B", 1, "o", 8, "cpu"), variants={"a": fails, "b": list})
    first, second = kernels_cuda.measure(case, 1000.0, lambda calls: 1.0)
    assert first == "Llama-3-8B TP1 o x8 a: out of memory" and isinstance(second, kernels_cuda.Result)


@pytest.mark.slow
def test_a_grown_pair_decodes_without_a_tokenizer(tmp_path: Path) -> None:
    """bench/step.py in a process that cannot import any of the front end's packages, and the engine below it."""
    shapes = []
    for role, sizes in (("target", (512, 9, 8, 2, 128, 1152, 4224)), ("draft", (256, 3, 8, 2, 64, 512, 4224))):
        shape: dict[str, Any] = dict(zip(grow.FIELDS, (*sizes, False), strict=True))
        config = grow.grown_config(ModelConfig.from_dir(DEMO / role), shape, "int4")
        shapes.append(str(tmp_path / f"{role}.json"))
        Path(shapes[-1]).write_text(json.dumps(config))
    code = (
        f"import sys, runpy\nfor name in {FRONT}: sys.modules[name] = None\n"
        f"sys.argv = ['step', '--pair', {','.join(shapes)!r}, '--device', 'cpu', '--prompts', '1', '--tokens', '24',"
        f" '--context', '400', '--json', {str(tmp_path / 'out.json')!r}]\n"
        "import tools.gpu_check, bench.kernels_cuda\nrunpy.run_module('bench.step', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=gpu_check.ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    print(found)
    assert found["same text"] > 0.4 and found["tree equals ar"] == 1.0 and found["serial"]["tok/round"] > 1.5
    assert set(found["step ms"]) == set(shapes) and all(ms > 0 for ms in found["step ms"].values())


def test_prompts_are_the_embedded_tokenizers() -> None:
    from transformers import AutoTokenizer

    tokenizer, prompts = AutoTokenizer.from_pretrained(DEMO / "target"), step.read_prompts(8)
    assert len(prompts) == 8 and all(tokenizer(tokenizer.decode(ids))["input_ids"] == ids for ids in prompts)


def test_agreement() -> None:
    assert step.agreement([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]]) == pytest.approx(4 / 6)
