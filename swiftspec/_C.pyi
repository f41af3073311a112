"""SwiftSpec's native operators, as `python -m tools.stubs` reads them from the extension (csrc/bind)."""

from collections.abc import Callable, Sequence

import numpy
import torch

Array = torch.Tensor | numpy.ndarray

build_info: str
cuda_built: bool
cuda_archs: tuple[int, ...]

class Cache:
    """A KV cache: keys and values [layers, sequences, kv_heads, capacity, head_dim], which it keeps alive."""
    def __init__(self, k: Array, v: Array) -> None: ...
    def move(self, sequence: int, source: Sequence[int], start: int) -> None:
        """Moves slots source[i] to start + i, in place and in every layer; see MoveArgs in common/arguments.h."""

class Decoder:
    """Decoder forward as one call; see PackedModel and ForwardArgs in host/decoder/decoder.h."""
    def __init__(
        self,
        embedding: Array,
        cos: Array,
        sin: Array,
        norm: Array,
        eps: float,
        head: Weights,
        layers: Sequence[tuple[Array, Weights, Weights, Array, Weights, Weights]],
        heads: int,
        kv_heads: int,
        group: ShmGroup | None,
        timeout_s: float,
    ) -> None:
        """Each of `layers`: input norm, qkv, o, post norm, gate_up, down. Keeps all arguments alive."""
    def forward(
        self,
        tokens: Array,
        positions: Array,
        slots: Array,
        sequence: Array,
        kv_len: Array,
        mask: Array,
        cache: Cache,
        logits: Array | None,
    ) -> None:
        """Runs a batch (model/batch.py) whose rows are sorted by sequence. Skips the LM head without `logits`."""

class FastReply:
    """The state from which a draft replies without Python; see host/decoder/fast_reply.h."""
    def reply(self, result: Sequence[int]) -> list[int]:
        """The packed proposal that follows a packed result; empty if Python must handle the result."""

class Mailbox:
    """Messages of int32 words over shared memory; see Mailbox in host/shm/mailbox.h."""
    def __init__(self, name: str, side: int, words: int, timeout_s: float, spin: bool) -> None: ...
    def leave(self) -> None:
        """Announces that this side sends no more. Sent messages stay readable."""
    def recv(self, timeout_s: float, message_timeout_s: float) -> list[int]:
        """Receives a message. `message_timeout_s` limits the waits within it."""
    def recv_or_reply(
        self, state: FastReply, result: int, proposal: int, note: int, timeout_s: float, message_timeout_s: float
    ) -> tuple[list[int], bool]:
        """As `recv`, but immediately answers a message [result, ...] with [proposal, note, ...] if `state` has a reply.
        The second value is whether it did."""
    def send(self, words: Sequence[int], timeout_s: float) -> None:
        """Sends a message. Waits up to `timeout_s` while the mailbox is full."""

class Population:
    """Rounds of particles, or of exact chains, as one call each. Works on both models and in place on the tensors; see
    host/decoder/population.h."""
    def __init__(
        self,
        draft: Decoder,
        draft_cache: Cache,
        target: Decoder,
        target_cache: Cache,
        tensors: Sequence[Array],
        steps: int,
        verify_mode: str,
        power: float,
        threshold: float,
        deferred_bonus: bool,
    ) -> None:
        """`tensors`: those of SMCRound.tensors. `verify_mode`: weigh, match or reject. Keeps all arguments alive."""
    def compact(self, group: int, promoted: int, surviving: Sequence[int]) -> None:
        """Follows a compaction of both caches: the first `promoted` slots joined the prefix, slots `surviving` are
        kept."""
    def round(
        self, spans: Sequence[tuple[int, float, Array | None]], summary: Array, on_forward: Callable | None
    ) -> tuple[float, float]:
        """Runs a round of the first groups. Each span is (groups, temperature, bias [vocab]); temperature 0 draws
        without noise. Fills `summary` [groups, 3 + max_tokens + width] as SMCRound does. Calls on_forward(is_target,
        rows, seconds) after each forward. Returns the seconds of the draft's forwards and of the target's."""

class Rounds:
    """Expansions and verifications as one call each, for one decoder and a cache of one sequence; see
    host/decoder/rounds.h. The ranks of a group make the same calls and merge their best tokens. Raises OSError if a
    rank is lost."""
    def __init__(self, decoder: Decoder, cache: Cache) -> None: ...
    def expand(
        self,
        tree: Tree,
        prefix: int,
        pending: Sequence[int],
        leaves: int,
        children: int,
        scoring: Scoring,
        coupled: bool,
        tau: float,
        allowed: Callable | None,
    ) -> tuple[int, float]:
        """Expands the likeliest leaves. `prefix`: number of verified tokens with KV. `pending`: verified tokens without
        KV, only before the first expansion. `allowed`: maps the leaves to their token masks, uint8 [leaves, bytes], one
        bit per token; None allows all. Returns the number of expanded leaves and the seconds of the forward."""
    def probabilities(self, tokens: Sequence[int], parents: Sequence[int], scoring: Scoring) -> list[float]:
        """Target probabilities of each node's token after its parent, root excluded, for the proposal that was verified
        last. Raises ValueError if it had fewer nodes."""
    def scoring(
        self, vocab: int, temperature: float, bias: Array | None, noisy: bool, seed: int, stream: int
    ) -> Scoring:
        """`bias`: [vocab] float32. `noisy`: add the noise of `seed` and `stream`."""
    def verify(
        self, tokens: Sequence[int], parents: Sequence[int], prefix: int, scoring: Scoring, allowed: Array | None
    ) -> tuple[list[int], list[int], float]:
        """Verifies a proposal. `allowed`: token masks of the nodes, uint8 [nodes, bytes], or None. Returns the accepted
        path, whose KV now follows the prefix, the token drawn after each of its nodes, and the seconds of the
        forward."""

class Scoring:
    """Scores of one request's logits: temperature, bias and noise. Created by `Rounds.scoring`."""

class ShmGroup:
    """Collectives over shared memory; see ShmGroup in host/shm/ll_shm.h."""
    def __init__(self, name: str, rank: int, size: int, capacity: int, timeout_s: float, spin: bool) -> None: ...
    def all_gather(self, x: Array, out: Array, timeout_s: float) -> None:
        """Gathers x of every rank, in rank order."""
    def all_reduce(self, x: Array, timeout_s: float) -> None:
        """Sums x (float32, float64 or bfloat16) over the ranks, in place and in rank order."""
    def leave(self) -> None:
        """Announces that this rank sends no more. Sent data stays readable."""

class Tree:
    """A draft tree on NumPy arrays, which it keeps alive; see host/decoder/tree.h."""
    def __init__(self, token: Array, parent: Array, slot: Array, logprob: Array, visible: Array, sizes: Array) -> None:
        """The arrays of `DraftTree` (swiftspec/tree/tree.py)."""
    def best_subtree(self, bs: int, root: int) -> tuple[list[int], list[int], list[int]]:
        """The likeliest nodes of the sub-tree of `root`, their tokens, and the index of each parent among them."""
    def fast_reply(
        self, request: int, prefix_len: int, bs: int, w: int, steps: int, expansion_yield: float
    ) -> FastReply:
        """The state for replying to the next result of a request."""
    def prospects(self, bs: int, w: int, root: int) -> tuple[float, float]:
        """Probability mass, relative to `root`, of the bs likeliest nodes and of the w likeliest leaves."""
    def reroot(self, node: int) -> tuple[list[int], list[int]]:
        """Makes a node the root. Returns the tree slots from the old root to its parent, and the surviving ones."""
    def walk(self, tokens: Sequence[int]) -> list[int]:
        """The path below the root that matches the longest prefix of `tokens`."""

class Weights:
    """Packed weights of a projection of k inputs and n outputs. Keeps its arrays alive."""
    def __init__(
        self,
        data: Array,
        scales: Array | None,
        zeros: Array | None,
        bias: Array | None,
        k: int,
        n: int,
        int8_activations: bool,
    ) -> None:
        """`data`: blocks of 16 outputs in float32 or bfloat16; int8 if `scales` are given; int4 if `zeros` are given
        too (layouts: host/ops/product.h). `int8_activations`: rows are quantised to int8."""

def attention(
    qkv: Array,
    cos: Array,
    sin: Array,
    slots: Array,
    mask: Array,
    cache: Cache,
    layer: int,
    sequence: int,
    length: int,
    out: Array,
) -> None:
    """RoPE, KV append and masked attention of the rows of one sequence with `length` slots in use; see AttentionArgs in
    kernels_host.h."""

def checksums(data: Array) -> bytes:
    """One 8-byte checksum per started MiB of `data` [n] uint8. Every bit of the data changes it."""

def children(
    logits: Array,
    vocab: int,
    bias: Array | None,
    noise: Array | None,
    noise_rows: Array | None,
    temperature: float,
    tau: float,
    tokens: Array,
    values: Array,
) -> None:
    """Per row the k largest of log_softmax(scores) and their tokens; `tokens` and `values` are [rows, k]."""

def draw(
    logits: Array,
    vocab: int,
    bias: Array | None,
    noise: Array | None,
    noise_rows: Array | None,
    temperature: float,
    tokens: Array,
) -> None:
    """Per row the token of the highest score; see ScoreArgs in common/arguments.h."""

def draw_keyed(
    logits: Array, vocab: int, bias: Array | None, temperature: float, keys: Array, tokens: Array, values: Array
) -> None:
    """Per row the token of the highest score with the noise of its key, and log_softmax(scores) at that token."""

def gumbel_keyed(keys: Array, first: int, out: Array) -> None:
    """As gumbel_rows, for the row keys [rows] int32."""

def gumbel_of(bits: Array, out: Array) -> None:
    """Converts noise bits to Gumbel noise (float32), as in gumbel_rows."""

def gumbel_rows(seed: int, stream: int, positions: Array, first: int, out: Array) -> None:
    """Fills `out` [rows, count] float32 with the Gumbel noise of positions [rows] int32, for tokens from `first` on."""

def level() -> str:
    """The ISA level in use: avx512_bf16, avx512_vnni, avx512, avx_vnni, avx2 or none."""

def linear(
    weights: Weights, x: Array, norm: Array | None, eps: float, residual: Array | None, out: Array, swiglu: bool
) -> None:
    """RMSNorm, product and epilogue; see LinearArgs in kernels_host.h. A float32 `out` of a bfloat16 model receives
    logits, which are not rounded."""

def log_probs(logits: Array, vocab: int, bias: Array | None, temperature: float, tokens: Array, out: Array) -> None:
    """Per row log_softmax(scores) at its token."""

def noise_bits(seed: int, stream: int, positions: Array, out: Array) -> None:
    """Fills `out` [rows, vocab] with noise bits of the positions [rows]; all int32."""

def pack_dense(matrix: Array, data: Array) -> None:
    """Packs a bfloat16 or float32 matrix [n, k] into blocks of 16 outputs, padded with zeros."""

def pack_int4(
    codes: Array,
    scales: Array,
    zeros: Array | None,
    order: str,
    first: int,
    data: Array,
    block_scales: Array,
    block_zeros: Array,
) -> None:
    """Packs n outputs of an int4 matrix into blocks, from output `first` on. `order` "outputs" or "awq": codes [k, n /
    8] int32, scales [k / group, n], zeros [k / group, n / 8]; "inputs": codes [n, k / 8], scales [n, k / group], zeros
    [n / 8, k / group]. `zeros` None: 8."""

def pack_int8(matrix: Array, data: Array, scales: Array) -> None:
    """Quantises a bfloat16 or float32 matrix [n, k] to int8 and packs it into blocks of 16 outputs."""

def peak(rounds: int, float32: bool) -> int:
    """Runs `rounds` iterations of a loop of products only. Returns its number of floating-point operations."""

def resample(
    *,
    log_weights: Array,
    mask: Array,
    ends: Array,
    path: Array,
    log_z: Array,
    ess: Array,
    resampled: Array,
    rounds: Array,
    uniform: Array,
    threshold: float,
    width: int,
) -> None:
    """Updates the statistics of particle groups and resamples those with a low effective sample size, in place; see
    host/decoder/particles.h."""

def set_threads(count: int) -> None:
    """Sets the number of threads that share large products, including the caller."""

def threads() -> int:
    """The number of threads; 1 by default and after a fork."""

def use_level(name: str) -> bool:
    """Selects an ISA level, for tests. Returns False if this CPU does not support it."""

class CudaAttention:
    """Attention of one forward; see AttentionSetup in kernels_cuda.h. It keeps its arrays alive."""
    def __init__(
        self,
        *,
        cos: Array,
        sin: Array,
        positions: Array,
        slots: Array,
        sequence: Array | None,
        kv_len: Array,
        mask: Array,
        cache: CudaCache,
        heads: int,
        owner: Array,
        tail: Array,
        count: Array,
        groups: Array,
        arrived: Array,
        part_values: Array,
        part_sums: Array,
    ) -> None: ...
    def attend(self, qkv: Array, layer: int, out: Array, stream: int) -> None:
        """Once a layer."""
    def prepare(self, stream: int) -> None:
        """Once a forward, before the layers."""

class CudaCache:
    """A cache [layers, sequences, kv_heads, capacity, head_dim] on a GPU, which it keeps alive; float8 comes as
    uint8."""
    def __init__(self, k: Array, v: Array) -> None: ...
    def move(self, sequence: int, source: Array, start: int, stream: int) -> None:
        """Moves slots source[i] to start + i, in device and in every layer. The caller has checked `source`, which lies
        on the GPU."""

class CudaChannel:
    """One rank's end of a group of GPUs; see cuda/peers/channel.h. WaitPolicy in seconds."""
    def __init__(
        self, rank: int, inboxes: Sequence[int], lines: int, epoch: Array, done: Array, trouble: Array, patience: float
    ) -> None:
        """`inboxes`: the addresses at which this rank sees every rank's. On the GPU `epoch` [1] int64 and `done` [1]
        int32, `trouble` [1] int64 in pinned memory."""

class CudaInbox:
    """Zeroed memory of the current GPU that other processes can open."""
    def __init__(self, bytes: int) -> None: ...
    def handle(self) -> bytes:
        """What another process opens it by."""
    @property
    def address(self) -> int: ...

class CudaPeerInbox:
    """Another process's inbox, as the current GPU reaches it."""
    def __init__(self, handle: bytes) -> None: ...
    @property
    def address(self) -> int: ...

class CudaTree:
    """A draft tree on a GPU and the rows of its next expansion, which it keeps alive; see TreeState and Expansion in
    kernels_cuda.h."""
    def __init__(
        self,
        *,
        token: Array,
        parent: Array,
        slot: Array,
        weight: Array,
        visible: Array,
        used: Array,
        node: Array,
        tokens: Array,
        positions: Array,
        slots: Array,
        mask: Array,
        children: int,
    ) -> None: ...
    def add(self, tokens: Array, values: Array, stream: int) -> None:
        """Children [w, children] of these rows: tokens int64, log-probabilities float32."""
    def leaves(self, prefix: Array, stream: int) -> None:
        """Hands the likeliest leaves the next tree slots, and makes their rows. `prefix` [1] int64: slots before the
        tree's."""

class CudaWeights:
    """A projection's tiles on the current GPU, which it keeps alive; see cuda::Weights in cuda/linear/tiling.h."""
    def __init__(self, data: Array, bias: Array | None, k: int, n: int, group: int) -> None:
        """group 0 is bf16."""
    def precede(self, tiles: Array) -> None:
        """The tiles that L2 is to have when this projection ends."""
    def scratch_bytes(self, rows: int) -> int:
        """What a product of so many rows wants for reading the weights once for many of them; 0: it does not."""

class CudaWord:
    """8 bytes of shared memory that the ranks' hosts and GPUs see, zero at first."""
    def __init__(self, name: str, rank: int, size: int, seconds: float) -> None: ...
    def view(self) -> memoryview:
        """To be used no longer than the word."""

def attention_groups_cuda(rows: int, heads: int, kv_heads: int, one_sequence: bool) -> int:
    """How many groups of rows attention has room for."""

def attention_lines_cuda(rows: int, heads: int, capacity: int) -> int:
    """How many lines of `part_values` and `part_sums` it needs."""

def children_cuda(
    logits: Array,
    vocab: int,
    bias: Array | None,
    noise: Array | None,
    noise_rows: Array | None,
    temperature: float,
    tau: float,
    tokens: Array,
    values: Array,
    stream: int,
) -> None:
    """As many of each row's largest log_softmax(scores) as tokens and values [rows, k] hold."""

def cuda_bus_id() -> str:
    """The PCI bus id of the current GPU."""

def cuda_device() -> dict:
    """What the kernels know of the current GPU: see cuda::Device in cuda/device/device.h."""

def cuda_inbox_bytes(ranks: int, lines: int) -> int:
    """Bytes that a rank reads in, zero at first."""

def cuda_lines(n: int, rows: int) -> int:
    """LL lines of a product of n outputs, whatever its inputs."""

def cuda_reaches(bus_id: str) -> bool:
    """Whether the current GPU reaches that one's memory."""

def cuda_tile_bytes(k: int, n: int, group: int) -> int:
    """Bytes of a projection's tiles on the current GPU. group 0 is bf16."""

def cuda_trouble(word: int) -> tuple[int, int, int, int] | None:
    """(rank, source, slot, epoch) of a wait that gave up, or None."""

def draw_cuda(
    logits: Array,
    vocab: int,
    bias: Array | None,
    noise: Array | None,
    noise_rows: Array | None,
    temperature: float,
    tokens: Array,
    stream: int,
) -> None:
    """The token of each row's highest score; see ScoreArgs in common/arguments.h."""

def draw_keyed_cuda(
    logits: Array,
    vocab: int,
    bias: Array | None,
    temperature: float,
    keys: Array | None,
    tokens: Array,
    values: Array,
    stream: int,
) -> None:
    """The token of each row's highest score under the noise of its key, or without keys the one that is given, and
    log_softmax(scores) there."""

def embed_cuda(tokens: Array, table: Array, out: Array, stream: int) -> None:
    """out[row] = table[tokens[row]]."""

def expand_cuda(weights: CudaWeights, first: int, out: Array, stream: int) -> None:
    """Rows [2 half, k] of bfloat16 from tiles; see cuda::expand in kernels_cuda.h."""

def gather_cuda(channel: CudaChannel, mine: Array, out: Array, stream: int) -> None:
    """Every rank's array, in the order of the ranks; see cuda::GatherArgs in kernels_cuda.h."""

def gather_cuda_virtual(
    channels: Sequence[CudaChannel], mine: Sequence[Array], out: Sequence[Array], stream: int
) -> None:
    """All ranks of a group in one launch, for tests."""

def gumbel_rows_cuda(seed: int, noise_stream: int, positions: Array, first: int, out: Array, stream: int) -> None:
    """Gumbel noise [rows, count] float32 of positions [rows] int64, for the tokens from `first` on."""

def linear_cuda(
    weights: CudaWeights,
    x: Array,
    norm: Array | None,
    eps: float,
    residual: Array | None,
    out: Array,
    swiglu: bool,
    channel: CudaChannel | None,
    scratch: Array | None,
    stream: int,
) -> None:
    """A projection; see cuda::LinearArgs in kernels_cuda.h. A float32 `out` has logits. With scratch_bytes of `scratch`
    a launch takes up to 128 rows, else 32."""

def linear_cuda_virtual(
    weights: Sequence[CudaWeights],
    x: Sequence[Array],
    residual: Array,
    out: Sequence[Array],
    channels: Sequence[CudaChannel],
    delays: int,
    stream: int,
) -> None:
    """All ranks of a group in one launch, for tests; see linear_virtual in kernels_cuda.h."""

def repack_bf16_cuda(matrix: Array, out: Array, stream: int) -> None:
    """Tiles of a matrix [n, k]."""

def repack_int4_cuda(codes: Array, scales: Array, zeros: Array, group: int, out: Array, stream: int) -> None:
    """Tiles of an int4 matrix; see cuda/linear/repack.h."""

def resample_cuda(
    *,
    log_weights: Array,
    mask: Array,
    ends: Array,
    path: Array,
    log_z: Array,
    ess: Array,
    resampled: Array,
    rounds: Array,
    uniform: Array,
    threshold: float,
    width: int,
    stream: int,
) -> None:
    """Groups of particles weighed, and resampled where the weights are uneven, in one launch; see ResampleArgs in
    kernels_cuda.h."""

def use_cuda_device(ordinal: int) -> None:
    """Says which GPU this thread's next calls are for."""
