"""The clock of the emulated GPU: it ranks projections as an H100 does, repeats itself, and knows what costs time."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.simt.clock import EACH, Emulator, Projection, Tiling, build, compare, errors, held_out, spearman
from tests.simt.emulate import CSRC

# of the held-out projections; 0.98 and 6.4 % when the costs were fitted
LEAST_RANK, MOST_ERROR = 0.95, 0.10
# file, original, replacement, and limits of the time relative to that of the original
FAULTS = {
    "no barrier of the cluster": ("cuda/linear/linear.cu", "    sync_cluster(task);\n", "", (0.5, 0.99)),
    "one tile in flight": ("cuda/linear/tiling.h", "kMaxStages = 16;", "kMaxStages = 1;", (1.1, 2.0)),
}

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("g++") is None or sys.platform != "linux", reason="no g++, or no Linux"),
]
Make = Callable[[str], Emulator]


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    return Emulator(build("g++", tmp_path_factory.mktemp("clock")), {})


@pytest.fixture
def mutated(tmp_path: Path) -> Make:
    """An emulator of kernels with one of FAULTS."""

    def make(name: str) -> Emulator:
        file, original, changed, _ = FAULTS[name]
        csrc = tmp_path / "csrc"
        shutil.copytree(CSRC, csrc)
        text = (csrc / file).read_text(encoding="utf-8")
        assert text.count(original) == 1
        (csrc / file).write_text(text.replace(original, changed), encoding="utf-8")
        (tmp_path / "objects").mkdir()
        return Emulator(build("g++", tmp_path / "objects", csrc), {})

    return make


def first_of(emulator: Emulator, variant: int) -> tuple[Projection, Tiling]:
    """A projection with its first tiling of a variant."""
    projection = Projection("Llama-3.2-1B", 1, "down")
    return projection, next(t for t in emulator.tilings(projection, EACH) if t.variant == variant)


@pytest.mark.timeout(600)
def test_measured_projections_have_their_rank(emulator: Emulator) -> None:
    mean, _, rank = errors((clock, us) for projection, clock, us in compare(emulator) if held_out(projection))
    assert rank > LEAST_RANK and mean < MOST_ERROR


@pytest.mark.parametrize("variant", [0, 1, 2])
def test_times_are_repeatable_and_early_starts_save_some(emulator: Emulator, variant: int) -> None:
    case = first_of(emulator, variant)
    first, again = emulator.times([case])[0], emulator.times([case])[0]
    assert first == again
    assert replace(emulator, early=False).microseconds([case])[0] > first[0] + 0.5


@pytest.mark.parametrize("name", ["memory", "port"])
def test_slower_copies_take_longer(emulator: Emulator, name: str) -> None:
    case = first_of(emulator, 0)
    assert emulator.changed(name, 0.5).microseconds([case]) > emulator.microseconds([case])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FAULTS)
def test_changes_of_the_kernels_change_the_time(emulator: Emulator, mutated: Make, name: str) -> None:
    case, (least, most) = first_of(emulator, 0), FAULTS[name][3]
    assert least < mutated(name).microseconds([case])[0] / emulator.microseconds([case])[0] < most


def test_ranks() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == 1
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == -1
    assert abs(spearman([1, 1, 2, 3], [1, 2, 2, 3]) - 5 / 6) < 0.1
