"""CUDA operators without a GPU: their selection, and rejection of invalid arguments with a one-line message."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swiftspec import _C
from swiftspec.backends.reference import reference
from swiftspec.backends.unfused import unfused
from swiftspec.builder.load_options import select_operators
from swiftspec.errors import UserError
from swiftspec.model.config_json import parse_config

SHAPE = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
CONFIG = {**SHAPE, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "vocab_size": 8}
CPU = torch.device("cpu")


def test_requesting_cuda_operators_on_an_unsupported_machine_raises_with_the_reason() -> None:
    spec = parse_config(CONFIG).spec
    with pytest.raises(UserError, match="need a GPU, not cpu"):
        select_operators("cuda", spec, torch.bfloat16, CPU)
    assert select_operators("reference", spec, torch.bfloat16, torch.device("cuda")) is reference
    if not torch.cuda.is_available():
        assert select_operators("auto", spec, torch.bfloat16, torch.device("cuda")) is unfused


@pytest.mark.skipif(not _C.cuda_built, reason=_C.build_info)
@pytest.mark.parametrize(
    ("function", "change", "message"),
    [
        (_C.embed_cuda, {}, r"table: expected bfloat16\[\*, \*\] on .*, got bfloat16\[8, 16\] on cpu$"),
        (_C.embed_cuda, {"table": torch.zeros(8, 12)}, "multiples of 16 bytes"),
        (_C.embed_cuda, {"table": torch.zeros(8, 16)}, r"table: .*, got float32\[8, 16\] on cpu$"),
        (_C.norm_heads_cuda, {}, r"qkv: expected bfloat16\[8, 192\] on .*, got bfloat16\[8, 192\] on cpu$"),
        (_C.norm_heads_cuda, {"weight": torch.zeros(2, 96)}, "64 or 128"),
        (_C.norm_heads_cuda, {"weight": torch.zeros(4, 64)}, "fewer heads than the weights"),
        (_C.draw_cuda, {}, r"logits: expected float32\[\*, \*\] on .*, got float32\[2, 8\] on cpu$"),
        (_C.draw_cuda, {"vocab": 9}, "at least `vocab`"),
        (_C.draw_cuda, {"temperature": 0.0}, "above 0"),
        (_C.draw_cuda, {"noise": torch.zeros(1, 8)}, "come together"),
        (_C.CudaCache, {}, "k: expected"),
        (_C.CudaTree, {}, "token: expected"),
        (_C.CudaTree, {"node": torch.zeros(65)}, "1..64"),
        (_C.CudaTree, {"children": 5}, "below the nodes"),
    ]
    if _C.cuda_built
    else [],
)
def test_invalid_arguments_raise_before_a_launch(function: Any, change: dict[str, Any], message: str) -> None:
    """Invalid arguments, including arrays on the CPU, raise before a launch."""
    tokens, slots = torch.zeros(2, dtype=torch.int64), torch.zeros(4, 4, dtype=torch.bool)
    table, node = torch.zeros(8, 16, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int32)
    arrays = ("parent", "slot", "weight", "used", "positions", "slots", "mask")
    good: dict[Any, dict[str, Any]] = {
        _C.embed_cuda: {"tokens": tokens, "table": table, "out": table[:2], "stream": 0},
        _C.norm_heads_cuda: {"qkv": torch.zeros(8, 192, dtype=torch.bfloat16), "eps": 1e-6, "stream": 0,
                             "weight": torch.zeros(2, 64, dtype=torch.bfloat16)},
        _C.draw_cuda: {"logits": torch.zeros(2, 8), "vocab": 8, "bias": None, "noise": None, "noise_rows": None,
                       "temperature": 1.0, "scalars": None, "tokens": tokens, "stream": 0},
        _C.CudaCache: dict.fromkeys(("k", "v"), torch.zeros(2, 1, 2, 4, 64, dtype=torch.bfloat16)),
        _C.CudaTree: dict.fromkeys(arrays, tokens) | {"token": torch.zeros(9), "visible": slots, "node": node,
                                                      "tokens": tokens, "children": 2},
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        function(**(good[function] | change))
