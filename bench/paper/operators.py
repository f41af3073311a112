"""Tables 3 and 7 of the paper: operators of Llama 3, next to those that `bench.gpu.kernels` has measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.gpu.shapes import RankShape
from bench.gpu.targets import QUOTED, TABLE_3, TABLE_3_SHARD

GPU_KERNELS = Path(__file__).resolve().parents[2] / "profiles" / "h100-kernels.json"
ROWS = 8
CONTEXT = 1000  # tokens of the attention that is compared with Table 3, which does not give its own
PEAK_FLOPS, PEAK_BYTES_PER_S = 989e12, 3.35e12  # of an H800 or H100 SXM: dense bfloat16, HBM3
OTHERS = "SwiftSpec", "vLLM", "TensorRT-LLM", "FlashInfer", "FlashAttention", "Table 3"
Record = Callable[[str, str, str, str, float | None], str]  # of system, operator, unit, kind and value; returns a cell


@dataclass(frozen=True, slots=True)
class MeasuredOperator:
    """A measured operator of one rank's shard, 8 rows. `summed`: whether its all-reduce, of a group of one, is part of
    it. `moved`: bytes."""

    microseconds: float
    moved: int
    summed: bool


@dataclass(frozen=True, slots=True)
class MeasuredOperators:
    """The operators of a file of `bench.gpu.kernels`, by model, TP size and name, and the GPU's name and copy speed."""

    gpu: str
    copy_bytes_per_s: float
    found: dict[tuple[str, int, str], list[MeasuredOperator]]

    @staticmethod
    def read(file: Path) -> MeasuredOperators | None:
        """Returns None if there is no file."""
        if not file.is_file():
            return None
        data = json.loads(file.read_text(encoding="utf-8"))
        found: dict[tuple[str, int, str], list[MeasuredOperator]] = {}
        for row in data["results"]:
            if row["rows"] == ROWS and row["competitor"] in ("swiftspec", "swiftspec, summed"):
                made = MeasuredOperator(row["microseconds"], row["moved"], row["competitor"] != "swiftspec")
                found.setdefault((row["model"], row["tp"], row["op"]), []).append(made)
        return MeasuredOperators(data["machine"]["gpu"], 1e9 * data["machine"]["copy GB/s"], found)

    def get(self, model: str, tp: int, op: str, *, summed: bool) -> MeasuredOperator | None:
        """Returns an operator; if `summed`, with its all-reduce where it has one."""
        several = sorted(self.found.get((model, tp, op), ()), key=lambda each: each.summed)
        return (several[-1] if summed else several[0]) if several else None


def flops(op: str) -> float:
    """Returns the floating-point operations of an operator of Table 3's shard over 8 rows."""
    shape = RankShape.of(*TABLE_3_SHARD)
    if op == "attention":
        return 4.0 * ROWS * shape.heads * shape.width * CONTEXT
    outputs, inputs, _ = shape.projection(op)
    return 2.0 * ROWS * outputs * inputs


def table_3_rows(ours: MeasuredOperators | None, record: Record) -> Iterator[list[str]]:
    """Yields the rows of Table 3: microseconds and shares of the peaks, in the paper and here."""
    for op, (took, compute, memory) in TABLE_3.items():
        row = [op, record("paper", op, "us", "quoted", took)]
        row += ["<0.01" if compute is None else f"{compute:.1f}", f"{memory:.1f}"]
        name = f"attention {CONTEXT}" if op == "attention" else op
        mine = ours and ours.get(*TABLE_3_SHARD, name, summed=False)
        if ours is None or mine is None:
            yield [*row, *["-"] * 4]
            continue
        seconds = 1e-6 * mine.microseconds
        speed = mine.moved / seconds
        shares = {
            "% of compute": flops(op) / seconds / PEAK_FLOPS,
            "% of memory": speed / PEAK_BYTES_PER_S,
            "% of copy": speed / ours.copy_bytes_per_s,
        }
        row.append(record("this project", op, "us", "measured", mine.microseconds))
        yield row + [record("this project", op, unit, "measured", 100 * share) for unit, share in shares.items()]


def table_7_rows(ours: MeasuredOperators | None, record: Record) -> Iterator[list[str]]:
    """Yields the rows of Table 7 in microseconds: those of the systems in OTHERS, and ours with the all-reduce."""
    for (model, tp, op), quoted in QUOTED.items():
        label = f"{model}, TP {tp}, {op}"
        mine = ours and ours.get(model, tp, op, summed=True)
        cells = [record(name, label, "us", "quoted", quoted.get(name)) for name in OTHERS]
        yield [label, *cells, record("this project", label, "us", "measured", mine and mine.microseconds)]
