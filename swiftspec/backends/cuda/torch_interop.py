"""Passes torch's current device and stream, and KV caches, to the native CUDA operators. These check their array
arguments (csrc/bind/array.h)."""

from __future__ import annotations

import torch
from torch import Tensor

from swiftspec import _C


def use_current_device() -> None:
    """Makes torch's current GPU the current device of the native extension, which has its own CUDA runtime and with it
    its own current device per thread. Call it before native functions that do not take a `current_stream()`."""
    _C.use_cuda_device(torch.cuda.current_device())


def current_stream() -> int:
    """Returns the cudaStream_t of torch's current stream; also calls `use_current_device`."""
    use_current_device()
    return torch.cuda.current_stream().cuda_stream


def on_gpu(device: torch.device) -> bool:
    """Returns whether the device is a GPU."""
    return device.type == "cuda"


def native_cache(k: Tensor, v: Tensor) -> _C.CudaCache:
    """Wraps keys and values [layers, sequences, kv_heads, capacity, head_dim] for the native extension; float8 is
    passed as uint8."""
    use_current_device()
    k, v = (part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part for part in (k, v))
    return _C.CudaCache(k, v)
