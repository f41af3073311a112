"""Device and stream of the CUDA operators. The native side checks their array arguments (csrc/bind/array.h)."""

from __future__ import annotations

import torch
from torch import Tensor

from swiftspec import _C


def use_current_device() -> None:
    """Makes torch's current GPU the current device of the native extension, which has its own CUDA runtime and with it
    its own current device per thread. Call it before native functions that do not take a `current_stream()`."""
    _C.use_cuda_device(torch.cuda.current_device())


def current_stream() -> int:
    """Torch's current stream; also makes torch's current GPU the native extension's."""
    use_current_device()
    return torch.cuda.current_stream().cuda_stream


def on_gpu(device: torch.device) -> bool:
    """Whether the device is a GPU."""
    return device.type == "cuda"


def native_cache(k: Tensor, v: Tensor) -> _C.CudaCache:
    """Wraps keys and values [layers, S, G, capacity, hd] for the native extension; float8 is passed as uint8."""
    use_current_device()
    k, v = (part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part for part in (k, v))
    return _C.CudaCache(k, v)
