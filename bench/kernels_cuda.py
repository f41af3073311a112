"""The operators of a Llama-3 layer on a GPU, one by one, beside cuBLAS, torch's int4 product and SDPA.

    python -m bench.kernels_cuda [--only "Llama-3-70B TP4"] [--rows 8] [--budget 90] [--json out.json]

How a time is taken: a graph of many calls over copies of weights or caches that are together several times the L2,
replayed between two events; the median replay over the number of calls. So no launch is in it, and every call meets
memory that is cold. `floor` is the bytes that must move over the copy speed of this run. Most important cases first;
after `--budget` seconds the rest is left out and said to be.

Compared are: `swiftspec` (ops/cuda.py, where it is there: norm, activation, residual, RoPE and KV append included),
`unfused` (the same work through libraries), and the bare products `torch int4` and `cublas bf16`. Not run on a GPU yet.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench import targets
from swiftspec.batch import Batch
from swiftspec.errors import UserError
from swiftspec.model.linear import DenseWeight, Int4Weight
from swiftspec.ops import reference, unfused

COLD = 256 << 20  # bytes that the copies of a case are together at least
CALLS, REPLAYS = 200, 20
BF16, GROUP = torch.bfloat16, 128
# hidden, query heads, key-value heads, width of a head, inner
MODELS = {
    "Llama-3-70B": (8192, 64, 8, 128, 28672),
    "Llama-3-8B": (4096, 32, 8, 128, 14336),
    "Llama-3.2-3B": (3072, 24, 8, 128, 8192),
    "Llama-3.2-1B": (2048, 32, 8, 64, 8192),
}
PLACES = [
    ("Llama-3-70B", 4), ("Llama-3-70B", 1), ("Llama-3.2-3B", 1), ("Llama-3.2-1B", 1), ("Llama-3-8B", 1),
    ("Llama-3-70B", 8), ("Llama-3.2-3B", 4), ("Llama-3-8B", 4), ("Llama-3.2-1B", 4), ("Llama-3-70B", 2),
    ("Llama-3-8B", 2), ("Llama-3.2-3B", 2), ("Llama-3.2-1B", 2),
]  # fmt: skip
CONTEXTS = (1000, 500, 4000)
Call = Callable[[], Any]
Timer = Callable[[list[Call]], float]  # microseconds a call


@dataclass(frozen=True, slots=True)
class Case:
    """One operator of one rank. `variants`: for each competitor, what makes its calls, on one copy after the other."""

    model: str
    tp: int
    op: str
    rows: int
    moved: int  # bytes
    variants: dict[str, Callable[[], list[Call]]]

    @property
    def name(self) -> str:
        return f"{self.model} TP{self.tp} {self.op} x{self.rows}"


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    model: str
    tp: int
    op: str
    rows: int
    competitor: str
    microseconds: float
    gigabytes: float  # a second, of the bytes that must move
    of_copy: float
    over_floor: float  # microseconds
    accept: float  # microseconds, for 8 rows
    goal: float
    paper: float | None  # microseconds, quoted, on other hardware


def graph_timer(calls: list[Call]) -> float:
    """Microseconds a call, by replays of a graph."""
    many = list(itertools.islice(itertools.cycle(calls), max(CALLS, len(calls))))
    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in many:
            call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(1000 * start.elapsed_time(stop) / len(many))
    return median(times)


def copy_speed(device: str, size: int = 4 << 30) -> float:
    """GB/s read and written by a copy on the device, far larger than its caches."""
    source = torch.ones(size // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(6):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return size / (1e6 * median(times[1:]))


def random_int4(outputs: int, inputs: int, device: str) -> Int4Weight:
    words = [
        torch.randint(-(2**31), 2**31, (rows, outputs // 8), dtype=torch.int32, device=device)
        for rows in (inputs, inputs // GROUP)
    ]
    scales = torch.rand(inputs // GROUP, outputs, device=device).add_(0.5).mul_(1e-3).half()
    return Int4Weight(words[0], scales, words[1], GROUP)


def linear_case(model: str, tp: int, op: str, rows: int, device: str, cold: int = COLD) -> Case:
    """One projection of a layer. Inputs and outputs of a rank are multiples of a group here."""
    hidden, heads, kv_heads, width, inner = MODELS[model]
    n, k = {
        "qkv": ((heads + 2 * kv_heads) * width // tp, hidden),
        "o": (hidden, heads * width // tp),
        "swiglu": (2 * inner // tp, hidden),
        "down": (hidden, inner // tp),
    }[op]
    weights = n * k // 2 + k // GROUP * n * 5 // 2
    moved = weights + 2 * rows * (k + (n // 2 if op == "swiglu" else n) + (n if op in ("o", "down") else 0))

    def inputs(count: int) -> tuple[Tensor, Tensor, range]:
        x, residual = torch.randn(rows, k, device=device).to(BF16), torch.randn(rows, n, device=device).to(BF16)
        return x, residual, range(max(4, math.ceil(cold / count)))

    def whole(ops: Any) -> list[Call]:
        x, residual, copies = inputs(weights)
        norm = ops.pack_norm(torch.ones(k, device=device), 1e-5, BF16, device)
        packed = [ops.pack(random_int4(n, k, device), BF16, device) for _ in copies]
        return [_projection(ops, op, x, norm, weight, residual) for weight in packed]

    def int4() -> list[Call]:
        x, _, copies = inputs(weights)
        packed = [unfused.pack(random_int4(n, k, device), BF16, device) for _ in copies]
        return [lambda weight=weight: weight(x) for weight in packed]

    def bf16() -> list[Call]:
        x, _, copies = inputs(2 * n * k)
        dense = [DenseWeight(torch.randn(n, k, dtype=BF16, device=device)) for _ in copies]
        products = [reference.pack(weight, BF16, device) for weight in dense]
        return [lambda product=product: product(x) for product in products]

    variants = {**_ours(whole, device), "torch int4": int4, "cublas bf16": bf16}
    return Case(model, tp, op, rows, moved, variants)


def _ours(calls: Callable[[Any], list[Call]], device: str) -> dict[str, Callable[[], list[Call]]]:
    """The competitors that are modules of operators: ops/cuda.py where it is there, and the libraries."""
    try:
        modules = {"swiftspec": importlib.import_module("swiftspec.ops.cuda")} if device.startswith("cuda") else {}
    except ImportError:
        modules = {}
    return {name: partial(calls, ops) for name, ops in {**modules, "unfused": unfused}.items()}


def _projection(ops: Any, op: str, x: Tensor, norm: Any, packed: Any, residual: Tensor) -> Call:
    if op == "swiglu":
        return lambda: ops.norm_swiglu(x, norm, packed)
    if op == "qkv":
        return lambda: ops.norm_linear(x, norm, packed)
    return lambda: ops.linear_residual(x, packed, residual, None)


@dataclass(slots=True)
class Cache:
    k: Tensor  # [layers, 1, kv_heads, capacity, width]
    v: Tensor


def attention_case(model: str, tp: int, context: int, rows: int, device: str, cold: int = COLD) -> Case:
    """Attention of `rows` nodes of a tree, the last of `context` slots; each copy is a layer of one cache."""
    _, heads, kv_heads, width, _ = MODELS[model]
    heads, kv_heads = heads // tp, kv_heads // tp
    moved = 4 * kv_heads * context * width

    def whole(ops: Any) -> list[Call]:
        layers = max(4, math.ceil(cold / moved))
        size = (layers, 1, kv_heads, context, width)
        cache = Cache(*(torch.randn(size, dtype=BF16, device=device) for _ in range(2)))
        table = torch.randn(2, context, width, dtype=BF16, device=device)
        slots = torch.arange(context - rows, context, device=device)
        window = torch.rand(rows, max(rows, 8), device=device) < 0.5
        window[:, -rows:] |= torch.eye(rows, dtype=torch.bool, device=device)
        batch = Batch(slots, slots, slots, window, torch.zeros_like(slots), torch.tensor([context], device=device))
        qkv = torch.randn(rows, (heads + 2 * kv_heads) * width, dtype=BF16, device=device)
        plan = ops.prepare(batch, cache, table[0], table[1], heads)
        return [lambda layer=layer: ops.tree_attention(qkv, plan, layer) for layer in range(layers)]

    return Case(model, tp, f"attention {context}", rows, moved, _ours(whole, device))


def cases(rows: tuple[int, ...], device: str) -> Iterator[Case]:
    """All of them; 8 rows of the first five places before the first place's other numbers of rows, and so on."""
    order = itertools.product(enumerate(PLACES), rows)
    for (_, (model, tp)), count in sorted(order, key=lambda case: case[0][0] + 5 * (case[1] != 8)):
        for op in ("qkv", "o", "swiglu", "down"):
            yield linear_case(model, tp, op, count, device)
        for context in CONTEXTS:
            yield attention_case(model, tp, context, count, device)


def measure(case: Case, copy: float, timer: Timer) -> Iterator[Result | str]:
    """A result for each competitor, or in one line why there is none."""
    floor = case.moved / (1e3 * copy)
    kind = targets.attention if case.op.startswith("attention") else targets.linear
    target, paper = kind(case.moved, copy), targets.PAPER.get((case.model, case.tp, case.op))
    for competitor, make in case.variants.items():
        try:
            us = timer(make())
        except (RuntimeError, ValueError, UserError) as error:
            yield f"{case.name} {competitor}: {str(error).partition(chr(10))[0]}"
            continue
        speed = case.moved / (1e3 * us)
        head = (case.name, case.model, case.tp, case.op, case.rows, competitor)
        yield Result(*head, us, speed, speed / copy, us - floor, target.accept, target.goal, paper)


@dataclass(slots=True)
class Findings:
    """All there is so far, as the file holds it."""

    machine: dict[str, Any]
    results: list[Result] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def write(self, file: Path | None) -> None:
        if file is not None:
            file.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def line(r: Result) -> str:
    numbers = f"{r.microseconds:8.2f} {r.gigabytes:8.0f} {r.of_copy:8.2f} {r.over_floor:8.2f}"
    paper = "" if r.paper is None else f"{r.paper:.1f}"
    return f"{r.name:36} {r.competitor:12} {numbers} {r.accept:8.2f} {r.goal:8.2f} {paper:>8}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--rows", default="8,1,16,32,4")
    parser.add_argument("--budget", type=float, default=90.0, help="seconds after which no case is begun")
    parser.add_argument("--json", type=Path, help="where to write the results, after every case")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("PyTorch finds no NVIDIA GPU here")
    began, copy = time.monotonic(), copy_speed("cuda")
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "copy GB/s": round(copy, 1)}
    print(f"{machine['gpu']}: a copy moves {copy:.0f} GB/s")
    print(f"{'':36} {'':12} {'us':>8} {'GB/s':>8} {'of copy':>8} {'over':>8} {'accept':>8} {'goal':>8} {'paper':>8}")
    findings = Findings(machine)
    for case in cases(tuple(map(int, args.rows.split(","))), "cuda"):
        if args.only not in case.name:
            continue
        if time.monotonic() - began > args.budget:
            findings.left_out.append(case.name)
            continue
        for found in measure(case, copy, graph_timer):
            if isinstance(found, str):
                findings.failed.append(found)
            else:
                findings.results.append(found)
            print(found if isinstance(found, str) else line(found), flush=True)
        findings.write(args.json)
    findings.write(args.json)
    print(f"{len(findings.failed)} failed, {len(findings.left_out)} cases left out for want of time")
    return 1 if findings.failed else 0


if __name__ == "__main__":
    sys.exit(main())
