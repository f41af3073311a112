"""Size of the tree regions of an exact batch."""

from __future__ import annotations

from swiftspec.config import BatchConfig
from swiftspec.tree.mask import MASK_WIDTHS


def chain_region_slots(config: BatchConfig) -> int:
    """Returns the number of tree slots per group, a multiple of the widest mask window. A chain is committed to the
    prefix within two rounds."""
    widest = MASK_WIDTHS[-1]
    return -(-4 * config.shape.slots_per_round // widest) * widest
