"""The rules by which options become a configuration: any combination gives a configuration that the same rules leave as
it is, or one line of error."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftspec.builder.rules import RULES, Choices, Resolution
from swiftspec.config import MODES, EngineConfig
from swiftspec.drafter_kinds import GRAFTED, MTP_HEAD, SUFFIX_LOOKUP
from swiftspec.errors import UserError
from swiftspec.settings.flags import flag_name
from swiftspec.settings.settings import Settings, UsageError
from tests.support.cases import examples

SETTINGS: dict[str, Any] = {
    "mode": st.sampled_from(MODES),
    "draft_model": st.sampled_from([SUFFIX_LOOKUP, MTP_HEAD, "draft"]),
    "draft_url": st.just("host:7071"),
    "target_url": st.just("host:7070"),
    "target_tp": st.integers(1, 4),
    "draft_tp": st.integers(1, 4),
    "verify": st.sampled_from(["match", "reject"]),
    "proposal": st.sampled_from(["top", "coupled", "sample"]),
    "verify_batch": st.integers(1, 64),
    "draft_leaves": st.integers(1, 64),
    "draft_steps": st.integers(1, 64),
    "max_num_seqs": st.integers(1, 3),
    "synthetic_acceptance_length": st.floats(1, 9),
    "self_switch": st.booleans(),
    "adapt": st.booleans(),
    "graft_suffix": st.booleans(),
    "particles": st.integers(1, 8),
    "port": st.just(8000),
}
GIVEN = st.sets(st.sampled_from([*SETTINGS]), max_size=5).flatmap(
    lambda names: st.fixed_dictionaries({name: SETTINGS[name] for name in sorted(names)})
)


@settings(max_examples=examples(300), derandomize=True)
@given(
    chosen=GIVEN,
    ranks=st.integers(1, 4),
    device=st.sampled_from(["cpu", "cuda"]),
    block=st.none() | st.integers(1, 6),
)
def test_a_resolved_configuration_stays_as_it_is(
    chosen: dict[str, Any], ranks: int, device: Any, block: int | None
) -> None:
    try:
        options = Settings.create({**chosen, "device": device}, flag_name)
        draft = chosen.get("draft_model")
        options.make_plan(draft is not None or "draft_url" in chosen, ranks)
        choices = options.choices(draft is not None or "draft_url" in chosen, ranks)
        resolution = Resolution(choices, device, lambda: block)
        config = resolution.config()
    except UserError as error:
        assert "\n" not in str(error) and "{" not in str(error)
        return
    assert config.mode in MODES and config.drafter in ("model", SUFFIX_LOOKUP, GRAFTED)
    assert config.num_ranks == ranks
    again = Resolution(Choices.of(config, draft), device, lambda: block)
    assert again.config() == config
    for option in RULES.keys() - {"time_rows"}:
        value = getattr(config, option)
        assert option not in again.reasons or again.reasons[option].value == value
    for option, reason in resolution.reasons.items():
        assert reason.rule and getattr(config, option) == reason.value


def test_a_given_value_precedes_that_of_a_profile() -> None:
    profile = {"mode": "serial", "draft_steps": 5, "draft_leaves": 2}
    options = Settings.create({"draft_model": "draft", "draft_leaves": 3}, flag_name)
    resolution = Resolution(options.choices(True, 1, profile, "best.json"))
    config = resolution.config()
    assert (config.mode, config.draft_steps, config.draft_leaves) == ("serial", 5, 3)
    assert config.adapt_steps, "a value of a profile may be adapted"
    rules = {name: resolution.reasons[name].rule for name in profile}
    assert rules == {"mode": "profile", "draft_steps": "profile", "draft_leaves": "given"}
    assert resolution.reasons["mode"].why == "best.json"


@pytest.mark.parametrize(("given_", "steps"), [(None, 4), (2, 2), (9, 4)])
def test_a_block_head_limits_the_draft_steps(given_: int | None, steps: int) -> None:
    config = EngineConfig("serial", draft_steps=given_, adapt_steps=True, self_switch=True)
    resolved = Resolution(Choices.of(config, "head"), "cpu", lambda: 4).config()
    assert (resolved.draft_steps, resolved.adapt_steps, resolved.time_rows) == (steps, False, False)


def requests_at_a_time(ranks: int = 1, device: str = "cpu", profile: Any = None, **chosen: Any) -> int:
    options = Settings.create({"draft_model": "draft", **chosen}, flag_name)
    return Resolution(options.choices(True, ranks, profile, "best.json"), device).config().max_num_seqs


def test_a_server_on_a_cpu_decodes_several_requests_at_a_time() -> None:
    assert requests_at_a_time(port=8000) == requests_at_a_time(port=8000, mode="ar") == 4
    assert requests_at_a_time() == 1, "a chat"
    assert [requests_at_a_time(port=8000, max_num_seqs=count) for count in (1, 9)] == [1, 9]
    assert requests_at_a_time(port=8000, device="cuda") == 1
    assert requests_at_a_time(2, port=8000, mode="serial") == requests_at_a_time(2, port=8000) == 1
    assert requests_at_a_time(port=8000, target_url="host:7070") == 1
    assert requests_at_a_time(port=8000, mode="smc") == 1
    assert requests_at_a_time(port=8000, profile={"mode": "serial"}) == 1


def test_the_flags_are_named_in_errors() -> None:
    with pytest.raises(UsageError, match="--draft-model, or use --mode ar"):
        Settings(mode="serial").make_plan(False)
