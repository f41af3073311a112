"""Estimates the GPU memory that the models of a rank need, from their config.json, before weights are downloaded or
loaded, and finds the context length that fits.

Weights, KV cache and buffers are counted by the shapes of the rank's shard (model/shard.py) as the operators keep them.
What no shape determines, such as the buffers of libraries, is a constant below. None of it was measured on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from swiftspec.backends.cuda import cuda
from swiftspec.backends.cuda.attention import scratch_bytes
from swiftspec.backends.cuda.large_m import MAX_KERNEL_ROWS, SCRATCH_BYTES
from swiftspec.backends.reference import Backend
from swiftspec.cache.delta import MAX_SNAPSHOTS, MAX_UNFOLDED_POSITIONS
from swiftspec.errors import UserError
from swiftspec.model.config import ModelConfig
from swiftspec.model.formats import format_of
from swiftspec.model.formats.int8 import group_of
from swiftspec.model.shard import LayerShard, Shard
from swiftspec.model.spec import ExpertsSpec, GatedDeltaSpec, ModelSpec
from swiftspec.runtime.executors.graph import CAPTURED_ROWS, MAX_JOINT_ROWS
from swiftspec.runtime.runner import delta_slots
from swiftspec.sampling.noise import PositionNoise

MIB = 1 << 20
BYTES_PER_GB = 1e9
FLOAT_BYTES = 4
INT4_GROUP_BYTES = 4  # scale and zero point of a group, in the tiles of backends/cuda and in torch's layout
# Bytes of a rank that no shape determines: kernels, which CUDA loads on first use (about 200 MiB with torch's), cuBLAS'
# workspaces (32 MiB for each stream since Hopper), and what torch's allocator loses by fragmentation.
RESERVE_BYTES = 512 * MIB
# Channels of a NCCL communicator: 4 MiB for each direction and peer on up to 32 channels, of which NCCL uses some; and
# the inboxes of peer memory, 34 MB for 8 ranks.
GROUP_RESERVE_BYTES = 400 * MIB
# Graphs of a model: their nodes in the driver, and tensors of logits that live at the same time while one is replayed
GRAPH_NODE_BYTES = 64 * MIB
GRAPH_LOGITS = 4
CONTEXT_STEP = 256  # tokens; a context that is found is a multiple
MIN_CONTEXT = 2048  # tokens; a shorter context is not selected without being asked for


def kv_bytes_per_token(spec: ModelSpec, cache_dtype: torch.dtype) -> int:
    """Returns the size of one token's keys and values in all attention layers, in bytes."""
    return sum(2 * mixer.kv_size for mixer in spec.attention_mixers if not mixer.shares_kv) * cache_dtype.itemsize


def delta_sequence_bytes(mixers: Iterable[GatedDeltaSpec], slots: int, dtype: torch.dtype) -> int:
    """Returns the size of a sequence in a delta cache with `slots` slots, in bytes."""
    total = 0
    for mixer in mixers:
        state, slot = mixer.v_size * mixer.k_head_dim, mixer.k_size + mixer.v_size + mixer.num_v_heads
        total += (state + slots * slot) * FLOAT_BYTES + slots * mixer.conv_size * dtype.itemsize
    return total


def snapshot_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Returns the size of a snapshot of the delta layers of a model; 0 if it has none."""
    return delta_sequence_bytes(spec.delta_mixers, MAX_UNFOLDED_POSITIONS, dtype)


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimate of the GPU memory, in bytes, that a model needs on each of the `ranks` ranks that share it."""

    config: ModelConfig
    dtype: torch.dtype
    capacity: int  # slots of a sequence in the KV cache, those of the tree included
    ranks: int = 1
    sequences: int = 1  # in the KV cache
    ops: Backend = cuda
    cache_dtype: torch.dtype | None = None  # None: `dtype`
    int4_head: bool = False  # whether a dense LM head is quantised at load
    prefix_tokens: int = 0  # budget of the prefix cache
    tree_slots: int = 0  # those in `capacity`
    clusters: bool = True  # whether the GPU has thread block clusters
    int4_kernels: bool = True  # whether torch's int4 product runs on the GPU

    @cached_property
    def shard(self) -> Shard:
        """The shard of a rank; all ranks have the same shapes."""
        return Shard.of(self.config, 0, self.ranks)

    @property
    def weights(self) -> float:
        """Bytes of all matrices and norms: the embedding is whole on every rank."""
        spec = self.config.spec
        head = self.matrix_bytes(self.shard.head_rows, spec.hidden_size, self._head_group)
        norms = (4 * len(spec.layers) + 1) * spec.hidden_size * FLOAT_BYTES  # at most four in a layer
        routers = sum(experts.router_rows for experts in self._mixtures) * spec.hidden_size * FLOAT_BYTES
        matrices = sum(self.matrix_bytes(*each) for each in self._matrices()) + self._state_projections
        return matrices + self._embedding + self._per_layer + head + norms + routers

    @property
    def _mixtures(self) -> list[ExpertsSpec]:
        """The mixtures of experts of the layers that have one."""
        return [layer.mlp.experts for layer in self.config.spec.layers if layer.mlp.experts is not None]

    @property
    def _embedding(self) -> int:
        return self.config.spec.vocab_size * self.config.spec.hidden_size * self.dtype.itemsize

    @property
    def _per_layer(self) -> int:
        """Bytes of the table and the projections of per-layer embeddings, whole on every rank; quantised ones are
        counted as dense."""
        spec = self.config.spec
        columns = spec.per_layer_size * len(spec.layers)
        return columns * (spec.vocab_size + 3 * spec.hidden_size) * self.dtype.itemsize

    @property
    def _state_projections(self) -> int:
        """Bytes of the matrices of a draft head that its layers do not have: projections of the target's hidden states
        and of the embedding. 0 for other models."""
        head, hidden = self.config.spec.draft_head, self.config.spec.hidden_size
        if head is None:
            return 0
        states = (len(head.target_layer_ids) or 3) * head.target_hidden_size
        heads = [(part.num_heads, part.kv_heads, part.head_dim) for part in self._attention]
        columns = {
            "mtp": 2 * hidden,
            "eagle3": states + sum((queries + 2 * keys) * size for queries, keys, size in heads),
            "dflash": states + sum(2 * keys * size for _, keys, size in heads),
        }
        return columns[head.kind] * hidden * self.dtype.itemsize

    def _matrices(self) -> Iterator[tuple[int, int, int]]:
        """Yields outputs, inputs and inputs per int4 group, 0 if the matrix is kept dense, for each projection."""
        hidden = self.config.spec.hidden_size
        for layer, part in zip(self.config.spec.layers, self.shard.layers, strict=True):
            yield len(part.qkv), hidden, self._group(hidden)
            yield hidden, len(part.o), self._group(len(part.o), part.head_dim)
            dense = layer.mlp.experts is not None  # torch's operators, the only ones with experts, keep these dense
            yield len(part.gate_up), hidden, 0 if dense else self._group(hidden)
            down = 0 if dense else self._group(len(part.down), part.inner_unit)
            yield hidden * layer.mlp.num_experts, len(part.down), down
            if part.shared_gate_up is not None and part.shared_down is not None:
                yield len(part.shared_gate_up), hidden, 0
                yield hidden, len(part.shared_down), 0

    def _group(self, inputs: int, run: int | None = None) -> int:
        """Returns the inputs per group of an int4 matrix as the operators keep it; 0 if they keep it dense. `run`: runs
        of inputs of which the shard consists, which may split groups; None: all inputs are on every rank."""
        layout = format_of(self.config)
        if layout is None or not layout.is_int4:
            return 0
        split = run is not None and self.ranks > 1
        if _may_be_permuted(self.config) and (not self.ops.PERMUTED_INT4 or split):
            return 0
        return self._kept_group(inputs, math.gcd(layout.group_size, run) if split and run else layout.group_size)

    def _kept_group(self, inputs: int, group: int) -> int:
        """Returns the inputs per group of an int4 matrix with groups of `group` inputs; 0 if it is kept dense."""
        return self.ops.kept_int4_group(inputs, group, self.dtype) if self.int4_kernels else 0

    @property
    def _head_group(self) -> int:
        hidden = self.config.spec.hidden_size
        group = group_of(hidden) if self.int4_head else None
        return 0 if group is None or self.shard.head_rows % 8 else self._kept_group(hidden, group)

    def matrix_bytes(self, outputs: int, inputs: int, group: int) -> float:
        """Returns the size of a packed matrix. `group`: inputs per int4 group; 0: it is dense."""
        return outputs * inputs * (0.5 + INT4_GROUP_BYTES / group if group else self.dtype.itemsize)

    @property
    def _attention(self) -> list[LayerShard]:
        """The attention layers of the shard."""
        return [part for part in self.shard.layers if part.conv is None]

    @property
    def kv_token(self) -> int:
        """Bytes of one token's keys and values on a rank, padding heads included."""
        layers = zip(self.config.spec.attention_mixers, self._attention, strict=True)
        heads = sum(2 * part.kv_heads * part.head_dim for mixer, part in layers if not mixer.shares_kv)
        return heads * (self.cache_dtype or self.dtype).itemsize

    @property
    def cache(self) -> int:
        """Bytes of the KV cache and of the delta cache with its snapshots."""
        mixers = [
            replace(layer.mixer, num_k_heads=part.kv_heads, num_v_heads=part.num_heads)
            for layer, part in zip(self.config.spec.layers, self.shard.layers, strict=True)
            if isinstance(layer.mixer, GatedDeltaSpec)
        ]
        slots = delta_slots(self.capacity - self.tree_slots, self.tree_slots)
        delta = delta_sequence_bytes(mixers, slots, self.dtype)
        if self.prefix_tokens > 0:
            delta += MAX_SNAPSHOTS * delta_sequence_bytes(mixers, MAX_UNFOLDED_POSITIONS, self.dtype)
        return (self.kv_token * self.capacity + delta) * self.sequences

    @property
    def prefix_cache(self) -> int:
        """Bytes of a full prefix cache."""
        return self.kv_token * self.prefix_tokens

    @property
    def scratch(self) -> float:
        """Bytes of the buffers of a prefill chunk: hidden states, gates and products of all rows, those of attention,
        the partial sums of all ranks, and the RoPE tables."""
        spec, parts, size = self.config.spec, self.shard.layers, self.dtype.itemsize
        rows = self.ops.PREFILL_CHUNK_ROWS
        hidden, inner = spec.hidden_size, max(len(part.down) for part in parts)
        shared = [len(part.shared_down) for part in parts if part.shared_down is not None]
        numbers = rows * 4 * (hidden + max(inner, *shared, 0))
        gathered = rows * hidden * (self.ranks * size + FLOAT_BYTES) if self.ranks > 1 else 0
        tables = sum(2 * self.capacity * mixer.head_dim for mixer in {mixer.kind for mixer in spec.attention_mixers})
        needed = (numbers + tables) * size + gathered + self._widened_cache
        if self.ops.FUSED_ATTENTION:
            needed += max(
                scratch_bytes(rows, part.num_heads, part.kv_heads, part.head_dim, self.capacity, self.clusters)
                for part in self._attention
            )
        else:
            needed += self._masks(rows) + self._scores(rows)
        if self.ops.TILINGS:
            # weights in rows for a library product, and the packed rows of x (csrc/cuda/linear/large_m.h)
            return needed + SCRATCH_BYTES + MAX_KERNEL_ROWS * max(hidden, inner) * size
        experts = max((each.num_experts for each in self._mixtures), default=0)
        # all experts compute all rows: gate and up, their product, and the output in two dtypes
        return needed + rows * experts * (3 * inner * size + hidden * (size + FLOAT_BYTES))

    @property
    def _widened_cache(self) -> int:
        """Bytes of the keys and values of a layer in the model's dtype, if the cache has another: torch's operators
        read them."""
        if self.cache_dtype in (None, self.dtype):
            return 0
        size = self.dtype.itemsize
        return 2 * self.capacity * max(part.kv_heads * part.head_dim for part in self._attention) * size

    def _masks(self, rows: int) -> int:
        """Returns the bytes of the attention masks of a chunk of `rows` rows with torch's operators, over the whole
        cache: a mask for each kind of layer, repeated for the query heads that share keys."""
        size, total = self.dtype.itemsize, 0
        mixers = [mixer.kind for mixer in self.config.spec.attention_mixers]
        kinds = dict(zip(mixers, self._attention, strict=True))
        for mixer, part in kinds.items():
            temporary = 3 if mixer.window is None else 3 + 3 * 8  # bytes: Booleans, and three counts of visible slots
            total += rows * self.capacity * (temporary + size * (1 + part.num_heads // part.kv_heads))
        return total

    def _scores(self, rows: int) -> int:
        """Returns the bytes of the attention scores of `rows` rows over the whole cache, where torch's operators have
        no fused attention: with a soft cap or with sinks. Scores in the model's dtype and in float32, those together
        with the sinks, probabilities in float32 and in the model's dtype."""
        mixers = zip(self.config.spec.attention_mixers, self._attention, strict=True)
        heads = [part.num_heads for mixer, part in mixers if mixer.sinks or mixer.softcap is not None]
        return rows * self.capacity * max(heads, default=0) * (3 * FLOAT_BYTES + 2 * self.dtype.itemsize)

    @property
    def graphs(self) -> int:
        """Bytes of the CUDA graphs: noise and logits of their rows, those of joint forwards included, and nodes."""
        if self.ops.MAX_CAPTURED_SEQUENCES == 0 or self.config.spec.delta_mixers:
            return 0
        joint = min(self.sequences * CAPTURED_ROWS[-1], MAX_JOINT_ROWS) if self.sequences > 1 else 0
        rows = PositionNoise.BLOCK_POSITIONS + GRAPH_LOGITS * CAPTURED_ROWS[-1] + joint
        return rows * self.config.spec.vocab_size * FLOAT_BYTES + GRAPH_NODE_BYTES


def _may_be_permuted(config: ModelConfig) -> bool:
    """Returns whether the inputs of int4 matrices may be permuted (activation order): GPTQ and compressed-tensors."""
    fields: Any = config.quantization
    groups = fields.get("config_groups") or {}
    orders = [group.get("weights", {}).get("actorder") for group in groups.values() if isinstance(group, dict)]
    return bool(fields.get("desc_act")) or any(order in ("group", "dynamic") for order in orders)


def memory_by_purpose(held: Sequence[MemoryEstimate]) -> dict[str, float]:
    """Returns the bytes that a rank needs for the models `held`, by purpose."""
    reserve = RESERVE_BYTES + (GROUP_RESERVE_BYTES if any(need.ranks > 1 for need in held) else 0)
    return {
        "weights": sum(need.weights for need in held),
        "the KV cache": sum(need.cache for need in held),
        "prefill and attention": sum(need.scratch for need in held),
        "the prefix cache": sum(need.prefix_cache for need in held),
        "CUDA graphs and libraries": sum(need.graphs for need in held) + reserve,
    }


def free_memory(device: torch.device) -> int:
    """Returns the free memory of a GPU in bytes, including what torch has reserved and does not use."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


NeedsAt = Callable[[int], Sequence[Sequence[MemoryEstimate]]]


def fit_context(
    needs_at: NeedsAt, length: int, device: torch.device, *, adjust: bool, note: Callable[[str], object]
) -> int:
    """Returns the context length with which the models fit the free memory of a GPU: `length`, or a shorter one if
    `adjust` is set and `length` does not fit, which is reported to `note`.

    `needs_at`: returns for a context length the estimates of the models that each kind of rank holds. Raises UserError,
    which names the length that fits, if `length` does not fit and `adjust` is not set, or fewer than MIN_CONTEXT tokens
    fit.
    """
    free = free_memory(device)

    def fits(tokens: int) -> bool:
        return all(sum(memory_by_purpose(held).values()) <= free for held in needs_at(tokens))

    if fits(length):
        return length
    low, high = 0, length // CONTEXT_STEP
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * CONTEXT_STEP) else (low, middle - 1)
    found = low * CONTEXT_STEP
    if adjust and found >= MIN_CONTEXT:
        note(
            f"the context is limited to {found} of {length} tokens, which fit the {free / BYTES_PER_GB:.1f} GB of GPU"
            " memory that are free; --max-model-len sets the limit"
        )
        return found
    raise UserError(_refusal(needs_at(length), found, length, free, device))


def _refusal(
    needs: Sequence[Sequence[MemoryEstimate]], found: int, length: int, free: float, device: torch.device
) -> str:
    """Returns the error message if the models do not fit. `found`: the context length that does; 0: none."""
    parts, held = max(((memory_by_purpose(held), held) for held in needs), key=lambda pair: sum(pair[0].values()))
    listed = ", ".join(f"{size / BYTES_PER_GB:.1f} for {purpose}" for purpose, size in parts.items())
    layouts = [format_of(need.config) for need in held]
    fixes = [
        f"--max-model-len {found}, which fits" if found else "",
        "" if all(layout is not None and layout.is_int4 for layout in layouts) else "int4 weights",
        "" if held[0].cache_dtype else "--kv-cache-dtype fp8",
        "--prefix-cache-memory 0" if parts["the prefix cache"] else "",
        "more GPUs (--target-tp N)",
    ]
    *others, last = [fix for fix in fixes if fix]
    return (
        f"with a context of {length} tokens the models need {sum(parts.values()) / BYTES_PER_GB:.1f} GB of GPU memory"
        f" ({listed}), but {torch.cuda.get_device_name(device)} has {free / BYTES_PER_GB:.1f} GB free: use"
        f" {', '.join([*others, f'or {last}'] if others else [last])}"
    )
