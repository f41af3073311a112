"""Faults planted into copies of the kernels: tests/gpu on the emulated GPU must notice each. Without clusters and bulk
copies (Ampere's shape), in what reads a weight once for many rows and loads keys ahead, and for particles."""

from __future__ import annotations

import functools
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.simt.emulate import AMPERE, CSRC, HOPPER, build
from tests.simt.test_emulated_gpu import COMPILER, ROOT, run_tests

LINEAR, WIDE, ARRANGE = "linear/linear.cu", "linear/large_m.cu", "linear/pack_activations.cu"
ATTENTION, RESAMPLE, GATHER = "attention/attention.cu", "particles/resample.cu", "peers/gather.cu"
TESTS = {LINEAR: "test_products and 512-72", WIDE: "test_many_rows", ARRANGE: "test_many_rows", ATTENTION: "attention",
         RESAMPLE: "reference", GATHER: "pieces"}  # fmt: skip
FILES = {LINEAR: "test_linear", WIDE: "test_linear", ARRANGE: "test_linear", ATTENTION: "test_cuda_ops",
         RESAMPLE: "test_resampling", GATHER: "test_sums"}  # fmt: skip
SEEDS = (1, 2, 3)
HANGS = "60"  # seconds: several times what one of these tests takes

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("g++") is None or sys.platform != "linux", reason="no g++, or no Linux"),
]


@dataclass(frozen=True, slots=True)
class Fault:
    """What is put in the place of `right`, which its file has once."""

    what: str
    arch: int
    kernel: str  # the source to compile anew, and whose tests are run
    file: str
    right: str
    wrong: str = ""
    tests: tuple[str, str] | None = None  # a file and a choice of its tests, if they are others

    @property
    def watched(self) -> tuple[str, str]:
        return self.tests or (FILES[self.kernel], TESTS[self.kernel])


MANY_TURNS = ("test_linear", "test_many_turns")
MANY_PARTS = ("test_cuda_ops", "more_parts")
LONG_ROW = ("test_float8", "test_tiles_of_a_long_row")
FAULTS = [
    Fault("shares are read before all are there", HOPPER, RESAMPLE, RESAMPLE,
          "exp(found.weights[i] - offset);\n  __syncthreads();", "exp(found.weights[i] - offset);"),
    Fault("the ranks' pieces lie at their own length", HOPPER, GATHER, "peers/channel.h",
          "store_words(out + r * stride,",
          "store_words(out + r * count,"),
    Fault("a tile's place is filled before all lanes have read it", AMPERE, LINEAR, "linear/linear.cuh",
          "    __syncwarp();\n    if (lane_ < ptx::kLoaders) fetch(stage_);",
          "    if (lane_ < ptx::kLoaders) fetch(stage_);", MANY_TURNS),
    Fault("lanes copy before the barriers are there", AMPERE, LINEAR, "linear/linear.cuh",
          "    if constexpr (ptx::kLoaders > 1) __syncwarp();\n"),
    Fault("a tile is not waited for", AMPERE, LINEAR, "linear/linear.cuh",
          "    ptx::barrier_wait(full_ + stage_, parity_);\n"),
    Fault("the ring's parity stays", AMPERE, WIDE, "linear/linear.cuh", "    stage_ = 0;\n    parity_ ^= 1;",
          "    stage_ = 0;"),
    Fault("the last tile is lost", AMPERE, LINEAR, "linear/linear.cuh", "tile < tile_count;", "tile < tile_count - 1;"),
    Fault("a slab is not waited for", AMPERE, WIDE, WIDE, "    ptx::barrier_wait(full_ + slot_, parity_);\n"),
    Fault("a slab's place is filled before all warps have read it", AMPERE, WIDE, WIDE,
          "    __syncthreads();\n    if (loads_) fetch(slot_);", "    if (loads_) fetch(slot_);"),
    Fault("a slab's place is filled too early with clusters", HOPPER, WIDE, WIDE,
          "    __syncthreads();\n    if (loads_) fetch(slot_);", "    if (loads_) fetch(slot_);", MANY_TURNS),
    Fault("x is read before it is arranged", HOPPER, WIDE, WIDE,
          "  ptx::wait_for_dependencies();\n  slabs.start();", "  slabs.start();\n  ptx::wait_for_dependencies();"),
    Fault("sums are added to while another block reads them", HOPPER, WIDE, WIDE,
          "    ptx::cluster_sync();  // no warp adds to sums that another CTA still reads\n"),
    Fault("all launches take the first one's rows", AMPERE, WIDE, WIDE,
          "slabs + tiles::part_offset(t, most, all, done, 0)",
          "slabs"),
    Fault("four warps leave units to eight", AMPERE, WIDE, WIDE, "at, 1 << kLog, strip", "at, 8, strip"),
    Fault("a row is scaled by another's norm", AMPERE, ARRANGE, ARRANGE, "fragment::b_column(at.lane);",
          "at.lane % 8;"),
    Fault("rows are scaled by the first part's norms", AMPERE, ARRANGE, ARRANGE, "8 * eight, shared", "8 * j, shared"),
    Fault("a block leaves while another reads its squares", HOPPER, ARRANGE, ARRANGE,
          "  if (task.norm != nullptr) ptx::cluster_meet();"),
    Fault("a share's sums replace those before it", AMPERE, WIDE, WIDE, "share == 0, joined", "true, joined"),
    Fault("shares are taken in another order", HOPPER, WIDE, "linear/large_m.h", "    tile += t.warps_k();",
          "    tile += 1;"),
    Fault("a warp lists a key one place too far", AMPERE, ATTENTION, "attention/key_lists.h",
          "warp::popcount(word & ((1u << lane) - 1))", "warp::popcount(word & ((2u << lane) - 1))"),
    Fault("a row's run goes on over a gap in the second word", AMPERE, ATTENTION, "attention/key_lists.h",
          "if (~word != 0) run", "if (~word != 0 && c == 0) run"),
    Fault("a part's tiles are all its first", AMPERE, ATTENTION, "attention/attention.cu",
          "j.tile = first / F::kTile + turn + rank;", "j.tile = first / F::kTile + rank;", MANY_PARTS),
    Fault("scores are taken before keys have come", AMPERE, ATTENTION, "attention/block.h",
          "      wait_for_tile<1>(placement.prefetching);", "      wait_for_tile<3>(placement.prefetching);"),
    Fault("what came ahead is not waited for", HOPPER, ATTENTION, "attention/block.h", "wait_for_copies<kLater + 2>()",
          "wait_for_copies<kLater + 4>()", LONG_ROW),
    Fault("what came ahead is looked for on the wrong side", HOPPER, ATTENTION, "attention/block.h",
          "  if (asked) stage_state.side = 1 - stage_state.side;\n", "", LONG_ROW),
    Fault("what comes ahead overwrites what is computed", HOPPER, ATTENTION, "attention/block.h",
          "2 * F::kUnits * (1 - stage_state.side)", "2 * F::kUnits * stage_state.side", LONG_ROW),
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The folder of the kernels without a fault, of an architecture."""
    folder = tmp_path_factory.mktemp("whole")

    def built(arch: int) -> Path:
        build(COMPILER, folder, arch, ("-O1",))
        return folder

    return functools.cache(built)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what.replace(" ", "_"))
def test_a_planted_fault_is_noticed(fault: Fault, whole: Callable[[int], Path], tmp_path: Path) -> None:
    """With one of a few orders in which the threads take their turns."""
    csrc, objects = tmp_path / "csrc", tmp_path / "objects"
    shutil.copytree(CSRC, csrc)
    source = csrc / "cuda" / fault.file
    text = source.read_text()
    assert text.count(fault.right) == 1
    source.write_text(text.replace(fault.right, fault.wrong))
    shutil.copytree(whole(fault.arch), objects)
    (objects / f"{Path(fault.kernel).name}.{fault.arch}.o").unlink()
    module = build(COMPILER, objects, fault.arch, ("-O1",), csrc)
    noticed = (pytest.ExitCode.TESTS_FAILED, -signal.SIGSEGV, -signal.SIGABRT)  # or it led outside of memory
    assert any(result(module, *fault.watched, seed) in noticed for seed in SEEDS)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("arch", "file", "which"), sorted({(fault.arch, *fault.watched) for fault in FAULTS}))
def test_without_a_fault_nothing_is_noticed(whole: Callable[[int], Path], arch: int, file: str, which: str) -> None:
    """By the same clock, too."""
    assert result(build(COMPILER, whole(arch), arch, ("-O1",)), file, which, SEEDS[0]) == pytest.ExitCode.OK


def result(module: Path, file: str, which: str, seed: int) -> int:
    """The exit status of these tests. A test fails by its clock where a barrier's phase never ends."""
    path = ROOT / "tests" / "gpu" / f"{file}.py"
    return run_tests(module, [path], which, "few", "-x", "-n", "0", "--timeout", HANGS, seed=seed).returncode
