"""Process of the GPU trial: `python -m swiftspec.backends.cuda.trial` runs the checks of trial_checks.py on a GPU.

A kernel that faults or hangs costs the process its GPU, so the checks run in a process of their own, which
builder/gpu_trial.py starts, watches and starts again behind a check that has ended it. The request is one line of JSON
on standard input (`TrialRequest`). Standard output has two lines of JSON for each check, `{"begins": name}` and
`{"check": name, "reason": text or null}`, or the line `{"problem": text}` if the GPU cannot be used at all. The line of
the check TUNING, which times tilings and kernels (tuner.py), has the field "tuning", too. Standard error has the
traceback of each exception, and what is about to be timed. The process exits with 0 after the last check, and with
EXIT_DEVICE_FAULT after a check that has left the GPU unusable.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cuda import CudaBackend, cuda
from swiftspec.backends.cuda.devices import is_device_error, is_out_of_gpu_memory, require_usable
from swiftspec.backends.cuda.trial_checks import TrialDevice, TrialPlan, trial_checks
from swiftspec.backends.cuda.tuner import TUNE_S, Tuning, TuningBench
from swiftspec.backends.families import Family, compose
from swiftspec.backends.reference import Backend
from swiftspec.backends.unfused import unfused
from swiftspec.errors import UserError
from swiftspec.file_io import one_line

EXIT_DEVICE_FAULT = 3
TUNING = "tilings of projections, shapes of attention"
COLD = 4  # what the tuner reads per measurement, in sizes of the L2 cache
REPLAYS = 5  # of a graph that is timed
MAX_LIFE_S = 60  # a process whose parent has died ends after this time at the latest
WARM_UP_RUNS = 2  # before a capture: kernels are loaded on their first launch


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """What one process of a trial runs. `device`: of torch. `on_library`: families of operators to take from torch.
    `names`: the checks to run, in this order; TUNING is one of them. `tune_s`: seconds for TUNING, of which the checks
    of its result are not part."""

    plan: TrialPlan
    device: str
    early_starts: bool
    on_library: Sequence[Family]
    names: Sequence[str]
    tune_s: float = TUNE_S

    def to_json(self) -> dict[str, Any]:
        return {
            "plan": self.plan.to_json(),
            "device": self.device,
            "early_starts": self.early_starts,
            "on_library": [*self.on_library],
            "names": [*self.names],
            "tune_s": self.tune_s,
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> TrialRequest:
        return TrialRequest(**{**values, "plan": TrialPlan.from_json(values["plan"])})


def disable_early_starts() -> None:
    """Makes every kernel of this process start after its predecessor has ended. Must be called before the first launch:
    the launches are in the extension, which reads an environment variable once (csrc/cuda/launch.cuh). Processes that
    this one starts inherit the variable."""
    os.environ["SWIFTSPEC_EARLY_STARTS"] = "0"


def run_checks(request: TrialRequest, ops: Backend, at: TrialDevice) -> Iterator[dict[str, Any]]:
    """Yields the lines of the protocol. Ends after a check that leaves the device unusable, whose line has the field
    "fault"."""
    checks = {check.name: check for check in trial_checks(request.plan)}
    for name in request.names:
        yield {"begins": name}
        reason: str | None = None
        more: dict[str, Any] = {}
        try:
            if name == TUNING:
                more = {"tuning": tuned(request, ops, at).to_json()}
            else:
                reason = checks[name].run(ops, at)
            at.finish()
        except Exception as error:  # the check decides nothing else than whether these operators are used
            traceback.print_exc()
            more = {}  # a lack of memory does not count against the operators
            if not is_out_of_gpu_memory(error):
                reason = one_line(error)
                more = {"fault": reason} if is_device_error(error) or not _is_usable(at) else {}
        yield {"check": name, "reason": reason, **more}
        if "fault" in more:
            return


def tuned(request: TrialRequest, ops: Backend, at: TrialDevice) -> Tuning:
    """Returns what is faster than the defaults; nothing without graphs, in which it is timed."""
    if at.capture is None:
        return Tuning()
    cold_bytes, log = COLD * _C.cuda_device()["l2"], partial(print, file=sys.stderr, flush=True)
    bench = TuningBench(cast(CudaBackend, ops), at, replay_seconds, cold_bytes, log=log)
    return bench.tune(request.plan, request.tune_s)


def load_libraries(device: torch.device) -> None:
    """Loads the libraries that the checks use, since the first check would otherwise take the time for it and could
    count as hung (builder/gpu_trial.py)."""
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(64, 64, device=device).to(dtype)
        float((x @ x).float().norm())


def _is_usable(at: TrialDevice) -> bool:
    """Returns whether the device still works. Libraries report a fault of an earlier kernel in their own words."""
    try:
        at.finish()
        return bool(torch.zeros(1, device=at.device) == 0)
    except RuntimeError:
        return False


def capture_graph(work: Callable[[], Sequence[Tensor]]) -> tuple[Sequence[Tensor], Callable[[], None]]:
    """Captures `work` in a CUDA graph. Returns its outputs and the replay."""
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_RUNS):
            work()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        out = work()
    return out, graph.replay


def replay_seconds(calls: Sequence[Callable[[], Tensor]]) -> float:
    """Returns the seconds of the calls in a CUDA graph: the median of REPLAYS replays."""
    _, replay = capture_graph(lambda: [call() for call in calls])
    replay()
    times = list[float]()
    for _ in range(REPLAYS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return median(times)


def main() -> NoReturn:
    """Runs the request on standard input."""
    signal.alarm(MAX_LIFE_S)
    request = TrialRequest.from_json(json.loads(sys.stdin.readline()))
    if not request.early_starts:
        disable_early_starts()
    code = 0
    for line in _lines(request):
        sys.stdout.write(f"{json.dumps(line)}\n")
        sys.stdout.flush()
        code = EXIT_DEVICE_FAULT if "fault" in line else 0
    os._exit(code)  # the destructors of a faulted device may block


def _lines(request: TrialRequest) -> Iterator[Mapping[str, Any]]:
    """Yields all lines of the protocol."""
    try:
        device = require_usable(request.device)
        torch.cuda.set_device(device)
        load_libraries(device)
    except (RuntimeError, AssertionError, UserError) as error:  # torch without CUDA raises AssertionError
        yield {"problem": one_line(error)}
        return
    with torch.inference_mode():
        ops = compose(cuda, unfused, request.on_library)
        yield from run_checks(request, ops, TrialDevice(device, capture_graph))


if __name__ == "__main__":
    main()
