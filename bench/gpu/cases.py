"""Cases of bench/gpu/kernels.py. A case is an operator of one rank, and has a function per competitor that prepares its
calls.

Every competitor cycles through copies of its weights, or layers of a cache, that together are several times as large as
the L2, so every call reads cold memory.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.baselines import kernels as rivals
from bench.baselines.kernels import BaselineKernels, Tree
from bench.gpu.shapes import SPLITS, RankShape
from bench.gpu.timing import Call
from swiftspec.backends.cuda.linear import PeerCommunicator, make_inbox, max_lines
from swiftspec.backends.reference import reference, resampling
from swiftspec.backends.reference.resampling import PATH_HEADER_WORDS
from swiftspec.backends.reference.sampling import Scores
from swiftspec.backends.unfused import unfused
from swiftspec.model.batch import Batch
from swiftspec.model.formats.int4 import Int4Weight
from swiftspec.model.weights import DenseWeight

COLD = 256 << 20  # minimum bytes of all copies of a case together
BF16 = torch.bfloat16
CONTEXTS = (1000, 500, 4000)
PARTICLES, DRAWN = (8, 64), 5  # particles of a population, and rows per particle: 4 draft tokens and a bonus token
SAMPLED_ROWS = (1, 8, 16, 64)
RESAMPLED_SLOTS, RESAMPLED_TOKENS, RESAMPLED_COPIES = 1024, 512, 8  # tree slots in use, and the longest text
FIRST_SPLITS = 5  # splits that are measured with 8 rows before any is measured with other numbers of rows
OURS = "swiftspec"
SUMMED = "swiftspec, summed"  # with an all-reduce in a group of one, which measures its cost on one GPU
PAIRED = "swiftspec paired"  # attention with two blocks per multiprocessor
RIVALS = ("sdpa", "marlin", "flashinfer", "flexattention")
Made = Callable[[], list[Call]]


@dataclass(frozen=True, slots=True)
class Case:
    """One operator of one rank."""

    model: str
    tp: int
    op: str
    rows: int
    moved: int  # bytes read and written
    variants: dict[str, Made]  # by competitor

    @property
    def name(self) -> str:
        return f"{self.model} TP{self.tp} {self.op} x{self.rows}"


@dataclass(slots=True)
class Cache:
    k: Tensor  # [layers, 1, kv_heads, capacity, head_dim]
    v: Tensor


def random_int4(outputs: int, inputs: int, group: int, device: str) -> Int4Weight:
    words = [
        torch.randint(-(2**31), 2**31, (rows, outputs // 8), dtype=torch.int32, device=device)
        for rows in (inputs, inputs // group)
    ]
    scales = torch.rand(inputs // group, outputs, device=device).add_(0.5).mul_(1e-3).half()
    return Int4Weight(words[0], scales, words[1], group)


@dataclass(frozen=True, slots=True)
class Maker:
    """Builder of the cases for one device. `others`: kernels of other packages. `cold`: minimum bytes of all copies of
    a case."""

    device: str
    others: BaselineKernels
    cold: int = COLD

    def copies(self, size: int) -> range:
        return range(max(4, math.ceil(self.cold / size)))

    def linear(self, model: str, tp: int, op: str, rows: int) -> Case:
        """Returns the case of an int4 projection of a layer, or of the bfloat16 LM head (`op` head)."""
        n, k, group = RankShape.of(model, tp).projection(op)
        weights = n * k // 2 + k // group * n * 5 // 2 if group else 2 * n * k
        residual = n if op in ("o", "down") else 0
        out = {"swiglu": n // 2, "head": 2 * n}.get(op, n)  # logits are float32
        moved = weights + 2 * rows * (k + out + residual)

        def random() -> list[Int4Weight]:
            return [random_int4(n, k, group, self.device) for _ in self.copies(weights)]

        def dense() -> list[DenseWeight]:
            shape = (n, k)
            return [DenseWeight(torch.randn(shape, dtype=BF16, device=self.device)) for _ in self.copies(2 * n * k)]

        def whole(ops: Any, summed: bool = False) -> list[Call]:
            x, added, norm = self.rows(rows, k), self.rows(rows, n), self.norm(ops, k)
            packed = [ops.pack(weight, BF16, self.device) for weight in (random() if group else dense())]
            alone = Alone(n, self.device) if summed else None
            return [projection(ops, op, x, norm, weight, added, alone) for weight in packed]

        def bf16() -> list[Call]:
            x = self.rows(rows, k)
            return [partial(reference.pack(weight, BF16, self.device), x) for weight in dense()]

        def int4() -> list[Call]:
            x = self.rows(rows, k)
            return [partial(unfused.pack(weight, BF16, self.device), x) for weight in random()]

        variants = self.ours(whole)
        if residual and tp > 1 and OURS in variants:
            variants[SUMMED] = partial(whole, operators(self.device)[OURS], summed=True)
        variants["cublas bf16"] = bf16
        if group:
            variants["torch int4"] = int4
            if (marlin := self.others.product) is not None:
                variants["marlin"] = lambda: rivals.product_calls(marlin, self.rows(rows, k), random())
        return Case(model, tp, op, rows, moved, variants)

    def attention(self, model: str, tp: int, context: int, rows: int) -> Case:
        """Returns the case of tree attention over `context` slots, of which the last `rows` hold the nodes of the tree.

        Each copy is a layer of one cache.
        """
        window = torch.rand(rows, max(rows, 8), device=self.device) < 0.5
        window[:, -rows:] |= torch.eye(rows, dtype=torch.bool, device=self.device)
        return self._attention(model, tp, f"attention {context}", window, context)

    def particles(self, model: str, tp: int, count: int) -> Case:
        """Returns the case of attention of `count` particles with DRAWN rows each, over a shared prefix of 1000
        tokens."""
        own = torch.ones(DRAWN, DRAWN, dtype=torch.bool, device=self.device).tril()
        window = torch.block_diag(*itertools.repeat(own, count)).bool()
        return self._attention(model, tp, f"attention of {count} particles", window, 1000 + len(window))

    def _attention(self, model: str, tp: int, op: str, window: Tensor, context: int) -> Case:
        local, rows = RankShape.of(model, tp), len(window)
        heads, kv_heads, width = local.heads, local.kv_heads, local.width
        moved = 4 * kv_heads * context * width

        def cache() -> Cache:
            size = (len(self.copies(moved)), 1, kv_heads, context, width)
            return Cache(*(torch.randn(size, dtype=BF16, device=self.device) for _ in range(2)))

        def whole(ops: Any, **shape: str) -> list[Call]:
            held = cache()
            table = torch.randn(2, context, width, dtype=BF16, device=self.device)
            slots = torch.arange(context - rows, context, device=self.device)
            length = torch.tensor([context], device=self.device)
            batch = Batch(slots, slots, slots, window, torch.zeros_like(slots), length)
            qkv = self.rows(rows, (heads + 2 * kv_heads) * width)
            plan = ops.prepare(batch, held, table[0], table[1], heads, **shape)
            return [partial(ops.tree_attention, qkv, plan, layer) for layer in range(len(held.k))]

        def other(make: rivals.Attention) -> list[Call]:
            held, q = cache(), self.rows(rows, heads * width).view(rows, heads, width)
            return rivals.attention_calls(make, Tree(q, held.k[:, 0], held.v[:, 0], window))

        variants = self.ours(whole) | {"sdpa": partial(other, rivals.sdpa)}
        ours = operators(self.device).get(OURS)
        if ours is not None and ours.FUSED_ATTENTION:
            variants[PAIRED] = partial(whole, ours, shape="paired")
        variants |= {name: partial(other, make) for name, make in self.others.attention.items()}
        return Case(model, tp, op, rows, moved, variants)

    def sampling(self, model: str, op: str, rows: int) -> Case:
        """Returns the case of sampling: one token per row (`op` draw), or 8 candidates with log-probabilities
        (children)."""
        vocab = RankShape.of(model, 1).vocab

        def calls(ops: Any) -> list[Call]:
            noise_rows = torch.arange(rows, device=self.device)
            made = list[Call]()
            for _ in self.copies(8 * rows * vocab):
                logits, noise = (
                    torch.randn(rows, vocab, device=self.device),
                    torch.rand(rows, vocab, device=self.device),
                )
                scores = Scores(0.8, None, noise, noise_rows, 0.7)
                chosen = partial(ops.draw, logits, vocab) if op == "draw" else partial(ops.children, logits, vocab, 8)
                made.append(partial(chosen, scores))
            return made

        return Case(model, 1, op, rows, 8 * rows * vocab, self.ours(calls))

    def resampling(self, count: int) -> Case:
        """Returns the case of resampling all of `count` particles, with a copy of their weights, which resampling
        resets."""
        slots, words = RESAMPLED_SLOTS, PATH_HEADER_WORDS + RESAMPLED_TOKENS
        moved = 2 * count * (slots + 8 * words)

        def calls(ops: Any) -> list[Call]:
            resample = ops.resample or resampling.resample
            uniform = torch.rand(1, dtype=torch.float64, device=self.device)
            wide = {"dtype": torch.float64, "device": self.device}
            made = list[Call]()
            for _ in range(RESAMPLED_COPIES):  # from the L2, as after a round that has written them
                weights, now = torch.randn(1, count, **wide), torch.zeros(1, count, **wide)
                state = resampling.ResamplingState(
                    log_weights=now,
                    mask=torch.rand(1, count, slots, device=self.device) < 0.5,
                    ends=torch.zeros(1, count, 2, dtype=torch.bool, device=self.device),
                    path=torch.ones(1, count, words, dtype=torch.int64, device=self.device),
                    log_z=torch.zeros(1, **wide),
                    ess=torch.zeros(1, **wide),
                    resampled=torch.zeros(1, dtype=torch.int64, device=self.device),
                    rounds=torch.zeros(1, dtype=torch.int64, device=self.device),
                )

                def call(now: Tensor = now, weights: Tensor = weights, state: Any = state) -> Tensor:
                    now.copy_(weights)
                    resample(state, uniform, 2.0, slots)  # a sample size below twice the particles: always
                    return state.log_z

                made.append(call)
            return made

        return Case("particles", 1, "resample", count, moved, self.ours(calls))

    def rows(self, count: int, columns: int) -> Tensor:
        return torch.randn(count, columns, device=self.device).to(BF16)

    def norm(self, ops: Any, width: int) -> Any:
        return ops.pack_norm(torch.ones(width, device=self.device), 1e-5, BF16, self.device)

    def ours(self, calls: Callable[[Any], list[Call]]) -> dict[str, Made]:
        return {name: partial(calls, ops) for name, ops in operators(self.device).items()}


def operators(device: str) -> dict[str, Any]:
    """Returns the backends among the competitors: that of backends/cuda if available, and that of backends/unfused."""
    try:
        backends = {OURS: importlib.import_module("swiftspec.backends.cuda").cuda} if device.startswith("cuda") else {}
    except ImportError:
        backends = {}
    return {**backends, "unfused": unfused}


def projection(ops: Any, op: str, x: Tensor, norm: Any, packed: Any, residual: Tensor, group: Any) -> Call:
    if op == "swiglu":
        return partial(ops.norm_swiglu, x, norm, packed)
    if op in ("qkv", "head"):
        return partial(ops.norm_linear if op == "qkv" else ops.norm_head, x, norm, packed)
    return partial(ops.linear_residual, x, packed, residual, group)


class Alone(PeerCommunicator):
    """Communicator of a group of one rank, which sends all lines to itself."""

    def __init__(self, outputs: int, device: str) -> None:
        lines, error_word = max_lines(outputs), torch.zeros(2, dtype=torch.int64, pin_memory=True)
        self.inbox = make_inbox(1, lines, device)
        super().__init__(0, [self.inbox.data_ptr()], lines, error_word, torch.device(device))


def cases(make: Maker, rows: tuple[int, ...], contexts: tuple[int, ...] = CONTEXTS) -> Iterator[Case]:
    """Yields all cases, the most important first. `contexts`: keys of attention.

    The cases of a split with 8 rows come FIRST_SPLITS splits earlier than those with other numbers of rows.
    """
    order = itertools.product(enumerate(SPLITS), rows)
    for (number, (model, tp)), count in sorted(order, key=lambda case: case[0][0] + FIRST_SPLITS * (case[1] != 8)):
        for op in ("qkv", "o", "swiglu", "down", "head"):
            yield make.linear(model, tp, op, count)
        for context in contexts:
            yield make.attention(model, tp, context, count)
        if count == 8 and number == FIRST_SPLITS:
            yield from (make.particles("Llama-3-8B", 1, particles) for particles in PARTICLES)
            yield from (make.resampling(particles) for particles in PARTICLES)
            for op, several in itertools.product(("draw", "children"), SAMPLED_ROWS):
                yield make.sampling("Llama-3-8B", op, several)
