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
    assert (base.target, base.draft, base.origin) == (10.34, 3.73, "assumed")
    assert (split.target, split.draft, split.origin) == (10.48, 3.25, "assumed")


def test_fused_kernels_save_what_table_7_says() -> None:
    assert saved_per_layer_us("Llama-3-70B", 8) == pytest.approx(25.7 - 13.3 + 29.5 - 19.9)  # SwiGLU saves nothing
    assert saved_per_layer_us("Llama-3.2-1B", 4) == pytest.approx(7.0 + 10.5 + 6.5)
    for fused, base in ((KERNELS, BASE), (ALL, SPLIT)):
        times, unfused = paper_step_times(fused), paper_step_times(base)
        assert times.origin == "predicted" and times.target < unfused.target and times.draft < unfused.draft
    assert paper_step_times(KERNELS).target == pytest.approx(10.34 - 80 * 0.022)


def test_splits_have_the_step_times_of_table_1() -> None:
    times = split_step_times((4, 4))
    emulation = parse_emulation(times.emulation)
    assert emulation.target is not None and emulation.draft is not None
    assert 1000 * emulation.target.at(1, 8) == pytest.approx(times.target) == pytest.approx(11.86)
    assert 1000 * emulation.draft.at(1, 8) == pytest.approx(times.draft) == pytest.approx(2.8)
    assert 11.22 < split_step_times((6, 2)).target < 11.86


def test_gpu_time_is_summed_over_the_gpus_that_run_a_model() -> None:
    assert paper_step_times(SPLIT).gpu_ms == pytest.approx((6 * 10.48, 2 * 3.25))
    assert paper_step_times(BASE).gpu_ms == pytest.approx((8 * 10.34, 8 * 3.73))


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_configurations(system: System) -> None:
    config = engine_config(system, Shape(16, 4, 2), 2, 1)
    assert (config.mode, config.target_tp) == (system.mode, 2)
    if system is not PLAIN:
        assert (config.verify_batch, config.leaves_per_expansion, config.draft_steps) == (16, 4, 2)
    assert config.num_ranks == (3 if config.mode == "async" else 2)
