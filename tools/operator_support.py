"""Determines from the code which operators and executors run which model family in which weight format.

A family is represented by the default configuration of its model type in transformers, a format by a small matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoConfig

from swiftspec.backends.cpu import cpu
from swiftspec.backends.cuda import cuda
from swiftspec.backends.cuda import linear as cuda_linear
from swiftspec.backends.unfused import unfused
from swiftspec.errors import UserError
from swiftspec.model.architectures import ARCHITECTURES
from swiftspec.model.config_json import parse_config
from swiftspec.model.formats.blocks import BLOCK_TYPES, BlockWeight
from swiftspec.model.formats.float8_codes import Float8Weight
from swiftspec.model.formats.int4 import Int4Weight
from swiftspec.model.formats.int8 import Int8Weight
from swiftspec.model.formats.mxfp4 import GROUP, GROUP_BYTES, Mxfp4Weight
from swiftspec.model.spec import ModelSpec
from swiftspec.model.weights import DenseWeight, Weight

OUTPUTS, INPUTS = 1024, 512  # of a format's matrix
PAGE = """\
<!-- Made by `python -m tools.docs`: do not edit. -->
# Which operators run which model, in which format

A model runs on the operators in the row of its family, which keep its weights as in the row of its format. Every family
can have every format, except that GGUF files are read for the [families listed]({guide}) only. The
executors of each kind of operators are in [paths.md](paths.md): the native operators have the *native* executor, the
CUDA operators and torch's own operators on a GPU have *graphs*, and torch's own on a CPU, like the reference operators
(`--ops reference`), run *eagerly*.

"""
FAMILIES = """\
## Families

Each row is the default configuration of the family's model type in transformers, in bfloat16. A model that the native
operators or the CUDA operators do not support runs on torch's own operators, for the reason in parentheses. Sizes
decide too: the CUDA operators, for example, need heads of 64 or 128.

"""
FORMATS = """\
## Formats

How operators keep the weights of a projection, with the bits per weight including scales (groups of 128 inputs, except
in GGUF). The codes of a format are never rounded again; *bf16* weights are the dequantised ones. The reference
operators dequantise all formats. Int4 matrices whose rows change places are dequantised first
([families]({guide})).

"""
GUIDE = "guides/families.md#families"
FAMILY_HEAD = ("`architectures`", "on a CPU", "on a GPU")
FORMAT_HEAD = ("format", "native operators", "CUDA operators", "torch's own operators")


def family_spec(name: str) -> ModelSpec:
    """Returns the spec of the default configuration of a family in ARCHITECTURES."""
    kind = ARCHITECTURES[name].model_type
    # by default a head of this family has 42 elements, of which RoPE cannot rotate half; released models have 128
    sizes = {"head_dim": 128} if kind == "glm4_moe" else {}
    config = AutoConfig.for_model(kind, **sizes).to_dict()
    return parse_config({**config, "architectures": [name]}).spec


def family_rows() -> Iterator[list[str]]:
    """Yields the rows of the first table: a family and its operators on a CPU and on a GPU."""
    for name in ARCHITECTURES:
        spec = family_spec(name)
        yield [f"`{name}`", _operators("native", cpu.check_spec, spec), _operators("CUDA", cuda.check_spec, spec)]


def _operators(name: str, check_spec: Any, spec: ModelSpec) -> str:
    try:
        check_spec(spec, torch.bfloat16)
    except UserError as error:
        return f"torch's own ({str(error).partition('; ')[0]})"
    return name


def format_rows() -> Iterator[list[str]]:
    """Yields the rows of the second table: a format, and how three kinds of operators keep it."""
    for name, weight in _matrices().items():
        on_gpu = "int4" if cuda_linear.int4_group_size(weight) else "bf16"
        in_torch = "int4" if _kept_by_torch(weight) else "bf16"
        yield [name, _native_storage(weight), on_gpu, in_torch]


def _kept_by_torch(weight: Weight) -> bool:
    """Returns whether torch's own operators keep the codes of a matrix."""
    is_int4 = isinstance(weight, Int4Weight)
    return is_int4 and unfused.kept_int4_group(weight.shape[1], weight.group_size, torch.bfloat16) > 0


def _native_storage(weight: Weight) -> str:
    packed = cpu.pack(weight, torch.bfloat16, "cpu")
    code_bits = 8 * packed.data.nbytes // (OUTPUTS * INPUTS)
    tensors = [packed.data, *packed.optional_tensors().values()]
    bits = 8 * sum(tensor.nbytes for tensor in tensors if tensor is not None) / (OUTPUTS * INPUTS)
    name = "float4" if isinstance(weight, Mxfp4Weight) else {4: "int4", 8: "int8", 16: "bf16"}[code_bits]
    return f"{name}, {bits:.3g} bits"


def _matrices() -> dict[str, Weight]:
    """Returns a matrix [OUTPUTS, INPUTS] of each format."""
    dense = torch.randn(OUTPUTS, INPUTS)
    int4, int8 = Int4Weight.of(dense, 128), Int8Weight.of(dense)
    assert int8 is not None
    groups = torch.zeros(OUTPUTS, INPUTS // GROUP, dtype=torch.uint8)
    mxfp4 = Mxfp4Weight(groups.unsqueeze(2).expand(-1, -1, GROUP_BYTES), groups)
    floats = Float8Weight(dense.to(torch.float8_e4m3fn), torch.ones(OUTPUTS, INPUTS // 128), 128)
    blocks = {
        f"GGUF {name}": BlockWeight(torch.zeros(OUTPUTS, kind.row_bytes(INPUTS), dtype=torch.uint8), kind)
        for name, kind in BLOCK_TYPES.items()
    }
    return {
        "dense (bf16, fp16, fp32; GGUF F32, F16, BF16)": DenseWeight(dense),
        "int4 (AWQ, GPTQ, compressed-tensors)": int4,
        "int4 with activation order (GPTQ, compressed-tensors)": replace(int4, permutation=torch.arange(INPUTS)),
        "int8 (compressed-tensors)": int8,
        "float8 (fp8, compressed-tensors)": floats,
        "MXFP4 (mxfp4, GGUF)": mxfp4,
        **blocks,
    }
