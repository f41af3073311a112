"""Row-parallel projections (O, down) with their all-reduce over several GPUs, as in the paper's Table 7.

    torchrun --standalone --nproc-per-node 4 -m bench.gpu.all_reduce [--rows 8,1,32] [--budget 60] [--json out.json]

Competitors: `swiftspec` (the all-reduce in the kernel of the projection, through peer memory), `swiftspec two-shot`
(the same with two-shot sums, csrc/cuda/peers/channel.h), and the same int4 product followed by NCCL's all-reduce
(`product + nccl`), by an all-gather and a sum in rank order (`product + gather`, what the engine does without peer
memory), or by the one-shot all-reduce of torch's symmetric memory (`product + one-shot`). All add the residual.
`product` is one rank's product without the sum.

Each call reads other weights, so that they come from memory. A CUDA graph of many calls is replayed between two events;
a figure is the median replay of the slowest rank, divided by the number of calls. Every competitor's first result is
compared with that of NCCL before it is timed. Not run on a GPU yet.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.baselines.kernels import BaselineKernels, first_line
from bench.common.device import check_device
from bench.common.groups import leave
from bench.gpu import targets
from bench.gpu.cases import BF16, OURS, Maker, random_int4
from bench.gpu.shapes import RankShape
from bench.gpu.timing import Call, Timer, fixed_graph_timer
from swiftspec.backends.cuda import cuda
from swiftspec.distributed.collectives.join import RankGroup, join_group
from swiftspec.distributed.collectives.peers import PeerMemoryGroup
from swiftspec.distributed.collectives.torch_dist import TorchDistGroup
from swiftspec.distributed.launch.world import join_world

SHAPES = ("Llama-3-70B", "Llama-3-8B", "Llama-3.2-3B", "Llama-3.2-1B")
OPS = ("o", "down")
PRODUCT, NCCL, GATHER, ONE_SHOT = "product", "product + nccl", "product + gather", "product + one-shot"
TWO_SHOT = f"{OURS} two-shot"
TOLERANCE = 0.05  # of the largest sum: sums of bfloat16 products in another order

Reduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class SumTime:
    """Time of a projection of one rank with its all-reduce."""

    model: str
    ranks: int
    op: str
    rows: int
    competitor: str
    microseconds: float  # of the slowest rank
    quoted: dict[str, float]  # microseconds on an H800 from the paper, 8 rows

    def __str__(self) -> str:
        quoted = ", ".join(f"{who} {us:.1f}" for who, us in self.quoted.items())
        name = f"{self.model} TP{self.ranks} {self.op} x{self.rows}"
        return f"{name:32} {self.competitor:20} {self.microseconds:8.2f}  {quoted}".rstrip()


class OneShotReduce:
    """All-reduce by torch's symmetric memory: every rank reads the inputs of all ranks and adds them."""

    def __init__(self, elements: int, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        if dist.group.WORLD is None:
            raise RuntimeError("there is no process group")
        self._name = dist.group.WORLD.group_name
        self._buffer = symmetric.empty(elements, dtype=BF16, device=device)
        symmetric.rendezvous(self._buffer, self._name)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.symm_mem.one_shot_all_reduce_copy(
            self._buffer[: x.numel()], x.view(-1), "sum", self._name
        ).view(x.shape)


def nccl_all_reduce(x: Tensor) -> Tensor:
    """All-reduces x in place by the library's algorithm."""
    dist.all_reduce(x)
    return x


def competitors(group: RankGroup, one_shot: Reduce | str, nccl: Reduce, gather: Reduce) -> dict[str, Any]:
    """Returns the all-reduces by name, None for the product alone, or a text that explains why a competitor is missing.

    `one_shot`: the all-reduce of torch's symmetric memory, or why there is none. `nccl`, `gather`: the library's.
    """
    ours = two_shot = "the GPUs do not exchange data by peer memory"
    if isinstance(group, PeerMemoryGroup):
        ours, two_shot = group.all_reduce, group.all_reduce.two_shot()
    return {NCCL: nccl, OURS: ours, TWO_SHOT: two_shot, GATHER: gather, ONE_SHOT: one_shot, PRODUCT: None}


@dataclass(slots=True)
class SumBench:
    """Measurement of the competitors on one rank. All ranks make the same calls."""

    group: RankGroup
    reduces: dict[str, Any]  # see `competitors`
    ops: Any
    timer: Timer
    make: Maker

    def case(self, model: str, op: str, rows: int) -> tuple[list[SumTime], list[str]]:
        """Measures all competitors on a case. Returns their times, and a line for each that failed or is missing."""
        outputs, inputs, int4_group = RankShape.of(model, self.group.size).projection(op)
        copies = self.make.copies(outputs * inputs // 2)
        device = self.make.device
        packed = [self.ops.pack(random_int4(outputs, inputs, int4_group, device), BF16, device) for _ in copies]
        x, residual = self.make.rows(rows, inputs), self.shared_rows(rows, outputs)
        quoted = targets.QUOTED.get((model, self.group.size, op), {}) if rows == 8 else {}
        found, failed = list[SumTime](), list[str]()
        want = self.ops.linear_residual(x, packed[0], residual, self.reduces[NCCL]).float()
        for name, reduce in self.reduces.items():
            if isinstance(reduce, str):
                failed.append(f"{model} TP{self.group.size} {op} x{rows} {name}: {reduce}")
                continue
            calls: list[Call] = [partial(self.ops.linear_residual, x, each, residual, reduce) for each in packed]
            try:
                if reduce is not None:
                    check(calls[0]().float(), want)
                us = self.slowest(self.timer(calls))
            except (RuntimeError, ValueError) as error:
                failed.append(f"{model} TP{self.group.size} {op} x{rows} {name}: {first_line(error)}")
                continue
            found.append(SumTime(model, self.group.size, op, rows, name, us, quoted))
        return found, failed

    def shared_rows(self, rows: int, columns: int) -> Tensor:
        """Returns random rows that are the same on all ranks, such as the residual stream."""
        return self.group.all_gather(self.make.rows(rows, columns))[0].contiguous()

    def slowest(self, us: float) -> float:
        """Returns the largest of the ranks' times."""
        return float(self.group.all_gather(torch.tensor([us], device=self.make.device)).max())

    def agree(self, go_on: bool) -> bool:
        """Returns rank 0's answer on all ranks."""
        return bool(self.group.all_gather(torch.tensor([int(go_on)], device=self.make.device))[0].item())


def check(found: Tensor, want: Tensor) -> None:
    """Raises ValueError if a sum differs from that of NCCL by more than rounding."""
    off = float((found - want).abs().max() / want.abs().max())
    if not off < TOLERANCE:
        raise ValueError(f"its sum differs from NCCL's by {off:.1%} of the largest one")


def one_shot_reduce(elements: int, device: torch.device) -> Reduce | str:
    """Returns the all-reduce of torch's symmetric memory, or why there is none."""
    try:
        return OneShotReduce(elements, device)
    except (AttributeError, ImportError, RuntimeError) as error:
        return first_line(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="8,1,32")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds after which no further case starts")
    parser.add_argument("--json", type=Path, help="file for the results of rank 0, written after every case")
    args = parser.parse_args()
    world, began = join_world(log=lambda line: print(line, flush=True)), time.monotonic()
    if world is None:
        parser.error("requires several ranks; start it with torchrun --standalone --nproc-per-node 2")
    check_device(parser, "cuda", world.local_size)
    device, rows = torch.device("cuda", world.local_rank), [int(count) for count in args.rows.split(",")]
    hidden = max(RankShape.of(model, world.size).hidden for model in SHAPES)
    group = join_group(world, "all-reduce", world.rank, world.size, device=device, share_device=False, width=hidden)
    gather = TorchDistGroup("all-reduce", world.rank, world.size, nccl=True).all_reduce
    one_shot = one_shot_reduce(max(rows) * hidden, device)
    bench = SumBench(
        group, competitors(group, one_shot, nccl_all_reduce, gather), cuda, fixed_graph_timer,
        Maker(str(device), BaselineKernels()),
    )  # fmt: skip
    whole: dict[str, Any] = {
        "machine": {"gpu": torch.cuda.get_device_name(device), "ranks": world.size, "torch": torch.__version__},
        "results": [], "failed": [], "left out": [],
    }  # fmt: skip
    for model, op, count in itertools.product(SHAPES, OPS, rows):
        if not bench.agree(time.monotonic() < began + args.budget):
            whole["left out"].append(f"{model} TP{world.size} {op} x{count}")
            continue
        found, failed = bench.case(model, op, count)
        whole["results"] += [asdict(each) for each in found]
        whole["failed"] += failed
        if world.rank == 0:
            print("\n".join([*map(str, found), *failed]), flush=True)
            if args.json is not None:
                args.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    leave(group, device)


if __name__ == "__main__":
    main()
