"""Checks of the GPU trial, run on a CPU with torch's operators: they pass, and each finds its operator broken."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from swiftspec.backends.cuda import trial
from swiftspec.backends.cuda.devices import is_device_error
from swiftspec.backends.cuda.trial import TrialRequest, run_checks
from swiftspec.backends.cuda.trial_checks import (
    AttentionShape,
    LayerShape,
    ProjectionShape,
    TreeShape,
    TrialDevice,
    TrialPlan,
    trial_checks,
)
from swiftspec.backends.reference import resampling
from swiftspec.backends.unfused import unfused
from tests.support.fake_cuda_graphs import Rerun

LAYER = LayerShape(
    ProjectionShape("qkv", 256, 64, 32), ProjectionShape("o", 64, 128, 32), ProjectionShape("gate_up", 192, 64, 0),
    ProjectionShape("down", 64, 96, 32), AttentionShape(2, 1, 64, 1200, "bfloat16", True),
)  # fmt: skip
PLAN = TrialPlan((LAYER,), (ProjectionShape("head", 303, 64, 0),), TreeShape(20, 4, 5), 4)
AT = TrialDevice(torch.device("cpu"), Rerun())
DEVICE_ERROR = "tree_attention: an illegal memory access was encountered"


def request(*names: str) -> TrialRequest:
    return TrialRequest(PLAN, "cuda:0", True, [], names or [check.name for check in trial_checks(PLAN)])


def reasons(ops: Any, at: TrialDevice = AT, *names: str) -> dict[str, str]:
    """Reasons of the checks that fail."""
    lines = [*run_checks(request(*names), ops, at)]
    return {str(line["check"]): why for line in lines if (why := line.get("reason")) is not None}


def broken(**functions: Callable[..., Any]) -> Any:
    return unfused.with_operators(**functions)


def test_all_checks_pass_and_cover_every_family() -> None:
    assert reasons(unfused) == {}
    checks = trial_checks(PLAN)
    kinds = {check.family or check.switch for check in checks}
    assert kinds == {
        "projections", "attention", "embedding", "sampling", "tree", "cache", "resampling", "early_starts", "graphs",
    }  # fmt: skip
    assert len({check.name for check in checks}) == len(checks)
    assert TrialPlan.from_json(json.loads(json.dumps(PLAN.to_json()))) == PLAN
    assert TrialRequest.from_json(json.loads(json.dumps(request().to_json()))).names == request().names


def test_equal_names_are_numbered() -> None:
    """Shapes whose descriptions are equal: attention with another capacity, and layers with other projections."""
    longer = replace(LAYER, attention=replace(LAYER.attention, capacity=1300))
    wider = replace(LAYER, down=replace(LAYER.down, inputs=160))
    names = [check.name for check in trial_checks(replace(PLAN, layers=(LAYER, longer, wider)))]
    assert len({*names}) == len(names)
    assert {f"{LAYER.attention} (2)", f"slot moves of {LAYER.attention} (2)", f"{LAYER}, captured (3)"} <= {*names}


def test_attention_over_a_float8_cache() -> None:
    shape = AttentionShape(2, 1, 64, 200, "float8_e4m3fn", False)
    plan = TrialPlan((replace(LAYER, attention=shape),), PLAN.heads, None, 0)
    checks = {check.name: check for check in trial_checks(plan)}
    assert checks[str(shape)].run(unfused, AT) is None


def shifted(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A result that is wrong in its last column of the last row."""

    def wrong(*args: Any, **kwargs: Any) -> Tensor:
        out = function(*args, **kwargs)
        out[-1, -1] += 20
        return out

    return wrong


def wrong_children(logits: Tensor, vocab: int, k: int, *rest: Any) -> tuple[Tensor, Tensor]:
    tokens, values = unfused.children(logits, vocab, k, *rest)
    return tokens.flip(1), values


def wrong_resample(groups: Any, *rest: Any) -> None:
    resampling.resample(groups, *rest)
    groups.path[1, 0, 1] += 1


def wrong_mover(k: Tensor, v: Tensor) -> Any:
    return lambda sequence, source, start: unfused.make_slot_mover(k, v)(0, source, start)


class WrongTree:
    """Takes the first leaves instead of the best ones."""

    def __init__(self, *sizes: Any) -> None:
        self.rows = SimpleNamespace(nodes=torch.tensor([0, -1, -1, -1, -1]))
        self.region = torch.zeros(2, dtype=torch.int64)

    def add_root(self, token: Tensor, slot: Tensor, tokens: Tensor, logprobs: Tensor) -> None:
        self.region[0], self.region[1] = slot[0], slot[0] + 20

    def best_leaves(self, prefix: Tensor) -> Any:
        return self.rows


@pytest.mark.parametrize(
    ("functions", "check"),
    [
        ({"norm_linear": shifted(unfused.norm_linear)}, "qkv 64 x 256 int4/32"),
        ({"norm_swiglu": shifted(unfused.norm_swiglu)}, "gate_up 64 x 192 bf16"),
        ({"linear_residual": shifted(unfused.linear_residual)}, "o 128 x 64 int4/32"),
        ({"norm_head": shifted(unfused.norm_head)}, "head 64 x 303 bf16"),
        ({"tree_attention": shifted(unfused.tree_attention)}, str(LAYER.attention)),
        ({"embed": shifted(unfused.embed)}, "embedding of 64"),
        ({"draw": lambda logits, *rest: unfused.draw(logits, *rest) + 1}, "sampling of 303"),
        ({"children": wrong_children}, "sampling of 303"),
        ({"log_probs": lambda *of: unfused.log_probs(*of) + 0.1}, "sampling of 303"),
        ({"device_tree": WrongTree}, "draft tree"),
        ({"make_slot_mover": wrong_mover}, f"slot moves of {LAYER.attention}"),
        ({"resample": wrong_resample}, "resampling"),
    ],
)
def test_a_wrong_operator_is_found(functions: dict[str, Callable[..., Any]], check: str) -> None:
    assert check in reasons(broken(**functions), AT, check)


def test_results_that_depend_on_the_predecessor_are_found() -> None:
    """A kernel that reads its input too early is right only if the stream has been waited for."""
    waited = [False]

    class Device(TrialDevice):
        def finish(self) -> None:
            waited[0] = True

    def early(x: Tensor, *rest: Any) -> Tensor:
        out = unfused.norm_linear(x, *rest)
        if not waited[0]:
            out += 1
        waited[0] = False
        return out

    name = f"{LAYER}, repeated"
    assert reasons(broken(norm_linear=early), Device(AT.device), name) == {
        name: "kernels in a row have other results than one by one"
    }


def test_a_replay_that_differs_is_found() -> None:
    class Stale(Rerun):
        """A graph whose replays do nothing."""

        def __call__(self, *of: Any) -> Any:
            out, _ = super().__call__(*of)
            return out, lambda: None

    name = f"{LAYER}, captured"
    assert [*reasons(unfused, TrialDevice(AT.device, Stale()), name)] == [name]
    assert reasons(unfused, TrialDevice(AT.device), name) == {}, "without graphs there is nothing to capture"


def test_a_fault_ends_the_process_and_other_errors_do_not() -> None:
    def refuse(*of: Any) -> Any:
        raise ValueError("qkv: expected\n bfloat16")

    def fault(*of: Any) -> Any:
        raise RuntimeError(DEVICE_ERROR)

    def exhausted(text: str) -> Any:
        def raises(*of: Any) -> Any:
            raise RuntimeError(text)

        return raises

    names = (str(LAYER.attention), "embedding of 64")
    assert reasons(broken(prepare=refuse), AT, *names) == {names[0]: "qkv: expected bfloat16"}
    for text in ("CUDA out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"):
        assert reasons(broken(prepare=exhausted(text)), AT, *names) == {}
    lines = [*run_checks(request(*names), broken(prepare=fault), AT)]
    assert lines == [{"begins": names[0]}, {"check": names[0], "reason": DEVICE_ERROR, "fault": DEVICE_ERROR}]


def test_a_fault_that_a_library_reports_ends_the_process() -> None:
    lost = [False]

    class Device(TrialDevice):
        def finish(self) -> None:
            if lost[0]:
                raise RuntimeError("CUDA error: unspecified launch failure")

    def fault(*of: Any) -> Any:
        lost[0] = True
        raise RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED")

    lines = [*run_checks(request(str(LAYER.attention), "embedding of 64"), broken(prepare=fault), Device(AT.device))]
    assert len(lines) == 2 and lines[1]["fault"] == "CUBLAS_STATUS_EXECUTION_FAILED"


def test_libraries_are_loaded_before_the_first_check(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, load = list[torch.device](), trial.load_libraries

    def noted(device: torch.device) -> None:
        devices.append(device)
        load(device)

    monkeypatch.setattr(trial, "load_libraries", noted)
    monkeypatch.setattr(trial, "require_usable", {"cuda": AT.device}.get)  # torch sets no device without an index
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    lines = trial._lines(replace(request("embedding of 64"), device="cuda"))
    assert next(iter(lines)) == {"begins": "embedding of 64"} and devices == [AT.device] * 2


def test_which_errors_are_of_the_device() -> None:
    assert is_device_error(RuntimeError("CUDA error: unspecified launch failure\nCompile with ..."))
    assert is_device_error(RuntimeError("linear: an illegal memory access was encountered"))
    for other in (RuntimeError("CUDA error: out of memory"), torch.OutOfMemoryError("CUDA out of memory"),
                  RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), RuntimeError("shape mismatch"),
                  ValueError("CUDA error")):  # fmt: skip
        assert not is_device_error(other)


def test_early_starts_are_disabled_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWIFTSPEC_EARLY_STARTS", "1")
    trial.disable_early_starts()
    assert os.environ["SWIFTSPEC_EARLY_STARTS"] == "0"
