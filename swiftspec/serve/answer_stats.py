"""What one answer cost, as one JSON object: our fields, llama.cpp's `timings`, vLLM's `metrics`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from swiftspec.config import EngineConfig
from swiftspec.observe.acceptance import Acceptance
from swiftspec.params import SamplingParams

if TYPE_CHECKING:
    from swiftspec.distributed.draft.failover import Outage
    from swiftspec.engine import Stats

Json = dict[str, Any]


def answer_summary(
    *, model: str, draft_model: str | None, plan: EngineConfig, stats: Stats, text: str, token_ids: Sequence[int],
    prompt_token_ids: Sequence[int], finish_reason: str, sampling: SamplingParams, load_time: float,
    outages: Sequence[Outage] = (),
) -> Json:  # fmt: skip
    """The object that --json prints. `finish_reason`: stop, length, or abort after Ctrl-C. No number is NaN or inf."""
    return {
        "model": model,
        "draft_model": draft_model,
        "text": text,
        "token_ids": list(token_ids),
        "prompt_token_ids": list(prompt_token_ids),
        "finish_reason": finish_reason,
        "usage": {
            "prompt_tokens": len(prompt_token_ids),
            "completion_tokens": len(token_ids),
            "total_tokens": len(prompt_token_ids) + len(token_ids),
        },
        "timings": timings(stats, len(token_ids), load_time),
        "metrics": metrics(plan.for_request(sampling), stats, len(token_ids), outages),
        **({"guidance": guidance_stats(sampling)} if sampling.guided else {}),
        **(population_stats(plan, stats) if plan.mode == "smc" else {}),
    }


def guidance_stats(sampling: SamplingParams) -> Json:
    """The scale, and the negative prompt as it was read; without a token the prompt's last one stands in."""
    negative = list(sampling.negative_prompt_ids)
    return {"guidance_scale": sampling.guidance_scale, "negative_prompt_token_ids": negative}


def population_stats(plan: EngineConfig, stats: Stats) -> Json:
    """What a weighted population says of itself: that its text is not exactly the target's, and how far it was from
    falling apart. `log_z`: the estimate of log of the sum of p^alpha over all texts, which for power 1 is truly 0."""
    end = stats.population
    return {
        "exact": False,
        "particles": plan.population.particles,
        "ess_mean": end and end.ess_mean,
        "resample_rate": end and end.resample_rate,
        "log_z": end and end.log_z,
        "coalesced_prefix": end and end.coalesced_prefix,
        "cache_full": end and end.full,
    }


def timings(stats: Stats, tokens: int, load_time: float) -> Json:
    """llama.cpp's names, and what loading the models took. Times in milliseconds. Of the prompt, cache_n tokens were
    kept from earlier requests and prompt_n were read. No draft_n where nothing is accepted or rejected."""
    accepted = {"draft_n": stats.drafted, "draft_n_accepted": stats.accepted} if stats.population is None else {}
    return {
        "load_ms": _ms(load_time),
        "cache_n": stats.cached_tokens,
        "prompt_n": stats.prompt_tokens - stats.cached_tokens,
        "prompt_ms": _ms(stats.prompt_time),
        "predicted_n": tokens,
        "predicted_ms": _ms(stats.decode_time),
        "predicted_per_second": _share(tokens, stats.decode_time),
        **accepted,
    }


def metrics(plan: EngineConfig, stats: Stats, tokens: int, outages: Sequence[Outage] = ()) -> Json:
    """vLLM's shape, and ours from `mode` on. `plan`: for this request. Acceptance counts whole rounds, so a stop inside
    the last round leaves it as it was. `target_busy`, `draft_busy`: the share of the decode time in the forwards of
    each; together they may come to more than 1, as the draft of mode async runs beside the target. `outages`: when the
    draft group was away."""
    return {
        "time_to_first_token_ms": _ms(stats.first_token_time),
        "generation_time_ms": _ms(stats.decode_time),
        "tokens_per_second": _share(tokens, stats.decode_time),
        "speculative_decoding": speculation_stats(plan, stats),
        "mode": plan.mode,
        "split": {"target_tp": plan.target_tp, "draft_tp": plan.draft_tp},
        "target_busy": min(_share(stats.target_busy_time, stats.decode_time), 1.0),
        "draft_busy": min(_share(stats.draft_busy_time, stats.decode_time), 1.0),
        "drafter_lost": stats.drafter_lost,
        "draft_outages": [outage_record(each) for each in outages],
        **final_round_shape(plan, stats),
        "policy": policy_stats(stats),
    }


def final_round_shape(plan: EngineConfig, stats: Stats) -> Json:
    """bs and d in force at the end; 1 and 0 where the draft was not asked, null in mode smc."""
    if plan.mode == "smc":
        return {"verify_batch": None, "draft_steps": None}
    if plan.mode == "ar" or plan.verify_batch == 1:
        return {"verify_batch": 1, "draft_steps": 0}
    found = stats.policy
    bs, d = (plan.verify_batch, plan.initial_draft_steps) if found is None else (found.nodes, found.steps)
    return {"verify_batch": bs, "draft_steps": d}


def outage_record(away: Outage) -> Json:
    """Why the draft group was away, and when, in seconds since the request began; `to_s` is null while it is still."""
    until = None if away.until is None else round(away.until, 3)
    return {"reason": away.reason, "from_s": round(away.since, 3), "to_s": until}


def speculation_stats(plan: EngineConfig, stats: Stats) -> Json | None:
    """Always: sum(histogram) = steps, sum(j * histogram[j]) = accepted tokens. None where nothing is accepted or
    rejected.

    By depth (`per_pos`, vLLM's word, counted from 1) and by the rank of a child among its siblings: how many tokens
    were accepted, and how many chances there were. Where children are drawn and verified by rejection, the first one's
    share of its chances is to come to the mean of 1 - TV(p, q), which `expected` gives. What a round must give to be
    worth its time, and the speedup over plain decoding that this means, are known once plain rounds were measured.
    """
    if plan.mode == "smc":
        return None
    most = 0 if plan.mode == "ar" else plan.verify_batch - 1
    seen, times = Acceptance.from_rounds(stats.verified), stats.policy
    return {
        "mean_acceptance_length": mean_acceptance_length(stats),
        "draft_acceptance_rate": _share(stats.accepted, stats.drafted),
        "num_spec_steps": stats.rounds,
        "num_draft_tokens": stats.drafted,
        "num_accepted_draft_tokens": stats.accepted,
        "num_spec_tokens": most,
        "acceptance_histogram": _padded(seen.histogram, most + 1),
        "num_accepted_tokens_per_pos": _padded(seen.accepted_at_depth, most),
        "num_chances_per_pos": _padded(seen.tried_at_depth, most),
        "num_accepted_tokens_per_child": _padded(seen.accepted_child, most),
        "num_chances_per_child": _padded(seen.tried_child, most),
        "expected_first_child_acceptance_rate": seen.expected_rate,
        "break_even_acceptance_length": times and times.break_even,
        "speedup_over_plain": times and times.speedup,
    }


def policy_stats(stats: Stats) -> Json | None:
    """d and bs in use at the end, and from which round on how many expansions and nodes were decided for."""
    found = stats.policy
    if found is None:
        return None
    changes = [{"round": at, "draft_steps": d.steps, "verify_batch": d.nodes} for at, d in found.changes]
    times = {"tree_round_ms": found.tree_round, "plain_round_ms": found.plain_round}
    shown = {name: None if seconds is None else _ms(seconds) for name, seconds in times.items()}
    shape = {"draft_steps": found.steps, "verify_batch": found.nodes}
    return {**shape, "plain_rounds": found.ar_rounds, "changes": changes, **shown}


def mean_acceptance_length(stats: Stats) -> float:
    """Tokens per target forward, the bonus token counted; 0 before the first round."""
    if stats.population is not None:
        return stats.tokens / max(stats.rounds, 1)
    return 1 + stats.accepted / stats.rounds if stats.rounds else 0.0


def summary_line(stats: Stats, tokens: int) -> str:
    """`312 tok, 348 tok/s, TTFT 41 ms, 3.4 tok/round`."""
    parts = [
        f"{tokens} tok",
        format_speed(_share(tokens, stats.decode_time)),
        f"TTFT {stats.first_token_time * 1e3:.0f} ms",
        f"{mean_acceptance_length(stats):.1f} tok/round",
    ]
    if stats.cached_tokens:
        parts.append(f"{stats.cached_tokens} of {stats.prompt_tokens} prompt tokens kept")
    if stats.policy is not None and stats.policy.ar_rounds:
        parts.append(f"{stats.policy.ar_rounds} of {stats.rounds} rounds without the draft")
    if stats.policy is not None and stats.policy.changes:
        parts.append(f"now d {stats.policy.steps}, bs {stats.policy.nodes}")
    if stats.population is not None:
        parts.append("approximate")
        if stats.population.full:
            parts.append("ended because the cache holds no further round of so many unlike particles")
    if stats.drafter_lost is not None:
        parts.append(f"the drafter was lost ({stats.drafter_lost}), the target went on alone")
    return ", ".join(parts)


def format_speed(value: float) -> str:
    """`348 tok/s`, `2.5 tok/s`."""
    return f"{value:.0f} tok/s" if value >= 10 else f"{value:.2g} tok/s"


def _padded(counts: list[int], length: int) -> list[int]:
    return counts + [0] * (length - len(counts))


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _share(part: float, whole: float) -> float:
    """part / whole, 0 where that is no number."""
    value = part / whole if whole > 0 else 0.0
    return value if math.isfinite(value) else 0.0
