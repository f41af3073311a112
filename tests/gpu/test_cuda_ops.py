"""CUDA operators other than projections: they equal the reference, and rows are independent of each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cpu import cpu as host
from swiftspec.backends.cuda import CudaBackend, attention, cuda
from swiftspec.backends.cuda.torch_interop import current_stream
from swiftspec.backends.cuda.tree import DeviceTree
from swiftspec.backends.reference import noise, reference
from swiftspec.backends.reference.sampling import Scores
from swiftspec.model.batch import Batch, Chain
from swiftspec.model.spec import RopeSpec
from tests.gpu.device import DEVICE, EMULATED, captured, most, needs_kernels

pytestmark = [pytest.mark.gpu, needs_kernels]

BF16, F64 = torch.bfloat16, torch.float64
HEADS = most([(4, 2, 64), (8, 1, 128), (14, 2, 64), (32, 8, 128), (24, 8, 128), (2, 2, 64), (64, 8, 128)], 3)


def dice(seed: int) -> torch.Generator:
    return torch.Generator(device=DEVICE).manual_seed(seed)


def random(*shape: int, seed: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, generator=dice(seed), device=DEVICE).to(dtype)


def close(ours: Tensor, theirs: Tensor, bound: float = 5e-3) -> None:
    assert ours.shape == theirs.shape and bool(ours.isfinite().all())
    assert float((ours.double() - theirs.double()).norm() / theirs.double().norm()) < bound


class Cache:
    def __init__(self, sequences: int, kv_heads: int, capacity: int, dim: int) -> None:
        self.k = random(2, sequences, kv_heads, capacity, dim, seed=8)
        self.v = random(2, sequences, kv_heads, capacity, dim, seed=9)

    def double(self) -> Cache:
        other = object.__new__(Cache)
        other.k, other.v = self.k.double(), self.v.double()
        return other


def tables(dim: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    cos, sin = reference.rope_tables(RopeSpec(theta=1e4), dim, length, BF16, DEVICE)
    return cos.to(dtype), sin.to(dtype)


def window_batch(rows: int, length: int, width: int, seed: int, causal: bool = False) -> Batch:
    """Rows in the last slots of one sequence; each sees a random part of the window and itself."""
    slots = torch.arange(length - rows, length, device=DEVICE)
    columns = torch.arange(length - width, length, device=DEVICE)
    mask = torch.rand(rows, width, generator=dice(seed), device=DEVICE) < (2 if causal else 0.5)
    mask = mask & (columns < slots[:, None]) | (columns == slots[:, None])
    return Batch(slots, slots, slots, mask, torch.zeros_like(slots), torch.tensor([length], device=DEVICE))


def check_attention(batch: Batch, heads: int, kv_heads: int, dim: int, capacity: int, shape: str | None = None) -> None:
    sequences, length = batch.kv_len.shape[0], capacity + 8
    ours = Cache(sequences, kv_heads, capacity, dim)
    exact = ours.double()
    qkv = random(len(batch), (heads + 2 * kv_heads) * dim, seed=4)
    got = cuda.tree_attention(qkv, cuda.prepare(batch, ours, *tables(dim, length, BF16), heads, shape=shape), 1)
    plan = reference.prepare(batch, exact, *tables(dim, length, F64), heads)
    close(got, reference.tree_attention(qkv.double(), plan, 1))
    close(ours.k, exact.k)
    assert torch.equal(ours.v.double(), exact.v), "the new values, in the other layer none"


@pytest.mark.parametrize(
    ("rows", "length", "shape"), [(1, 256, None), (9, 400, None), (1, 256, "paired"), (9, 400, "paired")]
)
def test_later_layers_load_before_the_wait(rows: int, length: int, shape: str | None) -> None:
    """In all layers but the first, units to which the forward does not append are loaded before RoPE and append have
    ended. The results are bitwise those of a first layer. The only row of a batch sees its own key in a full unit."""
    heads, kv_heads, dim = 4, 2, 128
    batch, turns = window_batch(rows, length, 32, 3, causal=True), tables(dim, length, BF16)
    qkv = random(2, rows, (heads + 2 * kv_heads) * dim, seed=4)
    cache, other = Cache(1, kv_heads, length, dim), Cache(1, kv_heads, length, dim)
    plan = cuda.prepare(batch, cache, *turns, heads, shape=shape)
    later = [cuda.tree_attention(qkv[layer], plan, layer) for layer in range(2)][1]
    first = cuda.prepare(batch, other, *turns, heads, shape=shape)
    assert torch.equal(later, cuda.tree_attention(qkv[1], first, 1))
    assert torch.equal(cache.k[1], other.k[1]) and torch.equal(cache.v[1], other.v[1])


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_query_and_key_heads_are_normalised_before_rope(heads: int, kv_heads: int, dim: int) -> None:
    batch, ours = window_batch(9, 130, 64, 1), Cache(1, kv_heads, 135, dim)
    exact, qkv = ours.double(), random(9, (heads + 2 * kv_heads) * dim, seed=4)
    weight = random(heads + kv_heads, dim, seed=5)
    norm = cuda.pack_norm(weight, 1e-6, BF16, DEVICE)
    got = cuda.tree_attention(qkv.clone(), cuda.prepare(batch, ours, *tables(dim, 140, BF16), heads), 1, norm)
    plan = reference.prepare(batch, exact, *tables(dim, 140, F64), heads)
    exact_norm = reference.pack_norm(weight, 1e-6, F64, DEVICE)
    close(got, reference.tree_attention(qkv.double(), plan, 1, exact_norm))
    close(ours.k, exact.k)
    assert torch.equal(ours.v.double(), exact.v)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_a_normalised_row_does_not_depend_on_the_others(heads: int, kv_heads: int, dim: int) -> None:
    qkv, weight = random(9, (heads + 2 * kv_heads) * dim, seed=4), random(heads + kv_heads, dim, seed=5)
    every, alone = qkv.clone(), qkv[4:5].clone()
    for rows in (every, alone):
        _C.norm_heads_cuda(rows, weight, 1e-6, current_stream())
    assert torch.equal(every[4:5], alone)
    assert torch.equal(every[:, (heads + kv_heads) * dim :], qkv[:, (heads + kv_heads) * dim :]), "values are kept"


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize(
    ("rows", "length", "width"), [(1, 1, 8), (8, 8, 8), (5, 41, 16), (9, 130, 64), (20, 600, 256), (8, 1100, 64)]
)
def test_attention(heads: int, kv_heads: int, dim: int, rows: int, length: int, width: int) -> None:
    check_attention(window_batch(rows, length, width, length), heads, kv_heads, dim, length + 5)


@pytest.mark.parametrize("seen", [40, 72, 110])
def test_gaps_after_the_first_mask_word(seen: int) -> None:
    """Rows that all see the text before the tree, and of the tree's older nodes only their ancestors."""
    batch = window_batch(5, 300, 160, 3)
    batch.mask[:, :seen] = True
    check_attention(batch, 4, 2, 64, 305)


@pytest.mark.parametrize("dim", [64, 128])
def test_attention_over_a_prompt_chunk_and_a_long_context(dim: int) -> None:
    check_attention(window_batch(64 if EMULATED else 256, 900, 256, 1, causal=True), 8, 2, dim, 2000)
    check_attention(window_batch(5, 2500, 1200, 3), 4, 2, dim, 2501)
    if not EMULATED:
        check_attention(window_batch(8, 32_768, 64, 2), 8, 1, dim, 32_768)
        check_attention(window_batch(5, 9000, 4096, 3), 4, 2, dim, 9001)


def test_attention_over_more_tiles_than_blocks() -> None:
    check_attention(window_batch(2, 4200, 40, 3), 2, 1, 64, 4200)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("length", [300, 1300, 2600])
def test_attention_of_a_cache_for_long_contexts(length: int, dim: int) -> None:
    """Its kernel has other clusters."""
    check_attention(window_batch(5, length, 64, 3), 4, 2, dim, 8300)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("rows", "length", "width"), [(8, 8, 8), (9, 130, 64), (20, 600, 256), (8, 1100, 64), (40, 300, 150), (5, 2600, 64)]
)
def test_attention_by_pairs_of_blocks(rows: int, length: int, width: int, dim: int) -> None:
    """Two blocks share a multiprocessor. Few and many keys, rows of several groups, units that do not fit at once."""
    check_attention(window_batch(rows, length, width, length), 8, 2, dim, length + 5, "paired")


@pytest.mark.parametrize(("heads", "chosen"), [(8, "paired"), (4, "short")])
def test_a_kernel_shape_belongs_to_the_heads_of_a_model(heads: int, chosen: str) -> None:
    """Shapes add in another order, so the bits show which one has run."""
    length, qkv = 700, random(5, (heads + 4) * 64, seed=4)
    kernels = cuda.attention_shapes(length)
    assert kernels == (["short", "long", "paired"] if _C.cuda_device()["at_once"][3] else ["short"])
    assert cuda.attention_shapes(9000)[0] == kernels[1 % len(kernels)]

    def run(ops: CudaBackend, shape: str | None) -> Tensor:
        batch, cache = window_batch(5, length, 64, 1), Cache(1, 2, length, 64)
        plan = ops.prepare(batch, cache, *tables(64, length, BF16), heads, shape=shape)
        return cuda.tree_attention(qkv, plan, 1)

    got = run(cuda.with_operators(kernel_shapes={f"8/2 heads of 64, {kernels[0]}": "paired"}), None)
    same = [shape for shape in kernels if torch.equal(run(cuda, shape), got)]
    assert same == [chosen if chosen in kernels else "short"]


def test_attention_over_more_rows_than_one_launch() -> None:
    """A prefill chunk is split into launches; each reads from the cache what the earlier ones have written."""
    length, rows = (700, 530) if EMULATED else (3000, 1024)
    check_attention(window_batch(rows, length, rows + 6, 7, causal=True), 4, 2, 64, length + 9)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_attention_of_a_prefill_chunk(heads: int, kv_heads: int, dim: int) -> None:
    """Of the least rows that use flash attention, and of a chunk after a prefix of another sequence than the first."""
    rows, length = attention.MIN_FLASH_ROWS, 400
    alone = replace(window_batch(rows, rows, 40, 1, causal=True), chain=Chain(0, rows))
    check_attention(alone, heads, kv_heads, dim, length)
    batch, kv_len = window_batch(150, length, 192, 2, causal=True), torch.tensor([7, length], device=DEVICE)
    batch = replace(batch, sequence=torch.ones_like(batch.slots), kv_len=kv_len, chain=Chain(1, length))
    check_attention(batch, heads, kv_heads, dim, length + 9)
    assert cuda.prepare(batch, Cache(2, kv_heads, length, dim), *tables(dim, length, BF16), heads).flash is not None


@pytest.mark.parametrize("dim", [64, 128])
def test_attention_of_a_population(dim: int) -> None:
    """Many rows over one prefix, each with its own tail."""
    rows, length = (60, 300) if EMULATED else (320, 1800)
    check_attention(window_batch(rows, length, length // 2, 4), 8, 2, dim, 2048)


def test_attention_over_two_sequences_with_slots_out_of_order() -> None:
    slots = torch.tensor([6, 9, 4, 8, 5], device=DEVICE)
    sequence, kv_len = torch.tensor([1, 0, 1, 0, 1], device=DEVICE), torch.tensor([10, 7], device=DEVICE)
    mask = torch.ones(5, 8, dtype=torch.bool, device=DEVICE)
    check_attention(Batch(slots, slots, slots, mask, sequence, kv_len), 4, 2, 64, 32)


@pytest.mark.parametrize("seed", most(list(range(12)), 10))
def test_a_row_of_attention_depends_only_on_its_own_keys(seed: int) -> None:
    """The keys of a path, contiguous or scattered over a tree with other nodes and holes, give identical bits."""
    noise = torch.Generator().manual_seed(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=noise))

    heads, kv_heads, dim, count = 6, 2, (64, 128)[seed % 2], pick(1, 70 if seed < 8 else 1500)
    capacity, shape = count + (90 if seed % 4 < 2 else 8300), "paired" if seed % 3 == 2 else None  # of three kernels
    path_k, path_v = (random(kv_heads, count, dim, seed=seed + s) for s in (50, 60))
    qkv, (cos, sin) = random(12, (heads + 2 * kv_heads) * dim, seed=seed), tables(dim, capacity, BF16)

    def run(prefix: int, places: list[int], length: int, window: int, others: list[int]) -> Tensor:
        cache = Cache(1, kv_heads, capacity, dim)
        where = [*range(prefix), *places]
        cache.k[1, 0][:, where], cache.v[1, 0][:, where] = path_k, path_v
        mask = torch.rand(1 + len(others), window, generator=noise) < 0.6
        mask[:, : max(prefix - (length - window), 0)] = True
        mask[0] = torch.isin(torch.arange(length - window, length), torch.tensor(where))
        slots = torch.tensor([where[-1], *others])
        for row, slot in enumerate(slots.tolist()):
            mask[row, slot - length] = True
        rows = torch.randperm(len(slots), generator=noise)
        positions = torch.full_like(slots, count - 1)
        parts = (slots, positions, slots[rows], mask[rows], torch.zeros_like(slots), torch.tensor([length]))
        batch = Batch(*(part.to(DEVICE) for part in parts), max_kv_len=length)
        plan = cuda.prepare(batch, cache, cos, sin, heads, shape=shape)
        out = cuda.tree_attention(qkv[: len(slots)][rows.to(DEVICE)].contiguous(), plan, 1)
        return out[(rows == 0).to(DEVICE)]

    alone = run(count - 1, [count - 1], count, min(8, count), [])
    for _ in range(2 if EMULATED else 6):
        prefix = pick(max(count - 60, 0), count - 1)
        free = prefix + torch.randperm(capacity - prefix, generator=noise)[: count - prefix + 11].sort().values
        chosen = torch.zeros(len(free), dtype=torch.bool)
        chosen[torch.randperm(len(free), generator=noise)[: count - prefix]] = True
        places, others = free[chosen].tolist(), free[~chosen].tolist()[: pick(0, 11)]
        length = min(max(places[-1], *others, 0) + 1 + pick(0, 5), capacity)
        assert torch.equal(run(prefix, places, length, length - prefix + pick(0, 9), others), alone)


def test_a_replay_equals_an_eager_call() -> None:
    heads, kv_heads, dim, capacity = 8, 2, 128, 5000
    batch, cache = window_batch(8, 300, 64, 1), Cache(1, kv_heads, capacity, dim)
    qkv, (cos, sin) = random(8, (heads + 2 * kv_heads) * dim, seed=4), tables(dim, capacity, BF16)

    def work() -> Tensor:
        plan = cuda.prepare(batch, cache, cos, sin, heads)
        cuda.tree_attention(qkv, plan, 0)
        return cuda.tree_attention(qkv, plan, 1)

    replay = captured(work)
    for length in (300, 40, 4000, 1024, 1025):  # one cluster's part, several
        other = window_batch(8, length, 64, length)
        for mine, theirs in ((batch.slots, other.slots), (batch.mask, other.mask), (batch.kv_len, other.kv_len)):
            mine.copy_(theirs)
        first = replay().clone()
        replay().zero_()
        assert torch.equal(replay(), first) and torch.equal(first, work())


@pytest.mark.parametrize("vocab", most([1, 33, 4097, 128_256], 3))
def test_noise_is_bitwise_identical_to_the_hosts(vocab: int) -> None:
    positions = torch.tensor([0, 1, 7, 2**31 - 1])
    got = cuda.gumbel_rows(2**63 + 5, 3, positions.to(DEVICE), range(vocab)).cpu()
    torch.testing.assert_close(got, reference.gumbel_rows(2**63 + 5, 3, positions, range(vocab)), rtol=1e-6, atol=1e-6)
    if host.level() != "none":
        assert torch.equal(got, host.gumbel_rows(2**63 + 5, 3, positions, range(vocab)))
    part = range(vocab // 3, vocab)
    assert torch.equal(cuda.gumbel_rows(2**63 + 5, 3, positions.to(DEVICE), part).cpu(), got[:, part.start :])


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("vocab", [1, 5, 33, 700] if EMULATED else [1, 5, 33, 4096, 5003, 128_256])
def test_draw_and_children(vocab: int, noisy: bool, biased: bool) -> None:
    logits = random(9, vocab + 5, seed=vocab, dtype=torch.float32) * 4
    logits[:, vocab:] = 1e9
    if vocab > 8:
        logits[0, :vocab:2] = -torch.inf
    bias = random(vocab, seed=2, dtype=torch.float32) if biased else None
    block = cuda.gumbel_rows(vocab, 0, torch.arange(3, device=DEVICE), range(vocab)) if noisy else None
    rows = torch.arange(9, device=DEVICE) % 3 if noisy else None
    scores, cpu_logits = Scores(1.3, bias, block, rows, 0.7), logits.cpu()
    on_cpu = [None if t is None else t.cpu() for t in (bias, block, rows)]
    theirs = Scores(1.3, on_cpu[0], on_cpu[1], on_cpu[2], 0.7)
    assert torch.equal(cuda.draw(logits, vocab, scores).cpu(), reference.draw(cpu_logits, vocab, theirs))
    for k in {1, min(8, vocab), min(64, vocab)}:
        tokens, values = (t.cpu() for t in cuda.children(logits, vocab, k, scores))
        want = reference.children(cpu_logits, vocab, k, theirs)[1]
        torch.testing.assert_close(values, want, rtol=1e-5, atol=2e-5)
        # nearly equal candidates may change places, so that of each one the reference's own value is compared
        ranked, its_values = reference.children(cpu_logits, vocab, vocab, theirs)
        of_token = torch.empty_like(its_values).scatter_(1, ranked, its_values)
        torch.testing.assert_close(of_token.gather(1, tokens), want, rtol=1e-5, atol=2e-5)
        assert all(len(row.unique()) == k for row in tokens)
        one = cuda.children(logits[3:4], vocab, k, Scores(1.3, bias))
        again = cuda.children(logits, vocab, k, Scores(1.3, bias))
        assert all(torch.equal(a[0], b[3]) for a, b in zip(one, again, strict=True)), "a row depends on itself"


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("vocab", [1, 5, 33, 700] if EMULATED else [1, 5, 33, 4096, 5003, 128_256])
def test_keyed_draws_and_their_log_probabilities(vocab: int, biased: bool) -> None:
    """Draws are bitwise identical to those with the noise in memory; rows are independent of each other."""
    logits = random(9, vocab + 5, seed=vocab, dtype=torch.float32) * 4
    logits[:, vocab:] = 1e9
    bias = random(vocab, seed=2, dtype=torch.float32) if biased else None
    positions = torch.arange(9, device=DEVICE)
    row_keys = [noise.row_key(vocab, 3, position) for position in range(9)]
    keys = torch.tensor(row_keys, dtype=torch.uint32).view(torch.int32).to(DEVICE)
    scores = Scores(1.3, bias, cuda.gumbel_rows(vocab, 3, positions, range(vocab)), positions)
    tokens, values = cuda.draw_keyed(logits, vocab, keys, scores)
    assert torch.equal(tokens, cuda.draw(logits, vocab, scores))
    cpu_scores = Scores(1.3, None if bias is None else bias.cpu())
    torch.testing.assert_close(
        values.cpu(), reference.log_probs(logits.cpu(), vocab, tokens.cpu(), cpu_scores), rtol=1e-5, atol=2e-5
    )
    assert torch.equal(values, cuda.log_probs(logits, vocab, tokens, scores))
    one = cuda.draw_keyed(logits[3:4], vocab, keys[3:4], scores)
    assert torch.equal(one[0], tokens[3:4]) and torch.equal(one[1], values[3:4])
    scalars = torch.tensor([[1.3, 1, 1], [0.6, 1, 1], [1, 1, 1]], dtype=F64, device=DEVICE)
    table = None if bias is None else torch.stack((bias, -bias, 2 * bias))
    several = cuda.draw_keyed(logits, vocab, keys, Scores(bias=table, scalars=scalars))
    for i, temperature in enumerate((1.3, 0.6, 1.0)):
        rows, mine = slice(3 * i, 3 * i + 3), Scores(temperature, None if table is None else table[i])
        alone = cuda.draw_keyed(logits[rows], vocab, keys[rows], mine)
        assert torch.equal(several[0][rows], alone[0]) and torch.equal(several[1][rows], alone[1])
    logits[0, vocab - 1], logits[1] = torch.nan, -torch.inf
    tokens, values = cuda.draw_keyed(logits, vocab, keys, scores)
    assert tokens[:2].tolist() == [-1, -1] and bool(values[0].isnan()) and bool((tokens[2:] >= 0).all())
    assert bool(cuda.log_probs(logits[:1], vocab, torch.zeros(1, dtype=torch.int64, device=DEVICE), scores).isnan())


def test_candidates_at_the_edges() -> None:
    tied, _ = cuda.children(torch.zeros(1, 20, device=DEVICE), 20, 4)
    assert tied.tolist() == [[0, 1, 2, 3]], "of equal scores the earlier tokens"
    scores = torch.full((2, 20), torch.nan, device=DEVICE)
    scores[1] = -torch.inf
    tokens, values = cuda.children(scores, scores.shape[1], 4)
    assert not bool((values > -torch.inf).any()) and bool(((tokens >= 0) & (tokens < 20)).all())
    assert cuda.children(scores.double(), 20, 4)[1].dtype == F64, "other types take the reference"
    assert cuda.draw(scores[:0], 20).shape == (0,)
    assert cuda.draw(scores, 20).tolist() == [-1, -1], "nothing to draw"
    crowded = torch.full((1, 40_000), -1.0, device=DEVICE)
    crowded[0, 31:9000:32] = torch.arange(281, device=DEVICE) % 5.0  # a warp's best, and more, in one lane
    ranked = crowded.sort(descending=True, stable=True).indices
    assert torch.equal(cuda.children(crowded, crowded.shape[1], 30)[0], ranked[:, :30]), "more candidates than lanes"
    logits = torch.zeros(3, 3000, device=DEVICE)
    logits[0, 2999], logits[1, 1234] = torch.nan, torch.inf
    assert cuda.draw(logits, 3000).tolist() == [-1, -1, 0], "not finite somewhere"
    assert cuda.draw(logits, 2999).tolist() == [0, -1, 0], "beyond the vocabulary"


@pytest.mark.parametrize(("capacity", "path"), most([(9, 4), (200, 150), (3000, 2500)], 2))
def test_slots_move_in_place(capacity: int, path: int) -> None:
    """In one launch, and in several: one takes 64 slots."""
    ours, theirs = (Cache(2, 3, capacity, 64) for _ in range(2))
    order = torch.randperm(capacity, generator=dice(path), device=DEVICE)[:path].sort().values.tolist()
    start = 1 if order[0] > 0 else 0
    cuda.make_slot_mover(ours.k, ours.v)(1, order, start)
    reference.make_slot_mover(theirs.k, theirs.v)(1, order, start)
    assert torch.equal(ours.k, theirs.k) and torch.equal(ours.v, theirs.v)


@pytest.mark.parametrize("dim", most([64, 2048, 8192], 2))
def test_embedding(dim: int) -> None:
    table = random(50, dim, seed=1)
    tokens = torch.tensor([3, 49, 0, 3], device=DEVICE)
    assert torch.equal(cuda.embed(tokens, table), reference.embed(tokens, table))


def test_a_tree_grows_without_the_host() -> None:
    """As the same code on a CPU (tests/native/test_cuda_code.py): order of the leaves, ties, and mask rows."""
    w, k, slots, prefix = 6, 4, 31, torch.tensor([17], device=DEVICE)
    tree = DeviceTree(slots, k, w, DEVICE)
    first = -(torch.randint(0, 9, (1, k), generator=dice(9), device=DEVICE) / 8)
    tree.add_root(torch.tensor([5], device=DEVICE), prefix, torch.arange(k, device=DEVICE).view(1, k), first)
    assert tree.region.tolist() == [17, 48] and tree.token[:2].tolist() == [5, 0] and tree.used.tolist() == [1 + k, 1]
    weights, parents, seen, taken = [0.0, *first[0].tolist()], [0] * (1 + k), {0: {0}}, {0}
    for step in range(5):
        rows = tree.best_leaves(prefix)
        leaves = sorted((n for n in range(len(weights)) if n not in taken), key=lambda n: (-weights[n], n))[:w]
        assert rows.nodes.tolist() == leaves + [-1] * (w - len(leaves))
        for row, node in enumerate(leaves):
            slot = 1 + step * w + row
            seen[node] = seen[parents[node]] | {slot}
            assert set(rows.mask[row].nonzero().flatten().tolist()) == seen[node]
            assert int(rows.positions[row]) == 17 + len(seen[node]) - 1 and int(rows.slots[row]) == 17 + slot
        taken.update(leaves)
        values = -(torch.randint(0, 9, (w, k), generator=dice(step), device=DEVICE) / 8)
        tree.add_children(torch.arange(w * k, device=DEVICE).view(w, k), values)
        for row, node in enumerate(leaves):
            weights += [weights[node] + value for value in values[row].tolist()]
            parents += [node] * k
    assert tree.logprob[: len(weights)].tolist() == weights and tree.used.tolist() == [len(weights), slots]
    with pytest.raises(ValueError, match="no free slots"):
        tree.best_leaves(prefix)


def test_invalid_arguments_are_rejected() -> None:
    batch, cache = window_batch(2, 10, 8, 1), Cache(1, 2, 16, 64)
    cos, sin = tables(64, 16, BF16)
    with pytest.raises(ValueError, match="cos: expected bfloat16"):
        cuda.prepare(batch, cache, cos.float(), sin, 4)
    with pytest.raises(ValueError, match="multiple of kv_heads"):
        cuda.prepare(batch, cache, cos, sin, 3)
    with pytest.raises(ValueError, match="shape must be short, long or paired"):
        cuda.prepare(batch, cache, cos, sin, 4, shape="other")
    plan = cuda.prepare(batch, cache, cos, sin, 4)
    with pytest.raises(ValueError, match="qkv: expected"):
        cuda.tree_attention(random(2, 64, seed=1), plan, 0)
    with pytest.raises(ValueError, match=r"qkv: expected .* no memory"):
        cuda.tree_attention(random(2, 512, seed=1).to("meta"), plan, 0)
