"""Leaves the rank group of a benchmark."""

from __future__ import annotations

import os
import sys

import torch

from swiftspec.distributed.collectives.join import RankGroup
from swiftspec.distributed.collectives.leave import leave_group


def leave(group: RankGroup, device: torch.device) -> None:
    """Leaves the group. If that takes too long, exits without the interpreter's shutdown, which would wait as well."""
    if leave_group(group, device, lambda: None, lost=False) is not None:
        sys.stdout.flush()
        os._exit(0)
