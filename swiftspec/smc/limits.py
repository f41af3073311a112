"""Size limits of a population, and the sampling parameters that sequence groups do not support."""

from __future__ import annotations

from swiftspec.config import PopulationConfig
from swiftspec.errors import UserError
from swiftspec.params import SamplingParams
from swiftspec.tree.mask import MASK_WIDTHS

MAX_REGION_SLOTS = 32768  # maximum number of tree slots of all groups together


def region_slots(config: PopulationConfig, context: int) -> int:
    """Returns the number of tree slots per group: enough for N texts of `context` tokens, but at most the group's share
    of MAX_REGION_SLOTS; a multiple of the widest mask window. Raises UserError if that share does not hold two
    rounds."""
    widest, groups = MASK_WIDTHS[-1], config.smc_groups
    if config.chains is not None:  # a chain is committed to the prefix within two rounds
        return -(-4 * config.slots_per_round // widest) * widest
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


def check_sampling(sampling: SamplingParams, chains: bool = False) -> None:
    """Raises UserError for sampling parameters that sequence groups do not support. `chains`: True for exact batching,
    with one verified chain per group; False for mode smc."""
    where, instead = (
        ("with max_num_seqs above 1", "use max_num_seqs 1") if chains else ("in mode smc", "use mode serial")
    )
    if sampling.greedy and not chains:
        raise UserError("temperature 0 is not supported in mode smc; raise it, or use mode serial")
    if sampling.guided:
        raise UserError(f"guidance is not supported {where}; set guidance_scale to 1, or {instead}")
    if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
        raise UserError(f"log-probabilities are not supported {where}; remove them, or {instead}")
    if sampling.verify_batch is not None or sampling.draft_steps is not None:
        raise UserError(f"verify_batch and draft_steps are not supported {where}; remove them, or {instead}")
    if sampling.grammar is not None:
        raise UserError(f"grammars are not supported {where}; remove the grammar, or {instead}")
