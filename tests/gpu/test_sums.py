"""All-reduce in the projection kernel of a group of GPUs, with virtual ranks in one launch."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cuda import linear as ops
from tests.gpu.device import DEVICE, EMULATED, FEW, emulated_gpu, needs_kernels
from tests.gpu.test_linear import generator, rows_of, weight

pytestmark = [pytest.mark.gpu, needs_kernels]
ROOT = Path(__file__).resolve().parents[2]
K, N = (256, 136) if EMULATED else (512, 1024)
NARROW = 72
SANITIZED = os.environ.get("SWIFTSPEC_TEST_EPOCHS", "60")  # fewer there, too
EPOCHS = (6 if FEW else 12) if EMULATED else int(SANITIZED)


class Ranks:
    """Virtual ranks of a group on this GPU: inboxes in its memory, one launch for all."""

    def __init__(
        self, size: int, k: int, n: int, group: int, timeout_s: float = 5.0, *, two_shot: bool = False
    ) -> None:
        self.weights = [weight(k, n, group, seed) for seed in range(size)]
        self.packed = [ops.pack(w, torch.bfloat16, DEVICE) for w in self.weights]
        lines = ops.max_lines(n)
        self.inboxes = [ops.make_inbox(size, lines, DEVICE) for _ in range(size)]
        self.error_word = torch.zeros(2, dtype=torch.int64, pin_memory=not EMULATED)
        addresses = [box.data_ptr() for box in self.inboxes]
        ends = [ops.PeerCommunicator(r, addresses, lines, self.error_word, DEVICE, timeout_s) for r in range(size)]
        self.ends = [end.two_shot() for end in ends] if two_shot else ends

    def sum(self, x: list[Tensor], residual: Tensor, delays: int) -> list[Tensor]:
        out = [torch.full_like(residual, float("nan")) for _ in x]
        _C.linear_cuda_virtual(
            [p.native for p in self.packed], x, residual, out, [end.native for end in self.ends], delays,
            torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
        return out

    def expected(self, x: list[Tensor], residual: Tensor) -> Tensor:
        """Each rank's product rounded, added in rank order in float32, rounded, then the residual."""
        zero = torch.zeros_like(residual)
        total = torch.zeros_like(residual, dtype=torch.float32)
        for rows, packed in zip(x, self.packed):
            total += ops.linear_residual(rows, packed, zero).float()
        return (total.bfloat16().float() + residual.float()).bfloat16()


def words(count: int, seed: int) -> Tensor:
    return torch.randint(2**31, (count,), generator=generator(seed), dtype=torch.int32).to(DEVICE)


@pytest.mark.parametrize("group", [128, 0])
@pytest.mark.parametrize("size", [1, 2, 4, 6, 8])
def test_sums_over_virtual_ranks(size: int, group: int) -> None:
    """Results equal the sum of the rounded products in rank order, bitwise and on every rank, over epochs of varying
    length, with and without pauses."""
    ranks = Ranks(size, K, N, group)
    for epoch in range(EPOCHS):
        count = (8, 1, 32, 3, 17, 16)[epoch % 6]
        x = [rows_of(count, K, 100 * epoch + r) for r in range(size)]
        residual = rows_of(count, N, epoch)
        want = ranks.expected(x, residual)
        for out in ranks.sum(x, residual, delays=epoch % 3 * (epoch + 1)):
            assert torch.equal(out, want), f"epoch {epoch}"
    assert [int(end.epoch) for end in ranks.ends] == [EPOCHS] * size
    assert ranks.ends[0].describe_fault() is None


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_two_shot_sums_over_virtual_ranks(size: int) -> None:
    """The same bits on every rank, over epochs of varying length and width, so that owners of lines change. The first
    epoch cleans."""
    ranks, narrow = (Ranks(size, K, outputs, 128, two_shot=True) for outputs in (N, NARROW))
    narrow.ends = ranks.ends
    for end in ranks.ends:
        end.epoch.fill_(3)
    for epoch in range(EPOCHS + 1):
        count, those = (16, 8, 1, 32, 3, 17)[epoch % 6], (ranks, narrow)[epoch // 2 % 2]
        x = [rows_of(count, K, 100 * epoch + r) for r in range(size)]
        residual = rows_of(count, those.packed[0].outputs, epoch)
        want = those.expected(x, residual)
        for out in those.sum(x, residual, delays=epoch % 3 * (epoch + 1)):
            assert torch.equal(out, want), f"epoch {epoch}"
    assert [int(end.epoch) for end in ranks.ends] == [EPOCHS + 4] * size
    assert ranks.ends[0].describe_fault() is None


@pytest.mark.parametrize("size", [3, 4])
def test_two_shot_sums_of_blocks_with_several_strips(size: int) -> None:
    """A warp sums strips that its rank owns and receives the sums of others."""
    with emulated_gpu(8) if EMULATED else nullcontext():
        ranks = Ranks(size, K, N if EMULATED else 8 * N, 128, two_shot=True)
        for end in ranks.ends:
            end.epoch.fill_(4)
        for epoch, count in enumerate((8, 17)):
            x = [rows_of(count, K, epoch + r) for r in range(size)]
            residual = rows_of(count, ranks.packed[0].outputs, epoch)
            want = ranks.expected(x, residual)
            assert all(torch.equal(out, want) for out in ranks.sum(x, residual, delays=epoch))


@pytest.mark.parametrize("two_shot", [False, True])
def test_cleaning_epochs_write_every_line(two_shot: bool) -> None:
    """Whatever an earlier epoch has left there, of which the flag would be valid again one cycle later."""
    ranks = Ranks(3, K, N, 128, two_shot=two_shot)
    for end in ranks.ends:
        end.epoch.fill_(2**30)
    for count in (32, 1, 32, 17):
        ranks.sum([rows_of(count, K, r) for r in range(3)], rows_of(count, N), 0)
    for box in ranks.inboxes:
        flags = box.view(torch.int32)[1::2]
        assert flags.unique().tolist() == [2**30 + 1 + epoch for epoch in range(4)]


@pytest.mark.parametrize("two_shot", [False, True])
def test_flags_wrap_on_virtual_ranks(two_shot: bool) -> None:
    """Across the wrap of the 32-bit flags, where lines are cleaned."""
    ranks = Ranks(4, K, N, 128, two_shot=two_shot)
    for start in (2**30 - 3, 2**32 - 8):
        for end in ranks.ends:
            end.epoch.fill_(start)
        for epoch in range(16):
            count = (32, 1)[epoch % 2]
            x = [rows_of(count, K, epoch + r) for r in range(4)]
            residual = rows_of(count, N, epoch)
            for out in ranks.sum(x, residual, delays=epoch):
                assert torch.equal(out, ranks.expected(x, residual))


@pytest.mark.parametrize(("size", "two_shot"), [(1, False), (2, False), (4, False), (8, False), (4, True)])
def test_gathers_over_virtual_ranks(size: int, two_shot: bool) -> None:
    """Messages of any length, interleaved with sums that share lines and epochs, across the wrap of the flags."""
    ranks = Ranks(size, K, N, 128, two_shot=two_shot)
    for start in (0, 2**32 - 8):
        for end in ranks.ends:
            end.epoch.fill_(start)
        for count in (1, 2, 7, 600, 16 * N, 136):
            mine = [words(count, r) for r in range(size)]
            out = [torch.full((size * (count + 1),), -1, dtype=torch.int32, device=DEVICE) for _ in mine]
            _C.gather_cuda_virtual(
                [end.native for end in ranks.ends], mine, [o[: size * count] for o in out],
                torch.cuda.current_stream().cuda_stream,
            )  # fmt: skip
            for found in out:
                assert torch.equal(found[: size * count].view(size, count), torch.stack(mine))
                assert (found[size * count :] == -1).all(), "nothing is written behind the messages"
            x, residual = [rows_of(3, K, r) for r in range(size)], rows_of(3, N, 7)
            for summed in ranks.sum(x, residual, 0):
                assert torch.equal(summed, ranks.expected(x, residual))


@pytest.mark.parametrize("size", [2, 3])
def test_messages_longer_than_the_lines_go_in_chunks(size: int) -> None:
    """One launch and epoch per chunk, interleaved with sums, across the wrap of the flags."""
    ranks = Ranks(size, K, N, 128)
    hold = 2 * ops.max_lines(N)  # words that the lines hold
    for start in (0, 2**32 - 5):
        for end in ranks.ends:
            end.epoch.fill_(start)
        for count, pieces in ((hold, 1), (hold + 1, 2), (3 * hold - 7, 3)):
            before = int(ranks.ends[0].epoch)
            mine = [words(count, r) for r in range(size)]
            out = [torch.full((size * count + 1,), -1, dtype=torch.int32, device=DEVICE) for _ in mine]
            _C.gather_cuda_virtual(
                [end.native for end in ranks.ends], mine, [o[:-1] for o in out],
                torch.cuda.current_stream().cuda_stream,
            )  # fmt: skip
            for found in out:
                assert torch.equal(found[:-1].view(size, count), torch.stack(mine)) and int(found[-1]) == -1
            assert [int(end.epoch) for end in ranks.ends] == [before + pieces] * size
            x, residual = [rows_of(3, K, r) for r in range(size)], rows_of(3, N, 7)
            for summed in ranks.sum(x, residual, 0):
                assert torch.equal(summed, ranks.expected(x, residual))


def test_a_group_of_one_through_the_usual_entry() -> None:
    ranks = Ranks(1, K, N, 128)
    x, residual = rows_of(40, K), rows_of(40, N, 5)
    got = ops.linear_residual(x, ranks.packed[0], residual, ranks.ends[0])
    assert torch.equal(got, ranks.expected([x], residual))
    assert int(ranks.ends[0].epoch) == 2  # 32 rows, then 8
    message = torch.randn(8, 17, dtype=torch.float64, device=DEVICE)
    assert ranks.ends[0].supports(message) and torch.equal(ranks.ends[0].gather(message), message[None])
    assert int(ranks.ends[0].epoch) == 3
    message = torch.randn(3 * ops.max_lines(N) + 5, device=DEVICE)  # of two words to a line
    assert ranks.ends[0].supports(message) and torch.equal(ranks.ends[0].gather(message), message[None])
    assert int(ranks.ends[0].epoch) == 5 and not ranks.ends[0].supports(message.repeat(ops.MAX_GATHER_LAUNCHES))


def test_launches_that_overlap() -> None:
    """Consecutive sums and gathers, each of which starts before the previous one has ended."""
    ranks = Ranks(1, K, N, 128)
    end, packed = ranks.ends[0], ranks.packed[0]
    x, residual, mine = rows_of(9, K), rows_of(9, N, 5), words(40, 1)
    want = ranks.expected([x], residual)
    found = [(ops.linear_residual(x, packed, residual, end), end.gather(mine)) for _ in range(6)]
    assert all(torch.equal(summed, want) and torch.equal(gathered, mine[None]) for summed, gathered in found)
    assert int(end.epoch) == 12


ALONE = """
from tests.gpu.test_sums import K, N, Ranks, ops, rows_of, torch
ranks = Ranks(2, K, N, 128, timeout_s=0.2)
try:
    ops.linear_residual(rows_of(3, K), ranks.packed[0], rows_of(3, N), ranks.ends[0])
    torch.cuda.synchronize()
except RuntimeError:
    print(ranks.ends[0].describe_fault())
"""


def test_a_peer_that_never_arrives() -> None:
    """In a separate process, since the kernel traps and destroys the context."""
    run = subprocess.run(
        [sys.executable, "-c", ALONE], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.stdout.startswith("GPU rank 0 waited too long for rank 1 (slot 0, epoch 0);"), run.stderr[-2000:]


def test_messages_are_checked() -> None:
    end = Ranks(2, K, N, 128).ends[0]
    whole = words(4, 1)
    for mine, out, message in (
        (whole, whole, "every rank's message"),
        (whole, torch.zeros(8, device=DEVICE), "out: expected int32"),
        (whole[::2], whole, "mine: .*not contiguous"),
        (whole.view(torch.uint8)[:3], whole.view(torch.uint8)[:6], "whole words"),
    ):
        with pytest.raises(ValueError, match=message):
            _C.gather_cuda(end.native, mine, out, 0)
