"""Mutation tests of the kernels: tests/gpu on the emulated GPU must detect each fault in a copy of csrc/cuda.

The faults cover code without clusters and bulk copies (Ampere), the large-M kernels, key prefetching and resampling.
"""

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

LINEAR, LARGE_M, PACK = "linear/linear.cu", "linear/large_m.cu", "linear/pack_activations.cu"
DIRECT, STREAM, APPEND = "linear/direct.cu", "linear/stream.cu", "linear/rope_epilogue.h"
ATTENTION, RESAMPLE, GATHER = "attention/attention.cu", "particles/resample.cu", "peers/gather.cu"
SAMPLING = "sampling/sampling.cu"
TESTS = {LINEAR: "test_products and 512-72", LARGE_M: "test_many_rows", PACK: "test_many_rows", ATTENTION: "attention",
         RESAMPLE: "reference", GATHER: "chunks", SAMPLING: "draw_and_children"}  # fmt: skip
FILES = {LINEAR: "test_linear", LARGE_M: "test_linear", PACK: "test_linear", ATTENTION: "test_cuda_ops",
         RESAMPLE: "test_resampling", GATHER: "test_sums", SAMPLING: "test_cuda_ops"}  # fmt: skip
SEEDS = (1, 2, 3)
TEST_TIMEOUT_S = "60"  # several times the duration of one of these tests

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("g++") is None or sys.platform != "linux", reason="no g++, or no Linux"),
]


@dataclass(frozen=True, slots=True)
class Mutation:
    """Replaces `original`, which occurs once in `file`, by `mutated`."""

    name: str
    arch: int
    kernel: str  # the source to recompile; it determines the tests to run
    file: str
    original: str
    mutated: str = ""
    tests: tuple[str, str] | None = None  # a test file and a -k expression, instead of the kernel's

    @property
    def selection(self) -> tuple[str, str]:
        return self.tests or (FILES[self.kernel], TESTS[self.kernel])


MANY_ITERATIONS = ("test_linear", "test_many_iterations")
LONG_CACHE = ("test_cuda_ops", "cache_for_long_contexts")
LATER_LAYERS = ("test_cuda_ops", "later_layers")
GAPS = ("test_cuda_ops", "gaps_after_the_first_mask_word")
EDGES = ("test_cuda_ops", "candidates_at_the_edges")
APPENDS, ALL_TILINGS = ("test_append", "has_the_bits"), ("test_append", "all_tilings")
APPENDS_LATER, JUST_WRITTEN = ("test_append", "later_layers"), ("test_append", "just_written")
USUAL_ORDER = ("test_append", "usual_order")
LONG_ROW = ("test_float8", "test_tiles_of_a_long_row")
TWO_SHOT = ("test_sums", "two_shot or cleaning")
MUTATIONS = [
    Mutation("weights are read before all are written", HOPPER, RESAMPLE, RESAMPLE,
          "exp(found.weights[i] - offset);\n  __syncthreads();", "exp(found.weights[i] - offset);"),
    Mutation("the norm's weight is not waited for", HOPPER, LINEAR, LINEAR, "    await_norm(task, at, shared);\n"),
    Mutation("the ranks' pieces lie at their own length", HOPPER, GATHER, "peers/channel.h",
          "store_words(out + r * stride,",
          "store_words(out + r * count,"),
    Mutation("others' sums are waited for before own ones are sent", HOPPER, LINEAR, LINEAR,
          "session.owns(unit.strip) != (pass == 0)", "session.owns(unit.strip) != (pass == passes - 1)", TWO_SHOT),
    Mutation("an owner sums before all lines have arrived", HOPPER, LINEAR, "peers/channel.h",
          "from.contains(r) && !ll::parse_line(seen[r], flag, payload[r])",
          "from.contains(r) && !ll::parse_line(seen[r], flag, payload[r]) && r == from.first", TWO_SHOT),
    Mutation("two-shot sums leave lines as they were in cleaning epochs", HOPPER, LINEAR, "peers/channel.h",
          "channel.two_shot && !ll::is_cleaning_epoch(epoch, protocol_params())", "channel.two_shot", TWO_SHOT),
    Mutation("owners keep their sums", HOPPER, LINEAR, "peers/channel.h",
          "    if (mine && two_shot()) broadcast(line, total);\n", "", TWO_SHOT),
    Mutation("a stage is refilled before all lanes have read it", AMPERE, LINEAR, "linear/linear.cuh",
          "    __syncwarp();\n    if (lane_ < ptx::kLoaders) fetch(stage_);",
          "    if (lane_ < ptx::kLoaders) fetch(stage_);", MANY_ITERATIONS),
    Mutation("lanes copy before the barriers are initialised", AMPERE, LINEAR, "linear/linear.cuh",
          "    if constexpr (ptx::kLoaders > 1) __syncwarp();\n"),
    Mutation("a tile is not waited for", AMPERE, LINEAR, "linear/linear.cuh",
          "    ptx::barrier_wait(full_ + stage_, parity_);\n"),
    Mutation("the ring's parity stays", AMPERE, LARGE_M, "linear/linear.cuh", "    stage_ = 0;\n    parity_ ^= 1;",
          "    stage_ = 0;"),
    Mutation("the last tile is lost", AMPERE, LINEAR, "linear/linear.cuh", "tile < tile_count;",
          "tile < tile_count - 1;"),
    Mutation("a slab is not waited for", AMPERE, LARGE_M, LARGE_M, "    ptx::barrier_wait(full_ + slot_, parity_);\n"),
    Mutation("a slab is replaced before all warps have read it", AMPERE, LARGE_M, LARGE_M,
          "    __syncthreads();\n    if (loads_) fetch(slot_);", "    if (loads_) fetch(slot_);"),
    Mutation("a slab is replaced too early with clusters", HOPPER, LARGE_M, LARGE_M,
          "    __syncthreads();\n    if (loads_) fetch(slot_);", "    if (loads_) fetch(slot_);", MANY_ITERATIONS),
    Mutation("x is read before it is packed", HOPPER, LARGE_M, LARGE_M,
          "  ptx::wait_for_dependencies();\n  slabs.start();", "  slabs.start();\n  ptx::wait_for_dependencies();"),
    Mutation("sums are added to while another block reads them", HOPPER, LARGE_M, LARGE_M,
          "    ptx::cluster_sync();  // no warp adds to sums that another CTA still reads\n"),
    Mutation("all launches take the first one's rows", AMPERE, LARGE_M, LARGE_M,
          "slabs + tiles::part_offset(t, most, all, done, 0)",
          "slabs"),
    Mutation("four warps skip the units of eight", AMPERE, LARGE_M, LARGE_M, "at, 1 << kLog, strip", "at, 8, strip"),
    Mutation("a row is scaled by another's norm", AMPERE, PACK, PACK, "fragment::b_column(at.lane);",
          "at.lane % 8;"),
    Mutation("rows are scaled by the first part's norms", AMPERE, PACK, PACK, "8 * eight, nullptr,", "8 * j, nullptr,"),
    Mutation("a block exits while another reads its squares", HOPPER, PACK, PACK,
          "  if constexpr (kNormed) ptx::cluster_meet();"),
    Mutation("a share's sums replace those before it", AMPERE, LARGE_M, LARGE_M, "share == 0, joined", "true, joined"),
    Mutation("shares are taken in another order", HOPPER, LARGE_M, "linear/large_m.h", "    tile += t.warps_k();",
          "    tile += 1;"),
    Mutation("a warp lists a key one place too far", AMPERE, ATTENTION, "attention/key_lists.h",
          "warp::popcount(word & ((1u << lane) - 1))", "warp::popcount(word & ((2u << lane) - 1))"),
    Mutation("a gap in the second mask word is missed", AMPERE, ATTENTION, "attention/key_lists.h",
          "if (~word != 0) run", "if (~word != 0 && c == 0) run", GAPS),
    Mutation("every part begins with the first one's turn", AMPERE, ATTENTION, "attention/block.h",
          "int turn = first_turn<F>(j.part);", "int turn = first_turn<F>(0);", LONG_CACHE),
    Mutation("a unit is loaded before the forward has appended to it", HOPPER, ATTENTION, "attention/block.h",
          "min32(s.shared_units, j.units_within(j.tile, j.group.appended))", "s.shared_units", LATER_LAYERS),
    Mutation("rows are attended to before RoPE has ended", HOPPER, ATTENTION, "attention/block.h",
          "      await_previous();\n", "      static_cast<void>(await_previous);\n", LATER_LAYERS),
    Mutation("a unit is loaded before QKV has appended to it", HOPPER, ATTENTION, "attention/block.h",
          "min32(s.shared_units, j.units_within(j.tile, j.group.appended))", "s.shared_units", APPENDS_LATER),
    Mutation("rows are attended to before QKV has ended", HOPPER, ATTENTION, "attention/block.h",
          "      await_previous();\n", "      static_cast<void>(await_previous);\n", APPENDS_LATER),
    *(Mutation(f"slots are read before they are written, by {kernel}", HOPPER, kernel, kernel,
               f"    if (!{name}.append.setup.prepared) ptx::wait_for_dependencies();\n", "", JUST_WRITTEN)
      for kernel, name in ((LINEAR, "ranks"), (DIRECT, "direct"), (STREAM, "stream"))),
    Mutation("RoPE turns the other way", HOPPER, DIRECT, APPEND, "fmaf(tiles::low(turned),",
          "fmaf(-tiles::low(turned),", APPENDS),
    Mutation("a row has the position of its neighbour", HOPPER, DIRECT, APPEND, "rows.position[i % 2]",
          "rows.position[0]", APPENDS),
    Mutation("a row has the slot of its neighbour", HOPPER, DIRECT, APPEND, ": rows.line[e] +",
          ": rows.line[0] +", APPENDS),
    Mutation("rows that a batch does not have are appended", HOPPER, DIRECT, APPEND,
          "if (row >= a.rows) continue;\n    const auto& v", "const auto& v", APPENDS),
    Mutation("float8 elements are swapped", HOPPER, DIRECT, APPEND, "high << 8 | low", "low << 8 | high", APPENDS),
    Mutation("values are rotated, too", HOPPER, DIRECT, APPEND, "is_value ? straight : rotated",
          "false ? straight : rotated", APPENDS),
    Mutation("all units have the tables of the first", HOPPER, LINEAR, LINEAR, "rows, strip + mine,", "rows, strip,",
          ALL_TILINGS),
    Mutation("a strip has the tables of the other", HOPPER, DIRECT, DIRECT, "at.lane), unit.strip, at.lane);",
          "at.lane), at.cluster * kStrips, at.lane);", ALL_TILINGS),
    Mutation("the second outputs of heads lie half of all outputs further on", HOPPER, "linear/repack.cu",
          "linear/tiles.h", "output_of_pair(t, pair, r / 8)", "pair + r / 8 * t.half", APPENDS),
    Mutation("a bias lies half of all outputs further on", HOPPER, DIRECT, "linear/lane_epilogue.h",
          "to.bias[tiles::output_of_pair(t, pair, i / 2) + i % 2]", "to.bias[i / 2 * t.half + pair + i % 2]",
          USUAL_ORDER),
    Mutation("a residual lies half of all outputs further on", HOPPER, DIRECT, "linear/lane_epilogue.h",
          "output = tiles::output_of_pair(t, pair, i / 2);", "output = i / 2 * t.half + pair;", USUAL_ORDER),
    Mutation("a residual of a chunk lies half of all outputs further on", HOPPER, "linear/prefill.cu",
          "linear/prefill.cu", "row * t.n + tiles::output_of_pair(t, pair, i / 4)", "row * t.n + i / 4 * t.half + pair",
          USUAL_ORDER),
    Mutation("heads are unpacked in halves", HOPPER, "linear/unpack.cu", "linear/unpack.h",
          "  if (t.heads == 0) written.apart", "  written.heads = 0, written.apart", USUAL_ORDER),
    Mutation("candidates after the first 32 are lost", HOPPER, SAMPLING, "sampling/top_few.h",
          "first < all; first += 32", "first < 1; first += 32", EDGES),
    Mutation("lists are merged before they are complete", HOPPER, SAMPLING, SAMPLING,
          "    __syncthreads();\n    if (warp_index < count", "    if (warp_index < count", EDGES),
    Mutation("sums are added in the wrong block", HOPPER, SAMPLING, SAMPLING, "all.block_sums[block] =",
          "all.block_sums[0] ="),
    Mutation("scores are computed before keys are loaded", AMPERE, ATTENTION, "attention/block.h",
          "      wait_for_tile<1>(placement.prefetching);", "      wait_for_tile<3>(placement.prefetching);"),
    Mutation("a prefetched tile is not waited for", HOPPER, ATTENTION, "attention/block.h",
          "wait_for_copies<kLater + 2>()", "wait_for_copies<kLater + 4>()", LONG_ROW),
    Mutation("a prefetched tile is read from the wrong side", HOPPER, ATTENTION, "attention/block.h",
          "  if (asked) stage_state.side = 1 - stage_state.side;\n", "", LONG_ROW),
    Mutation("a prefetched tile overwrites the current one", HOPPER, ATTENTION, "attention/block.h",
          "2 * F::kUnits * (1 - stage_state.side)", "2 * F::kUnits * stage_state.side", LONG_ROW),
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Builds the unchanged kernels for an architecture and returns the folder of the objects."""
    folder = tmp_path_factory.mktemp("whole")

    def built(arch: int) -> Path:
        build(COMPILER, folder, arch, ("-O1",))
        return folder

    return functools.cache(built)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "_"))
def test_a_mutation_is_detected(mutation: Mutation, whole: Callable[[int], Path], tmp_path: Path) -> None:
    """In at least one of several thread schedules."""
    csrc, objects = tmp_path / "csrc", tmp_path / "objects"
    shutil.copytree(CSRC, csrc)
    source = csrc / "cuda" / mutation.file
    text = source.read_text()
    assert text.count(mutation.original) == 1
    source.write_text(text.replace(mutation.original, mutation.mutated))
    shutil.copytree(whole(mutation.arch), objects)
    (objects / f"{Path(mutation.kernel).name}.{mutation.arch}.o").unlink()
    module = build(COMPILER, objects, mutation.arch, ("-O1",), csrc)
    detected = (pytest.ExitCode.TESTS_FAILED, -signal.SIGSEGV, -signal.SIGABRT)  # signals: an access out of bounds
    assert any(run_selection(module, *mutation.selection, seed) in detected for seed in SEEDS)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("arch", "file", "which"), sorted({(m.arch, *m.selection) for m in MUTATIONS}))
def test_without_a_mutation_the_tests_pass(whole: Callable[[int], Path], arch: int, file: str, which: str) -> None:
    """Within the same timeout."""
    assert run_selection(build(COMPILER, whole(arch), arch, ("-O1",)), file, which, SEEDS[0]) == pytest.ExitCode.OK


def run_selection(module: Path, file: str, which: str, seed: int) -> int:
    """Runs the selected tests and returns the exit status. A barrier whose phase never ends fails by the timeout."""
    path = ROOT / "tests" / "gpu" / f"{file}.py"
    return run_tests(module, [path], which, "few", "-x", "-n", "0", "--timeout", TEST_TIMEOUT_S, seed=seed).returncode
