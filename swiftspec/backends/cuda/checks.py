"""What the CUDA operators ask of their tensors, and the stream that they run on."""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes that the kernels read at a time


def current_stream() -> int:
    """Torch's current stream on the current device."""
    return torch.cuda.current_stream().cuda_stream


def check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> int:
    """The tensor's address. ValueError, one line, for what a kernel would read wrongly."""
    if tensor.dtype != dtype or tensor.shape != shape:
        raise ValueError(f"{name} must be {dtype} {list(shape)}, not {tensor.dtype} {list(tensor.shape)}")
    if tensor.device != device or not on_gpu(device):
        wanted = device if on_gpu(device) else "a GPU"
        raise ValueError(f"{name} lies on {tensor.device}, the CUDA operators want it on {wanted}")
    if device.index != torch.cuda.current_device():
        raise ValueError(f"{name} lies on {device}, the current device is cuda:{torch.cuda.current_device()}")
    address = tensor.data_ptr()
    if not tensor.is_contiguous() or (dtype == torch.bfloat16 and address % ALIGNMENT):
        raise ValueError(f"{name} must be contiguous, and aligned to {ALIGNMENT} bytes if bfloat16")
    return address


def on_gpu(device: torch.device) -> bool:
    """Whether kernels run there."""
    return device.type == "cuda"
