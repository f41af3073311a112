"""The native kernels (csrc/bindings*.cpp). Tensors are passed by address; sizes are counted in elements."""

from collections.abc import Sequence

build_info: str
cuda_built: bool

def noise_bits(seed: int, stream: int, positions: int, rows: int, vocab: int, out: int) -> None: ...
def noise_bits_cuda(
    seed: int, stream: int, positions: int, rows: int, vocab: int, out: int, cuda_stream: int = 0
) -> None: ...
def gumbel(bits: int) -> float: ...
def gumbel64(bits: int) -> float: ...
def gumbel_of(bits: int, count: int, out: int) -> None: ...
def gumbel_rows(seed: int, stream: int, positions: int, rows: int, first: int, count: int, out: int) -> None: ...
def level() -> str: ...
def use_level(name: str) -> bool: ...
def set_threads(count: int) -> None: ...
def threads() -> int: ...
def peak(rounds: int, wide: bool) -> int: ...

class Weights:
    def __init__(self, format: str, data: int, groups: int, bias: int, k: int, n: int, group: int) -> None: ...

def linear(
    weights: Weights,
    x: int,
    norm: int,
    eps: float,
    residual: int,
    out: int,
    logits: int,
    swiglu: bool,
    wide: bool,
    rows: int,
) -> None: ...
def attention(
    qkv: int,
    cos: int,
    sin: int,
    slots: int,
    mask: int,
    keys: int,
    values: int,
    out: int,
    rows: int,
    heads: int,
    kv_heads: int,
    capacity: int,
    length: int,
    width: int,
    dim: int,
    wide: bool,
) -> None: ...
def draw(
    logits: int,
    bias: int,
    noise: int,
    rows_of_noise: int,
    noise_rows: int,
    temperature: float,
    rows: int,
    vocab: int,
    stride: int,
    tokens: int,
) -> None: ...
def children(
    logits: int,
    bias: int,
    noise: int,
    rows_of_noise: int,
    noise_rows: int,
    temperature: float,
    tau: float,
    rows: int,
    vocab: int,
    stride: int,
    k: int,
    tokens: int,
    values: int,
) -> None: ...
def gumbel_keyed(keys: int, rows: int, first: int, count: int, out: int) -> None: ...
def log_probs(
    logits: int, bias: int, temperature: float, rows: int, vocab: int, stride: int, tokens: int, out: int
) -> None: ...
def move_kv(
    keys: int,
    values: int,
    layer_stride: int,
    layers: int,
    kv_heads: int,
    capacity: int,
    slot_bytes: int,
    source: Sequence[int],
    start: int,
) -> None: ...

class Group:
    def __init__(self, name: str, rank: int, size: int, capacity: int, seconds: float, spin: bool) -> None: ...
    def all_reduce(self, x: int, count: int, element: str, seconds: float) -> None: ...
    def all_gather(self, x: int, bytes: int, out: int, seconds: float) -> None: ...
    def leave(self) -> None: ...

class Mailbox:
    def __init__(self, name: str, side: int, words: int, seconds: float, spin: bool) -> None: ...
    def send(self, words: Sequence[int], seconds: float) -> None: ...
    def recv(self, seconds: float, pause: float) -> list[int]: ...
    def recv_or_answer(
        self, offer: Offer, asks: int, answers: int, note: int, seconds: float, pause: float
    ) -> tuple[list[int], bool]: ...
    def leave(self) -> None: ...

class Decoder:
    def __init__(
        self,
        wide: bool,
        eps: float,
        hidden: int,
        heads: int,
        kv_heads: int,
        dim: int,
        vocab: int,
        positions: int,
        embedding: int,
        cos: int,
        sin: int,
        norm: int,
        head: Weights,
        layers: list[tuple[int, Weights, Weights, int, Weights, Weights]],
        group: Group | None,
        timeout: float,
    ) -> None: ...
    def forward(
        self,
        tokens: int,
        positions: int,
        slots: int,
        rows: int,
        parts: list[tuple[int, int, int, int, int, int, int]],
        capacity: int,
        layer_stride: int,
        logits: int,
    ) -> None: ...

class Tree:
    def __init__(
        self, token: int, parent: int, slot: int, logprob: int, visible: int, sizes: int, nodes: int, slots: int
    ) -> None: ...
    def best_subtree(self, bs: int, root: int) -> tuple[list[int], list[int], list[int]]: ...
    def prospects(self, bs: int, w: int, root: int) -> tuple[float, float]: ...
    def walk(self, tokens: Sequence[int]) -> list[int]: ...
    def reroot(self, node: int) -> tuple[list[int], list[int]]: ...
    def offer(self, request: int, prefix_len: int, bs: int, w: int, steps: int, worth: float) -> Offer: ...

class Offer:
    def answer(self, result: Sequence[int]) -> list[int]: ...

class Scoring:
    def __init__(
        self, rounds: Rounds, vocab: int, temperature: float, bias: int, noisy: bool, seed: int, stream: int
    ) -> None: ...

class Rounds:
    def __init__(self, decoder: Decoder) -> None: ...
    def expand(
        self,
        tree: Tree,
        keys: int,
        values: int,
        capacity: int,
        layer_stride: int,
        prefix: int,
        pending: Sequence[int],
        w: int,
        k: int,
        scoring: Scoring,
        coupled: bool,
        tau: float,
    ) -> tuple[int, float]: ...
    def verify(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        keys: int,
        values: int,
        capacity: int,
        layer_stride: int,
        prefix: int,
        scoring: Scoring,
    ) -> tuple[list[int], list[int], float]: ...

# Where CUDA is built:

class CudaChannel:
    def __init__(
        self, rank: int, inboxes: list[int], lines: int, epoch: int, done: int, trouble: int, patience: float
    ) -> None: ...

class CudaWeights:
    def __init__(self, data: int, bias: int, k: int, n: int, group: int) -> None: ...
    def precede(self, tiles: int, bytes: int) -> None: ...

def cuda_tile_bytes(k: int, n: int, group: int) -> int: ...
def cuda_lines(n: int, rows: int) -> int: ...
def cuda_inbox_bytes(ranks: int, lines: int) -> int: ...
def cuda_trouble(word: int) -> tuple[int, int, int, int] | None: ...

class CudaInbox:
    def __init__(self, bytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    def handle(self) -> bytes: ...

class CudaPeerInbox:
    def __init__(self, handle: bytes) -> None: ...
    @property
    def address(self) -> int: ...

class CudaWord:
    def __init__(self, name: str, rank: int, size: int, seconds: float) -> None: ...
    def view(self) -> memoryview: ...

def cuda_bus_id() -> str: ...
def cuda_reaches(bus_id: str) -> bool: ...
def repack_int4_cuda(
    k: int, n: int, group: int, codes: int, scales: int, zeros: int, out: int, stream: int
) -> None: ...
def repack_bf16_cuda(k: int, n: int, matrix: int, out: int, stream: int) -> None: ...
def linear_cuda(
    weights: CudaWeights,
    x: int,
    norm: int,
    eps: float,
    residual: int,
    out: int,
    logits: int,
    swiglu: bool,
    channel: CudaChannel | None,
    rows: int,
    stream: int,
) -> None: ...
def linear_cuda_virtual(
    weights: list[CudaWeights],
    x: list[int],
    residual: int,
    out: list[int],
    channels: list[CudaChannel],
    rows: int,
    delays: int,
    stream: int,
) -> None: ...
def gather_cuda(channel: CudaChannel, mine: int, out: int, count: int, stream: int) -> None: ...
def gather_cuda_virtual(
    channels: list[CudaChannel], mine: list[int], out: list[int], count: int, stream: int
) -> None: ...

# What follows is there where CUDA was built: addresses are the device's, `stream` is a CUDA stream's handle.

class CudaAttention:
    def __init__(
        self,
        *,
        cos: int,
        sin: int,
        positions: int,
        slots: int,
        sequence: int,
        kv_len: int,
        mask: int,
        owner: int,
        tail: int,
        count: int,
        groups: int,
        arrived: int,
        part_values: int,
        part_sums: int,
        rows: int,
        width: int,
        sequences: int,
        heads: int,
        kv_heads: int,
        capacity: int,
        dim: int,
        clusters: int,
    ) -> None: ...
    def prepare(self, stream: int) -> None: ...
    def attend(self, qkv: int, keys: int, values: int, out: int, stream: int) -> None: ...

def attention_groups_cuda(rows: int, heads: int, kv_heads: int, one_sequence: bool) -> int: ...
def attention_lines_cuda(rows: int, heads: int, capacity: int) -> int: ...
def attention_clusters_cuda(dim: int) -> int: ...
def gumbel_rows_cuda(
    seed: int, noise_stream: int, positions: int, rows: int, first: int, count: int, out: int, stream: int
) -> None: ...
def children_cuda(
    logits: int,
    bias: int,
    noise: int,
    rows_of_noise: int,
    temperature: float,
    tau: float,
    rows: int,
    vocab: int,
    stride: int,
    k: int,
    tokens: int,
    values: int,
    stream: int,
) -> None: ...
def verify_cuda(
    *,
    target: int,
    draft: int,
    tokens: int,
    coins: int,
    keys: int,
    marks: int,
    arrived: int,
    accepted: int,
    count: int,
    bonus: int,
    batch: int,
    steps: int,
    vocab: int,
    target_strides: tuple[int, int],
    draft_strides: tuple[int, int],
    wide: bool,
    stream: int,
) -> None: ...
def move_kv_cuda(
    keys: int,
    values: int,
    layer_stride: int,
    layers: int,
    kv_heads: int,
    capacity: int,
    slot_bytes: int,
    source: int,
    count: int,
    start: int,
    stream: int,
) -> None: ...
def embed_cuda(tokens: int, table: int, rows: int, row_bytes: int, out: int, stream: int) -> None: ...
def rms_norm_cuda(x: int, weight: int, eps: float, rows: int, dim: int, out: int, stream: int) -> None: ...

class CudaTree:
    def __init__(
        self,
        *,
        token: int,
        parent: int,
        slot: int,
        weight: int,
        visible: int,
        used: int,
        nodes: int,
        slots: int,
    ) -> None: ...
    def leaves(
        self, w: int, prefix: int, node: int, tokens: int, positions: int, places: int, mask: int, stream: int
    ) -> None: ...
    def add(self, w: int, node: int, k: int, tokens: int, values: int, stream: int) -> None: ...
