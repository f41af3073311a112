"""Phases of the kernels of a layer from clocks that each warp records (csrc/cuda/stamps.cuh).

    SWIFTSPEC_STAMPS=1 python setup.py build_ext --build-lib build/stamps
    python -m bench.gpu.with_extension build/stamps bench.gpu.stamps --json out.json [--trace trace.json]

Runs a chain of layers (bench/gpu/chain.py) as a CUDA graph and reduces the stamps of the last layer: per phase the
median and the largest time over warps, how evenly blocks lie on multiprocessors, and the gaps between kernels. Clocks
of one multiprocessor are compared with each other only; the start of a warp has in addition the nanoseconds of the GPU,
from which follows the length of a cycle. `--trace` writes Chrome's trace event format: a process per multiprocessor, a
thread per block. Without stamps in the extension the exit code is 5. Not run on a GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.common.device import check_device
from bench.gpu.chain import chain_of
from bench.gpu.timing import captured
from swiftspec import _C

SKIPPED = 5  # exit code
POINTS, START_NS, PLACE = 12, 12, 13  # words of a record, csrc/cuda/stamps.h
LINEAR = (
    "start", "weights requested", "dependencies", "norm scales", "staged by warp", "staged", "first tile", "last tile",
    "sum of warps", "cluster barrier", "stored", "exit",
)  # fmt: skip
ATTENTION = (
    "start", "key counts", "planned", "dependencies", "requested", "queries", "scores", "softmax", "values",
    "cluster barrier", "stored", "exit",
)  # fmt: skip
LAYERS = 3  # of the chain; the first two warm up caches and clocks
WARM_UP = 20  # replays
RECORDS = 1 << 16  # warps of all launches
Records = NDArray[np.int64]  # [warps, words]
Capture = Callable[[Sequence[Callable[[], Any]]], Callable[[], None]]


@dataclass(frozen=True, slots=True)
class Launch:
    """Records of the warps of one launch."""

    kernel: str
    records: Records

    @property
    def points(self) -> tuple[str, ...]:
        return ATTENTION if self.kernel == "attention" else LINEAR

    @property
    def multiprocessors(self) -> Records:
        return self.records[:, PLACE] & 0xFFFFFFFF

    @property
    def blocks(self) -> Records:
        return self.records[:, PLACE] >> 32


def cycles_per_ns(launches: Sequence[Launch]) -> float:
    """Returns the clock rate: over each multiprocessor, cycles between its first and its last start per nanosecond
    between them; the median. Returns 1 if no multiprocessor has two starts apart."""
    records = np.concatenate([launch.records for launch in launches])
    where = np.concatenate([launch.multiprocessors for launch in launches])
    rates = list[float]()
    for number in np.unique(where):
        mine = records[where == number]
        first, last = mine[mine[:, START_NS].argmin()], mine[mine[:, START_NS].argmax()]
        if last[START_NS] > first[START_NS]:
            rates.append(float((last[0] - first[0]) / (last[START_NS] - first[START_NS])))
    return float(np.median(rates)) if rates else 1.0


def phases(launch: Launch, rate: float) -> list[dict[str, Any]]:
    """Returns for each point the microseconds since the previous point that the warp reached, and since its start:
    median and largest over the warps that reached it."""
    found, before = list[dict[str, Any]](), launch.records[:, 0].copy()
    for index, name in enumerate(launch.points[1:], 1):
        clock = launch.records[:, index]
        reached = clock > 0
        if not reached.any():
            continue
        took = (clock - before)[reached] / rate / 1e3
        since = (clock - launch.records[:, 0])[reached] / rate / 1e3
        found.append({
            "point": name, "warps": int(reached.sum()), "us": float(np.median(took)), "largest us": float(took.max()),
            "since start us": float(np.median(since)),
        })  # fmt: skip
        before[reached] = clock[reached]
    return found


def spread(launch: Launch, multiprocessors: int) -> dict[str, float]:
    """Returns how blocks lie on the GPU's multiprocessors: the number of blocks, of multiprocessors that have any, and
    the blocks of the busiest one over the mean."""
    pairs = np.unique(np.stack([launch.multiprocessors, launch.blocks]), axis=1)
    counts = np.unique(pairs[0], return_counts=True)[1]
    return {
        "blocks": int(counts.sum()),
        "multiprocessors": len(counts),
        "largest of mean": float(counts.max() * multiprocessors / counts.sum()),
    }


def window(launch: Launch, rate: float) -> tuple[float, float]:
    """Returns the nanoseconds of the GPU at the first start and the last exit."""
    lasted = (launch.records[:, :POINTS].max(1) - launch.records[:, 0]) / rate
    return float(launch.records[:, START_NS].min()), float((launch.records[:, START_NS] + lasted).max())


def reduce(launches: Sequence[Launch]) -> dict[str, Any]:
    """Returns the table of the launches, in their order. `gap us`: from the last exit of the launch before to the first
    wait that has returned in this one, for attention with the kernel of RoPE in between; `early us`: how long before
    that exit its first block has started."""
    rate, kernels, ended = cycles_per_ns(launches), list[dict[str, Any]](), None
    seen = len(np.unique(np.concatenate([launch.multiprocessors for launch in launches])))
    for launch in launches:
        start, end = window(launch, rate)
        found: dict[str, Any] = {"kernel": launch.kernel, "us": (end - start) / 1e3, **spread(launch, seen)}
        if ended is not None:
            ready = launch.points.index("dependencies")
            reached = launch.records[launch.records[:, ready] > 0]  # not by blocks without keys
            waited = reached[:, START_NS] + (reached[:, ready] - reached[:, 0]) / rate
            found |= {"gap us": float(waited.min() - ended) / 1e3, "early us": (ended - start) / 1e3}
        kernels.append(found | {"phases": phases(launch, rate)})
        ended = end
    return {"cycles per ns": rate, "kernels": kernels}


def trace_events(launches: Sequence[Launch]) -> Iterator[dict[str, Any]]:
    """Yields the phases of the first warp of each block as events of Chrome's trace format, in microseconds."""
    rate = cycles_per_ns(launches)
    for launch in launches:
        _, first = np.unique(launch.blocks, return_index=True)
        for record, place, block in zip(launch.records[first], launch.multiprocessors[first], launch.blocks[first]):
            before = 0
            for index, name in enumerate(launch.points[1:], 1):
                if record[index] <= 0:
                    continue
                began, ended = ((record[i] - record[0]) / rate for i in (before, index))
                yield {
                    "name": name, "cat": launch.kernel, "ph": "X", "pid": int(place), "tid": int(block),
                    "ts": float(record[START_NS] + began) / 1e3, "dur": float(ended - began) / 1e3,
                }  # fmt: skip
                before = index


def recorded(model: str, rows: int, context: int, device: str, capture: Capture = captured) -> list[Launch]:
    """Returns the launches of the last layer of a chain. `capture`: captures calls and returns their replay; their
    launches get the same records in every replay."""
    chain = chain_of(model, rows, context, device)
    chain.grow(LAYERS)
    chain.prefetching()
    calls = chain.calls(LAYERS)
    native: Any = _C  # of a build with stamps
    buffer = torch.zeros(RECORDS, native.STAMP_WORDS, dtype=torch.int64, device=device)
    for call in calls:
        call()
    native.start_stamps(buffer)
    replay = capture(calls)
    entries = native.stop_stamps()
    for _ in range(WARM_UP):  # each overwrites the stamps of the one before
        replay()
    words = buffer.cpu().numpy()
    last = entries[-(len(entries) // LAYERS) :]
    return [Launch(kernel, words[first : first + count]) for kernel, first, count in last]


def describe(found: dict[str, Any]) -> Iterator[str]:
    """Yields the lines of a table."""
    for kernel in found["kernels"]:
        gap = f", gap {kernel['gap us']:.2f}, early {kernel['early us']:.2f}" if "gap us" in kernel else ""
        yield (
            f"  {kernel['kernel']:24} {kernel['us']:7.2f} us, {kernel['blocks']} blocks on"
            f" {kernel['multiprocessors']}, busiest {kernel['largest of mean']:.2f} of mean{gap}"
        )
        for phase in kernel["phases"]:
            times = f"{phase['us']:7.2f} {phase['largest us']:7.2f} {phase['since start us']:8.2f}"
            yield f"    {phase['point']:18} {times}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="Llama-3-8B,Llama-3-70B,Llama-3.2-1B", help="of bench/gpu/shapes.py")
    parser.add_argument("--contexts", default="1000", help="comma-separated numbers of keys")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--json", type=Path, required=True, help="file for the tables, written after each")
    parser.add_argument("--trace", type=Path, help="file for the trace of the last table")
    args = parser.parse_args()
    check_device(parser, "cuda")
    if not hasattr(_C, "start_stamps"):
        print("this extension records no stamps: build one with SWIFTSPEC_STAMPS=1")
        raise SystemExit(SKIPPED)
    whole: dict[str, Any] = {"rows": args.rows, "tables": []}
    launches: list[Launch] = []
    with torch.inference_mode():
        for model in args.models.split(","):
            for context in map(int, args.contexts.split(",")):
                launches = recorded(model, args.rows, context, "cuda")
                found = {"model": model, "context": context, **reduce(launches)}
                whole["tables"].append(found)
                args.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
                print(f"{model} after {context} tokens", *describe(found), sep="\n", flush=True)
    if args.trace is not None:
        args.trace.write_text(json.dumps({"traceEvents": [*trace_events(launches)]}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
