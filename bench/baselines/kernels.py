"""Kernels of other projects for the same operators, if they can be imported: Marlin, FlashInfer, FlexAttention.

`find` tries to import each of them once. A package that is missing, or that lacks a documented name, is reported in one
line, such as "flashinfer: not importable". Each kernel gets its inputs in its preferred layout, prepared before the
timing, and is compared with plain torch before it is timed, because a kernel that is called incorrectly can be fast.

Marlin is the AWQ product of vLLM or of sgl-kernel, or else the original kernel (float16, without zero points).
FlashInfer is the attention of one request with a custom mask. FlexAttention is torch's, compiled with such a mask. Not
run on a GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftspec.model.formats.int4 import AWQ_ORDER, Int4Weight, pack_int4, unpack_int4

BF16 = torch.bfloat16
BITS = 4
Call = Callable[[], Any]
CLOSE = 0.02  # allowed relative error of a result; rounding accounts for a tenth of it
TILES = [8 * j + i for i in range(8) for j in range(8)]  # order of 64 outputs in Marlin's scales and zeros


class Absent(Exception):
    """Raised when a kernel is not available. The message is one line."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Inputs of tree attention over one cache per layer.

    A row attends to all slots before the window, and in the window (the last slots of the context) to those that
    `window` allows.
    """

    q: Tensor  # [rows, heads, head_dim]
    keys: Tensor  # [layers, kv_heads, context, head_dim]
    values: Tensor
    window: Tensor  # [rows, window slots] bool

    def mask(self) -> Tensor:
        """Returns the attention mask, bool [rows, context]."""
        return F.pad(self.window, (self.keys.shape[2] - self.window.shape[1], 0), value=True)


Attention = Callable[[Tree], list[Callable[[], Tensor]]]  # one call per layer, which returns [rows, heads, head_dim]


@dataclass(frozen=True, slots=True)
class Product:
    """A kernel that multiplies by int4 weights."""

    package: str
    make: Callable[[Int4Weight], Callable[[Tensor], Tensor]]  # packs a weight; [rows, inputs] -> [rows, outputs]
    exact: bool = True  # if False, it takes float16 and gets the weights in a wrong order: only its time is valid


@dataclass(slots=True)
class BaselineKernels:
    product: Product | None = None  # Marlin
    attention: dict[str, Attention] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)  # one line per kernel, available ones included


def find() -> BaselineKernels:
    """Returns the available kernels, and one line per kernel with its package or the reason why it is not available."""
    found = BaselineKernels()
    try:
        found.product = marlin()
        found.said.append(f"marlin: {found.product.package}'s")
    except Absent as error:
        found.said.append(f"marlin: {error}")
    for name, attempt in (("flashinfer", flashinfer), ("flexattention", flexattention)):
        try:
            found.attention[name] = attempt()
            found.said.append(f"{name}: here")
        except Absent as error:
            found.said.append(f"{name}: {error}")
    return found


def fetch(module: str, *names: str) -> list[Any]:
    """Imports a module and returns its attributes `names`.

    Raises Absent on any error, because packages fail in many ways during their import.
    """
    try:
        loaded = importlib.import_module(module)
        return [getattr(loaded, name) for name in names]
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        raise Absent("not importable" if error.name == package else f"not importable ({first_line(error)})") from None
    except AttributeError as error:
        raise Absent(f"API differs from its documentation ({first_line(error)})") from None
    except Exception as error:
        raise Absent(f"not importable ({first_line(error)})") from None


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def checked(calls: list[Callable[[], Tensor]], wanted: Tensor) -> list[Call]:
    """Returns `calls` if the leading columns of the result of the first one are close to `wanted`. Raises ValueError
    otherwise."""
    got = calls[0]().flatten(1)[:, : wanted.shape[1]].double()
    error = float((got - wanted).norm() / wanted.norm())
    if not error <= CLOSE:
        raise ValueError(f"result differs from torch (relative error {error:.2g})")
    return list(calls)


def product_calls(product: Product, x: Tensor, weights: list[Int4Weight]) -> list[Call]:
    """Returns one call per weight.

    Unless `product.exact` is False, 64 outputs of the first weight are compared with plain torch, and ValueError is
    raised if they differ.
    """
    if not product.exact:
        return [partial(product.make(weight), x.half()) for weight in weights]
    ready = [partial(product.make(weight), x) for weight in weights]
    few = weights[0].outputs(torch.arange(min(64, weights[0].scales.shape[1]), device=x.device))
    return checked(ready, x.double() @ few.dequantize(torch.float32).double().T)


def attention_calls(make: Attention, tree: Tree) -> list[Call]:
    """Returns one call per layer. Raises ValueError if the result of the first layer differs from plain torch."""
    group = tree.q.shape[1] // tree.keys.shape[1]
    keys, values = (t[0].repeat_interleave(group, 0).double() for t in (tree.keys, tree.values))
    wanted = F.scaled_dot_product_attention(tree.q.transpose(0, 1).double(), keys, values, tree.mask())
    return checked(make(tree), wanted.transpose(0, 1).flatten(1))


def sdpa(tree: Tree) -> list[Callable[[], Tensor]]:
    """Returns one call per layer of torch's scaled dot product attention with a mask, on the kernel that torch selects.

    On Hopper torch selects cuDNN's kernel, if possible. Query heads that share keys are rows of one head. RoPE and KV
    append are not included.
    """
    rows, heads, width = tree.q.shape
    kv_heads = tree.keys.shape[1]
    q = tree.q.view(rows, kv_heads, -1, width).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, width)
    mask = torch.zeros(rows, tree.keys.shape[2], dtype=q.dtype, device=q.device)
    mask = mask.masked_fill_(~tree.mask(), float("-inf")).repeat(heads // kv_heads, 1)[None, None]

    def call(layer: int) -> Tensor:
        out = F.scaled_dot_product_attention(q, tree.keys[layer, None], tree.values[layer, None], mask)
        return out.view(kv_heads, -1, rows, width).permute(2, 0, 1, 3)

    return [partial(call, layer) for layer in range(len(tree.keys))]


def flexattention() -> Attention:
    """Returns torch's FlexAttention, compiled anew for each shape. Raises Absent if it or, on a GPU, triton is not
    importable."""
    if torch.cuda.is_available() and importlib.util.find_spec("triton") is None:
        raise Absent("triton is not importable")
    flex, block_mask = fetch("torch.nn.attention.flex_attention", "flex_attention", "create_block_mask")

    def make(tree: Tree) -> list[Callable[[], Tensor]]:
        torch.compiler.reset()  # otherwise torch would run the ninth shape uncompiled
        # fullgraph raises an error instead of running uncompiled pieces; one compile thread starts no processes
        compiled = torch.compile(flex, dynamic=False, fullgraph=True, options={"compile_threads": 1})
        return flex_calls(compiled, block_mask, tree)

    return make


def flex_calls(flex: Any, block_mask: Any, tree: Tree) -> list[Callable[[], Tensor]]:
    context, columns = tree.keys.shape[2], tree.window.shape[1]

    def visible(batch: Tensor, head: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        column = slot - (context - columns)
        return (column < 0) | tree.window[row, column.clamp(0, columns - 1)]

    mask = block_mask(visible, None, None, tree.q.shape[0], context, device=tree.q.device)
    q = tree.q.transpose(0, 1)[None].contiguous()

    def call(layer: int) -> Tensor:
        keys, values = tree.keys[layer, None], tree.values[layer, None]
        return flex(q, keys, values, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    return [partial(call, layer) for layer in range(len(tree.keys))]


def flashinfer() -> Attention:
    """Returns FlashInfer's attention of one request with a packed mask, the baseline of the paper. Raises Absent if it
    is not importable."""
    attend, packbits = fetch("flashinfer", "single_prefill_with_kv_cache", "packbits")

    def make(tree: Tree) -> list[Callable[[], Tensor]]:
        packed = packbits(tree.mask().flatten(), bitorder="little")
        return [
            partial(attend, tree.q, keys, values, packed_custom_mask=packed, kv_layout="HND")
            for keys, values in zip(tree.keys, tree.values, strict=True)
        ]

    return make


def marlin() -> Product:
    """Returns the first available Marlin kernel: vLLM's, sgl-kernel's or the original. Raises Absent if there is
    none."""
    reasons = []
    for package, attempt in (("vllm", _vllm), ("sgl_kernel", _sgl_kernel), ("marlin", _marlin)):
        try:
            return attempt()
        except Absent as error:
            reasons.append(f"{package} {error}")
    alike = all(reason.endswith(" not importable") for reason in reasons)
    raise Absent("not importable (vllm, sgl_kernel, marlin)" if alike else "; ".join(reasons))


def _vllm() -> Product:
    (repack,) = fetch("vllm._custom_ops", "awq_marlin_repack")
    (types,) = fetch("vllm.scalar_type", "scalar_types")
    names = ("apply_awq_marlin_linear", "awq_to_marlin_zero_points", "marlin_make_empty_g_idx")
    names += ("marlin_make_workspace_new", "marlin_permute_scales")
    place = "vllm.model_executor.layers.quantization.utils.marlin_utils"
    apply, to_zeros, no_index, workspace_on, permute = fetch(place, *names)

    def make(weight: Int4Weight) -> Callable[[Tensor], Tensor]:
        (k, n), device = (weight.packed.shape[0], weight.scales.shape[1]), weight.packed.device
        codes, zeros = (pack_int4(unpack_int4(words), AWQ_ORDER) for words in (weight.packed, weight.zeros))
        given = {
            "weight": repack(codes, size_k=k, size_n=n, num_bits=BITS),
            "weight_scale": permute(weight.scales.to(BF16), size_k=k, size_n=n, group_size=weight.group_size),
            "weight_zp": to_zeros(zeros, size_k=k // weight.group_size, size_n=n, num_bits=BITS),
            "g_idx": no_index(device),
            "g_idx_sort_indices": no_index(device),
            "workspace": workspace_on(device),
            "quant_type": types.uint4,
            "output_size_per_partition": n,
            "input_size_per_partition": k,
        }
        return lambda x: apply(input=x, **given)

    return Product("vllm", make)


def _sgl_kernel() -> Product:
    repack, product = fetch("sgl_kernel", "awq_marlin_repack", "gptq_marlin_gemm")
    (types,) = fetch("sgl_kernel.scalar_type", "scalar_types")

    def make(weight: Int4Weight) -> Callable[[Tensor], Tensor]:
        (k, n), device = (weight.packed.shape[0], weight.scales.shape[1]), weight.packed.device
        tiles = repack(pack_int4(unpack_int4(weight.packed), AWQ_ORDER), k, n, BITS)
        scales = _in_tiles(weight.scales.to(BF16))
        zeros = pack_int4(_in_tiles(unpack_int4(weight.zeros)), AWQ_ORDER)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        workspace = torch.zeros(processors, dtype=torch.int32, device=device)
        none = torch.empty(0, dtype=torch.int32, device=device)
        rest = {"is_k_full": True, "use_atomic_add": False, "use_fp32_reduce": True, "is_zp_float": False}
        return lambda x: product(
            x, None, tiles, scales, None, zeros, none, none, workspace, types.uint4, len(x), n, k, **rest
        )

    return Product("sgl_kernel", make)


def _in_tiles(columns: Tensor) -> Tensor:
    """Reorders [groups, outputs] to the order in which Marlin's threads read scales and zeros."""
    return columns.view(-1, 64)[:, TILES].view(columns.shape).contiguous()


def _marlin() -> Product:
    (multiply,) = fetch("marlin", "mul")

    def make(weight: Int4Weight) -> Callable[[Tensor], Tensor]:
        (k, n), device = (weight.packed.shape[0], weight.scales.shape[1]), weight.packed.device
        codes = weight.packed.view(k // 16, 2 * n)  # the same number of words; Marlin's own packing takes minutes
        scales = weight.scales.half()
        workspace = torch.zeros(n // 128 * 16, dtype=torch.int32, device=device)

        def call(x: Tensor) -> Tensor:
            out = torch.empty(len(x), n, dtype=torch.half, device=device)
            multiply(x, codes, out, scales, workspace)
            return out

        return call

    return Product("marlin", make, exact=False)
