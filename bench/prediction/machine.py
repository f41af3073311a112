"""The machine that speeds are predicted for: constants of the latency model for this machine's CPU or GPUs."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from bench.prediction.latency_model import GPUS, Constants, Gpu, LatencyLine, constants
from swiftspec.backends.cpu import cpu as host
from swiftspec.builder.hardware import thread_count
from swiftspec.lab.machine import read_bandwidth

PEAK_ROUNDS = 2_000_000  # of `cpu.peak`; a few milliseconds
CPU_OPERATOR_S = (4e-6, 2e-6)  # (slow, fast): assumed fixed cost of an operator on the CPU
CPU_READ_SHARE = (0.6, 1.0)  # (slow, fast): assumed share of the read bandwidth that products with few rows reach
CPU_PEAK_SHARE = (0.3, 0.7)  # (slow, fast): assumed share of the arithmetic peak of one thread, times the threads
CPU_SAMPLER_S = (60e-6, 20e-6)  # (slow, fast): assumed time of sampling per forward


def cpu_constants() -> tuple[Constants, Constants]:
    """Returns the (slow, fast) constants of the latency model for this machine's CPU, from its measured read bandwidth
    and arithmetic peak and assumed shares of them."""
    bandwidth, threads = read_bandwidth(), thread_count(None, 1)
    peak = _arithmetic_peak() * threads
    slow, fast = (
        Constants(
            LatencyLine(CPU_OPERATOR_S[end], CPU_READ_SHARE[end] * bandwidth),
            LatencyLine(CPU_OPERATOR_S[end], CPU_READ_SHARE[end] * bandwidth),
            LatencyLine(10 * CPU_OPERATOR_S[end], bandwidth),
            CPU_SAMPLER_S[end],
            CPU_PEAK_SHARE[end] * peak,
        )
        for end in (0, 1)
    )
    return slow, fast


def _arithmetic_peak() -> float:
    """Returns the floating-point operations per second of one thread of the native operators, or an assumption of 10
    billion where they cannot run."""
    if host.level() == "none":
        return 1e10
    began = time.perf_counter()
    count = host.peak(PEAK_ROUNDS, True)
    return count / (time.perf_counter() - began)


def gpu_model(name: str) -> Gpu | None:
    """Returns the data of a GPU that the latency model knows, by the name that torch reports, such as "NVIDIA H200"."""
    return next((gpu for key, gpu in GPUS.items() if key in name.lower()), None)


@dataclass(frozen=True, slots=True)
class PredictedMachine:
    """The machine that speeds are predicted for. `title`: for messages. `ends`: (slow, fast) constants of the latency
    model. `ranks`: GPUs, or 1 on a CPU."""

    title: str
    ends: tuple[Constants, Constants]
    ranks: int


def this_machine() -> PredictedMachine | None:
    """Returns this machine for predictions: its GPUs if there are any, otherwise its CPU. None if the latency model
    does not know the GPU."""
    if torch.cuda.is_available():
        name, count = torch.cuda.get_device_name(), torch.cuda.device_count()
        gpu = gpu_model(name)
        return None if gpu is None else PredictedMachine(f"{count} x {name}", constants(gpu), count)
    threads = thread_count(None, 1)
    return PredictedMachine(f"this CPU with {threads} thread{'s' if threads > 1 else ''}", cpu_constants(), 1)
