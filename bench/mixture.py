"""Cost of the rows of a forward of a mixture of experts on a CPU, with random int4 weights.

    python -m bench.mixture [--layers 24] [--hidden 2048] [--experts 64] [--inner 768] [--chosen 8]
                            [--rows 1,2,4,8,16] [--threads 2] [--repeats 7]

The native operators run a bfloat16 model with int8 activations, as `swiftspec serve` does. Rows are a chain of random
tokens after a context of random tokens. Columns: the least and the median milliseconds of the forward, the least
relative to one row, the experts of a layer that the rows use, and the least milliseconds of the mixtures of all layers
alone, on rows that choose experts independently of each other, with the experts that these use. Random weights choose
experts more evenly than trained ones, and the rows of a forward, which share a context, less evenly than independent
rows. Numbers of rows alternate within each repeat.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from swiftspec.backends.cpu import cpu as host
from swiftspec.backends.cpu.linear import CpuNorm
from swiftspec.backends.cpu.packing import PackedLinear
from swiftspec.cache.kv import KVCache
from swiftspec.cache.model_cache import ModelCache
from swiftspec.model.batch import Batch
from swiftspec.model.packed_model import PackedAttention, PackedLayer, PackedMixture, PackedModel
from swiftspec.model.spec import ExpertsSpec, RopeSpec
from swiftspec.model.weights import DenseWeight

HEADS, KV_HEADS, HEAD_DIM = 32, 4, 128
VOCAB, CONTEXT, CAPACITY, GROUP = 32768, 64, 256, 128
BF16 = torch.bfloat16


def random_int4(outputs: int, inputs: int) -> PackedLinear:
    blocks = outputs // 16
    codes = torch.randint(-(2**31), 2**31 - 1, (blocks, inputs // 8, 16), dtype=torch.int32)
    scales = (torch.rand(blocks, inputs // GROUP, 16) * inputs**-0.5 / 4).to(BF16)
    zeros = torch.full(scales.shape, 8, dtype=torch.uint8)
    return PackedLinear(inputs=inputs, outputs=outputs, int8_activations=1, data=codes, scales=scales, zeros=zeros)


class RandomMixture:
    """A model of random weights, and its KV cache with CONTEXT tokens."""

    def __init__(self, layers: int, hidden: int, inner: int, experts: ExpertsSpec) -> None:
        def norm(*shape: int) -> CpuNorm:
            return host.pack_norm(torch.ones(shape), 1e-6, BF16, "cpu")

        def layer(index: int) -> PackedLayer:
            router = host.pack(DenseWeight(torch.randn(experts.num_experts, hidden) * hidden**-0.5), BF16, "cpu")
            gate_up = random_int4(experts.num_experts * 2 * inner, hidden)
            mlp = PackedMixture(router, gate_up, random_int4(experts.num_experts * hidden, inner), experts)
            qkv, o = random_int4((HEADS + 2 * KV_HEADS) * HEAD_DIM, hidden), random_int4(hidden, HEADS * HEAD_DIM)
            heads = norm(HEADS + KV_HEADS, HEAD_DIM)
            return PackedLayer(norm(hidden), qkv, o, norm(hidden), mlp, heads, cache_layer=index)

        self.experts, self.hidden, self.layers = experts, hidden, [layer(index) for index in range(layers)]
        tables = host.rope_tables(RopeSpec(1e6), HEAD_DIM, CAPACITY, BF16, "cpu")
        self.attention = PackedAttention(*tables, HEADS, KV_HEADS)
        embedding, head = torch.randn(VOCAB, hidden).to(BF16), random_int4(VOCAB, hidden)
        self.stack = PackedModel(embedding, self.layers, norm(hidden), head, [self.attention], None)
        self._fused = host.fuse(self.stack)
        self.cache = ModelCache(KVCache(layers, KV_HEADS, HEAD_DIM, CAPACITY, host.make_slot_mover, dtype=BF16))
        self.forward(self.chain(CONTEXT, 0))

    def chain(self, rows: int, first: int = CONTEXT) -> Batch:
        """Returns a batch of random tokens."""
        places, length = torch.arange(first, first + rows), torch.tensor([first + rows])
        mask = torch.ones(rows, rows, dtype=torch.bool).tril()
        return Batch(torch.randint(0, VOCAB, (rows,)), places, places, mask, torch.zeros_like(places), length)

    def forward(self, batch: Batch) -> None:
        assert self._fused is not None
        self._fused.forward(batch, self.cache, True)

    def mixtures(self, x: Tensor) -> None:
        """Runs the mixtures of all layers on the same rows."""
        for layer in self.layers:
            host.mlp(x, layer.mlp_norm, layer.mlp, x)

    def used(self, x: Tensor, layer: PackedLayer) -> int:
        """Returns the number of experts that the rows x use in a layer."""
        assert isinstance(layer.mlp, PackedMixture)
        logits = host.norm_head(x, layer.mlp_norm, layer.mlp.router)
        return len(logits.topk(self.experts.experts_per_token).indices.unique())

    def used_by_forward(self, batch: Batch) -> float:
        """Returns the average number of experts of a layer that the rows of a forward use."""
        plan, found = host.prepare(batch, self.cache.kv, self.attention.cos, self.attention.sin, HEADS), list[int]()
        hidden = host.embed(batch.tokens, self.stack.embedding)
        for index, layer in enumerate(self.layers):
            qkv = host.norm_linear(hidden, layer.input_norm, layer.qkv)
            hidden = host.linear_residual(host.tree_attention(qkv, plan, index, layer.qk_norm), layer.o, hidden)
            found.append(self.used(hidden, layer))
            hidden = host.mlp(hidden, layer.mlp_norm, layer.mlp, hidden)
        return statistics.mean(found)


def milliseconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - began)


def report(model: RandomMixture, rows: Sequence[int], repeats: int) -> None:
    forwards, mixtures = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
    used, independent = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
    for _ in range(repeats):
        for count in rows:
            batch, x = model.chain(count), torch.randn(count, model.hidden).to(BF16)
            forwards[count].append(milliseconds(lambda batch=batch: model.forward(batch)))
            mixtures[count].append(milliseconds(lambda x=x: model.mixtures(x)))
            used[count].append(model.used_by_forward(batch))
            independent[count].append(statistics.mean(model.used(x, layer) for layer in model.layers))
    print("| rows | forward ms | median | relative | experts used | mixtures ms | experts used |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for count in rows:
        best = min(forwards[count])
        numbers = (
            f"{best:.1f}", f"{statistics.median(forwards[count]):.1f}", f"{best / min(forwards[rows[0]]):.2f}",
            f"{statistics.mean(used[count]):.1f}", f"{min(mixtures[count]):.1f}",
            f"{statistics.mean(independent[count]):.1f}",
        )  # fmt: skip
        print(f"| {count} | {' | '.join(numbers)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 24, "hidden": 2048, "experts": 64, "inner": 768, "chosen": 8, "threads": 2, "repeats": 7}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rows", default="1,2,4,8,16")
    args = parser.parse_args()
    torch.manual_seed(0)
    host.set_threads(args.threads)
    experts = ExpertsSpec(args.experts, args.chosen, norm_topk_prob=True)
    model = RandomMixture(args.layers, args.hidden, args.inner, experts)
    mlps = [layer.mlp for layer in model.layers]
    size = sum(matrix.data.nbytes for mlp in mlps for matrix in (mlp.gate_up, mlp.down))
    print(f"ISA level {host.level()}, {host.threads()} threads, codes of all experts: {size / 1e9:.2f} GB\n")
    report(model, [int(count) for count in args.rows.split(",")], args.repeats)


if __name__ == "__main__":
    main()
