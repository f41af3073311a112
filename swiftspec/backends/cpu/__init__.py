"""CPU backend: fused operators for x86-64 CPUs with AVX2 or more and for aarch64, in the native extension.

It overrides operators of reference/ for bfloat16 and float32 models (`check_supported`) with bfloat16, float32, int4,
int8 or float4 weights. Products are accumulated in float32. A row's result does not depend (bitwise) on the other rows
of its batch, on their number, or on the slots of its keys.
"""

from __future__ import annotations

from pathlib import Path

import torch

from swiftspec import _C
from swiftspec.backends.cpu import attention, delta, linear, packing, sampling
from swiftspec.backends.cpu.decoder import HostDecoder
from swiftspec.backends.cpu.packing import BLOCK_OUTPUTS
from swiftspec.backends.reference import Backend
from swiftspec.capabilities import OPERATORS
from swiftspec.errors import UserError
from swiftspec.file_io import file_facts
from swiftspec.model.packed_model import PackedModel
from swiftspec.model.spec import ModelSpec, unknown_fields

MAX_HEAD_DIM = 512

DELTA_HEAD_UNIT = 16  # elements


class CpuBackend(Backend):
    """The operators of a model on a CPU. They use up to `threads` threads, which are those of the process."""

    name = "cpu"
    FLOAT32_STREAM = True  # with a bfloat16 cache
    INT8_ACTIVATIONS = True
    OWN_THREADS = True
    PACKED_CACHE = True

    pack = staticmethod(packing.pack)
    pack_norm = staticmethod(linear.pack_norm)
    pack_mixture = staticmethod(packing.pack_mixture)
    mask_outputs = staticmethod(packing.mask_outputs)

    norm_linear = staticmethod(linear.norm_linear)
    norm_swiglu = staticmethod(linear.norm_swiglu)
    linear_residual = staticmethod(linear.linear_residual)
    mlp = staticmethod(linear.mlp)
    norm_head = staticmethod(linear.norm_head)
    prepare = staticmethod(attention.prepare)
    tree_attention = staticmethod(attention.tree_attention)
    multiply_sigmoid = staticmethod(delta.multiply_sigmoid)
    prepare_delta = staticmethod(delta.prepare_delta)
    gated_delta = staticmethod(delta.gated_delta)
    per_layer_embeddings = staticmethod(linear.per_layer_embeddings)
    add_per_layer = staticmethod(linear.add_per_layer)

    make_slot_mover = staticmethod(attention.make_slot_mover)
    fold_state = staticmethod(_C.fold_delta)
    move_slots = staticmethod(_C.move_slots)

    gumbel_rows = staticmethod(sampling.gumbel_rows)
    draw = staticmethod(sampling.draw)
    draw_keyed = staticmethod(sampling.draw_keyed)
    children = staticmethod(sampling.children)
    log_probs = staticmethod(sampling.log_probs)
    resample = staticmethod(sampling.resample)

    level = staticmethod(_C.level)  # returns the ISA level in use, such as "avx512_bf16"; "none": the CPU has none
    use_level = staticmethod(_C.use_level)  # selects an ISA level, for tests; returns False if it is not supported
    threads = staticmethod(_C.threads)
    set_threads = staticmethod(_C.set_threads)  # that share large products and prompt chunks; 1 by default
    # peak(rounds, float32) runs a loop of products only and returns its number of floating-point operations
    peak = staticmethod(_C.peak)

    def machine_facts(self) -> dict[str, object]:
        """Returns what decides the speed of these operators on a given CPU, serialisable as JSON: the ISA level, and
        attributes of the native extension's file that change when it is built again."""
        assert _C.__file__ is not None
        return {"level": self.level(), "extension": file_facts(Path(_C.__file__))}

    def check_supported(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device | str) -> None:
        """Raises UserError if these operators cannot run the model because of its dtype, its layers, the device, or the
        CPU."""
        if torch.device(device).type != "cpu":
            raise UserError(f"the CPU operators need a CPU, not {device}")
        if self.level() == "none":
            raise UserError("the CPU operators need x86-64 with AVX2, or aarch64")
        self.check_spec(spec, dtype)

    def check_spec(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        """Raises UserError if these operators cannot run the model on any CPU, because of its dtype or its layers."""
        if dtype not in (torch.bfloat16, torch.float32):
            name = str(dtype).removeprefix("torch.")
            raise UserError(f"the CPU operators compute in bfloat16 or float32, not {name}")
        for head_dim in (mixer.head_dim for mixer in spec.attention_mixers):
            if head_dim % 16 or head_dim > MAX_HEAD_DIM:
                limits = f"a head dimension that is a multiple of 16 and at most {MAX_HEAD_DIM}"
                raise UserError(f"the CPU operators need {limits}, not {head_dim}")
        for mixer in spec.delta_mixers:
            if mixer.k_head_dim % DELTA_HEAD_UNIT or mixer.v_head_dim % DELTA_HEAD_UNIT:
                sizes = f"{mixer.k_head_dim} and {mixer.v_head_dim}"
                raise UserError(f"the CPU operators need delta heads of a multiple of {DELTA_HEAD_UNIT}, not {sizes}")
        mixtures = {layer.mlp.intermediate_size for layer in spec.layers if layer.mlp.experts is not None}
        for size in (spec.hidden_size, *mixtures) if mixtures else ():
            if size % BLOCK_OUTPUTS:
                limits = f"experts whose sizes are multiples of {BLOCK_OUTPUTS}"
                raise UserError(f"the CPU operators need {limits}, not {size}")
        missing = unknown_fields(spec, OPERATORS["cpu"])
        if missing is not None:
            raise UserError(f"the CPU operators have no {missing}")

    def kept_int4_group(self, inputs: int, group: int, dtype: torch.dtype) -> int:
        return group if group % BLOCK_OUTPUTS == 0 else 0

    def fuse(self, stack: PackedModel) -> HostDecoder | None:
        """Returns the model as one native call, or None if it is sharded over ranks without shared memory."""
        return HostDecoder(stack) if stack.group is None or stack.group.memory is not None else None


cpu = CpuBackend()
