"""The native kernels (csrc/bindings.cpp). Tensors are passed by address; sizes are counted in elements."""

build_info: str
cuda_built: bool

def noise_bits(seed: int, stream: int, positions: int, rows: int, vocab: int, out: int) -> None: ...
def noise_bits_cuda(
    seed: int, stream: int, positions: int, rows: int, vocab: int, out: int, cuda_stream: int = 0
) -> None: ...
def gumbel(bits: int) -> float: ...
def gumbel64(bits: int) -> float: ...
def has_bf16() -> bool: ...
def linear(
    x: int,
    norm: int,
    eps: float,
    weight: int,
    bias: int,
    residual: int,
    out: int,
    logits: int,
    swiglu: bool,
    rows: int,
    k: int,
    n: int,
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
) -> None: ...
def log_top_k(x: int, rows: int, vocab: int, k: int, tokens: int, values: int) -> None: ...
def move_kv(
    region: int,
    layer_stride: int,
    layers: int,
    kv_heads: int,
    capacity: int,
    slot_bytes: int,
    source: int,
    count: int,
    start: int,
) -> None: ...

class Group:
    def __init__(self, name: str, rank: int, size: int, capacity: int, seconds: float, spin: bool) -> None: ...
    def all_reduce(self, x: int, count: int, element: str, seconds: float) -> None: ...
    def all_gather(self, x: int, bytes: int, out: int, seconds: float) -> None: ...
    def leave(self) -> None: ...

class Mailbox:
    def __init__(self, name: str, side: int, words: int, seconds: float, spin: bool) -> None: ...
    def send(self, words: int, n: int, seconds: float) -> None: ...
    def wait(self, seconds: float) -> int: ...
    def take(self, words: int, n: int, seconds: float) -> None: ...
    def leave(self) -> None: ...
