"""Where the CUDA operators run. What they ask of their arrays the native side checks (csrc/bind/array.h)."""

from __future__ import annotations

import torch
from torch import Tensor

from swiftspec import _C


def use_current_device() -> None:
    """Makes torch's current GPU the native side's, which has a CUDA runtime of its own and with it, in each thread, an
    own idea of which GPU is meant. To be called before what has no `current_stream` among its arguments."""
    _C.use_cuda_device(torch.cuda.current_device())


def current_stream() -> int:
    """Torch's current stream on the current device, which is made the native side's."""
    use_current_device()
    return torch.cuda.current_stream().cuda_stream


def on_gpu(device: torch.device) -> bool:
    """Whether kernels run there."""
    return device.type == "cuda"


def native_cache(k: Tensor, v: Tensor) -> _C.CudaCache:
    """Keys and values [layers, S, G, capacity, hd] as the native side takes them: float8 by its bytes."""
    use_current_device()
    k, v = (part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part for part in (k, v))
    return _C.CudaCache(k, v)
