"""Which GPUs the CUDA operators support, and the one-line message for the others."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swiftspec import _C
from swiftspec.backends.cuda import devices
from swiftspec.errors import UserError


class Machine:
    """A machine with one GPU, as torch and the extension report it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch
        self.native(cuda_built=True, cuda_archs=(90,), use_cuda_device=lambda _: None, cuda_device=dict)
        self.torch(
            is_available=lambda: True, current_device=lambda: 0, device=lambda _: nullcontext(),
            get_device_name=lambda _: "A GPU", get_device_capability=lambda _: (9, 0),
        )  # fmt: skip

    def native(self, **values: Any) -> None:
        for name, value in values.items():
            self.patch.setattr(_C, name, value, raising=False)

    def torch(self, **values: Any) -> None:
        for name, value in values.items():
            self.patch.setattr(torch.cuda, name, value)

    def refusal(self, device: str = "cuda:0") -> str:
        with pytest.raises(UserError) as error:
            devices.require_usable(device)
        assert "\n" not in str(error.value)
        return str(error.value)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_a_cpu_is_refused(machine: Machine) -> None:
    assert "need a GPU, not cpu" in machine.refusal("cpu")


def test_a_build_without_cuda_is_refused(machine: Machine) -> None:
    machine.native(cuda_built=False, build_info="CUDA kernels left out: nvcc not found")
    assert machine.refusal("cuda").startswith("CUDA kernels left out: nvcc not found; install")


@pytest.mark.parametrize(
    ("built", "driver", "message"),
    [(None, 0, "without CUDA"), ("13.0", 0, "no NVIDIA driver"), ("13.0", 13000, "no usable GPU"),
     ("13.0", 12040, "driver supports CUDA 12.4, but this PyTorch needs 13.0; install a newer driver, or a PyTorch"
                      " built for CUDA 12")],
)  # fmt: skip
def test_without_a_gpu_the_message_names_what_is_missing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, built: str | None, driver: int, message: str
) -> None:
    machine.torch(is_available=lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: driver, raising=False)
    assert message in machine.refusal()


@pytest.mark.parametrize(
    ("archs", "taken"),
    [
        ((90,), {(9, 0)}),
        ((86, 100), {(8, 6), (8, 7), (8, 9), (10, 0), (10, 3)}),
        ((80, 120), {(8, 0), (8, 6), (8, 7), (8, 9), (12, 0), (12, 1)}),
    ],
)
def test_a_gpu_runs_kernels_of_its_compute_capability_generation(
    machine: Machine, archs: tuple[int, ...], taken: set[tuple[int, int]]
) -> None:
    """A GPU runs code for an earlier GPU of its generation, but not for a later one."""
    machine.native(cuda_archs=archs)

    def found(*capability: int) -> Callable[[Any], tuple[int, ...]]:
        return lambda _: capability

    for capability in ((8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)):
        machine.torch(get_device_capability=found(*capability))
        if capability in taken:
            assert devices.require_usable("cuda") == torch.device("cuda", 0)
        else:
            major, minor = capability
            assert f"A GPU needs sm_{major}{minor}; reinstall swiftspec" in machine.refusal()


def test_a_gpu_that_is_too_old_is_refused(machine: Machine) -> None:
    machine.torch(get_device_capability=lambda _: (7, 5))
    assert "need compute capability 8.0 (Ampere) or more; A GPU has 7.5" in machine.refusal()


def test_a_driver_that_is_too_old_for_the_kernels_is_reported(machine: Machine) -> None:
    def refuse() -> None:
        raise RuntimeError("device: CUDA driver version is insufficient for CUDA runtime version")

    machine.native(cuda_device=refuse)
    assert machine.refusal() == (
        "the CUDA operators cannot use A GPU: device: CUDA driver version is insufficient for CUDA runtime version"
    )


class Driver:
    """The driver's library, which finds `gpus` GPUs or fails with `error`."""

    def __init__(self, gpus: int, error: int = 0) -> None:
        self.gpus, self.error = gpus, error

    def cuInit(self, flags: int) -> int:
        return self.error

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.gpus
        return 0


@pytest.mark.parametrize(
    ("driver", "told"),
    [(None, False), (Driver(2), True), (Driver(0), False), (Driver(0, 100), False), (Driver(0, 803), True)],
)
def test_an_unused_gpu_is_explained(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, driver: Driver | None, told: bool
) -> None:
    """If the driver finds one, or fails; not if there is no driver or CUDA_VISIBLE_DEVICES hides all GPUs."""

    def load(name: str) -> Driver:
        if driver is None:
            raise OSError(f"{name}: cannot open shared object file")
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 12040, raising=False)
    assert devices.why_gpu_unused() is None  # torch uses it
    machine.torch(is_available=lambda: False)
    why = devices.why_gpu_unused()
    assert (why is not None and "driver supports CUDA 12.4" in why) == told


def test_pci_addresses_are_written_as_linux_does(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, data = torch.device("cuda", 0), {"pci_domain_id": 0, "pci_bus_id": 0x3B, "pci_device_id": 0}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**data))
    assert devices.pci_address(gpu) == "0000:3b:00.0"
    del data["pci_domain_id"]  # an older torch
    assert devices.pci_address(gpu) is None
