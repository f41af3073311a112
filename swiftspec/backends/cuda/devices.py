"""Checks whether the CUDA operators can run on a GPU, and explains in one line why not. Also identifies GPUs."""

from __future__ import annotations

import ctypes
import hashlib
from contextlib import suppress
from pathlib import Path

import torch

from swiftspec import _C, __version__
from swiftspec.errors import UserError, is_out_of_memory

DRIVER_FILE = Path("/proc/driver/nvidia/version")
MIN_COMPUTE_CAPABILITY = (8, 0)  # Ampere
DRIVER_LIBRARY = "libcuda.so.1"
CUDA_ERRORS_WITHOUT_GPU = (34, 100)  # CUresult: the library is the toolkit's stub; the driver finds no GPU
FULL_BYTES = 1 << 28  # free memory below which a failed capture is attributed to a lack of it; a guess
# How torch begins its messages about a failed device, and how the CUDA runtime describes faults of kernels; the native
# extension reports the latter without the former
DEVICE_ERRORS = (
    "CUDA error", "illegal memory access", "launch failure", "misaligned address", "illegal instruction",
    "launch timed out", "hardware stack error", "invalid program counter", "not supported on global/shared",
    "device-side assert",
)  # fmt: skip


def require_usable(device: torch.device | str) -> torch.device:
    """Returns `device` with an explicit index. Raises UserError with the reason if the CUDA operators cannot run on
    it."""
    device = torch.device(device)
    if device.type != "cuda":
        raise UserError(f"the CUDA operators need a GPU, not {device}")
    if not _C.cuda_built:
        raise UserError(f"{_C.build_info}; install swiftspec on a machine with nvcc to run on {device}")
    if not torch.cuda.is_available():
        raise UserError(f"no usable NVIDIA GPU: {why_no_gpu()}")
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    if (major, minor) < MIN_COMPUTE_CAPABILITY:
        raise UserError(f"the CUDA operators need compute capability 8.0 (Ampere) or more; {name} has {major}.{minor}")
    if not any(arch // 10 == major and arch % 10 <= minor for arch in _C.cuda_archs):
        built = ", ".join(f"sm_{arch}" for arch in _C.cuda_archs)
        raise UserError(
            f"the CUDA operators were built for {built}, but {name} needs sm_{major}{minor}; reinstall swiftspec on"
            " this machine, or with SWIFTSPEC_CUDA_ARCHS=all"
        )
    with torch.cuda.device(device):
        try:
            _C.use_cuda_device(device.index)
            _C.cuda_device()
        except RuntimeError as error:  # for example the driver is too old or the GPU partition too small
            raise UserError(f"the CUDA operators cannot use {name}: {error}") from None
    return device


def build_info() -> str:
    """Returns in one line which GPUs the extension was built for, or why it was built without CUDA."""
    return str(_C.build_info)


def driver_version() -> str | None:
    """Returns the CUDA version that the NVIDIA driver supports, such as "12.8"; None without a driver."""
    driver = int(getattr(torch._C, "_cuda_getDriverVersion", int)())
    return f"{driver // 1000}.{driver % 1000 // 10}" if driver else None


def machine_facts(device: torch.device) -> dict[str, str | None]:
    """Returns everything outside of the models that decides whether the CUDA operators work on a GPU, serialisable as
    JSON: the contents of the native extension, the GPU itself and not only its model, its driver and torch."""
    assert _C.__file__ is not None
    with Path(_C.__file__).open("rb") as extension:
        digest = hashlib.file_digest(extension, "sha256").hexdigest()
    return {
        "version": __version__,
        "extension": digest,
        "gpu": torch.cuda.get_device_name(device),
        "uuid": gpu_uuid(device),
        "driver": _driver_build() or driver_version(),
        "torch": torch.__version__,
    }


def _driver_build() -> str | None:
    """Returns the line with the version of the NVIDIA driver; None if the kernel does not report it."""
    with suppress(OSError):
        return DRIVER_FILE.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    return None


def why_no_gpu() -> str:
    """Returns in one line why torch finds no GPU and how to fix it."""
    if torch.version.cuda is None:
        return "this PyTorch was built without CUDA; install a CUDA build"
    driver = int(getattr(torch._C, "_cuda_getDriverVersion", int)())  # 12080 for CUDA 12.8; 0 without a driver
    needed = torch.version.cuda
    if 0 < driver // 1000 < int(needed.partition(".")[0]):
        has = f"{driver // 1000}.{driver % 1000 // 10}"
        return (
            f"the NVIDIA driver supports CUDA {has}, but this PyTorch needs {needed}; install a newer driver, or a"
            f" PyTorch built for CUDA {has.partition('.')[0]}"
        )
    return "no NVIDIA driver is installed" if driver == 0 else "the driver reports no usable GPU"


def why_gpu_unused() -> str | None:
    """Returns why torch cannot use the GPU of this machine, in one line; None if it can, or if the driver shows this
    process no GPU."""
    return why_no_gpu() if not torch.cuda.is_available() and _driver_shows_gpu() else None


def _driver_shows_gpu() -> bool:
    """Returns whether the NVIDIA driver itself, without torch, finds a GPU or fails at it. False without a driver, and
    if CUDA_VISIBLE_DEVICES hides all GPUs."""
    try:
        driver = ctypes.CDLL(DRIVER_LIBRARY)
    except OSError:
        return False
    error = driver.cuInit(0)
    if error != 0:
        return error not in CUDA_ERRORS_WITHOUT_GPU
    count = ctypes.c_int()
    return driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value > 0


def gpu_uuid(device: torch.device) -> str | None:
    """Returns the UUID of a GPU, the same in all processes; None for a CPU."""
    return None if device.type != "cuda" else str(torch.cuda.get_device_properties(device).uuid)


def pci_address(device: torch.device) -> str | None:
    """Returns the PCI address of a GPU as Linux writes it, such as "0000:3b:00.0"; None if torch does not report it."""
    data = torch.cuda.get_device_properties(device)
    numbers = [getattr(data, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if not all(isinstance(number, int) for number in numbers):
        return None
    domain, bus, slot = numbers
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def is_device_error(error: BaseException) -> bool:
    """Returns whether an exception reports that a kernel has failed, after which this process cannot use its GPU any
    more. Exhausted memory is not such an error, in whatever words CUDA, cuBLAS or a capture report it."""
    if not isinstance(error, RuntimeError) or not any(part in str(error) for part in DEVICE_ERRORS):
        return False
    return not is_out_of_gpu_memory(error)


def is_out_of_gpu_memory(error: BaseException) -> bool:
    """Returns whether an error reports that memory ran out, also in the capture of a CUDA graph: CUDA may then report
    that the capture was invalidated, and not why, so such an error counts if the current GPU has hardly any memory
    left."""
    if is_out_of_memory(error):
        return True
    if "capture" not in str(error) or not torch.cuda.is_available():
        return False
    try:
        return torch.cuda.mem_get_info()[0] < FULL_BYTES
    except RuntimeError:  # a GPU that has failed answers nothing
        return False
