"""Asynchronous copies from device to host. The host waits only when it reads a copy."""

from __future__ import annotations

import torch
from numpy.typing import NDArray
from torch import Tensor


class AsyncCopy:
    """A copy of a tensor in host memory. A copy from a CUDA device is asynchronous; `read` waits for it."""

    def __init__(self, tensor: Tensor) -> None:
        pinned = tensor.device.type == "cuda"
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned).copy_(tensor, non_blocking=True)
        self._event: torch.cuda.Event | None = None
        if pinned:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))  # the stream of the copy

    def read(self) -> NDArray:
        if self._event is not None:
            self._event.synchronize()
        return self._copy.numpy()
