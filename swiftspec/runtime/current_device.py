"""The current CUDA device, which is a property of a thread."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_NO_DEVICE = nullcontext()


def set_current_device(device: torch.device) -> None:
    """Makes a GPU the current device of the calling thread; does nothing for a CPU.

    Every thread that uses a GPU calls this first. A new thread begins with GPU 0, while streams, events, graphs and the
    native operators belong to the current device, whatever the device of their tensors is. `device`: with an index.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Returns a context manager within which a GPU is the current device of the calling thread; no-op for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else _NO_DEVICE
