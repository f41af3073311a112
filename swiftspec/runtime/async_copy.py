"""Asynchronous copies from device to host. The host waits only when it reads a copy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable

import torch
from numpy.typing import NDArray
from torch import Tensor


class HostCopies:
    """Copies of device tensors in host memory. A copy that has been read is used again for the next tensor of the same
    shape, dtype and device, because allocating pinned memory takes the host longer than waiting for a short copy."""

    def __init__(self) -> None:
        self._unused = defaultdict[Hashable, list[AsyncCopy]](list)

    def start(self, tensor: Tensor) -> AsyncCopy:
        """Starts a copy of a tensor, on a CUDA device on the current stream."""
        unused = self._unused[tensor.shape, tensor.dtype, tensor.device]
        copy = unused.pop() if unused else AsyncCopy(tensor, unused)
        copy.start(tensor)
        return copy


class AsyncCopy:
    """A copy of a tensor in host memory. A copy from a CUDA device is asynchronous; `read` waits for it."""

    def __init__(self, like: Tensor, unused: list[AsyncCopy]) -> None:
        """`unused`: receives the copy when it has been read."""
        on_gpu = like.device.type == "cuda"
        self._buffer, self._unused = torch.empty_like(like, device="cpu", pin_memory=on_gpu), unused
        self._event = torch.cuda.Event() if on_gpu else None

    def start(self, tensor: Tensor) -> None:
        """Starts the copy of a tensor of the same shape, dtype and device."""
        self._buffer.copy_(tensor, non_blocking=True)
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(tensor.device))  # the stream of the copy

    def read(self) -> NDArray:
        """Waits for the copy and returns what it holds. Must be called once."""
        if self._event is not None:
            self._event.synchronize()
        values = self._buffer.numpy().copy()
        self._unused.append(self)
        return values
