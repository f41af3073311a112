"""The GPU trial on its parent's side: rungs, processes that hang, die or print garbage, the verdict's file, and what a
model pair does with a verdict."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from swiftspec import _C
from swiftspec.backends.cuda import cuda, devices
from swiftspec.backends.cuda.linear import ProjectionTiling
from swiftspec.backends.cuda.trial import TUNING, TrialRequest
from swiftspec.backends.cuda.trial_checks import (
    AttentionShape,
    LayerShape,
    ProjectionShape,
    TreeShape,
    TrialPlan,
    trial_checks,
)
from swiftspec.backends.cuda.tuner import Tuning
from swiftspec.backends.families import FAMILIES
from swiftspec.backends.unfused import unfused
from swiftspec.builder import gpu_trial
from swiftspec.builder.gpu_trial import LIMITS, CheckProcess, GpuVerdict, TrialRunner, run_trial, search_rungs
from swiftspec.builder.models import Models
from swiftspec.builder.plan import Loading, Plan
from swiftspec.builder.ranks import agree_on_operators
from swiftspec.builder.trial_plan import TrialModel, make_trial_plan
from swiftspec.builder.verdict_file import VerdictFile
from swiftspec.config import EngineConfig
from swiftspec.distributed.launch.config_check import RankRole
from swiftspec.errors import RankLost, UserError
from swiftspec.model.config_json import parse_config
from swiftspec.token_engine import TokenEngine

ATTENTION = AttentionShape(2, 1, 64, 300, "bfloat16", False)
LAYER = LayerShape(
    ProjectionShape("qkv", 256, 64, 32), ProjectionShape("o", 64, 128, 32), ProjectionShape("gate_up", 192, 64, 0),
    ProjectionShape("down", 64, 96, 32), ATTENTION,
)  # fmt: skip
PLAN = TrialPlan((LAYER,), (ProjectionShape("head", 303, 64, 0),), TreeShape(20, 4, 5), 4)
CHECKS = trial_checks(PLAN)
NAMES = [check.name for check in CHECKS]
OF_FAMILY = {check.family: check.name for check in CHECKS if check.family is not None}
REPEATED, CAPTURED = f"{LAYER}, repeated", f"{LAYER}, captured"
TILINGS = {"8 x 8 bf16": ProjectionTiling("ring", 1, 8, 1, 1)}
TUNED = Tuning(TILINGS, {"2/1 heads of 64, short": "paired"})
WRONG_ROW = {"tilings": {"8 x 8 bf16": ["ring", 1, 1, 1, "1"]}, "kernel_shapes": {}}
Fails = Callable[[GpuVerdict, str], bool]


def searched(fails: Fails) -> tuple[GpuVerdict, list[tuple[GpuVerdict, list[str]]]]:
    """The verdict if the checks fail for which `fails` is True, and the runs that led to it."""
    runs: list[tuple[GpuVerdict, list[str]]] = []

    def run(verdict: GpuVerdict, names: Sequence[str]) -> Mapping[str, str | None]:
        runs.append((verdict, [*names]))
        return {name: "it is off" if fails(verdict, name) else None for name in names}

    verdict, complete = search_rungs(CHECKS, run)
    assert complete
    assert not any(fails(verdict, name) for name in NAMES if decides(verdict, name)), "the first rung that passes"
    return verdict, runs


def decides(verdict: GpuVerdict, name: str) -> bool:
    """Whether a check is about something that the verdict uses."""
    check = next(check for check in CHECKS if check.name == name)
    if check.family is not None:
        return check.family not in verdict.on_library
    return verdict.graphs or check.switch != "graphs"


def test_if_everything_passes_nothing_falls_back() -> None:
    verdict, runs = searched(lambda verdict, name: False)
    assert verdict == GpuVerdict() and verdict.note() is None and len(runs) == 1 and runs[0][1] == [*NAMES, TUNING]


@pytest.mark.parametrize("name", [REPEATED, OF_FAMILY["attention"], OF_FAMILY["sampling"]])
def test_what_passes_without_early_starts_disables_them(name: str) -> None:
    verdict, runs = searched(lambda verdict, each: each == name and verdict.early_starts)
    assert verdict.fallbacks == {"early_starts": f"{name}: it is off"}
    assert runs[1][1] == [name]
    assert verdict.note() == (
        f"GPU: kernels do not start early ({name}: it is off); all else runs on the CUDA operators"
    )  # fmt: skip


def test_checks_with_the_same_name_are_refused() -> None:
    with pytest.raises(ValueError, match="the same name"):
        search_rungs([*CHECKS, CHECKS[0]], lambda verdict, names: dict.fromkeys(names))


def test_graphs_whose_replays_differ_are_not_captured() -> None:
    verdict, _ = searched(lambda verdict, name: name == CAPTURED and verdict.graphs)
    assert verdict.fallbacks.keys() == {"graphs"}


@pytest.mark.parametrize("family", OF_FAMILY)
def test_a_family_that_fails_is_replaced_alone(family: str) -> None:
    """Also if a layer fails with it; early starts stay, since they are not the cause."""

    def fails(verdict: GpuVerdict, name: str) -> bool:
        if family in verdict.on_library:
            return False
        return name == OF_FAMILY[family] or (family in ("attention", "projections") and name in (REPEATED, CAPTURED))

    verdict, runs = searched(fails)
    assert verdict.fallbacks == {family: f"{OF_FAMILY[family]}: it is off"}
    assert runs[-1][1] == [REPEATED, CAPTURED], "a layer is tried again with torch's operators"


def test_several_causes_at_once() -> None:
    def fails(verdict: GpuVerdict, name: str) -> bool:
        wrong = name == OF_FAMILY["attention"] and "attention" not in verdict.on_library
        return wrong or (name == REPEATED and verdict.early_starts) or (name == CAPTURED and verdict.graphs)

    verdict, _ = searched(fails)
    assert verdict.fallbacks.keys() == {"attention", "early_starts", "graphs"}


def test_a_layer_that_only_fails_as_a_whole_loses_its_operators() -> None:
    verdict, _ = searched(lambda verdict, name: name == REPEATED and "projections" not in verdict.on_library)
    assert verdict.on_library == {"projections", "attention"} and not verdict.early_starts
    runs = 0

    def never(verdict: GpuVerdict, names: Sequence[str]) -> Mapping[str, str | None]:
        nonlocal runs
        runs += 1
        return dict.fromkeys(names, "it is off")

    verdict, _ = search_rungs(CHECKS, never)
    assert verdict.on_library == {*FAMILIES} and runs < 8
    assert (verdict.note() or "").startswith("GPU: torch's operators replace the CUDA operators (")


def test_a_check_without_time_for_a_second_run_counts_as_failed() -> None:
    calls = 0

    def run(verdict: GpuVerdict, names: Sequence[str]) -> Mapping[str, str | None]:
        nonlocal calls
        calls += 1
        return {name: "it hung for 5 s" if name == REPEATED else None for name in names} if calls == 1 else {}

    verdict, complete = search_rungs(CHECKS, run)
    assert not complete and not verdict.early_starts and {"projections", "attention"} <= verdict.on_library


class Script:
    """A scripted process: lines, seconds to wait, or the way in which it ends."""

    def __init__(self, clock: list[float], steps: Sequence[str | float]) -> None:
        self.clock, self.steps, self.stopped = clock, [*steps], False

    def next_line(self, timeout_s: float) -> str | None:
        while self.steps:
            step = self.steps.pop(0)
            if isinstance(step, str):
                return step
            self.clock[0] += min(step, timeout_s)
            if step > timeout_s:
                raise TimeoutError
        return None

    def stop(self) -> str:
        self.stopped = True
        return "SIGABRT"


def lines(*names: str, reason: str | None = None) -> list[str]:
    return [json.dumps(line) for name in names for line in ({"begins": name}, {"check": name, "reason": reason})]


def scripted(*scripts: Sequence[str | float]) -> tuple[TrialRunner, list[TrialRequest], list[float], list[Script]]:
    """A runner of scripted processes; the first 3 s of each are its imports."""
    clock, requests, waiting, processes = [0.0], list[TrialRequest](), [*scripts], list[Script]()

    def start(request: TrialRequest) -> Script:
        requests.append(request)
        processes.append(Script(clock, [3.0, *waiting.pop(0)]))
        return processes[-1]

    return TrialRunner(PLAN, "cuda:1", start, lambda: clock[0]), requests, clock, processes


def begins(name: str) -> str:
    return json.dumps({"begins": name})


def test_a_process_continues_behind_a_check_that_ends_it() -> None:
    a, b, c = NAMES[:3]
    runner, requests, clock, processes = scripted([*lines(a), begins(b)], lines(c, reason="it is off"))
    found = runner.run(GpuVerdict({"early_starts": "", "cache": ""}), [a, b, c])
    assert found == {a: None, b: "it ended its process (SIGABRT)", c: "it is off"}
    assert [request.names for request in requests] == [[a, b, c], [c]]
    assert all(process.stopped for process in processes) and clock[0] == 6
    first = requests[0]
    assert (first.device, first.early_starts, first.on_library) == ("cuda:1", False, ["cache"])


@pytest.mark.parametrize(
    ("again", "reason", "lasts"),
    [
        ([12.0, *lines(NAMES[1])[1:]], None, 12), ([60.0], "it hung for 20 s", 20),
        ([], "it ended its process (SIGABRT)", 0),
    ],
    ids=["passes", "hangs", "dies"],
)  # fmt: skip
def test_a_check_that_takes_too_long_is_repeated_with_more_time(again: Any, reason: str | None, lasts: int) -> None:
    a, b, c = NAMES[:3]
    runner, requests, clock, _ = scripted([*lines(a), begins(b), 60.0], [begins(b), *again], lines(c))
    assert runner.run(GpuVerdict(), [a, b, c]) == {a: None, b: reason, c: None}
    assert [request.names for request in requests] == [[a, b, c], [b, c], [c]]
    assert clock[0] == 3 * 3 + LIMITS.check_s + lasts


def test_other_lines_are_ignored_and_do_not_prolong_a_check() -> None:
    a, b = NAMES[:2]
    garbage = [
        "Warning: a\x00b",
        "[1, 2",
        "{}",
        '{"check": 7, "reason": null}',
        begins("another"),
        *lines(b),
        "[" * 5000,
    ]
    runner, _, _, _ = scripted([*garbage[:5], begins(a), *garbage[4:5], *lines(a)[1:], *lines(b)])
    assert runner.run(GpuVerdict(), [a, b]) == {a: None, b: None}
    endless: list[str | float] = [begins(a), *(each for _ in range(99) for each in (*garbage, 1.0))]
    runner, _, clock, _ = scripted(endless, endless)
    assert runner.run(GpuVerdict(), [a])[a] == "it hung for 20 s" and clock[0] == 3 + 5 + 3 + 20


@pytest.mark.parametrize(
    ("last", "kept"),
    [
        ([{"check": TUNING, "reason": None, "tuning": TUNED.to_json()}], TUNED),
        ([{"check": TUNING, "reason": None, "tuning": WRONG_ROW}], Tuning()),
        ([], Tuning()),
        ([60.0], Tuning()),
    ],
    ids=["tuned", "garbage", "dies", "hangs"],
)
def test_tuning_changes_no_fallback(last: list[Any], kept: Tuning) -> None:
    clock = [0.0]
    steps = [*lines(*NAMES), begins(TUNING), *(json.dumps(step) if isinstance(step, dict) else step for step in last)]
    verdict, problem = run_trial(PLAN, "cuda:0", lambda _: Script(clock, steps), lambda: clock[0])
    assert (verdict, problem) == (GpuVerdict(tuning=kept), None)
    assert GpuVerdict.from_json(json.loads(json.dumps(verdict.to_json()))) == verdict


def test_a_result_is_taken_from_the_check_that_runs_only() -> None:
    a, b = NAMES[:2]
    runner, _, _, _ = scripted([json.dumps({"check": b, "reason": None}), *lines(a)], [*lines(b)])
    assert runner.run(GpuVerdict(), [a, b]) == {a: None, b: None}


def test_a_process_that_does_not_begin_gives_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, requests, _, _ = scripted([])
    assert runner.run(GpuVerdict(), NAMES) == {} and len(requests) == 1
    assert runner.problem == "its process ended (SIGABRT)"
    clock = [0.0]
    verdict, problem = run_trial(PLAN, "cuda:0", lambda request: Script(clock, []), lambda: clock[0])
    assert verdict == GpuVerdict() and problem == "its process ended (SIGABRT)"

    busy = '{"problem": "CUDA error: all CUDA-capable devices are busy"}'
    clock = [0.0]
    found = run_trial(PLAN, "cuda:0", lambda request: Script(clock, [busy]), lambda: clock[0])
    assert found == (GpuVerdict(), "CUDA error: all CUDA-capable devices are busy")

    def refuse(request: TrialRequest) -> Any:
        raise PermissionError(13, "Permission denied")

    assert run_trial(PLAN, "cuda:0", refuse)[1] == "its process was not started (Permission denied)"


def test_the_time_is_that_of_all_processes() -> None:
    a, b, c = NAMES[:3]
    runner, _, clock, _ = scripted(*[[begins(each), 60.0] for each in (a, a, b, b)])
    assert runner.run(GpuVerdict(), [a, b, c]) == {a: "it hung for 20 s", b: "it hung for 3 s"}
    assert clock[0] == LIMITS.trial_s + LIMITS.repeated_check_s, "one repetition prolongs the trial"
    clock = [0.0]
    verdict, problem = run_trial(PLAN, "cuda:0", lambda request: Script(clock, [60.0]), lambda: clock[0])
    assert verdict == GpuVerdict() and problem == "no check began within 25 s"
    clock[0] = 0
    slow = [*lines(*NAMES[:3]), 60.0]
    verdict, problem = run_trial(PLAN, "cuda:0", lambda request: Script(clock, [24.5, *slow]), lambda: clock[0])
    assert verdict == GpuVerdict() and problem == "it was not complete after 25 s"


ECHO = "import json, sys; request = json.loads(sys.stdin.readline())\n"
ANSWER = """
for name in request["names"]:
    print(json.dumps({"begins": name}))
    print(json.dumps({"check": name, "reason": None}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "ended"),
    [(ECHO + ANSWER, None), (ECHO + "import os; os.abort()", "SIGABRT"), ("raise SystemExit(7)", "exit code 7"),
     (ECHO + "while True: pass", "SIGKILL")],
)  # fmt: skip
def test_real_processes(code: str, ended: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_trial, "STOP_S", 0.05 if ended == "SIGKILL" else 5.0)
    process = CheckProcess(TrialRequest(PLAN, "cuda:0", True, [], NAMES[:2]), [sys.executable, "-S", "-c", code])
    if ended == "SIGKILL":
        with pytest.raises(TimeoutError):
            process.next_line(0.05)
    elif ended is None:
        assert [json.loads(process.next_line(9) or "") for _ in range(4)][3] == {"check": NAMES[1], "reason": None}
    if ended != "SIGKILL":
        assert process.next_line(9) is None
    assert process.stop() == (ended or "exit code 0")


def test_verdicts_of_ranks_and_lower_rungs() -> None:
    ours, theirs = GpuVerdict({"graphs": "a"}), GpuVerdict({"graphs": "b", "attention": "c"})
    assert ours.union([theirs]).fallbacks == {"graphs": "a", "attention": "c"}
    assert theirs.without(["attention", "tree"], "d").fallbacks == {"graphs": "b", "attention": "c", "tree": "d"}
    assert GpuVerdict.from_json(theirs.to_json()) == theirs
    wrong_row = {"fallbacks": {}, "tuning": WRONG_ROW}
    wrong_shape = {"fallbacks": {}, "tuning": {"tilings": {}, "kernel_shapes": {"a": 1}}}
    others = [
        {"fallbacks": []},
        {"fallbacks": {"graph": "a"}},
        {"fallbacks": {"graphs": 1}},
        {"fallbacks": {}},
        wrong_row,
        wrong_shape,
    ]
    for wrong in ([], {}, *others):
        with pytest.raises(ValueError, match=r"not a (verdict|tuning)"):
            GpuVerdict.from_json(wrong)
    other = {"8 x 8 bf16": ProjectionTiling("direct", 1, 8, 1, 1), "4 x 8 bf16": ProjectionTiling("ring", 2, 8, 1, 1)}
    ranks = [GpuVerdict(tuning=TUNED), GpuVerdict(tuning=Tuning(other, {"2/1 heads of 64, short": "long"}))]
    common = [verdict.union(ranks).tuning for verdict in ranks]
    assert common == [Tuning(other | TILINGS, TUNED.kernel_shapes)] * 2, "those of the first rank"
    assert ranks[1].lower("it failed", grouped=False) == GpuVerdict(), "the defaults first"
    rungs = [verdict := GpuVerdict()]
    while (verdict := rungs[-1].lower("it failed", grouped=True)) != rungs[-1]:
        rungs.append(verdict)
    steps = [after.fallbacks.keys() - before.fallbacks.keys() for before, after in pairwise(rungs)]
    assert steps == [{"early_starts"}, {"graphs"}, {"peers"}, {*FAMILIES}]
    alone = GpuVerdict({"early_starts": "", "graphs": ""}).lower("it failed", grouped=False)
    assert alone.on_library == {*FAMILIES} and alone.peers


def test_the_file_of_a_verdict(tmp_path: Path) -> None:
    verdict, facts = GpuVerdict({"tree": "it is off"}, TUNED), {"gpu": "H100", "plan": PLAN.to_json()}
    file = VerdictFile.of(tmp_path / "new", facts)
    assert file.read() is None
    file.write(verdict)
    assert VerdictFile.of(tmp_path / "new", json.loads(json.dumps(facts))).read() == verdict
    assert VerdictFile.of(tmp_path / "new", {**facts, "gpu": "H200"}).read() is None
    other = TrialPlan(PLAN.layers, PLAN.heads, None, 0)
    assert VerdictFile.of(tmp_path / "new", {**facts, "plan": other.to_json()}).read() is None
    for damage in ("", "{", "[" * 100_000, "\udcff", '{"fallbacks": {}}'):
        file.path.write_bytes(damage.encode(errors="surrogateescape"))
        assert file.read() is None
    file.path.unlink()
    os.mkfifo(file.path)
    assert file.read() is None
    file.write(verdict)
    assert file.read() == verdict and [*file.path.parent.iterdir()] == [file.path]
    VerdictFile(tmp_path / "new" / file.path.name / "x.json").write(verdict)  # a file is where the folder should be


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 304, "torch_dtype": "bfloat16",
    "max_position_embeddings": 512, "eos_token_id": 1,
}  # fmt: skip
AWQ = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}}


def test_the_plan_of_a_pair() -> None:
    target = TrialModel(parse_config({**LLAMA, **AWQ}), 1, 600, torch.bfloat16, False)
    draft = TrialModel(parse_config(LLAMA), 1, 600, torch.float8_e4m3fn, True)
    plan = make_trial_plan([target, draft], None, 0)
    awq, dense = plan.layers
    assert awq.projections == (
        ProjectionShape("qkv", 512, 256, 128), ProjectionShape("o", 256, 256, 128),
        ProjectionShape("gate_up", 1024, 256, 128), ProjectionShape("down", 256, 512, 128),
    )  # fmt: skip
    assert awq.attention == AttentionShape(4, 2, 64, 600, "bfloat16", False)
    assert dense.qkv.group == 0 and dense.attention.cache == "float8_e4m3fn"
    assert plan.heads == (ProjectionShape("head", 304, 256, 0), ProjectionShape("head", 304, 256, 128))
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True}
    permuted = TrialModel(parse_config({**LLAMA, "quantization_config": gptq}), 1, 600, torch.bfloat16, False)
    assert [layer.qkv.group for layer in make_trial_plan([permuted], None, 0).layers] == [128, 0]
    [shard] = make_trial_plan(
        [TrialModel(parse_config({**LLAMA, **AWQ}), 4, 600, torch.bfloat16, False)], None, 0
    ).layers
    assert shard.projections == (
        ProjectionShape("qkv", 192, 256, 128), ProjectionShape("o", 256, 64, 64),
        ProjectionShape("gate_up", 256, 256, 128), ProjectionShape("down", 256, 128, 128),
    )  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU that the CUDA operators can use."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**34, 2**34))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H100")
    set_uuid(monkeypatch, "GPU-1")
    monkeypatch.setattr("swiftspec.backends.cuda.require_usable", torch.device)
    monkeypatch.setattr(devices, "DRIVER_FILE", Path("/nonexistent"))
    monkeypatch.setenv("SWIFTSPEC_EARLY_STARTS", "")


def set_uuid(monkeypatch: pytest.MonkeyPatch, uuid: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=uuid))


class Trials:
    """Stands in for trials of the GPU. `plans`: of those that were run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.verdict = GpuVerdict()
        self.tuning = Tuning()
        self.problem: str | None = None
        self.plans: list[TrialPlan] = []
        monkeypatch.setattr(gpu_trial, "run_trial", self.run)

    def run(self, plan: TrialPlan, device: str) -> tuple[GpuVerdict, str | None]:
        assert device == "cuda:0"
        self.plans.append(plan)
        return self.verdict, self.problem


def created(model: Path, folder: Path, plan: EngineConfig | None = None, **more: Any) -> tuple[Plan, list[str]]:
    notes: list[str] = []
    options: Any = {"device": "cuda", "trial_cache": folder, "note": notes.append, **more}
    plan = plan or EngineConfig("serial")
    return Plan.create(model, model if plan.mode != "ar" else None, plan, None, options), notes


@pytest.mark.usefixtures("gpu")
def test_a_verdict_is_found_again(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials, folder = Trials(monkeypatch), tmp_path / "verdicts"
    trials.verdict = GpuVerdict({"attention": "it is off"}, TUNED)
    line = "GPU: attention by torch's operators (it is off); all else runs on the CUDA operators"
    for hint in ("", f"; the verdict of an earlier start, remove {folder} to repeat the trial"):
        pair, notes = created(model, folder)
        assert pair.gpu.verdict == trials.verdict and notes == [f"{line}{hint}"]
    assert len(trials.plans) == 1 and trials.plans[0].tree is not None and trials.plans[0].particles == 0
    created(model, folder, gpu_trial="again")
    created(model, folder, EngineConfig("smc"))
    assert len(trials.plans) == 3 and trials.plans[2].tree is None and trials.plans[2].particles == 4
    for file in folder.iterdir():
        file.write_text("{")
    created(model, folder)
    created(model, folder)
    assert len(trials.plans) == 4, "a damaged file is written again"
    others: list[dict[str, Any]] = [{"gpu_trial": "off"}, {"ops": "unfused"}, {"dtype": torch.float32}]
    for options in others:
        assert created(model, folder, **options)[0].gpu.verdict == GpuVerdict()
    assert len(trials.plans) == 4


@pytest.mark.usefixtures("gpu")
def test_gpus_of_one_model_have_their_own_verdicts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = Trials(monkeypatch)
    trials.verdict = GpuVerdict({"attention": "it is off"})
    first = created(model, tmp_path / "verdicts")[0].gpu.verdict
    set_uuid(monkeypatch, "GPU-2")
    trials.verdict = GpuVerdict()
    assert created(model, tmp_path / "verdicts")[0].gpu.verdict == GpuVerdict() != first
    set_uuid(monkeypatch, "GPU-1")
    assert created(model, tmp_path / "verdicts")[0].gpu.verdict == first and len(trials.plans) == 2


@pytest.mark.usefixtures("gpu")
def test_a_trial_without_a_result_is_not_kept(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Trials(monkeypatch)
    trials.problem = "its process ended (exit code 1)"
    _, notes = created(model, tmp_path / "verdicts")
    assert notes == [f"the GPU trial was not completed: {trials.problem}; --ops unfused skips it"]
    assert not (tmp_path / "verdicts").exists()


@pytest.mark.usefixtures("gpu")
def test_what_a_model_pair_does_with_a_verdict(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Trials(monkeypatch)

    def used(*fallbacks: str) -> tuple[Any, bool, int]:
        """Operators, whether graphs are captured, and the width of sums through peer memory."""
        trials.verdict = GpuVerdict(dict.fromkeys(fallbacks, "why"), trials.tuning)
        pair, _ = created(model, tmp_path, gpu_trial="again")
        found: list[Any] = []
        loaded = Models.of(replace(pair, loading=Loading(partial(load, found)))).load_side(
            "target", EngineConfig("serial"), None, None
        )
        return found[0], loaded.capture is not None, pair.peer_all_reduce_width(target=True, draft=True)

    trials.tuning = TUNED
    ops, captured, width = used()
    assert (ops.tilings, ops.kernel_shapes) == (TILINGS, TUNED.kernel_shapes)
    assert ops.mlp == cuda.mlp and captured
    assert used("projections")[0].pack == unfused.pack
    trials.tuning = Tuning()
    assert used() == (cuda, True, 256) and os.environ["SWIFTSPEC_EARLY_STARTS"] == ""
    assert used("graphs") == (cuda, False, 256)
    assert used("peers") == (cuda, True, 0)
    ops, captured, width = used("projections")
    assert (ops.pack, ops.tree_attention, captured, width) == (unfused.pack, cuda.tree_attention, True, 0)
    assert used(*FAMILIES)[0] is unfused
    assert used("early_starts")[0] is cuda and os.environ["SWIFTSPEC_EARLY_STARTS"] == "0"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.usefixtures("gpu")
def test_an_unknown_value_of_gpu_trial_is_one_line(model: Path, tmp_path: Path, device: str) -> None:
    with pytest.raises(UserError, match=r"^gpu_trial must be one of auto, off, again, not 'never'$"):
        created(model, tmp_path, gpu_trial="never", device=device)


def load(found: list[Any], *of: Any, ops: Any, **more: Any) -> Any:
    """Stands in for `load_model`."""
    found.append(ops)
    return object()


@pytest.mark.usefixtures("gpu")
def test_an_error_of_the_gpu_lowers_the_next_start(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a supervisor restarts a server: each incarnation meets the same error, until one does not use what fails."""
    trials, plan, history = Trials(monkeypatch), EngineConfig("serial"), list[set[str]]()
    for _ in range(4):
        pair, _ = created(model, tmp_path)
        history.append({*pair.gpu.verdict.fallbacks})
        error = RuntimeError("CUDA error: an illegal memory access was encountered\nFor debugging ...")
        with pytest.raises(RuntimeError), Models.of(pair).device_errors_recorded(plan):
            raise error
    assert history == [set(), {"early_starts"}, {"early_starts", "graphs"}, {"early_starts", "graphs", *FAMILIES}]
    assert len(trials.plans) == 1
    line = created(model, tmp_path)[0].gpu.verdict.fallbacks["graphs"]
    assert line.startswith("the GPU failed at run time: CUDA error: an illegal memory access") and "\n" not in line
    created(model, tmp_path, gpu_trial="again")
    for other in (RuntimeError("CUDA out of memory"), ValueError("CUDA error"), KeyError(1)):
        with pytest.raises(type(other)), Models.of(created(model, tmp_path)[0]).device_errors_recorded(plan):
            raise other
    assert created(model, tmp_path)[0].gpu.verdict == GpuVerdict(), "tried again, and other errors are not the GPU's"


def test_an_engine_reports_an_error_of_its_gpu() -> None:
    """It is no lack of memory, although its text contains that word."""
    errors: list[Exception] = []

    def fails() -> Any:
        raise RuntimeError("linear: an illegal memory access was encountered")
        yield

    models = SimpleNamespace(
        options=SimpleNamespace(device=torch.device("cpu")),
        record_device_error=lambda error, config: errors.append(error),
    )
    roles: Any = SimpleNamespace(config=None, decoding=None, limits=None, models=models)
    engine = TokenEngine(roles)
    with pytest.raises(RuntimeError, match="illegal memory access") as raised:
        next(engine._rounds(fails(), lambda: False))
    assert errors == [raised.value]


@pytest.mark.usefixtures("gpu")
def test_the_ranks_of_a_group_use_the_same_operators(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials, pairs, store = Trials(monkeypatch), list[Models](), HashStore()
    for fallback in ("attention", "early_starts", None):
        trials.verdict = GpuVerdict({} if fallback is None else {fallback: "why"})
        pairs.append(Models.of(created(model, tmp_path, gpu_trial="again")[0]))
    agreed: dict[int, Any] = {}

    class World:
        def __init__(self) -> None:
            self.store = store

    def join(rank: int) -> None:
        world: Any = World()
        agreed[rank] = agree_on_operators(pairs[rank], world, RankRole("target", rank, 3))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fallbacks = [agreed[rank].options.gpu.verdict.fallbacks for rank in range(3)]
    assert fallbacks == [{"attention": "why", "early_starts": "why"}] * 3
    alone: Any = World()
    assert agree_on_operators(pairs[2], alone, RankRole("draft", 0, 1)) is pairs[2]


@pytest.mark.usefixtures("gpu")
def test_an_error_lowers_the_verdict_of_the_group(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever copy of the pair records it, such as one from before the ranks have agreed, and unless another rank has
    caused it."""
    Trials(monkeypatch)
    plan, theirs = EngineConfig("serial"), GpuVerdict({"early_starts": "it is off on rank 1"})
    pair = replace(created(model, tmp_path)[0], loading=Loading(lambda path, **how: None))  # type: ignore[arg-type]
    models = Models.of(pair)
    agreed = models.with_common_verdict(lambda mine: [mine, json.dumps(theirs.to_json())])
    assert agreed.options.gpu.verdict == theirs
    found: list[RankLost | None] = [RankLost("GPU rank 0 waited too long for rank 1"), None]
    group: Any = SimpleNamespace(lost=lambda error: found[0], rank=0, size=2)
    agreed.load_side("target", plan, group, None)
    models.record_device_error(RuntimeError("CUDA error: unspecified launch failure"), plan)
    assert not created(model, tmp_path)[0].gpu.verdict.fallbacks
    found.pop(0)
    models.record_device_error(RuntimeError("CUDA error: unspecified launch failure"), plan)
    assert {*created(model, tmp_path)[0].gpu.verdict.fallbacks} == {"early_starts", "graphs"}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU")
def test_the_program_without_a_gpu() -> None:
    """It reports why, and has no verdict."""
    verdict, problem = run_trial(PLAN, "cuda:0")
    reason = _C.build_info if "left out" in _C.build_info else "no usable NVIDIA GPU: "
    assert verdict == GpuVerdict() and (problem or "").startswith(reason)
