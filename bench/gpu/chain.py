"""Layers of a model in place: a CUDA graph of all layers, once with the weights of few layers and once with those of
all, and without each of the operators.

    python -m bench.gpu.chain [--models Llama-3-8B,Llama-3-70B] [--rows 8] [--context 1000] --json out.json

What leaving out an operator saves is its marginal cost between its neighbours, which a benchmark of one operator cannot
show. Leaving out "append" makes RoPE and the append to the cache a launch of their own, which should cost time. If a
layer takes longer with the weights of all layers than with those of few, which exceed the L2 as well, the size of the
memory that a forward reads costs time. `SWIFTSPEC_EARLY_STARTS=0` measures without early starts. Weights are random
int4; the projections prefetch as in a model. If a trial has tuned nothing (`--tuned`), the exit code is 5. Not run on a
GPU.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.common.device import check_device
from bench.gpu import cases
from bench.gpu.cases import BF16, OURS, Cache, random_int4
from bench.gpu.shapes import GROUP, LAYERS, RankShape
from bench.gpu.timing import Call, eager_sequence_timer, sequence_timer
from bench.gpu.tuning import UNTUNED, add_tuned_option, read_tuning, with_tuning
from swiftspec.backends.cuda.tuner import Tuning
from swiftspec.model.batch import Batch
from swiftspec.model.packed_model import PackedLayer, PackedMlp, PackedModel

OPERATORS = ("qkv", "attention", "o", "swiglu", "down")
QKV_ATTENTION, APPEND = "qkv and attention", "append"
FEW = 4  # layers; those of the 1B, 128 MB, exceed the L2 of a Hopper GPU, too
SKIPPED = 5  # exit code


def operators(left_out: str | None) -> list[str]:
    """Returns the operators of a layer. QKV and attention are one, unless one of them or APPEND is left out."""
    if left_out in ("qkv", "attention", APPEND):
        return [op for op in OPERATORS if op != left_out]
    return [op for op in (QKV_ATTENTION, "o", "swiglu", "down") if op != left_out]


@dataclass(slots=True)
class Flow:
    """Activations between the operators, replaced by each call. The first tensors serve when their operator is left
    out."""

    hidden: Tensor
    qkv: Tensor
    attended: Tensor
    gated: Tensor


@dataclass(slots=True)
class Chain:
    """Packed layers of one model with random weights, and what their forward needs. `layers` are added on demand."""

    ops: Any
    local: RankShape
    rows: int
    context: int
    device: str
    layers: list[PackedLayer] = field(default_factory=list)

    def grow(self, count: int) -> None:
        """Packs random layers until there are `count`."""
        norm = self.ops.pack_norm(torch.ones(self.local.hidden, device=self.device), 1e-5, BF16, self.device)

        def packed(op: str) -> Any:
            outputs, inputs, group = self.local.projection(op)
            matrix = random_int4(outputs, inputs, group or GROUP, self.device)
            if op == "qkv":
                return self.ops.pack_qkv(matrix, self.local.width, BF16, self.device)
            return self.ops.pack(matrix, BF16, self.device)

        for index in range(len(self.layers), count):
            mlp = PackedMlp(packed("swiglu"), packed("down"))
            self.layers.append(PackedLayer(norm, packed("qkv"), packed("o"), norm, mlp, cache_layer=index))

    def prefetching(self) -> None:
        """Enables weight prefetch as in a model; the last layer prefetches the first one's QKV instead of the head."""
        self.ops.fuse(PackedModel(torch.empty(0), self.layers, None, self.layers[0].qkv, (), None))

    def calls(self, total: int, left_out: str | None = None) -> list[Call]:
        """Returns the calls of `total` layers, which use the packed ones cyclically, without the operator
        `left_out`."""
        local, rows = self.local, self.rows
        size = (len(self.layers), 1, local.kv_heads, self.context, local.width)
        cache = Cache(*(torch.randn(size, dtype=BF16, device=self.device) for _ in range(2)))
        table = torch.randn(2, self.context, local.width, dtype=BF16, device=self.device)
        slots = torch.arange(self.context - rows, self.context, device=self.device)
        window = torch.ones(rows, max(rows, 8), dtype=torch.bool, device=self.device).tril(max(rows, 8) - rows)
        length = torch.tensor([self.context], device=self.device)
        batch = Batch(slots, slots, slots, window, torch.zeros_like(slots), length)

        def random(columns: int) -> Tensor:
            return torch.randn(rows, columns, device=self.device).to(BF16)

        hidden = random(local.hidden)
        flow = Flow(
            hidden,
            random((local.heads + 2 * local.kv_heads) * local.width),
            random(local.heads * local.width),
            random(local.inner),
        )
        plan: Any = None

        def begin() -> None:
            nonlocal plan
            flow.hidden = hidden
            plan = self.ops.prepare(batch, cache, table[0], table[1], local.heads)

        def run(op: str, layer: PackedLayer) -> None:
            self._run(op, layer, flow, plan)

        made: list[Call] = [begin]
        for index in range(total):
            layer = self.layers[index % len(self.layers)]
            made += [partial(run, op, layer) for op in operators(left_out)]
        return made

    def _run(self, op: str, layer: PackedLayer, flow: Flow, plan: Any) -> None:
        ops, mlp = self.ops, layer.mlp
        assert isinstance(mlp, PackedMlp)
        match op:
            case "qkv and attention":
                flow.attended = ops.qkv_attention(flow.hidden, layer.input_norm, layer.qkv, plan, layer.cache_layer)
            case "qkv":
                flow.qkv = ops.norm_linear(flow.hidden, layer.input_norm, layer.qkv)
            case "attention":
                flow.attended = ops.tree_attention(flow.qkv, plan, layer.cache_layer)
            case "o":
                flow.hidden = ops.linear_residual(flow.attended, layer.o, flow.hidden)
            case "swiglu":
                flow.gated = ops.norm_swiglu(flow.hidden, layer.mlp_norm, mlp.gate_up)
            case _:
                flow.hidden = ops.linear_residual(flow.gated, mlp.down, flow.hidden)


def chain_of(model: str, rows: int, context: int, device: str, tuning: Tuning = UNTUNED) -> Chain:
    """Returns an empty chain of a model on one rank, on the operators of the device. `tuning`: as in `with_tuning`."""
    found = cases.operators(device)
    ops = with_tuning(found.get(OURS, found["unfused"]), tuning)
    return Chain(ops, RankShape.of(model, 1), rows, context, device)


def measure(model: str, args: argparse.Namespace, tuning: Tuning) -> Iterator[dict[str, Any]]:
    """Yields the microseconds per layer of each chain of a model: with few weights, then with all, then without each
    operator."""
    timer = sequence_timer if args.device == "cuda" else eager_sequence_timer
    chain, total = chain_of(model, args.rows, args.context, args.device, tuning), LAYERS[model]
    for held, without in ((FEW, (None,)), (total, (None, *((*OPERATORS, APPEND) if args.leave_out else ())))):
        chain.grow(held)
        chain.prefetching()
        for left_out in without:
            took = timer(chain.calls(total, left_out)) / total
            yield {"model": model, "weights of": held, "without": left_out, "us per layer": took}


def summary(chains: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns by model the microseconds per layer with few weights and with all, and the marginal cost of each operator
    that was left out; that of APPEND is negative if it saves time."""
    found: dict[str, dict[str, float]] = {}
    for chain in chains:
        model = found.setdefault(chain["model"], {})
        if chain["without"] is not None:
            model[chain["without"]] = model["all"] - chain["us per layer"]
        else:
            model["all" if "few" in model else "few"] = chain["us per layer"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="Llama-3-8B,Llama-3-70B,Llama-3.2-1B", help="of bench/gpu/shapes.py")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--context", type=int, default=1000, help="keys that attention reads")
    add_tuned_option(parser)
    parser.add_argument("--no-leave-out", dest="leave_out", action="store_false", help="only complete layers")
    parser.add_argument("--json", type=Path, required=True, help="file for the results, written after every chain")
    args = parser.parse_args()
    check_device(parser, args.device)
    tuning = read_tuning(args.tuned)
    if args.tuned is not None and not tuning and args.device == "cuda":
        print(f"{args.tuned} has tuned nothing")
        raise SystemExit(SKIPPED)
    early = os.environ.get("SWIFTSPEC_EARLY_STARTS") != "0"  # csrc/cuda/launch.cuh
    whole: dict[str, Any] = {"rows": args.rows, "context": args.context, "early starts": early, "chains": []}
    whole["tuned"] = bool(tuning)
    with torch.inference_mode():
        for model in args.models.split(","):
            for found in measure(model, args, tuning):
                whole["chains"].append(found)
                whole["models"] = summary(whole["chains"])
                args.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
                what = "complete" if found["without"] is None else f"without {found['without']}"
                print(
                    f"{model:14} weights of {found['weights of']:3} layers, {what:18} {found['us per layer']:8.2f} us",
                    flush=True,
                )


if __name__ == "__main__":
    main()
