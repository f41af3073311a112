"""Table 7 of the paper: all competitors compute the same sums, on ranks that are threads and without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bench.baselines.kernels import BaselineKernels
from bench.gpu import all_reduce
from bench.gpu.all_reduce import GATHER, NCCL, ONE_SHOT, PRODUCT, TWO_SHOT, SumBench, SumTime, competitors
from bench.gpu.cases import OURS, Maker
from bench.gpu.shapes import RankShape
from bench.gpu.timing import Call
from swiftspec.backends.unfused import unfused
from tests.support.thread_group import ThreadGroup, on_ranks, peers

SMALL = RankShape(128, 2, 1, 64, 256, 512, 64)


class Reduce:
    """The all-reduce of a group, which has a two-shot form."""

    def __init__(self, group: ThreadGroup) -> None:
        self.group = group

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(x)

    def two_shot(self) -> Reduce:
        return Reduce(self.group)


def bench(group: ThreadGroup, timed: list[int], *, wrong: bool = False) -> SumBench:
    def library(x: Tensor) -> Tensor:
        return group.all_reduce(x)

    def faulty(x: Tensor) -> Tensor:
        return group.all_reduce(x) * (2 if wrong else 1)

    def timer(calls: list[Call]) -> float:
        timed.append(len(calls))
        calls[-1]()
        return 10.0 + group.rank

    joined: Any = peers(group, 1 << 20)
    joined.all_reduce = Reduce(group)
    reduces = competitors(joined, faulty, library, library)
    return SumBench(joined, reduces, unfused, timer, Maker("cpu", BaselineKernels(), cold=1))


@pytest.mark.parametrize("wrong", [False, True])
def test_competitors_are_compared_before_they_are_timed(monkeypatch: pytest.MonkeyPatch, wrong: bool) -> None:
    """The figure is that of the slowest rank. A wrong sum is reported instead of timed, on all ranks."""
    monkeypatch.setattr(RankShape, "of", staticmethod(lambda model, tp: SMALL))
    timed: list[int] = []

    def work(group: ThreadGroup) -> tuple[list[SumTime], list[str]]:
        torch.manual_seed(group.rank)
        return bench(group, timed, wrong=wrong).case("Llama-3-70B", "down", 8)

    ranks = on_ranks(4, work)
    for found, failed in ranks:
        names = [each.competitor for each in found]
        assert names == [
            name for name in (NCCL, OURS, TWO_SHOT, GATHER, ONE_SHOT, PRODUCT) if not wrong or name != ONE_SHOT
        ]
        assert {each.microseconds for each in found} == {13.0}
        assert all("Llama-3-70B TP4 down x8 product + one-shot: its sum differs" in line for line in failed)
        assert len(failed) == wrong
    assert len(timed) == 4 * (6 - wrong)
    assert "13.00  SwiftSpec 24.3, vLLM 25.4, TensorRT-LLM 26.1" in str(ranks[0][0][0]), "quoted from the paper"


def test_torch_has_the_one_shot_all_reduce() -> None:
    """The only operator of torch with which a competitor could silently be missing on a GPU."""
    schema = torch.ops.symm_mem.one_shot_all_reduce_copy.default._schema
    assert [argument.name for argument in schema.arguments] == ["symm_buffer", "local_input", "reduce_op", "group_name"]
    assert all_reduce.one_shot_reduce(8, torch.device("cpu")) == "there is no process group"
