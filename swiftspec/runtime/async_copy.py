"""What the device has found, on its way to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class AsyncCopy:
    """One copy into pinned memory and an event behind it: the host waits for that alone, when it reads."""

    def __init__(self, tensor: Tensor) -> None:
        pinned = tensor.device.type == "cuda"
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned).copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event() if pinned else None
        if self._event is not None:
            self._event.record()

    def read(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._copy
