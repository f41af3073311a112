"""CPU operators one at a time: microseconds, GB/s, GFLOPS, and their share of a copy's and a multiply loop's speed.

    python -m bench.kernels [--threads 1] [--level avx2] [--only linear] [--json out.json] [--quick]

The copy speed is measured in the same run with the same number of threads; the peak is that of one thread, times the
number of threads. An operator cycles through the weights of several layers, LAYERS bytes of them, as in a forward; so
does the copy. One thread is timed by its CPU time, several by the wall clock.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swiftspec.backends.cpu import cpu as host
from swiftspec.backends.reference.sampling import Scores
from swiftspec.model.batch import Batch
from swiftspec.model.formats.int4 import Int4Weight, pack_int4
from swiftspec.model.weights import DenseWeight

LAYERS = 16 << 20  # bytes of all weights that an operator cycles through
GROUP = 128
# outputs, inputs, whether the projection is gate and up
LINEAR = {
    "demo qkv": (640, 384, False),
    "demo o": (384, 384, False),
    "demo gate_up": (2048, 384, True),
    "demo down": (384, 1024, False),
    "demo head": (4096, 384, False),
    "1B qkv": (3072, 2048, False),
    "1B o": (2048, 2048, False),
    "1B gate_up": (16384, 2048, True),
    "1B down": (2048, 8192, False),
}
HEADS = {"demo": (6, 2, 64), "1B": (32, 8, 64)}  # query heads, key-value heads, head dimension
VOCABULARIES = {"demo": 4096, "1B": 128256}


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    run: Callable[[], Any]
    bytes: int  # read and written
    operations: int
    wide: bool = False  # whether arithmetic is in float32


@dataclass(slots=True)
class Cache:
    k: Tensor  # [1, 1, kv_heads, length, dim]
    v: Tensor


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    microseconds: float
    gigabytes: float  # per second
    gigaflops: float
    of_copy: float
    of_peak: float


def best(run: Callable[[], Any], quick: bool) -> float:
    """Returns the seconds per call of the fastest of several repetitions."""
    clock = time.thread_time if host.threads() == 1 else time.perf_counter
    run()
    began = clock()
    run()
    repeats = max(1, round((0.0005 if quick else 0.005) / max(clock() - began, 1e-6)))
    least = float("inf")
    for _ in range(2 if quick else 15):
        began = clock()
        for _ in range(repeats):
            run()
        least = min(least, (clock() - began) / repeats)
    return least


def make_weight(kind: str, n: int, k: int) -> tuple[Any, int]:
    """Builds a random packed projection with `n` outputs and `k` inputs. Returns it and its size in bytes."""
    dtype = torch.float32 if kind == "f32" else torch.bfloat16
    if kind == "int4":
        codes, zeros = (torch.randint(0, 16, (r, n), dtype=torch.uint8) for r in (k, k // GROUP))
        weight = Int4Weight(pack_int4(codes), torch.rand(k // GROUP, n).half(), pack_int4(zeros), GROUP)
    else:
        weight = DenseWeight(torch.randn(n, k).to(dtype))
    packed = host.pack(weight, dtype, "cpu")
    tensors = packed.data, *packed.optional_tensors().values()
    return packed, sum(each.nbytes for each in tensors if each is not None)


def linear_cases(rows: tuple[int, ...], names: list[str]) -> Iterator[Case]:
    for name, kind in itertools.product(names, ("bf16", "int4", "f32")):
        n, k, gated = LINEAR[name]
        weight, size = make_weight(kind, n, k)
        layers = itertools.cycle([weight, *(make_weight(kind, n, k)[0] for _ in range(LAYERS // size))])
        for count in rows:
            dtype = torch.float32 if kind == "f32" else torch.bfloat16
            x, norm = torch.randn(count, k).to(dtype), host.pack_norm(torch.ones(k), 1e-5, dtype, "cpu")
            residual = torch.randn(count, n).to(dtype)

            def run(
                x: Tensor = x, norm: Any = norm, res: Tensor = residual, layers: Any = layers, gated: bool = gated
            ) -> None:
                if gated:
                    host.norm_swiglu(x, norm, next(layers))
                else:
                    host.linear_residual(x, next(layers), res)

            moved = size + x.nbytes + (1 if gated else 2) * residual.nbytes
            yield Case(f"linear {name} {kind} x{count}", run, moved, 2 * count * n * k, kind == "f32")


def attention_cases(rows: tuple[int, ...], contexts: tuple[int, ...]) -> Iterator[Case]:
    for (name, (heads, kv_heads, dim)), length, count in itertools.product(HEADS.items(), contexts, rows):
        cache = Cache(*(torch.randn(1, 1, kv_heads, length, dim).bfloat16() for _ in range(2)))
        table, slots = torch.randn(length, dim).bfloat16(), torch.arange(length - count, length)
        window = torch.ones(count, count, dtype=torch.bool).tril()
        batch = Batch(slots, slots, slots, window, torch.zeros_like(slots), torch.tensor([length]))
        plan = host.prepare(batch, cache, table, table, heads)
        qkv = torch.randn(count, (heads + 2 * kv_heads) * dim).bfloat16()

        def run(qkv: Tensor = qkv, plan: Any = plan) -> None:
            host.tree_attention(qkv, plan, 0)

        yield Case(f"attention {name} {length} x{count}", run, 2 * cache.k.nbytes, 4 * count * heads * length * dim)


def sampling_cases(rows: int) -> Iterator[Case]:
    for name, vocab in VOCABULARIES.items():
        logits, places = torch.randn(rows, vocab), torch.arange(rows)
        scores = Scores(0.8, None, host.gumbel_rows(1, 0, places, range(vocab)), places, 0.7)
        runs: dict[str, tuple[Callable[[], Any], int]] = {
            "noise": (lambda places=places, vocab=vocab: host.gumbel_rows(1, 0, places, range(vocab)), 1),
            "draw": (lambda logits=logits, vocab=vocab, scores=scores: host.draw(logits, vocab, scores), 2),
            "children": (lambda logits=logits, vocab=vocab, scores=scores: host.children(logits, vocab, 8, scores), 2),
        }
        for what, (run, passes) in runs.items():
            yield Case(f"{what} {name} {vocab} x{rows}", run, passes * logits.nbytes, 0, True)


def copy_speed(quick: bool) -> float:
    """Returns the GB/s read and written by a copy between two buffers of LAYERS bytes together, split among the
    threads."""
    source, target = torch.ones(LAYERS // 8), torch.zeros(LAYERS // 8)
    parts = list(zip(target.chunk(host.threads()), source.chunk(host.threads()), strict=True))
    with ThreadPoolExecutor(len(parts)) as pool:

        def copy() -> None:
            if len(parts) == 1:
                target.copy_(source)
            else:
                list(pool.map(lambda part: part[0].copy_(part[1]), parts))

        return LAYERS / best(copy, quick) / 1e9


def peak_speed(wide: bool, quick: bool) -> float:
    """Returns the GFLOPS of a loop of multiply-adds on one thread, times the number of threads. `wide`: in float32."""
    rounds = 2_000 if quick else 20_000
    operations = host.peak(rounds, wide)
    return operations / best(lambda: host.peak(rounds, wide), quick) / 1e9 * host.threads()


def measure(cases: Iterator[Case], only: str, quick: bool) -> Iterator[Result]:
    copy, peak = copy_speed(quick), {wide: peak_speed(wide, quick) for wide in (False, True)}
    yield Result("copy", 0.0, copy, 0.0, 1.0, 0.0)
    for wide, speed in peak.items():
        yield Result(f"peak {'f32' if wide else 'bf16'}", 0.0, 0.0, speed, 0.0, 1.0)
    for case in cases:
        if only in case.name:
            seconds = best(case.run, quick)
            moved, done = case.bytes / seconds / 1e9, case.operations / seconds / 1e9
            yield Result(case.name, 1e6 * seconds, moved, done, moved / copy, done / peak[case.wide])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--level", default=host.level(), help="an ISA level, such as amx, avx512_bf16 or avx2")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--quick", action="store_true", help="fewer cases and repeats")
    args = parser.parse_args()
    if host.level() == "none" or not host.use_level(args.level):
        parser.error(f"this CPU does not support {args.level}")
    torch.set_num_threads(1)
    host.set_threads(args.threads)
    names = ["demo o"] if args.quick else list(LINEAR)
    rows, contexts = ((8,), (256,)) if args.quick else ((1, 8, 64), (256, 1024, 4096))
    cases = itertools.chain(linear_cases(rows, names), attention_cases(rows, contexts), sampling_cases(8))
    print(f"level {host.level()}, {args.threads} threads")
    print(f"{'':32} {'us':>10} {'GB/s':>8} {'GFLOPS':>8} {'of copy':>8} {'of peak':>8}")
    results = []
    for r in measure(cases, args.only, args.quick):
        results.append(r)
        numbers = f"{r.microseconds:10.1f} {r.gigabytes:8.1f} {r.gigaflops:8.1f} {r.of_copy:8.2f} {r.of_peak:8.2f}"
        print(f"{r.name:32} {numbers}", flush=True)
    if args.json is not None:
        head = {"level": host.level(), "threads": args.threads}
        args.json.write_text(json.dumps(head | {"results": [asdict(r) for r in results]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
