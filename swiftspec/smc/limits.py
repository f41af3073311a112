"""Size limits of a population."""

from __future__ import annotations

from swiftspec.config import PopulationConfig
from swiftspec.errors import UserError
from swiftspec.tree.mask import MASK_WIDTHS

MAX_REGION_SLOTS = 32768  # maximum number of tree slots of all groups together


def particle_region_slots(config: PopulationConfig, context: int) -> int:
    """Returns the number of tree slots per group: enough for N texts of `context` tokens, but at most the group's share
    of MAX_REGION_SLOTS; a multiple of the widest mask window. Raises UserError if that share does not hold two
    rounds."""
    widest, groups = MASK_WIDTHS[-1], config.smc_groups
    share = MAX_REGION_SLOTS // groups // widest * widest
    most = max(share - 1, 0) // (2 * (config.smc_draft_tokens + 1))
    if config.particles > most:
        of = "" if groups == 1 else f" in each of {groups} groups"
        fewer = "" if groups == 1 else "fewer --smc-groups"
        fix = " or ".join(filter(None, (f"at most {most} particles" if most > 0 else "", fewer)))
        raise UserError(
            f"{config.particles} particles with {config.smc_draft_tokens} draft tokens{of} do not fit the cache of"
            f" {MAX_REGION_SLOTS} slots: use {fix}"
        )
    return -(-min(config.particles * context + 2 * config.slots_per_round, share) // widest) * widest
