"""Checks of the GPU trial (trial.py): each kind of operator on the shapes of the models to load, with random weights,
compared with torch in float32.

Outputs of projections are compared in slices, so that no dense copy of a weight is needed. Bounds are several times
those of tests/gpu: rounding never exceeds them, and a wrong kernel does. The checks take the operators as an argument,
so that tests run them with those of other backends, and on a CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftspec.backends.families import Family
from swiftspec.backends.reference import Backend, noise, reference, resampling
from swiftspec.backends.reference.resampling import PATH_HEADER_WORDS, ResamplingState
from swiftspec.backends.reference.sampling import Scores
from swiftspec.model.batch import Batch, Chain
from swiftspec.model.formats.int4 import Int4Weight
from swiftspec.model.packed_model import PackedLayer, PackedMlp, PackedModel
from swiftspec.model.spec import RopeSpec
from swiftspec.model.weights import DenseWeight

Projection = Literal["qkv", "o", "gate_up", "down", "head"]
Switch = Literal["early_starts", "graphs"]
Capture = Callable[[Callable[[], Sequence[Tensor]]], tuple[Sequence[Tensor], Callable[[], None]]]
T = TypeVar("T")

BF16, F32 = torch.bfloat16, torch.float32
ROWS = (1, 8, 16, 32, 64)  # one for each kind of kernel
CHUNK_ROWS = (100, 300)  # of prefill chunks
MAX_HEAD_ROWS = 64  # a prefill chunk has no logits
SLICE_OUTPUTS = 16  # outputs of a compared slice
KEYS = (1, 127, 1025, 5000)  # within a tile, and one and several parts of attention
TREE_ROWS = 8
LAYER_KEYS = 200
REPEATS = 3
MAX_CANDIDATES = 64
NORM_EPS = 1e-5
SEED = 1
# largest relative errors, in the Frobenius norm; bfloat16 rounds by 2e-3, float8 by 4e-2
BF16_BOUND, FLOAT8_BOUND = 2e-2, 1e-1
SCORE_BOUND = 1e-3  # largest absolute error of scores and log-probabilities


@dataclass(frozen=True, slots=True)
class ProjectionShape:
    """A projection of one rank. `group`: inputs per scale of int4 weights; 0: bfloat16 weights."""

    op: Projection
    outputs: int
    inputs: int
    group: int

    def __str__(self) -> str:
        kind = f"int4/{self.group}" if self.group else "bf16"
        return f"{self.op} {self.inputs} x {self.outputs} {kind}"


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Attention of one rank. `cache`: dtype of the KV cache. `head_norms`: query and key heads are normalised."""

    heads: int
    kv_heads: int
    head_dim: int
    capacity: int
    cache: str
    head_norms: bool

    def __str__(self) -> str:
        norms = ", head norms" if self.head_norms else ""
        return f"attention {self.heads}/{self.kv_heads} heads of {self.head_dim}, {self.cache} cache{norms}"


@dataclass(frozen=True, slots=True)
class TreeShape:
    """The draft tree: tree slots, children per leaf (k), leaves per expansion (w)."""

    slots: int
    children: int
    leaves: int


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The projections and the attention of one layer."""

    qkv: ProjectionShape
    o: ProjectionShape
    gate_up: ProjectionShape
    down: ProjectionShape
    attention: AttentionShape

    @property
    def projections(self) -> tuple[ProjectionShape, ...]:
        return self.qkv, self.o, self.gate_up, self.down

    def __str__(self) -> str:
        return f"layer of {self.qkv.inputs}"


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """What a process will run on its GPU. `layers`: one for each kind of layer. `particles`: per request in mode smc, 0
    in other modes."""

    layers: tuple[LayerShape, ...]
    heads: tuple[ProjectionShape, ...]
    tree: TreeShape | None
    particles: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> TrialPlan:
        """Returns the plan that `to_json` has converted."""

        def layer(parts: Mapping[str, Any]) -> LayerShape:
            matrices = {name: ProjectionShape(**parts[name]) for name in ("qkv", "o", "gate_up", "down")}
            return LayerShape(**matrices, attention=AttentionShape(**parts["attention"]))

        tree = values["tree"]
        return TrialPlan(
            tuple(layer(parts) for parts in values["layers"]),
            tuple(ProjectionShape(**head) for head in values["heads"]),
            None if tree is None else TreeShape(**tree),
            values["particles"],
        )


@dataclass(frozen=True, slots=True)
class TrialDevice:
    """The device of a trial. `capture`: captures a function in a graph, and returns its outputs and the replay; None
    without graphs."""

    device: torch.device
    capture: Capture | None = None

    def finish(self) -> None:
        """Waits for all kernels."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def dice(self, seed: int = SEED) -> torch.Generator:
        return torch.Generator(device=self.device).manual_seed(seed)

    def random(self, *shape: int, seed: int = SEED) -> Tensor:
        """Returns normally distributed float32 numbers."""
        return torch.randn(shape, generator=self.dice(seed), device=self.device)


@dataclass(frozen=True, slots=True)
class TrialCheck:
    """A check of one family of operators, or of a switch over several families.

    `run`: takes the operators and returns why the check fails, or None.
    """

    name: str
    run: Callable[[Any, TrialDevice], str | None]
    family: Family | None = None
    switch: Switch | None = None


def trial_checks(plan: TrialPlan) -> list[TrialCheck]:
    """Returns the checks of a plan in the order in which they run: single operators first. Their names differ."""
    shapes = dict.fromkeys((*plan.heads, *(each for layer in plan.layers for each in layer.projections)))
    checks = [TrialCheck(str(shape), partial(check_projection, shape), "projections") for shape in shapes]
    attention = dict.fromkeys(layer.attention for layer in plan.layers)
    checks += [TrialCheck(str(shape), partial(check_attention, shape), "attention") for shape in attention]
    checks += [TrialCheck(f"slot moves of {shape}", partial(check_slot_moves, shape), "cache") for shape in attention]
    for hidden in dict.fromkeys(head.inputs for head in plan.heads):
        checks.append(TrialCheck(f"embedding of {hidden}", partial(check_embedding, hidden), "embedding"))
    for vocab in dict.fromkeys(head.outputs for head in plan.heads):
        children = 1 if plan.tree is None else plan.tree.children
        checks.append(TrialCheck(f"sampling of {vocab}", partial(check_sampling, vocab, children), "sampling"))
    if plan.tree is not None:
        vocab = max(head.outputs for head in plan.heads)
        checks.append(TrialCheck("draft tree", partial(check_tree, plan.tree, vocab), "tree"))
    if plan.particles > 0:
        checks.append(TrialCheck("resampling", partial(check_resampling, plan.particles), "resampling"))
    for layer in plan.layers:
        checks.append(TrialCheck(f"{layer}, appending QKV", partial(check_append, layer), "attention"))
        checks.append(TrialCheck(f"{layer}, repeated", partial(check_repeats, layer), switch="early_starts"))
        checks.append(TrialCheck(f"{layer}, captured", partial(check_replays, layer), switch="graphs"))
    return _numbered(checks)


def _numbered(checks: Sequence[TrialCheck]) -> list[TrialCheck]:
    """Returns the checks with different names: a name does not contain all of a shape, so a later check with the name
    of an earlier one gets a number."""
    count, found = Counter[str](), list[TrialCheck]()
    for check in checks:
        count[check.name] += 1
        number = count[check.name]
        found.append(check if number == 1 else replace(check, name=f"{check.name} ({number})"))
    return found


def difference(got: Tensor, want: Tensor, bound: float, what: str) -> str | None:
    """Returns in one phrase how `got` differs from `want`, or None if the relative error is at most `bound`. `what`:
    names the result."""
    if got.shape != want.shape:
        return f"{what} has the shape {[*got.shape]}"
    if not bool(got.float().isfinite().all()):
        return f"{what} is not finite"
    error = float((got.float() - want).norm() / want.norm().clamp_min(1e-30))
    return None if error <= bound else f"{what} is off by {error:.2g}"


def first_of(found: Iterator[str | None]) -> str | None:
    """Returns the first reason, or None. Later comparisons are not made."""
    return next((reason for reason in found if reason is not None), None)


def random_weight(shape: ProjectionShape, at: TrialDevice) -> DenseWeight | Int4Weight:
    """Returns a weight whose products have elements of about 1."""
    n, k, group = shape.outputs, shape.inputs, shape.group
    if group == 0:
        return DenseWeight(torch.randn((n, k), generator=at.dice(), device=at.device, dtype=BF16).mul_(k**-0.5))

    def words(rows: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, (rows, n // 8), generator=at.dice(), dtype=torch.int32, device=at.device)

    scales = torch.rand(k // group, n, generator=at.dice(), device=at.device).add_(0.5).mul_(k**-0.5 / 5).half()
    return Int4Weight(words(k), scales, words(k // group), group)


def sampled_outputs(count: int) -> list[slice]:
    """Returns slices of the first, middle and last outputs, which begin at a multiple of 8."""
    first, middle, last = (max(start, 0) // 8 * 8 for start in (0, count // 2, count - SLICE_OUTPUTS))
    return [
        slice(first, min(first + SLICE_OUTPUTS, count)),
        slice(middle, min(middle + SLICE_OUTPUTS, count)),
        slice(last, count),
    ]


def matrix_slice(weight: DenseWeight | Int4Weight, rows: slice) -> Tensor:
    """Returns outputs of a weight in float32: [outputs, inputs]."""
    if isinstance(weight, DenseWeight):
        return weight.weight[rows].float()
    eighths = slice(rows.start // 8, rows.stop // 8)
    part = Int4Weight(
        weight.packed[:, eighths].contiguous(),
        weight.scales[:, rows].contiguous(),
        weight.zeros[:, eighths].contiguous(),
        weight.group_size,
    )
    return part.dequantize(F32)


def normalised(x: Tensor, weight: Tensor) -> Tensor:
    """Returns the RMSNorm of x in float32, rounded to bfloat16 before and after the weight is applied."""
    scale = (x.float().square().mean(-1, keepdim=True) + NORM_EPS).rsqrt()
    return ((x.float() * scale).to(BF16) * weight).float()


def norm_weight(count: int, at: TrialDevice) -> Tensor:
    return torch.rand(count, generator=at.dice(2), device=at.device).add_(0.5).to(BF16)


def product(shape: ProjectionShape, ops: Backend, norm: Any, packed: Any, x: Tensor, residual: Tensor) -> Tensor:
    """Returns the result of a projection as a model calls it."""
    if shape.op in ("o", "down"):
        return ops.linear_residual(x, packed, residual)
    function = {"qkv": ops.norm_linear, "gate_up": ops.norm_swiglu, "head": ops.norm_head}[shape.op]
    return function(x, norm, packed)


def check_projection(shape: ProjectionShape, ops: Backend, at: TrialDevice) -> str | None:
    """A projection with its norm, residual or activation, for each number of rows."""
    weight, gains = random_weight(shape, at), norm_weight(shape.inputs, at)
    packed, norm = ops.pack(weight, BF16, at.device), ops.pack_norm(gains, NORM_EPS, BF16, at.device)
    x = at.random(max(CHUNK_ROWS), shape.inputs, seed=3).to(BF16)
    residual = at.random(max(CHUNK_ROWS), shape.outputs, seed=4).to(BF16)
    half = shape.outputs // 2
    slices = sampled_outputs(half if shape.op == "gate_up" else shape.outputs)

    def want(rows: int, of: slice) -> Tensor:
        if shape.op in ("o", "down"):
            return x[:rows].float() @ matrix_slice(weight, of).T + residual[:rows, of].float()
        gate = (inputs := normalised(x[:rows], gains)) @ matrix_slice(weight, of).T
        if shape.op != "gate_up":
            return gate
        return F.silu(gate) * (inputs @ matrix_slice(weight, slice(half + of.start, half + of.stop)).T)

    def run(rows: int) -> Tensor:
        few = x[:rows]
        with ops.prefill_chunk() if rows in CHUNK_ROWS else nullcontext():
            return product(shape, ops, norm, packed, few, residual[:rows])

    def compare() -> Iterator[str | None]:
        for rows in (*ROWS, *CHUNK_ROWS):
            if shape.op == "head" and rows > MAX_HEAD_ROWS:
                continue
            got = run(rows)
            for of in slices:
                yield difference(got[:, of], want(rows, of), BF16_BOUND, f"its result for {rows} rows")

    return first_of(compare())


@dataclass(slots=True)
class TrialCache:
    """Keys and values of one layer: [1, sequences, kv_heads, capacity, head_dim]."""

    k: Tensor
    v: Tensor

    @staticmethod
    def of(shape: AttentionShape, sequences: int, used: int, capacity: int, at: TrialDevice) -> TrialCache:
        """Returns a cache whose first `used` slots are random."""
        parts: list[Tensor] = []
        for seed in (5, 6):
            size = (1, sequences, shape.kv_heads, capacity, shape.head_dim)
            whole = torch.zeros(size, dtype=getattr(torch, shape.cache), device=at.device)
            random = at.random(1, sequences, shape.kv_heads, used, shape.head_dim, seed=seed)
            whole[..., :used, :].copy_(random)
            parts.append(whole)
        return TrialCache(*parts)

    def first(self, slots: int) -> TrialCache:
        """Returns a copy of the first slots."""
        return TrialCache(self.k[..., :slots, :].clone(), self.v[..., :slots, :].clone())


def tree_batch(lengths: Sequence[int], at: TrialDevice) -> Batch:
    """Returns a batch over the last slots of each sequence, of which a row sees itself and half of the earlier ones.
    `lengths`: slots in use, by sequence."""
    counts = [min(TREE_ROWS, length) for length in lengths]
    slots = torch.cat([torch.arange(n - count, n) for n, count in zip(lengths, counts, strict=True)])
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(counts))
    width = max(counts)
    ends = torch.tensor(lengths)[sequence]
    columns = ends[:, None] - width + torch.arange(width)
    mask = torch.rand(len(slots), width, generator=torch.Generator().manual_seed(SEED)) < 0.5
    mask = mask & (columns < slots[:, None]) | (columns == slots[:, None])
    parts = (slots, slots, slots, mask, sequence, torch.tensor(lengths))
    return Batch(*(part.to(at.device) for part in parts), max_kv_len=None)


def chunk_batch(lengths: Sequence[int], at: TrialDevice) -> Batch:
    """Returns a prefill chunk at the end of the only sequence."""
    (length,) = lengths
    rows = min(CHUNK_ROWS[0], length)
    slots = torch.arange(length - rows, length, device=at.device)
    mask = torch.ones(rows, rows, dtype=torch.bool, device=at.device).tril()
    kv_len = torch.tensor([length], device=at.device)
    return Batch(slots, slots, slots, mask, torch.zeros_like(slots), kv_len, chain=Chain(0, length))


def rope_of(shape: AttentionShape, length: int, at: TrialDevice) -> tuple[Tensor, Tensor]:
    return reference.rope_tables(RopeSpec(theta=1e4), shape.head_dim, length, BF16, at.device)


def check_attention(shape: AttentionShape, ops: Backend, at: TrialDevice) -> str | None:
    """Attention of tree rows over contexts of several lengths, also over two sequences, and of a prefill chunk, and the
    new keys and values."""
    bound = BF16_BOUND if shape.cache == "bfloat16" else FLOAT8_BOUND
    gains = at.random(shape.heads + shape.kv_heads, shape.head_dim, seed=7).to(BF16)
    own_norm = exact_norm = None
    if shape.head_norms:
        own_norm = ops.pack_norm(gains, NORM_EPS, BF16, at.device)
        exact_norm = reference.pack_norm(gains, NORM_EPS, F32, at.device)

    def compare() -> Iterator[str | None]:
        lengths = [keys for keys in KEYS if keys <= shape.capacity]
        trees = [[keys] for keys in lengths] + [[lengths[-1], lengths[len(lengths) // 2]]]
        for used, make in [(used, tree_batch) for used in trees] + [([lengths[-1]], chunk_batch)]:
            batch, most = make(used, at), max(used)
            cache = TrialCache.of(shape, len(used), most, shape.capacity, at)
            want_cache = cache.first(most)
            qkv = at.random(len(batch), (shape.heads + 2 * shape.kv_heads) * shape.head_dim, seed=8).to(BF16)
            cos, sin = rope_of(shape, most, at)
            plan = reference.prepare(batch, want_cache, cos.float(), sin.float(), shape.heads)
            want = reference.tree_attention(qkv.float(), plan, 0, exact_norm)
            got = ops.tree_attention(qkv.clone(), ops.prepare(batch, cache, cos, sin, shape.heads), 0, own_norm)
            where = f"over {used[0]} keys" if len(used) == 1 else f"over two sequences of up to {most} keys"
            where = where if batch.chain is None else f"for a prefill chunk {where}"
            yield difference(got, want, bound, f"its result {where}")
            for mine, theirs in ((cache.k, want_cache.k), (cache.v, want_cache.v)):
                yield difference(mine[..., :most, :], theirs.float(), bound, f"the cache {where}")

    return first_of(compare())


def check_slot_moves(shape: AttentionShape, ops: Backend, at: TrialDevice) -> str | None:
    """Slots of the second of two sequences move to the front, in all layers and heads."""
    slots = min(shape.capacity, 300)
    cache = TrialCache.of(shape, 2, slots, slots, at)
    want = cache.first(slots)
    source = [slot for slot in range(1, slots) if slot % 3 != 1 or slot > slots - 5]
    ops.make_slot_mover(cache.k, cache.v)(1, source, 1)
    reference.make_slot_mover(want.k, want.v)(1, source, 1)
    same = all(torch.equal(a.float(), b.float()) for a, b in ((cache.k, want.k), (cache.v, want.v)))
    return None if same else "slots hold other values"


def check_embedding(hidden: int, ops: Backend, at: TrialDevice) -> str | None:
    table = at.random(50, hidden).to(BF16)
    tokens = torch.tensor([3, 49, 0, 3], device=at.device)
    same = torch.equal(ops.embed(tokens, table), table[tokens])
    return None if same else "rows are not those of the table"


def check_sampling(vocab: int, children: int, ops: Backend, at: TrialDevice) -> str | None:
    """Noise, draws, log-probabilities and candidates, compared with torch on the CPU."""
    logits = at.random(TREE_ROWS, vocab + 5, seed=9) * 4
    logits[:, vocab:] = 1e9  # beyond the vocabulary
    bias, host = at.random(vocab, seed=10), logits[:, :vocab].cpu()
    positions = torch.arange(TREE_ROWS)
    block = ops.gumbel_rows(7, 3, positions.to(at.device), range(vocab))
    rows = positions.to(at.device)
    scores = Scores(1.3, bias, block, rows, 0.7)
    numbers = torch.tensor([1.3, 0.7, 1.0], dtype=torch.float64, device=at.device)
    tensors = Scores(bias=bias, noise=block, rows=rows, scalars=numbers)
    keys = torch.tensor([noise.row_key(7, 3, p) for p in range(TREE_ROWS)], dtype=torch.uint32).view(torch.int32)

    def compare() -> Iterator[str | None]:
        exact_noise = reference.gumbel_rows(7, 3, positions, range(vocab))
        yield _apart(block.cpu(), exact_noise, "noise")
        plain = (host + bias.cpu()) / 1.3
        noisy, log_probs = plain + exact_noise, plain.log_softmax(-1)
        calibrated = (noisy / 0.7).log_softmax(-1)
        for each in (scores, tensors):
            yield _not_best(ops.draw(logits, vocab, each).cpu(), noisy, "a drawn token")
            for k in {min(children, vocab), min(MAX_CANDIDATES, vocab)}:
                tokens, values = (part.cpu() for part in ops.children(logits, vocab, k, each))
                yield _apart(values, calibrated.topk(k).values, "log-probabilities of candidates")
                yield _apart(values, calibrated.gather(1, tokens.clamp(0, vocab - 1)), "candidates")
        drawn, values = (part.cpu() for part in ops.draw_keyed(logits, vocab, keys.to(at.device), Scores(1.3, bias)))
        yield _not_best(drawn, noisy, "a token drawn by its key")
        want = log_probs.gather(1, drawn.clamp(0, vocab - 1)[:, None]).squeeze(1)
        yield _apart(values, want, "log-probabilities of drawn tokens")
        yield _apart(ops.log_probs(logits, vocab, drawn.to(at.device), Scores(1.3, bias)).cpu(), want, "log_probs")
        several = numbers.repeat(2, 1), torch.stack((torch.zeros_like(bias), bias))
        half, of_sets = TREE_ROWS // 2, Scores(bias=several[1], scalars=several[0])
        drawn = ops.draw_keyed(logits[: 2 * half], vocab, keys[: 2 * half].to(at.device), of_sets)[0].cpu()
        yield _not_best(drawn[half:], noisy[half : 2 * half], "a token drawn with the bias of its request")

    return first_of(compare())


def _apart(got: Tensor, want: Tensor, what: str) -> str | None:
    """Returns by how much numbers differ, if by more than SCORE_BOUND (relative to numbers above 1)."""
    error = float(((got - want).abs() / want.abs().clamp_min(1)).nan_to_num(nan=torch.inf).max())
    return None if error <= SCORE_BOUND else f"{what} off by {error:.2g}"


def _not_best(tokens: Tensor, scores: Tensor, what: str) -> str | None:
    """Returns a reason unless the score of each token is the highest of its row, up to SCORE_BOUND."""
    if bool(((tokens < 0) | (tokens >= scores.shape[1])).any()):
        return f"{what} is not in the vocabulary"
    own = scores.gather(1, tokens[:, None]).squeeze(1)
    return _apart(own, scores.max(1).values, f"the score of {what}")


def check_tree(shape: TreeShape, vocab: int, ops: Backend, at: TrialDevice) -> str | None:
    """Expansions on the device take the same leaves, slots and mask rows as on the host."""
    tree = ops.device_tree(shape.slots, shape.children, shape.leaves, vocab, at.device)
    if tree is None:
        return None
    w, k, start = shape.leaves, shape.children, 17
    dice = torch.Generator().manual_seed(SEED)
    first = -(torch.randint(0, 9, (1, k), generator=dice) / 8)
    token, slot = (torch.tensor([number], device=at.device) for number in (5, start))
    tree.add_root(token, slot, torch.arange(k, device=at.device).view(1, k), first.to(at.device))
    if tree.region.tolist() != [start, start + shape.slots]:
        return "it lies in another part of the cache"
    weights, parents, seen, taken = [0.0, *first[0].tolist()], [0] * (1 + k), {0: {0}}, {0}
    for step in range(min((shape.slots - 1) // w, 4)):
        rows = tree.best_leaves(tree.region[:1])
        leaves = sorted((n for n in range(len(weights)) if n not in taken), key=lambda n: (-weights[n], n))[:w]
        if rows.nodes.tolist() != leaves + [-1] * (w - len(leaves)):
            return "it expands other leaves"
        for row, node in enumerate(leaves):
            own = 1 + step * w + row
            seen[node] = seen[parents[node]] | {own}
            if {*rows.mask[row].nonzero().flatten().tolist()} != seen[node]:
                return "a mask row marks other slots"
            if (int(rows.positions[row]), int(rows.slots[row])) != (start + len(seen[node]) - 1, start + own):
                return "a node has another position or slot"
        taken.update(leaves)
        values = -(torch.randint(0, 9, (w, k), generator=dice) / 8)
        tokens = torch.arange(w * k, device=at.device).view(w, k)
        tree.add_children(tokens, values.to(at.device))
        for row, node in enumerate(leaves):
            weights += [weights[node] + value for value in values[row].tolist()]
            parents += [node] * k
    return None


def check_resampling(particles: int, ops: Backend, at: TrialDevice) -> str | None:
    """Particles are resampled as by torch on the CPU."""
    dice, slots, words = torch.Generator().manual_seed(SEED), 64, 40
    count = (3, particles)
    weights = 2 * torch.randn(count, dtype=torch.float64, generator=dice)
    weights[0] = 0  # stays as it is
    path = torch.randint(2**40, (*count, words), generator=dice)
    path[..., 0] = words - PATH_HEADER_WORDS
    mask, ends = (torch.rand(*count, width, generator=dice) < 0.5 for width in (slots, 2))
    zeros = [torch.zeros(3, dtype=dtype) for dtype in (torch.float64, torch.float64, torch.int64, torch.int64)]
    want = ResamplingState(weights, mask, ends, path, *zeros)
    got = ResamplingState(**{name: part.to(at.device, copy=True) for name, part in want.fields().items()})
    uniform = torch.rand(3, dtype=torch.float64, generator=dice)
    (ops.resample or resampling.resample)(got, uniform.to(at.device), 0.9, slots)
    resampling.resample(want, uniform, 0.9, slots)
    for name, part in want.fields().items():
        own = getattr(got, name).cpu()
        same = torch.allclose(own, part, rtol=1e-9, atol=1e-9) if part.is_floating_point() else torch.equal(own, part)
        if not same:
            return f"{name.replace('_', ' ')} differ"
    return None


class TrialLayer:
    """Two passes through one layer, whose kernels read what their predecessors write."""

    def __init__(self, shape: LayerShape, ops: Backend, at: TrialDevice) -> None:
        self._shape, self._ops, self._at = shape, ops, at
        matrices = [random_weight(each, at) for each in shape.projections]
        qkv = ops.pack_qkv(matrices[0], shape.attention.head_dim, BF16, at.device)
        o, gate_up, down = (ops.pack(matrix, BF16, at.device) for matrix in matrices[1:])
        hidden = shape.qkv.inputs
        norm = ops.pack_norm(norm_weight(hidden, at), NORM_EPS, BF16, at.device)
        head_norm, attention = None, shape.attention
        if attention.head_norms:
            gains = at.random(attention.heads + attention.kv_heads, attention.head_dim, seed=7).to(BF16)
            head_norm = ops.pack_norm(gains, NORM_EPS, BF16, at.device)
        self._layer = PackedLayer(norm, qkv, o, norm, PackedMlp(gate_up, down), head_norm)
        self._hidden = at.random(TREE_ROWS, hidden, seed=11).to(BF16)
        ops.fuse(PackedModel(self._hidden, [self._layer], norm, qkv, [], None))  # prefetching, as in the model
        capacity = min(attention.capacity, LAYER_KEYS + 100)
        self._keys = min(LAYER_KEYS, capacity)
        self._cache = TrialCache.of(attention, 1, self._keys, capacity, at)
        self._batch = tree_batch([self._keys], at)
        self._rope = rope_of(attention, self._keys, at)

    def forward(self, after: Callable[[], None] = lambda: None, separate: bool = False) -> tuple[Tensor, ...]:
        """Returns the outputs of attention and the hidden states of both passes. `after`: called after each operator.
        `separate`: QKV is an operator of its own."""
        ops, layer, hidden, kept = self._ops, self._layer, self._hidden, list[Tensor]()

        def done(x: T) -> T:
            after()
            return x

        plan = done(ops.prepare(self._batch, self._cache, *self._rope, self._shape.attention.heads))
        for _ in range(2):
            if separate:
                qkv = done(ops.norm_linear(hidden, layer.input_norm, layer.qkv))
                mixed = done(ops.tree_attention(qkv, plan, 0, layer.qk_norm))
            else:
                mixed = done(ops.qkv_attention(hidden, layer.input_norm, layer.qkv, plan, 0, layer.qk_norm))
            hidden = done(ops.linear_residual(mixed, layer.o, hidden))
            gated = done(ops.norm_swiglu(hidden, layer.mlp_norm, layer.mlp.gate_up))
            hidden = done(ops.linear_residual(gated, layer.mlp.down, hidden))
            kept += [mixed, hidden]
        return tuple(kept)

    def apart(self) -> tuple[Tensor, ...]:
        """Returns the outputs of kernels each of which starts after its predecessor has ended."""
        return tuple(part.clone() for part in self.forward(self._at.finish, separate=True))


def _same(got: Sequence[Tensor], want: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def check_append(shape: LayerShape, ops: Backend, at: TrialDevice) -> str | None:
    """A layer in which QKV applies RoPE and appends has the bits of separate operators."""
    layer = TrialLayer(shape, ops, at)
    want = layer.apart()
    return None if _same(layer.forward(at.finish), want) else "QKV appends other keys and values than attention"


def check_repeats(shape: LayerShape, ops: Backend, at: TrialDevice) -> str | None:
    """A layer's kernels in a row have the bits that they have one by one."""
    layer = TrialLayer(shape, ops, at)
    want = layer.apart()
    same = all(_same(layer.forward(), want) for _ in range(REPEATS))
    return None if same else "kernels in a row have other results than one by one"


def check_replays(shape: LayerShape, ops: Backend, at: TrialDevice) -> str | None:
    """A captured layer has the bits of an eager one in every replay."""
    if at.capture is None or ops.MAX_CAPTURED_SEQUENCES == 0:
        return None
    layer = TrialLayer(shape, ops, at)
    want = layer.apart()
    out, replay = at.capture(layer.forward)
    for _ in range(REPEATS):
        replay()
        if not _same(out, want):
            return "a replayed graph has other results than its kernels one by one"
        for part in out:
            part.fill_(torch.nan)
    return None
