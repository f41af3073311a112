"""Small profiles and other helpers of the tests of swiftspec/profiles."""

from __future__ import annotations

from typing import Any

KEY = {
    "hardware": {"kind": "cpu", "name": "test", "count": 2}, "ranks": 4, "target": "aa", "draft": "bb",
    "dtype": "bfloat16", "ops": "auto", "emulate": {"target": None, "draft": None},
}  # fmt: skip


def run(mode: str, x: int, y: int, *speeds: float, d: int | None = None, **others: Any) -> dict[str, Any]:
    """A run of a profile."""
    plan = {"mode": mode, "target_tp": x, "draft_tp": y, "verify_batch": 8, "draft_leaves": 8, "draft_steps": d}
    plan |= {name: others.pop(name) for name in tuple(others) if name in plan}
    return {
        "plan": plan, "ops": "auto", "variation": False, "speeds": list(speeds), "tokens_per_round": 2.5, "rounds": 9,
        "target_busy": 0.8, "steps": None, "dropped": None, **others,
    }  # fmt: skip


def profile(*runs: dict[str, Any], **others: Any) -> dict[str, Any]:
    """A profile of four ranks with these runs."""
    return {
        "swiftspec_profile": 1, "key": dict(KEY), "environment": {"torch": "2"}, "runs": list(runs), "steps": [],
        "settings": {"prompts": 1, "max_tokens": 8, "repeats": 2}, "rounds": [], "lanes": [], "around": {},
        "orchestration": None, "stopped": None, **others,
    }  # fmt: skip
