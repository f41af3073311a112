"""Cost of the rows of a forward on a CPU: milliseconds of its parts for each number of rows, relative to one row.

    python -m bench.rows [--model DIR [--draft-model DIR]] [--rows 1,2,4,8,12,16,24,32] [--context 256]
                         [--levels avx512_vnni,avx2] [--threads 2] [--repeats 5] [--json out.json]

Loads one model after the other, by default the demo models, with the operators and formats of `swiftspec serve`, and
prefills a context of random tokens. The rows are a chain of random tokens after it. For each ISA level, by default all
levels of this CPU:

- forward: the one native call with which decoding runs a forward;
- parts of the forward: the same operators, one call from Python each, in the order of a forward and on its weights, so
  that they find the same caches. "gather" is the embedding, RoPE tables and masks. "sum" is the sum of these parts;
- norms: RMSNorms and the quantisation of rows, which "projections" contain, measured by projections to 16 outputs;
- samplers on the logits of the rows: the greedy draw, a draw at COMMON_SAMPLING (bench/workload.py) without penalties,
  and the most likely children of every row in an expansion.

Levels and numbers of rows alternate within each repeat. A repeat yields the least time of each part; the tables contain
the least of all repeats, the JSON file the median as well. One thread is timed by its CPU time, several by the wall
clock. A call from Python takes microseconds (printed), which matters in the parts of small models.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.data.heldout import DEMO
from bench.large_report import machine
from bench.workload import COMMON_SAMPLING
from swiftspec import _C
from swiftspec.backends.cpu import cpu as host
from swiftspec.backends.cpu.packing import PackedLinear
from swiftspec.builder.load_options import HeadName, LoadOptions, Side
from swiftspec.builder.models import Models
from swiftspec.builder.plan import Plan
from swiftspec.config import EngineConfig
from swiftspec.errors import UserError
from swiftspec.model.batch import Batch
from swiftspec.model.packed_model import PackedMixture, PackedModel
from swiftspec.params import FILTERS, SamplingParams
from swiftspec.runtime.cancellation import CancelCheck
from swiftspec.runtime.runner import Runner

ROWS = (1, 2, 4, 8, 12, 16, 24, 32)
PROJECTIONS = ("qkv", "o", "gate_up", "down")
FORWARD = ("gather", *PROJECTIONS, "attention", "head")  # the parts whose sum is compared with the forward
SAMPLERS = ("draw", "filtered draw", "children")
SUMS = {"projections": PROJECTIONS, "sum": FORWARD}
LINES = (*PROJECTIONS, "projections", "norms", "attention", "head", "gather", "sum", "forward", *SAMPLERS)
BLOCK = 16  # outputs of a packed block
LEAST_S = 0.05  # seconds of a repeat, which runs a short forward several times

Spent = dict[str, float]  # part -> seconds
Key = tuple[str, int]  # ISA level, rows


@dataclass(frozen=True, slots=True)
class Measurement:
    """Least seconds of the parts at one ISA level with one number of rows, by repeat."""

    level: str
    rows: int
    repeats: Sequence[Spent]

    def least(self, part: str) -> float:
        """Returns the least milliseconds of a part. A sum of parts is that of the least times."""
        if part in SUMS:
            return sum(self.least(each) for each in SUMS[part])
        return 1000 * min(spent[part] for spent in self.repeats)

    def median(self, part: str) -> float:
        """Returns the median milliseconds of a part."""
        parts = SUMS.get(part, (part,))
        return 1000 * statistics.median(sum(spent[each] for each in parts) for spent in self.repeats)


class Stopwatch:
    """Adds the time since the last reading to a part: CPU time with one thread, otherwise wall-clock time."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)
        self._clock = time.thread_time if host.threads() == 1 else time.perf_counter
        self._last = self._clock()

    def lap(self, part: str) -> None:
        now = self._clock()
        self.spent[part] += now - self._last
        self._last = now


class MeasuredModel:
    """A loaded model whose KV cache holds a context of random tokens."""

    def __init__(self, name: str, runner: Runner, children: int) -> None:
        self.name, self.stack, self._runner, self._children = name, runner.model.stack, runner, children
        if any(isinstance(layer.mlp, PackedMixture) for layer in self.stack.layers):
            raise UserError(f"{name}: the rows of mixtures of experts are measured by bench.mixture")
        if self.stack.delta is not None:
            raise UserError(f"{name}: the rows of hybrids are measured by bench.random_pairs")
        self._kv, self._vocab, self._fused = runner.cache.kv, runner.vocab, runner.model.fused
        self._preparations = [(row_preparations(layer), layer) for layer in self.stack.layers]

    @property
    def context(self) -> int:
        return self._runner.cache.prefix_len[0]

    def measure(self, rows: int) -> Spent:
        """Returns the least seconds of every part in as many passes as take LEAST_S."""
        batch, least = self.chain(rows), Spent()
        began = time.perf_counter()
        while not least or time.perf_counter() - began < LEAST_S:
            logits, spent = self.run_parts(batch)
            spent = spent | self._run_preparations(rows) | self._run_samplers(logits) | self.run_forward(batch)[1]
            least = {part: min(seconds, least.get(part, seconds)) for part, seconds in spent.items()}
        return least

    def chain(self, rows: int) -> Batch:
        """Returns a batch of a chain of random tokens after the context."""
        tokens, places = torch.randint(0, self._vocab, (rows,)), torch.arange(self.context, self.context + rows)
        mask = torch.ones(rows, rows, dtype=torch.bool).tril()
        length = self.context + rows
        return Batch(tokens, places, places, mask, torch.zeros_like(places), torch.tensor([length]), length)

    def run_parts(self, batch: Batch) -> tuple[Tensor, Spent]:
        """Runs a forward one operator at a time. Returns its logits and the seconds of its parts."""
        stack, watch = self.stack, Stopwatch()
        kinds = stack.attention
        plans = [host.prepare(batch, self._kv, k.cos, k.sin, k.num_heads, k.options) for k in kinds]
        hidden = host.embed(batch.tokens, stack.embedding, 1.0).to(self._runner.model.stream_dtype)
        if stack.embedding_multiplier != 1:
            hidden = hidden.mul_(stack.embedding_multiplier)
        watch.lap("gather")
        for layer in stack.layers:
            times = layer.residual_multiplier
            qkv = host.norm_linear(hidden, layer.input_norm, layer.qkv)
            watch.lap("qkv")
            mixed = host.tree_attention(qkv, plans[layer.attention], layer.cache_layer, layer.qk_norm)
            watch.lap("attention")
            hidden = host.linear_residual(mixed, layer.o, hidden, None, layer.mixer_output_norm, times)
            watch.lap("o")
            gated = host.norm_swiglu(hidden, layer.mlp_norm, layer.mlp.gate_up, layer.mlp.activation)
            watch.lap("gate_up")
            hidden = host.linear_residual(gated, layer.mlp.down, hidden, None, layer.mlp_output_norm, times)
            if layer.output_scale is not None:
                hidden = hidden * layer.output_scale
            watch.lap("down")
        logits = host.norm_head(hidden, stack.norm, stack.head, stack.logit_multiplier, stack.logit_softcap)
        watch.lap("head")
        return logits, watch.spent

    def _run_preparations(self, rows: int) -> Spent:
        """Returns the seconds of the norms and the quantisation of rows before the projections of all layers."""
        inputs = {weight.inputs: self._random(rows, weight.inputs) for few, _ in self._preparations for weight in few}
        watch = Stopwatch()
        for (qkv, o, gate_up, down), layer in self._preparations:
            host.norm_linear(inputs[qkv.inputs], layer.input_norm, qkv)
            host.norm_linear(inputs[o.inputs], None, o)
            host.norm_linear(inputs[gate_up.inputs], layer.mlp_norm, gate_up)
            host.norm_linear(inputs[down.inputs], None, down)
        watch.lap("norms")
        return watch.spent

    def _run_samplers(self, logits: Tensor) -> Spent:
        watch, keys = Stopwatch(), torch.arange(len(logits), dtype=torch.int32)
        filters = SamplingParams(**COMMON_SAMPLING).values_of(FILTERS)
        host.draw(logits, self._vocab)
        watch.lap("draw")
        tokens = torch.empty(len(logits), dtype=torch.int64)
        _C.draw_filtered(logits, self._vocab, None, COMMON_SAMPLING["temperature"], filters, keys, tokens)
        watch.lap("filtered draw")
        host.children(logits, self._vocab, self._children)
        watch.lap("children")
        return watch.spent

    def run_forward(self, batch: Batch) -> tuple[Tensor, Spent]:
        """Runs a forward in one native call. Returns its logits and its seconds. The next forward writes the same slots
        of the cache."""
        watch = Stopwatch()
        logits = self._fused.forward(batch, self._runner.cache, True).logits
        watch.lap("forward")
        return logits, watch.spent

    def _random(self, rows: int, width: int) -> Tensor:
        return torch.randn(rows, width).to(self._runner.model.stream_dtype)


def row_preparations(layer: Any) -> list[PackedLinear]:
    """Returns the first block of each projection of a layer: the product is negligible, the preparation of rows is not
    shortened."""
    return [first_block(weight) for weight in (layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down)]


def first_block(weight: PackedLinear) -> PackedLinear:
    tensors = {name: tensor for name, tensor in weight.optional_tensors().items() if tensor is not None}
    cut = {name: tensor[:1] for name, tensor in tensors.items() if name != "order"}
    return replace(weight, outputs=min(BLOCK, weight.outputs), data=weight.data[:1], **{**cut, "bias": None})


def call_microseconds() -> float:
    """Returns the least microseconds of a call of a negligible projection."""
    x, weight = (
        torch.zeros(1, BLOCK),
        PackedLinear(inputs=BLOCK, outputs=BLOCK, data=torch.zeros(1, BLOCK, BLOCK)),
    )
    least = float("inf")
    for _ in range(1000):
        began = time.perf_counter()
        host.norm_linear(x, None, weight)
        least = min(least, time.perf_counter() - began)
    return 1e6 * least


def calls_per_forward(stack: PackedModel) -> int:
    """Returns the calls from Python in the parts of a forward."""
    return 5 * len(stack.layers) + len(stack.attention) + 2


def load(args: argparse.Namespace) -> Iterator[MeasuredModel]:
    """Yields the models, each loaded when the one before is no longer used. Raises UserError if one cannot be loaded or
    does not run in native code."""
    draft, rows = args.draft_model, max(args.rows)
    plan = EngineConfig(mode="ar") if draft is None else EngineConfig(mode="serial")
    options: LoadOptions = {
        "device": "cpu", "threads": args.threads, "head": args.head, "max_model_len": args.context + rows + 1,
        "prefix_cache_memory": 0,
    }  # fmt: skip
    pair = Plan.create(args.model, draft, plan, None, options)
    models = Models.of(pair)
    models.set_thread_counts(plan)
    sides: dict[Side, Path] = {"target": pair.checkpoints.target}
    if pair.checkpoints.draft is not None:
        sides["draft"] = pair.checkpoints.draft
    for side, folder in sides.items():
        loaded = models.load_side(side, plan, None, None)
        if loaded.model.fused is None or loaded.ops is not host:
            raise UserError(f"{folder}: the native CPU operators do not run this model")
        runner, _ = loaded.runner(rows, CancelCheck())
        runner.open(torch.randint(0, runner.vocab, (args.context + 1,)).tolist())
        yield MeasuredModel(folder.name, runner, plan.children_per_leaf)
        del loaded, runner


def measure(model: MeasuredModel, args: argparse.Namespace) -> list[Measurement]:
    """Measures every level with every number of rows, in a different order in each repeat. Repeat 0 only fills buffers
    and caches."""
    cases: list[Key] = [(level, rows) for level in args.levels for rows in args.rows]
    found: dict[Key, list[Spent]] = {case: [] for case in cases}
    best = host.level()
    try:
        for repeat in range(args.repeats + 1):
            print(f"{model.name}: repeat {repeat} of {args.repeats}", file=sys.stderr, flush=True)
            for level, rows in random.Random(repeat).sample(cases, len(cases)):
                host.use_level(level)
                spent = model.measure(rows)
                if repeat > 0:
                    found[level, rows].append(spent)
    finally:
        host.use_level(best)
    return [Measurement(level, rows, repeats) for (level, rows), repeats in found.items()]


def table(measurements: list[Measurement]) -> str:
    """Formats the measurements of one level: milliseconds, and below them the ratios to the smallest number of rows."""

    def block(title: str, value: Callable[[Measurement, str], float]) -> list[str]:
        head = f"{title:16}" + "".join(f"{each.rows:>9}" for each in measurements)
        return [head, *(f"{part:16}" + "".join(f"{value(m, part):9.4g}" for m in measurements) for part in LINES)]

    first, share = measurements[0], [m.least("sum") / m.least("forward") for m in measurements]
    lines = block("rows: ms", Measurement.least)
    lines += block(f"relative to {first.rows}", lambda m, part: m.least(part) / first.least(part))
    return "\n".join([*lines, f"{'sum / forward':16}" + "".join(f"{each:9.3g}" for each in share)])


def record(name: str, calls: int, measurements: list[Measurement]) -> dict[str, Any]:
    """Returns the measurements of a model for the JSON document."""
    return {"model": name, "calls": calls, "measurements": [
        {"level": m.level, "rows": m.rows, "least_ms": {part: round(m.least(part), 5) for part in LINES},
         "median_ms": {part: round(m.median(part), 5) for part in LINES}} for m in measurements
    ]}  # fmt: skip


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="target (default: the demo target, with the demo draft)")
    parser.add_argument("--draft-model", type=Path, help="draft, measured as well, with the LM head of a draft")
    parser.add_argument("--rows", type=lambda text: sorted({int(word) for word in text.split(",")}), default=ROWS)
    parser.add_argument("--context", type=int, default=256, help="tokens in the KV cache")
    parser.add_argument("--levels", type=lambda text: text.split(","), default=_C.levels(), help="ISA levels")
    parser.add_argument("--head", choices=HeadName.__args__, default="auto", help="format of the LM head")
    parser.add_argument("--threads", type=int, help="threads of one operator (default: as in serve)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    unknown = [level for level in args.levels if level not in _C.levels()]
    if unknown or not args.levels:
        parser.error(f"this CPU does not support {', '.join(unknown) or 'AVX2'}; levels: {', '.join(_C.levels())}")
    if min(*args.rows, args.context, args.repeats, args.threads or 1) < 1:
        parser.error("--rows, --context, --repeats and --threads must be at least 1")
    if args.model is None:
        args.model, args.draft_model = DEMO / "target", args.draft_model or DEMO / "draft"
    return args


def main(argv: list[str] | None = None) -> None:
    """Measures all models and prints the tables."""
    args = arguments(argv)
    torch.manual_seed(0)
    overhead, models = call_microseconds(), list[dict[str, Any]]()
    try:
        for model in load(args):
            measurements, calls = measure(model, args), calls_per_forward(model.stack)
            models.append(record(model.name, calls, measurements))
            where, threads = machine(), host.threads()
            title = f"{threads} thread{'s' if threads > 1 else ''}, context {model.context}"
            for level in args.levels:
                of_level = [m for m in measurements if m.level == level]
                print(f"{model.name}, {where['cpu']}, {level}, {title}")
                print(table(of_level), flush=True)
            print(f"{calls} calls from Python per forward: {calls * overhead / 1000:.3f} ms of the sum\n", flush=True)
            del model  # before the next one is loaded
    except UserError as error:
        sys.exit(f"bench.rows: {error}")
    if args.json is not None:
        settings = {"context": args.context, "head": args.head, "threads": host.threads(), "repeats": args.repeats}
        document = {"machine": machine(), "settings": settings, "call_us": round(overhead, 3), "models": models}
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
