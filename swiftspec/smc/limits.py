"""Size limits of a population."""

from __future__ import annotations

from swiftspec.config import PopulationConfig
from swiftspec.tree.mask import MASK_WIDTHS

DEFAULT_REGION_SLOTS = 32768  # tree slots of all groups together where memory does not determine them


def particle_region_slots(config: PopulationConfig, context: int, limit: int = DEFAULT_REGION_SLOTS) -> int:
    """Returns the number of tree slots per group: enough for N different texts of `context` tokens, but at most the
    group's share of `limit`, and at least two rounds; a multiple of the widest mask window. `limit`: tree slots of all
    groups together."""
    widest, two_rounds = MASK_WIDTHS[-1], 2 * config.slots_per_round
    share = max(limit // config.smc_groups // widest * widest, two_rounds)
    return -(-min(config.particles * context + two_rounds, share) // widest) * widest
