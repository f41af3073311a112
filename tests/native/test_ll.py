"""The LL protocol (csrc/common/ll.h): model checking of every interleaving, and ranks as threads under sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # each test starts processes

ROOT = Path(__file__).resolve().parents[2]
NEVER = 1_000_000
NO_WRAP = (NEVER, NEVER)  # flags, and epochs between two cleanings
ONE_SHOT, ANY = 0, -1  # epochs whose sums are two-shot: none, every set of them
SOURCES = ["tests/native/ll_threads.cpp", *(f"csrc/host/shm/{name}.cpp" for name in ("segment", "ll_shm", "mailbox"))]
NEAR_WRAP = 2**32 - 50
FIRST_LINE = 8 * (2**32 - 4)  # of a ring of 8 lines: four passes before the flags wrap


def build(out: Path, sources: list[str], *flags: str) -> str:
    """Compiles with the compiler that builds the extension; skips without one."""
    named = os.environ.get("CXX", "").split(" ")[0]
    compiler = next(
        (found for name in (named, "c++", "g++", "clang++") if name and (found := shutil.which(name))), None
    )
    if compiler is None:
        pytest.skip("no C++ compiler")
    common = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-pthread", "-Icsrc"]
    subprocess.run([compiler, *common, *flags, *sources, "-o", str(out)], cwd=ROOT, check=True)
    return str(out)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build(tmp_path_factory.mktemp("ll") / "model", ["tests/native/ll_model.cpp"], "-O2")


def walk(model: str, *numbers: int) -> str:
    run = subprocess.run([model, *map(str, numbers)], capture_output=True, text=True, check=True)
    outcome, states = run.stdout.split()
    assert int(states) >= 1
    return outcome


@pytest.mark.parametrize(
    ("ranks", "epochs", "words", "slots", "ahead", "outcome"),
    [
        (3, 3, 1, 1, 0, "stuck"),  # one place: a fast rank overwrites what a slow one still reads
        (3, 3, 1, 2, 0, "ok"),
        (3, 6, 1, 2, 0, "ok"),
        (2, 4, 2, 1, 0, "stuck"),
        (2, 6, 2, 2, 0, "ok"),  # two halves of a line are written and read separately
        (3, 3, 1, 2, 1, "stuck"),  # sending for the next epoch before all of this one has been received
        (3, 4, 1, 3, 1, "stuck"),
        (3, 5, 1, 4, 1, "ok"),
        (2, 6, 2, 3, 1, "stuck"),
        (2, 6, 2, 4, 1, "ok"),
    ],
)
def test_every_interleaving(
    model: str, ranks: int, epochs: int, words: int, slots: int, ahead: int, outcome: str
) -> None:
    longest = 2**epochs - 1
    assert walk(model, ranks, epochs, words, slots, ahead, *NO_WRAP, longest, ONE_SHOT) == outcome


@pytest.mark.parametrize(
    ("ranks", "epochs", "words", "slots", "ahead", "outcome"),
    [
        (3, 4, 1, 1, 0, "stuck"),
        (3, 4, 1, 2, 0, "ok"),
        (2, 6, 2, 1, 0, "stuck"),
        (2, 6, 2, 2, 0, "ok"),
        (3, 5, 1, 3, 1, "stuck"),
        (3, 5, 1, 4, 1, "ok"),
        (2, 6, 2, 3, 1, "stuck"),
        (2, 6, 2, 4, 1, "ok"),
    ],
)
def test_two_shot_sums_need_as_many_slots(
    model: str, ranks: int, epochs: int, words: int, slots: int, ahead: int, outcome: str
) -> None:
    """Alone, and mixed with one-shot exchanges in any order."""
    longest = 2**epochs - 1
    for two_shot in (longest, ANY):
        assert walk(model, ranks, epochs, words, slots, ahead, *NO_WRAP, longest, two_shot) == outcome


@pytest.mark.slow
def test_every_interleaving_of_three_ranks_and_half_lines(model: str) -> None:
    assert walk(model, 3, 3, 2, 2, 0, *NO_WRAP, 0b111, ONE_SHOT) == "ok"


@pytest.mark.parametrize(
    ("flags", "clean_every", "outcome"),
    [(3, NEVER, "stale"), (3, 6, "stale"), (3, 3, "ok"), (4, NEVER, "stale"), (4, 4, "stale"), (4, 2, "ok")],
)
def test_flags_wrap(model: str, flags: int, clean_every: int, outcome: str) -> None:
    """With 3 or 4 flags instead of 2^32 - 1 and messages of two lengths in any order: only cleaning twice per cycle of
    the flags prevents old words from being taken for new ones."""
    assert walk(model, 2, 10, 2, 2, 0, flags, clean_every, -1, ONE_SHOT) == outcome


@pytest.mark.parametrize(("clean_every", "outcome"), [(NEVER, "stale"), (4, "stale"), (2, "ok")])
def test_flags_wrap_between_two_shot_sums(model: str, clean_every: int, outcome: str) -> None:
    """Of three ranks, so that a line is unused where neither rank owns it; in any order with one-shot exchanges."""
    assert walk(model, 3, 8, 1, 2, 0, 4, clean_every, 0b11111111, ANY) == outcome


def run_threads(binary: str, times: int) -> None:
    runs = [("sum", ranks, 4, times * 1000 // ranks, NEAR_WRAP) for ranks in (2, 3, 8)]
    runs += [("sum", 2, 4, 100, 0), ("ring", 8, times * 500, FIRST_LINE), ("ring", 8, 500, 0)]
    runs += [("shm", ranks) for ranks in (1, 2, 4)]
    for arguments in runs:
        run = subprocess.run([binary, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=300)
        assert (run.returncode, run.stdout) == (0, "ok\n"), f"{arguments}: {run.stdout}{run.stderr}"


@pytest.mark.parametrize("times", [pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_ranks_as_threads(sanitizers: str, times: int, tmp_path: Path) -> None:
    """2 to 8 ranks of 4 blocks with random delays across the wrap of the flags, the ring, the shared memory."""
    flags = (f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all")
    run_threads(build(tmp_path / "threads", SOURCES, "-O1", "-g", *flags), times)
