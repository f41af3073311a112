"""The CUDA kernels' code on a CPU, under sanitizers: whole blocks of attention by an emulated MMA, sampling, moves, the
noise and tree expansions. tests/gpu covers launches and PTX, on a GPU or the emulated one."""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from swiftspec import _C
from swiftspec.tree.tree import NEG_INF, DraftTree

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which("g++") or shutil.which("clang++")
FLAGS = [
    "-std=c++20",
    "-O1",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
]
ROOT_TOKEN = 5
HOPPER, AMPERE = 900, 860  # with clusters of blocks, and without

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def build(folder: Path, name: str, *more: str, arch: int = HOPPER) -> str:
    """Builds a driver for an architecture; skips if the compiler has no working sanitizers."""
    probe, out = folder / "probe.cpp", str(folder / f"{name}-{arch}")
    probe.write_text("int main() { return 0; }\n")
    command = [str(COMPILER), *FLAGS, f"-DSWIFTSPEC_ARCH={arch}", f"-I{ROOT / 'csrc'}", "-o", out]
    linked = subprocess.run([*command, str(probe)], capture_output=True, check=False)
    if linked.returncode != 0 or subprocess.run([out], capture_output=True, check=False).returncode != 0:
        pytest.skip("no working sanitizers here")
    sources = [str(ROOT / "tests/native" / f"{name}.cpp"), *(str(ROOT / "csrc" / file) for file in more)]
    subprocess.run([*command, *sources], check=True)
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drivers")


@pytest.fixture(scope="module")
def sampling(folder: Path) -> str:
    return build(folder, "sampling_driver", "host/ops/move_kv.cpp")


@pytest.fixture(scope="module")
def lone_sampling(folder: Path) -> str:
    return build(folder, "sampling_driver", "host/ops/move_kv.cpp", arch=AMPERE)


@pytest.fixture(scope="module")
def tree(folder: Path) -> str:
    return build(folder, "tree_driver")


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "arch", [pytest.param(HOPPER, marks=pytest.mark.slow), pytest.param(AMPERE, marks=pytest.mark.long)]
)
def test_attention_is_softmax_and_rows_depend_only_on_their_own_keys(folder: Path, arch: int) -> None:
    run(build(folder, "attention_driver", arch=arch))


@pytest.mark.slow
def test_sampling_and_moves(sampling: str) -> None:
    run(sampling)


@pytest.mark.slow
def test_sampling_by_one_block(lone_sampling: str) -> None:
    run(lone_sampling)


@pytest.mark.slow
@pytest.mark.skipif(_C.level() == "none", reason="this CPU has no AVX2")
def test_noise_is_bitwise_identical_to_the_hosts(sampling: str) -> None:
    """A GPU and a CPU draw the same tokens from the same logits."""
    parts = [np.arange(20_000), 2**32 - 1 - np.arange(20_000), np.arange(0, 2**32, 65_537)]
    parts += [np.arange(-200, 200) + 2**power for power in range(8, 32)]
    bits = np.concatenate(parts).astype(np.uint32)
    done = subprocess.run([sampling, "noise"], input=bits.tobytes(), capture_output=True, check=True)
    host = np.empty(len(bits), dtype=np.float32)
    _C.gumbel_of(bits, host)
    assert done.stdout == host.tobytes()


def mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16


def children(parent: int, k: int, spread: int) -> Iterator[tuple[int, float]]:
    """The children that tests/native/tree_driver.cpp adds."""
    for child in range(k):
        token = mix((parent * 31 + child) % 2**32)
        value = mix((token + 1) % 2**32) % spread
        yield token, -math.inf if value % 7 == 6 else -value / 2**18


class ExpandedTree:
    """Parses the output of the driver: rows (node, token, position, tokens seen) of each expansion, and nodes."""

    def __init__(
        self, driver: str, expansions: int, w: int, k: int, slots: int, prefix: int, spread: int, *, alone: bool = False
    ) -> None:
        """`alone`: the root is expanded before the other leaves, and takes one slot."""
        lines = run(driver, *map(str, (expansions, w, k, slots, prefix, spread, int(alone)))).splitlines()
        rows = [[int(x) for x in line.split()[1:]] for line in lines if line.startswith("row")]
        token_at = {place - prefix: token for _, token, _, place, *_ in rows}
        assert [row[3] - prefix for row in rows] == list(range(len(rows))), "slots are handed out in order"
        self.all_rows = [rows[:1]] * alone + [rows[i : i + w] for i in range(int(alone), len(rows), w)]
        self.rows = [
            [(node, token, at, {token_at[s] for s in seen}) for node, token, at, _, *seen in part if node >= 0]
            for part in self.all_rows
        ]
        nodes = [line.split()[1:] for line in lines if line.startswith("node")]
        self.nodes = [(int(token), int(parent), float(weight)) for token, parent, weight in nodes]


@pytest.mark.slow
@pytest.mark.parametrize(("w", "k"), [(1, 1), (3, 2), (8, 8), (40, 3)])
@pytest.mark.parametrize("alone", [False, True])
def test_a_tree_expands_as_on_the_host(tree: str, w: int, k: int, alone: bool) -> None:
    expansions, prefix, spread = 6, 13, 2**20
    slots = expansions * w + alone
    grown = ExpandedTree(tree, expansions, w, k, slots, prefix, spread, alone=alone)
    host = DraftTree(1 + slots * k, slots)
    host.reset(ROOT_TOKEN)
    for rows in grown.rows:
        leaves = host.best_leaves(w)
        seen = [
            {int(host.token[n]) for n in np.flatnonzero(np.isin(host.slot, np.flatnonzero(m)))} for m in leaves.mask
        ]
        want = {
            token: (depth + prefix, ancestors)
            for token, depth, ancestors in zip(leaves.tokens.tolist(), leaves.depths.tolist(), seen, strict=True)
        }
        assert {token: (position, tokens) for _, token, position, tokens in rows} == want
        if not rows:
            continue
        made = [list(children(token, k, spread)) for token in leaves.tokens.tolist()]
        host.add_children(
            leaves.nodes,
            np.array([[token for token, _ in row] for row in made]),
            np.array([[value for _, value in row] for row in made], dtype=np.float32),
        )
    theirs = {int(host.token[i]): float(host.logprob[i]) for i in range(host.count)}
    assert {token: weight for token, _, weight in grown.nodes} == theirs
    for token, parent, _ in grown.nodes[1:]:
        assert token in [child for child, _ in children(grown.nodes[parent][0], k, spread)]


@pytest.mark.slow
@pytest.mark.parametrize("spread", [1, 12])
def test_of_equal_leaves_the_earlier_is_expanded_first(tree: str, spread: int) -> None:
    grown = ExpandedTree(tree, 5, 6, 4, 30, 0, spread)
    taken: set[int] = set()
    for part, rows in enumerate(grown.rows):
        before = 1 + 4 * sum(len(earlier) for earlier in grown.rows[:part])
        leaves = [n for n in range(before) if n not in taken and grown.nodes[n][2] > NEG_INF]
        order = sorted(leaves, key=lambda n: (-grown.nodes[n][2], n))[:6]
        assert [row[0] for row in rows] == order
        taken.update(order)


@pytest.mark.slow
def test_rows_without_a_leaf_are_padding(tree: str) -> None:
    first = ExpandedTree(tree, 1, 4, 2, 4, 9, 2**20).all_rows[0]
    assert first[0] == [0, ROOT_TOKEN, 9, 9, 0]
    assert first[1:] == [[-1, 0, 9, 9 + row, row] for row in (1, 2, 3)], "they see themselves alone"
