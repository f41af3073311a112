"""Where the CUDA operators run. What they ask of their arrays the native side checks (csrc/bind/array.h)."""

from __future__ import annotations

import torch


def current_stream() -> int:
    """Torch's current stream on the current device."""
    return torch.cuda.current_stream().cuda_stream


def on_gpu(device: torch.device) -> bool:
    """Whether kernels run there."""
    return device.type == "cuda"
