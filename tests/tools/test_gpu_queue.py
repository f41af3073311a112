"""tools/gpu_queue.py, its steps and their imports, without a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from bench.data.heldout import DEMO
from tools import gpu_queue
from tools.gpu import build, decisions, steps
from tools.gpu.queue import results_of
from tools.gpu.steps import ROOT, checks, questions, slug
from tools.width_expand.shapes import FIELDS, grown_config

BARE = {"torch", "numpy", "safetensors"}  # the project's dependencies on a bare GPU image


def front() -> set[str]:
    """Packages that the engine must not need: all other dependencies, and those of the server, by import name."""
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
    """Python code in a process that cannot import the front end's dependencies or pytest plugins."""
    refuse, plain = REFUSE.format(refused=front()), {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run([sys.executable, "-c", refuse + code], capture_output=True, text=True, cwd=ROOT, env=plain)


def test_the_first_steps_fit_into_nine_minutes() -> None:
    """The experiments that explain and the decodes of both pairs, whatever each of them takes."""
    planned = questions(Path("profiles"), "h200")
    names = [step.name for step in planned]
    until = names.index(f"decode {steps.PAIR}") + 1
    assert sum(step.limit for step in planned[:until]) <= 420
    assert {"trial", "footprint", "chain", "stamps", f"decode {steps.SMALL_PAIR}"} <= {*names[:until]}
    assert len({*names}) == len(names) and all(step.result is not None for step in planned)


@pytest.mark.parametrize(("gpus", "sizes", "split"), [(2, [2], "1+1"), (6, [2, 4], "3+1"), (8, [2, 4, 8], "6+2")])
def test_several_gpus_are_measured_together(
    gpus: int, sizes: list[int], split: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweep needs a package of the front end."""
    planned = checks(gpus)
    several = [step for step in planned if step not in checks()]
    assert [step.name for step in several] == [
        *(f"all-reduce over {size} GPUs" for size in sizes), f"decode Llama-3-70B,Llama-3.2-3B, split {split}",
        f"sweep over {sizes[-1]} GPUs",
    ]  # fmt: skip
    assert all(step.command[1:4] == ("-m", "tools.gpu.ranks", str(size)) for step, size in zip(several, sizes))
    assert several[-1].limit > int(steps.SWEEP_S) == 180
    monkeypatch.setattr(steps.importlib.util, "find_spec", lambda name: None)
    assert len(checks(gpus)) == len(planned) - 1


def test_every_file_of_gpu_tests_is_run_once() -> None:
    run = [part for step in steps.tests() for part in step.command if part.startswith("tests/gpu")]
    assert sorted(run) == sorted(str(file.relative_to(ROOT)) for file in (ROOT / "tests" / "gpu").glob("test_*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memcheck", "racecheck"])
def test_the_sanitizer_runs_tests_of_virtual_ranks(kind: str, collected: str) -> None:
    """The step selects tests of several ranks with few epochs each, and fails if the tool reports something."""
    step = next(step for step in checks() if step.name == kind)
    assert step.command[1:3] == ("--tool", kind) and step.environment["SWIFTSPEC_TEST_EPOCHS"] == "6"
    *_, file, option, which = step.command
    assert (file, option) == ("tests/gpu/test_sums.py", "-k") and "--error-exitcode" in step.command
    chosen = [line for line in collected.splitlines() if all(word in line for word in which.split(" and "))]
    assert all(line.startswith("tests/gpu/test_sums.py") for line in chosen)
    sizes = (2, 4, 6, 8) if kind == "memcheck" else (4,)
    names = {line.split("::")[1] for line in chosen}
    assert {f"test_sums_over_virtual_ranks[{size}-128]" for size in sizes} <= names
    assert kind == "memcheck" or all("[4" in name for name in names), "only these, for the race check takes long"


@pytest.mark.parametrize("plan", ["questions", "checks"])
def test_a_dry_run_prints_steps_and_decisions(
    plan: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_queue", "--dry-run", "--plan", plan])
    assert gpu_queue.main() == 0
    lines = capsys.readouterr().out.splitlines()
    planned = questions(Path("profiles"), "GPU") if plan == "questions" else checks(8)
    rules = decisions.rules(plan)
    assert len(lines) == len(planned) + 1 + len(rules)
    assert all(line.startswith(step.name) and f"{step.limit:.0f} s" in line for line, step in zip(lines, planned))
    assert all(rule.reached in line and rule.missed in line for line, rule in zip(lines[-len(rules) :], rules))


def test_one_line_reports_that_nothing_can_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No GPU, modules that this Python lacks, or results of another GPU."""
    monkeypatch.setattr(sys, "argv", ["gpu_queue", "--output", str(tmp_path)])
    monkeypatch.setattr(gpu_queue, "machine", lambda: None)
    with pytest.raises(SystemExit, match=r"^gpu_queue: PyTorch finds no NVIDIA GPU; list the steps with --dry-run$"):
        gpu_queue.main()
    (tmp_path / "old.json").write_text('{"machine": {"gpu": "NVIDIA A100"}, "steps": []}')
    sys.argv += ["--resume", str(tmp_path / "old.json")]
    monkeypatch.setattr(gpu_queue, "machine", lambda: {"gpu": "NVIDIA H200", "gpus": 1})
    with pytest.raises(SystemExit, match=r"^gpu_queue: .*old.json is from NVIDIA A100, this machine has NVIDIA H200$"):
        gpu_queue.main()
    found, lacks = gpu_queue.importlib.util.find_spec, ("pytest", "hypothesis")
    monkeypatch.setattr(gpu_queue.importlib.util, "find_spec", lambda name: None if name in lacks else found(name))
    sys.argv += ["--plan", "checks"]
    with pytest.raises(SystemExit, match=r"^gpu_queue: this Python lacks pytest, hypothesis: pip install pytest hyp"):
        gpu_queue.main()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_stand_in_runs_all_steps(tmp_path: Path) -> None:
    """Every step runs to its end or names what it lacks, and every rule whose step can run on a CPU has a figure."""
    command = [sys.executable, "-m", "tools.gpu_queue", "--stand-in", "--budget", "1500", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    whole = json.loads((tmp_path / "stand-in-queue.json").read_text())
    on_gpu = {"stamps", "stamps of attention", "footprint, pages touched", "stalls", "constants", "tilings"}
    states = {entry["name"]: entry["state"] for entry in whole["steps"]}
    assert {name: state for name, state in states.items() if state != "ok"}.keys() <= on_gpu, done.stdout[-3000:]
    assert {*states.values()} <= {"ok", "nothing to run", "failed"}
    lacking = {line["figure"] for line in whole["decisions"] if line["measured"] is None}
    assert lacking == {
        "SM clock, lowest of highest", "70B SwiGLU, pages touched against not",
        "8B projections, dependencies to first tile",
        "busiest multiprocessor of mean", "stalls for instructions per issue",
        f"{steps.SMALL_PAIR}, async on divided multiprocessors against serial",
        *(name for name in lacking if "projections, " in name or "two blocks per multiprocessor" in name),
    }  # fmt: skip
    assert decisions.table(results_of(whole)) == whole["decisions"]


@pytest.mark.parametrize(
    ("gpu", "name"),
    [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie")],
)
def test_files_are_named_as_the_predictor_names_gpus(gpu: str, name: str) -> None:
    assert slug(gpu) == name


@pytest.mark.parametrize("usable", [True, False])
def test_an_extension_for_another_gpu_is_built_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], usable: bool
) -> None:
    """It is usable only if it runs on this GPU, not if it contains CUDA code. Without the tools of a build, one line
    names them."""
    assert "require_usable" in build.LOOK
    reason = "the CUDA operators were built for sm_80, but an H100 needs sm_90"
    monkeypatch.setattr(build, "look", lambda: (usable, "CUDA kernels built for sm_90" if usable else reason))
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    assert build.main() == (0 if usable else 1)
    lines = capsys.readouterr().out.splitlines()
    if usable:
        assert lines == ["reusing the existing build: CUDA kernels built for sm_90"]
    else:
        assert lines == [
            f"building, since the existing extension is not usable: {reason}",
            "a build needs cmake, ninja, pybind11, setuptools: pip install cmake ninja pybind11 setuptools",
        ]


@pytest.fixture(scope="module")
def collected() -> str:
    """The tests of tests/gpu, in a process that has imported everything that the steps import, without the front
    end."""
    modules = "bench.gpu.constants, bench.gpu.kernels, bench.gpu.step, tools.gpu_queue"
    modules += ", bench.gpu.chain, bench.gpu.footprint, bench.gpu.stamps, bench.gpu.stalls, tools.gpu.trial"
    modules += ", bench.gpu.tilings"
    modules += ", bench.gpu.all_reduce, tools.gpu.ranks, swiftspec.engine"
    done = bare(f"import {modules}, pytest\nsys.exit(pytest.main(['tests/gpu', '-m', 'gpu', '--collect-only']))")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_a_bare_image_can_run_all_steps(collected: str) -> None:
    for file in (ROOT / "tests" / "gpu").glob("test_*.py"):
        assert f"tests/gpu/{file.name}::" in collected
    assert "No module named 'rich'" in bare("import rich").stderr, "the hook refuses"


@pytest.mark.slow
def test_a_width_expanded_pair_decodes_without_a_tokenizer(tmp_path: Path) -> None:
    """bench/gpu/step.py and the engine below it, in a process that cannot import any of the front end's packages."""
    shapes = []
    for role, sizes in (("target", (512, 9, 8, 2, 128, 1152, 4224)), ("draft", (256, 3, 8, 2, 64, 512, 4224))):
        shape: dict[str, Any] = dict(zip(FIELDS, (*sizes, False), strict=True))
        config = grown_config(DEMO / role, shape, "int4")
        shapes.append(str(tmp_path / f"{role}.json"))
        Path(shapes[-1]).write_text(json.dumps(config))
    done = bare(
        f"import runpy\nsys.argv = ['step', '--pair', {','.join(shapes)!r}, '--device', 'cpu', '--prompts', '1',"
        f" '--tokens', '12', '--context', '64', '--ops', 'unfused', '--json', {str(tmp_path / 'out.json')!r}]\n"
        "runpy.run_module('bench.gpu.step', run_name='__main__')"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["same text"] > 0.4 and found["tree equals ar"] == 1.0 and found["serial"]["tok/round"] > 1.5
    assert set(found["step ms"]) == set(shapes) and all(ms > 0 for ms in found["step ms"].values())
