"""The systems of the ablation and their step times in the paper."""

from __future__ import annotations

import pytest

from bench.paper.systems import (
    ALL,
    BASE,
    KERNELS,
    PLAIN,
    SPLIT,
    SYSTEMS,
    Shape,
    System,
    engine_config,
    paper_step_times,
    saved_per_layer_us,
    split_step_times,
)
from swiftspec.profiles.emulation import parse_emulation


def test_step_times_without_fused_kernels_are_those_of_table_6() -> None:
    base, split = paper_step_times(BASE), paper_step_times(SPLIT)
    assert (base.target, base.draft, base.origin) == (10.34, 3.73, "quoted")
    assert (split.target, split.draft, split.origin) == (10.48, 3.25, "quoted")


def test_fused_kernels_save_what_table_7_says() -> None:
    assert saved_per_layer_us("Llama-3-70B", 8) == pytest.approx(25.7 - 13.3 + 29.5 - 19.9)  # SwiGLU saves nothing
    assert saved_per_layer_us("Llama-3.2-1B", 4) == pytest.approx(7.0 + 10.5 + 6.5)
    for fused, base in ((KERNELS, BASE), (ALL, SPLIT)):
        times, unfused = paper_step_times(fused), paper_step_times(base)
        assert times.origin == "predicted" and times.target < unfused.target and times.draft < unfused.draft
    assert paper_step_times(KERNELS).target == pytest.approx(10.34 - 80 * 0.022)


def test_splits_have_the_step_times_of_table_1() -> None:
    emulation = parse_emulation(split_step_times(4, 4))
    assert emulation.target is not None and emulation.draft is not None
    assert emulation.target.at(1, 8) == pytest.approx(11.86e-3) and emulation.draft.at(1, 8) == pytest.approx(2.8e-3)
    between = parse_emulation(split_step_times(6, 2)).target
    assert between is not None and 11.22e-3 < between.at(1, 8) < 11.86e-3


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_configurations(system: System) -> None:
    config = engine_config(system, Shape(16, 4, 2), 2, 1)
    assert (config.mode, config.target_tp) == (system.mode, 2)
    if system is not PLAIN:
        assert (config.verify_batch, config.leaves_per_expansion, config.draft_steps) == (16, 4, 2)
    assert config.num_ranks == (3 if config.mode == "async" else 2)
