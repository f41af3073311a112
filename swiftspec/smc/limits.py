"""Size limits of a population, and the sampling parameters that mode smc does not support."""

from __future__ import annotations

from swiftspec.batching.limits import check_group_sampling
from swiftspec.config import PopulationConfig
from swiftspec.errors import UserError
from swiftspec.params import SamplingParams
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
    return -(-min(config.particles * context + 2 * config.shape.slots_per_round, share) // widest) * widest


def check_particle_sampling(sampling: SamplingParams) -> None:
    """Raises UserError for sampling parameters that mode smc does not support."""
    where, instead = "in mode smc", "use mode serial"
    if sampling.greedy:
        raise UserError(f"temperature 0 is not supported {where}; raise it, or {instead}")
    if sampling.guided:
        raise UserError(f"guidance is not supported {where}; set guidance_scale to 1, or {instead}")
    check_group_sampling(sampling, where, instead)
