"""Fakes of third-party packages, with the functions that their documentation describes. Each returns the correct result
only if it is called as documented."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from swiftspec.model.formats.awq import from_awq
from swiftspec.model.formats.int4 import AWQ_ORDER, pack_int4, unpack_int4

MARLIN_UTILS = "vllm.model_executor.layers.quantization.utils.marlin_utils"
UINT4 = SimpleNamespace(id=7)


def install(monkeypatch: pytest.MonkeyPatch, modules: dict[str, dict[str, Any]]) -> None:
    """Packages with these modules and nothing else; the folders above them are empty."""
    for name, content in modules.items():
        parts = name.split(".")
        for depth in range(1, len(parts)):
            above = ".".join(parts[:depth])
            if not isinstance(sys.modules.get(above), ModuleType):
                monkeypatch.setitem(sys.modules, above, ModuleType(above))
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)


def repack(codes: Tensor, size_k: int, size_n: int, num_bits: int) -> Tensor:
    assert codes.shape == (size_k, size_n // 8) and num_bits == 4
    return codes


def as_awq(x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """The product of a matrix in AutoAWQ's order."""
    weight = from_awq(codes, zeros, scales, x.shape[1] // len(scales))
    return (x.float() @ weight.dequantize(torch.float32).T).to(x.dtype)


def vllm() -> dict[str, dict[str, Any]]:
    """Weights stay in AutoAWQ's order; the fake marks scales and zeros when they are permuted."""

    def permute(scales: Tensor, size_k: int, size_n: int, group_size: int) -> Tensor:
        assert scales.shape == (size_k // group_size, size_n)
        return scales * 2

    def to_zeros(zeros: Tensor, size_k: int, size_n: int, num_bits: int) -> Tensor:
        assert zeros.shape == (size_k, size_n // 8) and num_bits == 4
        return zeros ^ -1

    def apply(
        input: Tensor, weight: Tensor, weight_scale: Tensor, weight_zp: Tensor, g_idx: Tensor,
        g_idx_sort_indices: Tensor, workspace: Tensor, quant_type: object, output_size_per_partition: int,
        input_size_per_partition: int,
    ) -> Tensor:  # fmt: skip
        assert quant_type is UINT4 and workspace.numel() == 132 and g_idx.numel() == g_idx_sort_indices.numel() == 0
        assert (output_size_per_partition, input_size_per_partition) == (8 * weight.shape[1], weight.shape[0])
        return as_awq(input, weight, weight_scale / 2, weight_zp ^ -1)

    utils = {
        "apply_awq_marlin_linear": apply,
        "awq_to_marlin_zero_points": to_zeros,
        "marlin_make_empty_g_idx": lambda device: torch.empty(0, dtype=torch.int32, device=device),
        "marlin_make_workspace_new": lambda device: torch.zeros(132, dtype=torch.int32, device=device),
        "marlin_permute_scales": permute,
    }
    types = {"scalar_types": SimpleNamespace(uint4=UINT4)}
    return {"vllm._custom_ops": {"awq_marlin_repack": repack}, "vllm.scalar_type": types, MARLIN_UTILS: utils}


def sgl_kernel() -> dict[str, dict[str, Any]]:
    def back(columns: Tensor) -> Tensor:
        """Reverts Marlin's order of columns: thread i of 8 holds column i of 8 tiles."""
        return columns.view(len(columns), -1, 8, 8).transpose(2, 3).reshape(columns.shape)

    def product(*given: Any, **rest: Any) -> Tensor:
        a, c, tiles, scales, global_scale, zeros, index, order, workspace, kind, m, n, k = given
        assert c is None and global_scale is None and kind is UINT4 and (m, k) == a.shape and n == scales.shape[1]
        assert index.numel() == order.numel() == 0 and workspace.numel() == 132
        assert rest == {
            "is_k_full": True, "use_atomic_add": False, "use_fp32_reduce": True, "is_zp_float": False,
        }  # fmt: skip
        plain = unpack_int4(zeros, AWQ_ORDER)
        return as_awq(a, tiles, back(scales), pack_int4(back(plain), AWQ_ORDER))

    types = {"scalar_types": SimpleNamespace(uint4=UINT4)}
    content = {"awq_marlin_repack": repack, "gptq_marlin_gemm": product}
    return {"sgl_kernel": content, "sgl_kernel.scalar_type": types}


def flashinfer() -> dict[str, dict[str, Any]]:
    def packbits(flat: Tensor, bitorder: str) -> Tensor:
        assert bitorder == "little" and flat.dtype == torch.bool
        return (F.pad(flat, (0, -len(flat) % 8)).view(-1, 8) << torch.arange(8)).sum(1).to(torch.uint8)

    def attend(q: Tensor, k: Tensor, v: Tensor, *, packed_custom_mask: Tensor, kv_layout: str) -> Tensor:
        assert kv_layout == "HND"
        bits = packed_custom_mask[:, None] >> torch.arange(8) & 1
        mask = bits.flatten()[: len(q) * k.shape[1]].view(len(q), -1).bool()
        group = q.shape[1] // len(k)
        k, v = (t.repeat_interleave(group, 0) for t in (k, v))
        return F.scaled_dot_product_attention(q.transpose(0, 1), k, v, mask).transpose(0, 1)

    return {"flashinfer": {"packbits": packbits, "single_prefill_with_kv_cache": attend}}
