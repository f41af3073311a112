"""Ranks as processes that all-reduce over peer memory: one GPU each if there are enough, otherwise one GPU for all."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from swiftspec.backends.cuda import linear as ops
from swiftspec.backends.cuda.peers import PeerAccessError, PeerCollectives
from swiftspec.distributed.collectives.peers import PeerMemoryGroup
from swiftspec.params import SamplingParams
from tests.gpu.device import DEVICE, EMULATED, captured, most, needs_kernels
from tests.gpu.test_graph import new_capture, random_model
from tests.gpu.test_linear import weight
from tests.gpu.test_smc_graph import LIMIT, answer, population

pytestmark = [pytest.mark.gpu, needs_kernels]
ROOT = Path(__file__).resolve().parents[2]
K, N = 512, 1024
HERE = DEVICE.type  # this process's GPU


def open_peers(rank: int, size: int, file: str, timeout_s: float) -> PeerCollectives:
    """The peer group of this process; its GPU becomes the current one."""
    device = torch.device(f"{HERE}:{rank % torch.cuda.device_count()}" if HERE == "cuda" else HERE)
    torch.cuda.set_device(device)
    store = FileStore(file, size)

    def exchange(topic: str, mine: bytes) -> list[bytes]:
        store.set(f"{topic} {rank}", mine.hex())
        return [bytes.fromhex(store.get(f"{topic} {peer}").decode()) for peer in range(size)]

    return PeerCollectives(rank, size, ops.max_lines(N), device, exchange, timeout_s)


def sum_two_shot(rank: int, size: int, file: str) -> None:
    sum_products(rank, size, file, two_shot=True)


def sum_products(rank: int, size: int, file: str, *, two_shot: bool = False) -> None:
    """Products of varying length, then replays of a graph of three products and gathers: each equals the sum in rank
    order, bitwise."""
    peers = open_peers(rank, size, file, 30.0)
    end = peers.communicator.two_shot() if two_shot else peers.communicator
    packed = [ops.pack(weight(K, N, 128, seed), torch.bfloat16, HERE) for seed in range(size)]

    def draw(rows: int, columns: int, seed: int) -> Tensor:
        return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16().to(HERE)

    def expected(x: list[Tensor], residual: Tensor) -> Tensor:
        total, zero = torch.zeros(residual.shape, device=HERE), torch.zeros_like(residual)
        for rows, its in zip(x, packed, strict=True):
            total += ops.linear_residual(rows, its, zero).float()
        return (total.bfloat16().float() + residual.float()).bfloat16()

    for epoch in range(6 if EMULATED else 30):
        rows = (8, 1, 32, 3, 17, 16)[epoch % 6]
        x, residual = [draw(rows, K, 100 * epoch + r) for r in range(size)], draw(rows, N, epoch)
        assert torch.equal(ops.linear_residual(x[rank], packed[rank], residual, end), expected(x, residual))
    x, residual = [draw(8, K, r) for r in range(size)], draw(8, N, 0)
    want, mine = expected(x, residual), packed[rank]
    everyone = torch.stack(x)

    def some() -> list[tuple[Tensor, Tensor]]:
        return [(ops.linear_residual(x[rank], mine, residual, end), end.gather(x[rank])) for _ in range(3)]

    replay = captured(some)
    before = int(end.epoch)
    for _ in range(5):
        assert all(torch.equal(summed, want) and torch.equal(rows, everyone) for summed, rows in replay())
    assert int(end.epoch) == before + 30
    print("ok")


def decode_particles(rank: int, size: int, file: str) -> None:
    """A request in mode smc on shards of two models, eagerly and with one graph per round, including the gathers of
    the logits; then the texts of the particles."""
    peers, nothing = open_peers(rank, size, file, 30.0), None
    ends: tuple[Any, Any, Any] = (nothing, SimpleNamespace(name="both", rank=rank, size=size, all_reduce=None), peers)
    group = PeerMemoryGroup(*ends)
    models = [random_model(group, seed) for seed in (1, 2)]
    workers = [population(models, *((2, 1) if EMULATED else (4, 3)), capture) for capture in (None, new_capture())]
    assert [worker.executors[0].name for worker in workers] == ["eager", "graph"]
    sampling = SamplingParams(temperature=1.5, seed=1)
    eager, graphed = (answer(worker, sampling, range(7), LIMIT // 2) for worker in workers)
    assert graphed == eager
    print([particle.tokens for particle in graphed.particles])


def wait_in_vain(rank: int, size: int, file: str) -> None:
    """Rank 0 sums; the other ranks never do, and stay alive until it has aborted."""
    peers, gave_up = open_peers(rank, size, file, 0.5), Path(f"{file}.done")
    while rank > 0 and not gave_up.exists():
        time.sleep(0.05)
    if rank > 0:
        return
    x, residual = (torch.zeros(3, columns, dtype=torch.bfloat16, device=HERE) for columns in (K, N))
    try:
        ops.linear_residual(x, ops.pack(weight(K, N, 128), torch.bfloat16, HERE), residual, peers.communicator)
        torch.cuda.synchronize()
    except RuntimeError:
        print(peers.communicator.describe_fault())
    gave_up.touch()


def refuse(rank: int, size: int, file: str) -> None:
    os.environ["SWIFTSPEC_PEERS"] = "0"
    with pytest.raises(PeerAccessError, match=r"^GPU rank 0: SWIFTSPEC_PEERS=0$"):
        open_peers(rank, size, file, 0.5)
    print("refused")


def on_ranks(work: str, size: int, file: Path) -> list[str]:
    """Returns the output of the ranks. They exit without cleanup, like a rank that has lost its GPU."""
    code = "import os, sys\nfrom tests.gpu import test_peers\n"
    code += f"test_peers.{work}(int(sys.argv[1]), {size}, {str(file)!r})\nsys.stdout.flush()\nos._exit(0)"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank)],
            cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        found = [rank.communicate(timeout=300 if EMULATED else 80) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(error[-1500:] for _, error in found)
    return [output for output, _ in found]


@pytest.mark.parametrize("size", most([2, 4], 1))
@pytest.mark.parametrize("work", ["sum_products", "sum_two_shot"])
def test_products_are_summed_over_processes(tmp_path: Path, work: str, size: int) -> None:
    assert on_ranks(work, size, tmp_path / "store") == ["ok\n"] * size


@pytest.mark.parametrize("size", [2])
def test_particles_of_a_group_use_one_graph_per_round(tmp_path: Path, size: int) -> None:
    first, *others = on_ranks("decode_particles", size, tmp_path / "store")
    assert first and all(other == first for other in others)


def test_a_missing_process_is_named(tmp_path: Path) -> None:
    line = "GPU rank 0 waited too long for rank 1 (slot 0, epoch 0); if rank 1 was not ended, SWIFTSPEC_PEERS=0 avoids"
    assert on_ranks("wait_in_vain", 2, tmp_path / "store") == [f"{line} peer memory\n", ""]


def test_peer_memory_can_be_switched_off(tmp_path: Path) -> None:
    assert on_ranks("refuse", 2, tmp_path / "store") == ["refused\n"] * 2
