"""Clock, power and throttle reasons of a GPU while a step runs, from NVML, which every NVIDIA driver contains.

NVML is called through ctypes, so nothing has to be installed. Reading it does not touch the GPU's contexts.
"""

from __future__ import annotations

import ctypes
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

LIBRARY = "libnvidia-ml.so.1"
INTERVAL_S = 0.05
SM_CLOCK = 1  # NVML_CLOCK_SM
BUSY_SHARE = 0.5  # of the largest power of a step, from which a sample counts as busy
IDLE = 0x1  # bit of nvmlDeviceGetCurrentClocksThrottleReasons, as those of REASONS
REASONS = {
    0x2: "clocks set by an application", 0x4: "power cap", 0x8: "hardware slowdown", 0x10: "sync boost",
    0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake", 0x100: "display clocks",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sample:
    """A reading. `at`: seconds on the clock of time.monotonic()."""

    at: float
    sm_mhz: int
    watts: float
    reasons: int  # bits of REASONS


class Sensor(Protocol):
    """Reads a GPU."""

    def read(self) -> Sample: ...


class Nvml:
    """The first GPU of this machine through NVML. Raises OSError if there is no library or no GPU."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(LIBRARY)
        self._device = ctypes.c_void_p()
        self._check(self._library.nvmlInit_v2())
        self._check(self._library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self._device)))

    def read(self) -> Sample:
        clock, milliwatts, reasons = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_ulonglong()
        library, device = self._library, self._device
        self._check(library.nvmlDeviceGetClockInfo(device, SM_CLOCK, ctypes.byref(clock)))
        self._check(library.nvmlDeviceGetPowerUsage(device, ctypes.byref(milliwatts)))
        self._check(library.nvmlDeviceGetCurrentClocksThrottleReasons(device, ctypes.byref(reasons)))
        return Sample(time.monotonic(), clock.value, milliwatts.value / 1e3, reasons.value)

    def _check(self, code: int) -> None:
        if code != 0:
            raise OSError(f"NVML returned error {code}")


def find_sensor() -> Sensor | None:
    """Returns the sensor of this machine, or None without NVML."""
    try:
        return Nvml()
    except (OSError, AttributeError):
        return None


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """Returns the SM clock, in MHz, over the samples in which the GPU was busy, the power in W, and the reasons for
    which the clock was limited, with the share of the busy samples; nothing if it never was."""
    awake = [sample for sample in samples if not sample.reasons & IDLE]
    if not awake:
        return {}
    most = max(sample.watts for sample in awake)
    busy = [sample for sample in awake if sample.watts >= BUSY_SHARE * most]
    clocks = sorted(sample.sm_mhz for sample in busy)
    limited = {name: sum(bool(sample.reasons & bit) for sample in busy) / len(busy) for bit, name in REASONS.items()}
    return {
        "samples": len(samples), "busy": len(busy), "lowest MHz": clocks[0], "median MHz": median(clocks),
        "highest MHz": clocks[-1], "most W": round(most, 1),
        "limited by": {name: round(share, 3) for name, share in limited.items() if share > 0},
    }  # fmt: skip


class Telemetry:
    """Reads a sensor in a thread every INTERVAL_S while the context is open. `file`: receives every sample as a line of
    JSON."""

    def __init__(self, sensor: Sensor | None, file: Path, wait: Callable[[threading.Event, float], bool] | None = None):
        self._sensor, self._file = sensor, file
        self._wait = wait or (lambda event, seconds: event.wait(seconds))
        self._stop, self.samples = threading.Event(), list[Sample]()
        self._thread = threading.Thread(target=self._run, daemon=True, name="telemetry")

    def __enter__(self) -> Telemetry:
        if self._sensor is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._sensor is None:
            return
        self._thread.join()
        with self._file.open("a", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(asdict(sample))}\n" for sample in self.samples)

    def _run(self) -> None:
        assert self._sensor is not None
        while not self._stop.is_set():
            try:
                self.samples.append(self._sensor.read())
            except OSError:  # a GPU that has fallen off the bus answers no more
                return
            self._wait(self._stop, INTERVAL_S)
