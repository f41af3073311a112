"""tools/gpu_check.py and the benches behind it, as far as they go without a GPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import step
from bench.heldout import DEMO
from swiftspec.model.config import ModelConfig
from tools import gpu_check, grow
from tools.gpu_check import Step

ROOT = gpu_check.ROOT
BARE = {"torch", "numpy", "safetensors"}  # what the project's dependencies are on a bare GPU image


def front() -> set[str]:
    """What the engine must do without: all other dependencies, and what serves, by the names they are imported by."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = {re.split(r"[^\w.-]", entry)[0].replace("-", "_") for entry in project["dependencies"]} - BARE
    assert {"transformers", "tokenizers", "rich", "pydantic"} <= listed
    return listed - {"pyyaml"} | {"yaml", "fastapi", "uvicorn", "typer", "grpc", "google", "msgspec", "matplotlib"}


REFUSE = """
import sys
class Refuse:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {refused!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Refuse)
"""


def bare(code: str) -> subprocess.CompletedProcess[str]:
    """Python code in a process that can import nothing of the front end."""
    refuse = REFUSE.format(refused=front())
    return subprocess.run([sys.executable, "-c", refuse + code], capture_output=True, text=True, cwd=ROOT)


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpu_check, "SCRATCH", tmp_path / "scratch")
    return tmp_path / "scratch"


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
    assert "KeyboardInterrupt" in whole["steps"][1]["tail"], "what it was at, when its time was over"
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


def gone(pid: str) -> bool:
    """Whether a process has ended, be it that nobody has asked for its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_child_that_is_left_behind_holds_nothing_up() -> None:
    """It has the step's output open when the step has ended, and is ended with it."""
    child = "import time; time.sleep(60)"
    code = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {child!r}]).pid)"
    outcome = gpu_check.run(python("parent", code), 20.0)
    assert outcome.state == "ok" and outcome.seconds < 15
    until = time.monotonic() + 5
    while not gone(outcome.tail.strip()) and time.monotonic() < until:
        time.sleep(0.05)
    assert gone(outcome.tail.strip())


def test_what_a_failed_step_found_is_kept_and_old_results_too(tmp_path: Path) -> None:
    """A step that fails after it wrote something; ones that wrote nothing of use leave what an earlier run kept."""
    new, empty, half, kept, old = (tmp_path / f"{name}.json" for name in ("new", "empty", "half", "kept", "old"))
    old.write_text('{"before": 1}')

    def writes(name: str, file: Path, text: str, keep: Path | None = None) -> Step:
        code = f"import sys; open({str(file)!r}, 'w').write({text!r}); sys.exit(3)"
        return replace(python(name, code, result=file), keep=keep)

    steps = [
        writes("kernels", new, '{"results": [1]}', kept),
        writes("constants", empty, '{"constants": {}}', old),
        writes("decode y", half, '{"pair"'),
    ]
    whole = gpu_check.run_all(steps, 60.0, tmp_path / "step.json", {})
    assert json.loads(kept.read_text()) == {"results": [1]} and json.loads(old.read_text()) == {"before": 1}
    assert [step["state"] for step in whole["steps"]] == ["failed"] * 3 and whole["decodes"] == []


def test_a_step_knows_its_limit_and_its_environment() -> None:
    code = "import os, sys; print(sys.argv[1], os.environ['SWIFTSPEC_TEST_EPOCHS'], os.environ['SWIFTSPEC_CUDA'])"
    step = Step("say", (sys.executable, "-c", code, gpu_check.SECONDS), 99, environment={"SWIFTSPEC_TEST_EPOCHS": "6"})
    assert gpu_check.run(step, 30.0).tail == "18 6 1\n"


def test_tests_that_are_all_skipped_are_no_tests() -> None:
    assert gpu_check.run(python("tests", "print('5 skipped in 1.0s')"), 9.0).state == "nothing to run"
    assert gpu_check.run(python("tests", "print('1 passed, 5 skipped in 1.0s')"), 9.0).state == "ok"


def test_all_that_must_be_done_fits_the_nine_minutes() -> None:
    """By the limits of the steps, with what it takes to see the GPU and to kill the last; others have what is left."""
    steps = gpu_check.plan(Path("profiles"), "h200")
    must, extra = ([step for step in steps if step.extra == kind] for kind in (False, True))
    assert steps == must + extra and sum(step.limit for step in must) <= 510
    names = [step.name for step in must]
    assert names[:2] == ["build", "tests of operators"]
    assert set(names) >= {
        "memcheck", "racecheck", "constants", "kernels", "decode demo auto", "decode Llama-3-70B,Llama-3.2-3B auto",
        "decode Llama-3-8B,Llama-3.2-1B auto",
    }  # fmt: skip
    assert steps[-1].name == "kernels, the rest" and "--resume" in steps[-1].command
    assert steps[-1].result == next(step.result for step in steps if step.name == "kernels")


def test_every_file_of_gpu_tests_is_run_once() -> None:
    run = [part for step in gpu_check.tests() for part in step.command if part.startswith("tests/gpu")]
    assert sorted(run) == sorted(str(file.relative_to(ROOT)) for file in (ROOT / "tests" / "gpu").glob("test_*.py"))


@pytest.mark.parametrize("kind", ["memcheck", "racecheck"])
def test_the_sanitizer_looks_at_virtual_ranks(kind: str, collected: str) -> None:
    """Its step selects tests of several ranks, few epochs of each, and fails where the tool finds something."""
    step = next(step for step in gpu_check.plan(Path("profiles"), "h200") if step.name == kind)
    assert step.command[1:3] == ("--tool", kind) and step.environment["SWIFTSPEC_TEST_EPOCHS"] == "6"
    *_, file, option, which = step.command
    assert (file, option) == ("tests/gpu/test_sums.py", "-k") and "--error-exitcode" in step.command
    chosen = [line for line in collected.splitlines() if all(word in line for word in which.split(" and "))]
    assert all(line.startswith("tests/gpu/test_sums.py") for line in chosen)
    sizes = (2, 4, 6, 8) if kind == "memcheck" else (4,)
    names = {line.split("::")[1] for line in chosen}
    assert {f"test_sums_over_virtual_ranks[{size}-128]" for size in sizes} <= names
    assert kind == "memcheck" or all("[4" in name for name in names), "only these, for the race check takes long"


def test_without_a_gpu_it_says_so_in_one_line() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    steps = len(gpu_check.plan(Path(), ""))
    for arguments, code, where in (((), 2, 1), (("--dry-run",), 0, steps)):
        command = [sys.executable, "-m", "tools.gpu_check", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == code and len((done.stdout + done.stderr).splitlines()) == where


@pytest.mark.parametrize(
    ("gpu", "name"),
    [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie")],
)
def test_files_are_named_as_the_predictor_names_gpus(gpu: str, name: str) -> None:
    assert gpu_check.slug(gpu) == name


@pytest.fixture(scope="module")
def collected() -> str:
    """The tests of tests/gpu, by a process that has imported all that the steps import and nothing of the front end."""
    code = "import bench.constants, bench.kernels_cuda, bench.step, bench.verify, tools.gpu_check, swiftspec.engine\n"
    done = bare(f"{code}import pytest\nsys.exit(pytest.main(['tests/gpu', '-m', 'gpu', '--collect-only']))")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_a_bare_image_can_run_all_of_it(collected: str) -> None:
    for file in (ROOT / "tests" / "gpu").glob("test_*.py"):
        assert f"tests/gpu/{file.name}::" in collected
    assert "No module named 'rich'" in bare("import rich").stderr, "the hook refuses"


@pytest.mark.slow
def test_a_grown_pair_decodes_without_a_tokenizer(tmp_path: Path) -> None:
    """bench/step.py in a process that cannot import any of the front end's packages, and the engine below it."""
    shapes = []
    for role, sizes in (("target", (512, 9, 8, 2, 128, 1152, 4224)), ("draft", (256, 3, 8, 2, 64, 512, 4224))):
        shape: dict[str, Any] = dict(zip(grow.FIELDS, (*sizes, False), strict=True))
        config = grow.grown_config(ModelConfig.from_dir(DEMO / role), shape, "int4")
        shapes.append(str(tmp_path / f"{role}.json"))
        Path(shapes[-1]).write_text(json.dumps(config))
    done = bare(
        f"import runpy\nsys.argv = ['step', '--pair', {','.join(shapes)!r}, '--device', 'cpu', '--prompts', '1',"
        f" '--tokens', '24', '--context', '400', '--json', {str(tmp_path / 'out.json')!r}]\n"
        "runpy.run_module('bench.step', run_name='__main__')"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["same text"] > 0.4 and found["tree equals ar"] == 1.0 and found["serial"]["tok/round"] > 1.5
    assert set(found["step ms"]) == set(shapes) and all(ms > 0 for ms in found["step ms"].values())


def test_prompts_are_the_embedded_tokenizers() -> None:
    from transformers import AutoTokenizer

    tokenizer, prompts = AutoTokenizer.from_pretrained(DEMO / "target"), step.read_prompts(8)
    assert len(prompts) == 8 and all(tokenizer(tokenizer.decode(ids))["input_ids"] == ids for ids in prompts)


def test_agreement() -> None:
    assert step.agreement([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]]) == pytest.approx(4 / 6)
