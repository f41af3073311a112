"""Number of ranks that a command starts, and advice on a plan."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from swiftspec.config import EngineConfig
from swiftspec.params import SamplingParams
from swiftspec.settings_schema import require

MAX_LOCAL_RANKS = 64  # ranks that a command starts itself, without a launcher


def requested_ranks(
    mode: str | None,
    target_tp: int | None,
    draft_tp: int | None,
    *,
    has_draft: bool,
    runs_on_gpu: Callable[[], bool] = lambda: False,
) -> int:
    """Returns the number of ranks that --target-tp and --draft-tp request, for a command that no launcher has started.
    Raises UserError if it exceeds MAX_LOCAL_RANKS.

    `has_draft`: a draft model is given, or used by default. `runs_on_gpu`: returns whether the models run on a GPU, so
    that one rank can run both; called only if the number of ranks depends on it.
    """
    ranks = target_tp or 1
    if mode is None and has_draft and (ranks > 1 or draft_tp):
        mode = "async"
    if mode == "async" and (target_tp, draft_tp) != (None, None):
        one_gpu = ranks == 1 and draft_tp is None and runs_on_gpu()
        ranks += draft_tp if draft_tp is not None else 0 if one_gpu else 1
    require(
        ranks <= MAX_LOCAL_RANKS,
        f"{ranks} ranks exceed the limit of {MAX_LOCAL_RANKS} per command: start them with torchrun",
    )
    return ranks


def synthetic_advice(plan: EngineConfig) -> str | None:
    """Returns a warning that answers are not the target's, and what prevents rounds from being as long as requested;
    None without synthetic acceptance."""
    length = plan.synthetic_acceptance_length
    if length is None:
        return None
    warning = f"synthetic acceptance length {length:g}: answers are not the target's; compare speeds only"
    needed = ceil(length) - 1  # depth of the deepest node that a round accepts
    if plan.mode == "serial" and plan.has_draft_model and needed > plan.initial_draft_steps:
        warning += (
            f". Proposals are seldom deeper than draft_steps {plan.initial_draft_steps}, and rounds shorter: raise it"
            f" to {needed}"
        )
    return warning


def acceptance_advice(plan: EngineConfig, sampling: SamplingParams) -> str | None:
    """Returns advice if the draft's children are selected without the noise with which the target samples, which lowers
    the acceptance rate; else None."""
    synthetic = plan.synthetic_acceptance_length is not None
    if plan.mode in ("ar", "smc") or plan.drafts_without_model or sampling.greedy or synthetic:
        return None
    if plan.proposal == "top":
        return "proposal top does not use the target's noise: proposal coupled has a higher acceptance rate"
    if plan.proposal == "sample" and plan.verify == "match":
        return "draft and target use independent noise: verify reject or proposal coupled has a higher acceptance rate"
    return None
