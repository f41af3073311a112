"""Size of the tree regions of an exact batch, and the sampling parameters that sequence groups do not support."""

from __future__ import annotations

from swiftspec.config import BatchConfig
from swiftspec.errors import UserError
from swiftspec.params import SamplingParams
from swiftspec.tree.mask import MASK_WIDTHS


def chain_region_slots(config: BatchConfig) -> int:
    """Returns the number of tree slots per group, a multiple of the widest mask window. A chain is committed to the
    prefix within two rounds."""
    widest = MASK_WIDTHS[-1]
    return -(-4 * config.shape.slots_per_round // widest) * widest


def check_batch_sampling(sampling: SamplingParams) -> None:
    """Raises UserError for sampling parameters that an exact batch does not support."""
    check_group_sampling(sampling, "with max_num_seqs above 1", "use max_num_seqs 1")


def check_group_sampling(sampling: SamplingParams, where: str, instead: str) -> None:
    """Raises UserError for sampling parameters that no sequence group supports. `where`, `instead`: the setting that
    excludes them, and what to use instead, for the message."""
    if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
        raise UserError(f"log-probabilities are not supported {where}; remove them, or {instead}")
    if sampling.verify_batch is not None or sampling.draft_steps is not None:
        raise UserError(f"verify_batch and draft_steps are not supported {where}; remove them, or {instead}")
    if sampling.grammar is not None:
        raise UserError(f"grammars are not supported {where}; remove the grammar, or {instead}")
    if sampling.bad_sequences:
        raise UserError(f"bad words of several tokens are not supported {where}; remove them, or {instead}")
