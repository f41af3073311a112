"""The registry of drafters: every kind that users select is built, and has its wrappers in the order of its entry."""

from __future__ import annotations

from typing import Any

import pytest

from swiftspec.builder.drafters import DRAFTERS, WrapperInputs, drafter_key, local_drafter_key
from swiftspec.capabilities import FEATURES
from swiftspec.config import EngineConfig
from swiftspec.control.controller import Controller
from swiftspec.control.shared_stats import SharedStats
from swiftspec.distributed.remote.failover import FailoverDrafter
from swiftspec.drafter_kinds import DRAFTER_KINDS, DRAFTER_OF_FEATURE, MODEL_FREE, NodeSource
from swiftspec.runtime.drafter import DrafterWrapper, NoDrafter
from swiftspec.runtime.fallback_drafter import FallbackDrafter


def test_every_kind_has_an_entry_and_a_row() -> None:
    assert {name for name, entry in DRAFTERS.items() if entry.needs == "nothing"} == MODEL_FREE | {"none"}
    assert {*DRAFTER_OF_FEATURE} <= {*FEATURES}
    marks = [DRAFTER_KINDS[name].model_free_source for name in MODEL_FREE]
    assert len({*marks}) == len(marks) and NodeSource.ROOT not in marks


@pytest.mark.parametrize(
    ("config", "here", "local"),
    [
        (EngineConfig("ar"), "none", "none"),
        (EngineConfig("serial"), "model", "model"),
        (EngineConfig("serial", drafter="suffix"), "suffix", "suffix"),
        (EngineConfig("serial", drafter="model+suffix"), "model", "model"),
        (EngineConfig("async"), "remote", "lookahead"),
        (EngineConfig("async", draft_tp=0), "lookahead", "lookahead"),
        (EngineConfig("serial", draft_remote=True), "remote", "model"),
        (EngineConfig("async", draft_remote=True), "tree deltas", "lookahead"),
        (EngineConfig("async", target_remote=True), "lookahead", "lookahead"),
    ],
)
def test_the_configuration_selects_the_kind(config: EngineConfig, here: str, local: str) -> None:
    assert (drafter_key(config), local_drafter_key(config)) == (here, local)


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("adaptive", [False, True])
def test_only_the_outermost_wrapper_handles_a_loss(kind: str, adaptive: bool) -> None:
    remote: Any = object()
    config = EngineConfig("serial", self_switch=adaptive)
    given = WrapperInputs(config, remote, None, SharedStats(config))
    entry, found = DRAFTERS[kind], list[type]()
    drafter: Any = NoDrafter()
    for wrap in entry.wrappers:
        drafter = wrap(drafter, given)
    while isinstance(drafter, DrafterWrapper):
        found.append(type(drafter))
        drafter = drafter.inner
    assert found[0] is (FailoverDrafter if entry.needs == "link" else FallbackDrafter)
    assert found[1:] == ([Controller] if adaptive and entry.needs != "nothing" else [])
