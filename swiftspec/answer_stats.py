"""Statistics of one answer as JSON: own fields, `timings` as in llama.cpp, and `metrics` as in vLLM."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from swiftspec.config import EngineConfig
from swiftspec.messages import VerifiedRound, cut_rounds
from swiftspec.observe.acceptance_stats import Acceptance
from swiftspec.params import SamplingParams

if TYPE_CHECKING:
    from swiftspec.distributed.remote.failover import Outage
    from swiftspec.engine import Stats

Json = dict[str, Any]
DECIMALS = 3  # of the numbers in JSON


def answer_summary(
    *,
    model: str,
    draft_model: str | None,
    plan: EngineConfig,
    stats: Stats,
    text: str,
    token_ids: Sequence[int],
    prompt_token_ids: Sequence[int],
    finish_reason: str,
    sampling: SamplingParams,
    load_time: float,
) -> Json:
    """Returns the object that --json prints. All numbers in it are finite.

    `finish_reason`: "stop", "length", or "abort" after Ctrl-C. `load_time`: seconds that loading the models took.
    """
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
        "metrics": metrics(plan.for_request(sampling), stats, len(token_ids)),
        **({"guidance": guidance_stats(sampling)} if sampling.guided else {}),
        **synthetic_stats(stats),
        **(population_stats(plan, stats) if plan.mode == "smc" else {}),
    }


def guidance_stats(sampling: SamplingParams) -> Json:
    """Returns the guidance scale and the tokens of the negative prompt. If these are empty, guidance has used the last
    token of the prompt as the negative prompt."""
    negative = list(sampling.negative_prompt_ids)
    return {"guidance_scale": sampling.guidance_scale, "negative_prompt_token_ids": negative}


def synthetic_stats(stats: Stats) -> Json:
    """Returns the fields that mark an answer with synthetic acceptance, whose text is not the target's; {} for other
    answers. `synthetic_acceptance_length` is the setting; `mean_acceptance_length` of the metrics is what was
    reached."""
    length = stats.synthetic_acceptance_length
    return {} if length is None else {"exact": False, "synthetic_acceptance_length": length}


def synthetic_note(stats: Stats) -> str | None:
    """Returns a clause that marks an answer with synthetic acceptance; None for other answers."""
    length = stats.synthetic_acceptance_length
    return None if length is None else f"synthetic acceptance length {length:g}: the text is not the target's"


def population_stats(plan: EngineConfig, stats: Stats) -> Json:
    """Returns the statistics of the particles in mode smc, whose text is approximate. They are null if the request
    ended without a result.

    `log_z` is an estimate of log(sum over all texts of p(text)^A), where A is the setting `power`. For A = 1 the exact
    value is 0.
    """
    end = stats.population
    return {
        "exact": False,
        "particles": plan.population.particles,
        "ess_mean": end and _rounded(end.ess_mean),
        "resample_rate": end and _rounded(end.resample_rate),
        "log_z": end and _rounded(end.log_z),
        "coalesced_prefix": end and end.coalesced_prefix,
        "cache_full": end and end.full,
    }


def timings(stats: Stats, tokens: int, load_time: float) -> Json:
    """Returns times in milliseconds and token counts under llama.cpp's names, and `load_ms`, the time to load the
    models.

    Of the prompt's tokens, `cache_n` came from the prefix cache and `prompt_n` were prefilled. The fields `draft_n` and
    `draft_n_accepted` are absent in mode smc, which accepts and rejects nothing.
    """
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


def metrics(plan: EngineConfig, stats: Stats, tokens: int) -> Json:
    """Returns metrics under vLLM's names; the fields from `mode` on are SwiftSpec's own.

    Acceptance statistics count output tokens only, so that tokens = rounds + accepted tokens, even if the answer ends
    within the last round. `target_busy` and `draft_busy` are the shares of the decode time in the forwards of each
    model; their sum can exceed 1, because in mode async they run concurrently.

    `plan`: the configuration for this request. `tokens`: output tokens.
    """
    return {
        "time_to_first_token_ms": _ms(stats.first_token_time),
        "generation_time_ms": _ms(stats.decode_time),
        **_mean_itl(stats, tokens),
        "tokens_per_second": _share(tokens, stats.decode_time),
        "graph_captures": stats.graph_captures,
        "speculative_decoding": speculation_stats(plan, stats),
        "mode": plan.mode,
        "split": {"target_tp": plan.target_tp, "draft_tp": plan.draft_tp},
        "target_busy": min(_share(stats.target_busy_time, stats.decode_time), 1.0),
        "draft_busy": min(_share(stats.draft_busy_time, stats.decode_time), 1.0),
        "drafter_lost": stats.drafter_lost,
        "draft_outages": [outage_record(each) for each in stats.outages],
        **final_round_shape(plan, stats),
        "policy": policy_stats(stats),
    }


def _mean_itl(stats: Stats, tokens: int) -> Json:
    """Returns the mean time from one output token to the next; {} with fewer than two tokens. The tokens of a round
    arrive together."""
    if tokens < 2:
        return {}
    since_first_token = stats.prompt_time + stats.decode_time - stats.first_token_time
    return {"mean_itl_ms": _ms(since_first_token / (tokens - 1))}


def final_round_shape(plan: EngineConfig, stats: Stats) -> Json:
    """Returns the bs and d of speculative rounds as adapted by the end of the answer: 1 and 0 in mode ar or with
    verify_batch 1, null in mode smc."""
    if plan.mode == "smc":
        return {"verify_batch": None, "draft_steps": None}
    if plan.mode == "ar" or plan.verify_batch == 1:
        return {"verify_batch": 1, "draft_steps": 0}
    found = stats.policy
    bs, d = (plan.verify_batch, plan.initial_draft_steps) if found is None else (found.nodes, found.steps)
    return {"verify_batch": bs, "draft_steps": d}


def outage_record(away: Outage) -> Json:
    """Returns an outage of the draft group: its reason, begin and end, in seconds since the start of the request. The
    end (`to_s`) is null while the outage lasts."""
    until = None if away.until is None else round(away.until, 3)
    return {"reason": away.reason, "from_s": round(away.since, 3), "to_s": until}


def speculation_stats(plan: EngineConfig, stats: Stats) -> Json | None:
    """Returns acceptance statistics under vLLM's names; None in mode smc, which accepts and rejects nothing.

    `acceptance_histogram[j]` is the number of rounds that accepted j draft tokens.

    Accepted tokens and attempts (`num_chances_*`; see `Acceptance`) are counted in `*_per_pos` by depth in the tree,
    from depth 1, and in `*_per_child` by the rank of a child among its siblings, the most likely first.

    `acceptance_by_source` has the numbers of proposed and accepted nodes of each source (`NodeSource`), by its label.

    `expected_first_child_acceptance_rate` is the mean of 1 - TV(p, q), where TV is the total variation distance; null
    without rejection sampling. `break_even_acceptance_length` (tokens per round at which speculation is as fast as
    decoding without the draft) and `speedup_over_plain` are null until rounds without the draft have been measured.
    """
    if plan.mode == "smc":
        return None
    # adaptation may exceed the configured bs
    most = 0 if plan.mode == "ar" else max(plan.verify_batch, *(len(each.parents) for each in stats.verified), 1) - 1
    times = stats.policy
    return {
        **_acceptance_stats(stats.verified, most),
        "break_even_acceptance_length": times and _rounded(times.break_even),
        "speedup_over_plain": times and _rounded(times.speedup),
    }


def _acceptance_stats(rounds: Sequence[VerifiedRound], most: int) -> Json:
    """Returns the part of `speculation_stats` that follows from the rounds. `most`: limit of the accepted tokens of a
    round."""
    seen, drafted = Acceptance.from_rounds(rounds), sum(len(each.parents) - 1 for each in rounds)
    accepted = sum(len(each.path) - 1 for each in rounds)
    return {
        "mean_acceptance_length": _share(len(rounds) + accepted, len(rounds)),
        "draft_acceptance_rate": _share(accepted, drafted),
        "num_spec_steps": len(rounds),
        "num_draft_tokens": drafted,
        "num_accepted_draft_tokens": accepted,
        "num_spec_tokens": most,
        "acceptance_histogram": _padded(seen.histogram, most + 1),
        "num_accepted_tokens_per_pos": _padded(seen.accepted_at_depth, most),
        "num_chances_per_pos": _padded(seen.tried_at_depth, most),
        "num_accepted_tokens_per_child": _padded(seen.accepted_child, most),
        "num_chances_per_child": _padded(seen.tried_child, most),
        "acceptance_by_source": {
            source.label: {"num_draft_tokens": count, "num_accepted_draft_tokens": seen.accepted_by_source[source]}
            for source, count in sorted(seen.proposed_by_source.items())
        },
        "expected_first_child_acceptance_rate": _rounded(seen.expected_rate),
    }


def cut_statistics(timings: Json, metrics: Json, rounds: Sequence[VerifiedRound], tokens: int) -> None:
    """Changes the statistics of an answer, in place, to those of its first `tokens` tokens, for an answer that ended
    there, at a stop string for instance, although the engine decoded more. The times stay unchanged.

    `rounds`: the verified rounds; without rounds, as in mode smc, nothing changes.
    """
    if not rounds or tokens >= timings["predicted_n"]:
        return
    kept = list(rounds)
    cut_rounds(kept, tokens)
    spec = metrics["speculative_decoding"]
    spec |= _acceptance_stats(kept, spec["num_spec_tokens"])
    speed = _share(tokens, timings["predicted_ms"] / 1e3)
    if "mean_itl_ms" in metrics:  # absent if one token remains
        between = metrics.pop("mean_itl_ms") * (timings["predicted_n"] - 1)
        metrics |= {"mean_itl_ms": round(between / (tokens - 1), 3)} if tokens > 1 else {}
    timings |= {"predicted_n": tokens, "predicted_per_second": speed}
    timings |= {"draft_n": spec["num_draft_tokens"], "draft_n_accepted": spec["num_accepted_draft_tokens"]}
    metrics["tokens_per_second"] = speed


def policy_stats(stats: Stats) -> Json | None:
    """Returns the controller's decisions: d and bs at the end of the answer, the rounds in which they changed, the
    number of rounds without the draft, and the median times of rounds with and without it. Returns None without a
    controller."""
    found = stats.policy
    if found is None:
        return None
    changes = [{"round": at, "draft_steps": d.steps, "verify_batch": d.nodes} for at, d in found.changes]
    times = {"tree_round_ms": found.speculative_round_time, "plain_round_ms": found.ar_round_time}
    shown = {name: None if seconds is None else _ms(seconds) for name, seconds in times.items()}
    shape = {"draft_steps": found.steps, "verify_batch": found.nodes}
    return {**shape, "plain_rounds": found.ar_rounds, "changes": changes, **shown}


def mean_acceptance_length(stats: Stats) -> float:
    """Returns the mean tokens per round: accepted draft tokens and the bonus token; in mode smc the output tokens.
    Returns 0 before the first round."""
    if stats.population is not None:
        return _share(stats.tokens, stats.rounds)
    return _share(stats.rounds + stats.accepted, stats.rounds)


def summary_line(stats: Stats, tokens: int) -> str:
    """Returns a line such as `312 tok, 348 tok/s, TTFT 41 ms, 3.4 tok/round`. `tokens`: output tokens."""
    parts = [
        f"{tokens} tok",
        format_speed(_share(tokens, stats.decode_time)),
        f"TTFT {stats.first_token_time * 1e3:.0f} ms",
        f"{mean_acceptance_length(stats):.1f} tok/round",
    ]
    if stats.policy is not None and stats.policy.ar_rounds:
        parts.append(f"{stats.policy.ar_rounds} of {stats.rounds} rounds without the draft")
    if stats.population is not None:
        parts.append("approximate")
        if stats.population.full:
            parts.append("ended because the KV cache has no room for another round of particles that differ this much")
    if (note := synthetic_note(stats)) is not None:
        parts.append(note)
    if stats.drafter_lost is not None:
        parts.append(f"the drafter was lost ({stats.drafter_lost}); decoding continued without it")
    return ", ".join(parts)


def ending_notes(stats: Stats, finish_reason: str | None, tokens: int, max_tokens: int | None) -> list[str]:
    """Returns why an answer of this many tokens ended, unless it ended by itself. `finish_reason`: None after Ctrl-C.
    `max_tokens`: its token limit."""
    if finish_reason is None:
        return ["stopped"]
    if finish_reason != "length" or (stats.population is not None and stats.population.full):
        return []  # `summary_line` reports a full cache of particles
    if max_tokens is not None and tokens >= max_tokens:
        return [f"cut at max_tokens {max_tokens}"]
    return ["cut because the context is full"]


def format_speed(value: float) -> str:
    """Formats tokens per second: `348 tok/s`, `2.5 tok/s`."""
    return f"{value:.0f} tok/s" if value >= 10 else f"{value:.2g} tok/s"


def _padded(counts: list[int], length: int) -> list[int]:
    return counts + [0] * (length - len(counts))


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, DECIMALS)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, DECIMALS)


def _share(part: float, whole: float) -> float:
    """Returns part / whole, rounded; 0 if `whole` is not positive or the quotient is not finite."""
    value = part / whole if whole > 0 else 0.0
    return round(value, DECIMALS) if math.isfinite(value) else 0.0
