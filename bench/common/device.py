"""Flag --device of the benchmarks."""

from __future__ import annotations

import argparse

import torch

from swiftspec.builder.hardware import DEVICE_TYPES, resolve_device
from swiftspec.errors import UserError


def add_device_flag(parser: argparse.ArgumentParser) -> None:
    """Adds --device, by default cpu, so that figures of a machine with a GPU stay comparable with the recorded ones."""
    parser.add_argument("--device", choices=DEVICE_TYPES, default="cpu", help="default: cpu")


def check_device(parser: argparse.ArgumentParser, device: str, gpus: int = 1) -> None:
    """Exits with a one-line message if the device is not available. `gpus`: number of GPUs that the ranks need."""
    try:
        resolve_device(device)
    except UserError as error:
        parser.error(str(error))
    if device == "cuda" and torch.cuda.device_count() < gpus:
        parser.error(f"--device cuda requires {gpus} GPUs, one for each rank, not {torch.cuda.device_count()}")
