"""Policy and speedup in the JSON of an answer."""

from __future__ import annotations

from swiftspec.answer_stats import cut_statistics, metrics, summary_line, synthetic_note, synthetic_stats, timings
from swiftspec.config import EngineConfig
from swiftspec.control.controller import PolicyReport
from swiftspec.control.round_stats import Decision
from swiftspec.engine import Stats
from swiftspec.messages import NodeSource, VerifiedRound
from tests.support.proposals import LOOKUP


def test_the_policy_reports_measurements_and_decisions() -> None:
    changes = ((18, Decision(0, 1, False)), (24, Decision(3, 8, True)))
    stats = Stats(
        policy=PolicyReport(
            3, 8, 6, changes, speculative_round_time=0.003, ar_round_time=0.002, break_even=1.5, speedup=2.0
        )
    )
    report = metrics(EngineConfig(), stats, 0)
    assert report["policy"] == {
        "draft_steps": 3,
        "verify_batch": 8,
        "plain_rounds": 6,
        "changes": [
            {"round": 18, "draft_steps": 0, "verify_batch": 1},
            {"round": 24, "draft_steps": 3, "verify_batch": 8},
        ],
        "tree_round_ms": 3.0,
        "plain_round_ms": 2.0,
    }
    spec = report["speculative_decoding"]
    assert (spec["break_even_acceptance_length"], spec["speedup_over_plain"]) == (1.5, 2.0)
    stats.rounds = 40
    assert summary_line(stats, 90).endswith(", 6 of 40 rounds without the draft")


def test_synthetic_acceptance_is_stated() -> None:
    stats = Stats(rounds=4, tokens=9, accepted=5)
    assert synthetic_stats(stats) == {} and synthetic_note(stats) is None and "synthetic" not in summary_line(stats, 9)
    stats.synthetic_acceptance_length = 2.5
    assert synthetic_stats(stats) == {"exact": False, "synthetic_acceptance_length": 2.5}
    note = "synthetic acceptance length 2.5: the text is not the target's"
    assert synthetic_note(stats) == note and summary_line(stats, 9).endswith(f"2.2 tok/round, {note}")


def test_expected_acceptance_is_reported_with_measured_acceptance() -> None:
    stats = Stats(verified=[VerifiedRound((-1, 0, 0), (0, 1), (0.75,)), VerifiedRound((-1, 0), (0,), (0.25,))])
    spec = metrics(EngineConfig(), stats, 3)["speculative_decoding"]
    assert spec["expected_first_child_acceptance_rate"] == 0.5
    assert (spec["num_accepted_tokens_per_child"][0], spec["num_chances_per_child"][0]) == (1, 2)


def test_the_limit_of_accepted_tokens_covers_proposals_above_the_configured_size() -> None:
    """Adaptation may verify more nodes than `verify_batch`."""
    parents, path = (-1, *range(11)), tuple(range(10))
    stats = Stats(verified=[VerifiedRound((-1, 0), (0,)), VerifiedRound(parents, path)])
    spec = metrics(EngineConfig(verify_batch=8), stats, 11)["speculative_decoding"]
    assert spec["num_spec_tokens"] == 11
    assert spec["acceptance_histogram"] == [1, *[0] * 8, 1, 0, 0]
    assert len(spec["num_accepted_tokens_per_pos"]) == len(spec["num_chances_per_child"]) == 11


def test_the_mean_inter_token_latency_begins_at_the_first_token() -> None:
    stats = Stats(prompt_time=2.0, first_token_time=2.5, decode_time=1.5)
    assert metrics(EngineConfig(), stats, 5)["mean_itl_ms"] == 250.0
    assert "mean_itl_ms" not in metrics(EngineConfig(), stats, 1)
    for kept, expected in ((3, 500.0), (1, None)):
        stats.verified = [VerifiedRound((-1, 0), (0, 1))] * 2 + [VerifiedRound((-1,), (0,))]
        timed, measured = timings(stats, 5, 0.0), metrics(EngineConfig(), stats, 5)
        cut_statistics(timed, measured, stats.verified, kept)
        assert measured.get("mean_itl_ms") == expected


def test_acceptance_is_reported_by_source() -> None:
    model, path = NodeSource.DRAFT_MODEL, (0, 2)
    stats = Stats(verified=[VerifiedRound((-1, 0, 0), path, (), (NodeSource.ROOT, model, model))])
    spec = metrics(EngineConfig(), stats, 3)["speculative_decoding"]
    assert spec["acceptance_by_source"] == {"draft_model": {"num_draft_tokens": 2, "num_accepted_draft_tokens": 1}}
    stats.verified.append(VerifiedRound((-1, 0, 0), path, (), (NodeSource.ROOT, model, LOOKUP)))
    spec = metrics(EngineConfig(), stats, 3)["speculative_decoding"]
    assert spec["acceptance_by_source"]["lookup"] == {"num_draft_tokens": 1, "num_accepted_draft_tokens": 1}
    assert metrics(EngineConfig(), Stats(), 0)["speculative_decoding"]["acceptance_by_source"] == {}


def test_values_that_were_not_measured_are_null() -> None:
    report = metrics(EngineConfig(), Stats(policy=PolicyReport(3, 8, 0, (), 0.003, None, None, None)), 0)
    assert report["policy"]["plain_round_ms"] is None and report["policy"]["tree_round_ms"] == 3.0
    assert report["speculative_decoding"]["break_even_acceptance_length"] is None
    spec = metrics(EngineConfig(), Stats(), 0)["speculative_decoding"]
    assert spec["speedup_over_plain"] is None and spec["expected_first_child_acceptance_rate"] is None


def test_the_time_shares_of_the_models_are_between_0_and_1() -> None:
    report = metrics(EngineConfig(), Stats(decode_time=2.0, target_busy_time=1.0, draft_busy_time=0.5), 0)
    assert (report["target_busy"], report["draft_busy"]) == (0.5, 0.25)
    report = metrics(EngineConfig(), Stats(decode_time=1.0, target_busy_time=1.1, draft_busy_time=1.2), 0)
    assert (report["target_busy"], report["draft_busy"]) == (1.0, 1.0)
    report = metrics(EngineConfig(), Stats(), 0)
    assert (report["target_busy"], report["draft_busy"]) == (0.0, 0.0)
