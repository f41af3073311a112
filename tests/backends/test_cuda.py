"""What of the CUDA operators shows without a GPU: they are chosen or refused, and nonsense is refused in one line."""

from __future__ import annotations

import pytest
import torch

from swiftspec import _C
from swiftspec.assemble.models import operators
from swiftspec.backends import library as unfused
from swiftspec.backends import reference
from swiftspec.backends.cuda.checks import check
from swiftspec.errors import UserError
from swiftspec.model.config_json import parse_config

SHAPE = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
CONFIG = {**SHAPE, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "vocab_size": 8}
CPU = torch.device("cpu")


def test_tensors_are_checked() -> None:
    with pytest.raises(ValueError, match=r"x must be torch.float32 \[2\], not torch.int64 \[2\]"):
        check("x", torch.tensor([1, 2]), torch.float32, (2,), CPU)
    with pytest.raises(ValueError, match=r"x must be torch.float32 \[3\], not torch.float32 \[2\]"):
        check("x", torch.ones(2), torch.float32, (3,), CPU)
    with pytest.raises(ValueError, match="x lies on cpu, the CUDA operators want it on a GPU"):
        check("x", torch.ones(2), torch.float32, (2,), CPU)


def test_who_asks_for_them_where_they_cannot_run_is_told_why() -> None:
    config = parse_config(CONFIG)
    with pytest.raises(UserError, match="need a GPU, not cpu"):
        operators("cuda", config, torch.bfloat16, CPU)
    assert operators("reference", config, torch.bfloat16, torch.device("cuda")) is reference
    if not torch.cuda.is_available():
        assert operators("auto", config, torch.bfloat16, torch.device("cuda")) is unfused


@pytest.mark.skipif(not _C.cuda_built, reason=_C.build_info)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 96}, "64 or 128"),
        ({"heads": 3}, "multiple of kv_heads"),
        ({"heads": 130}, "at most 64 heads"),
        ({"rows": 0}, "no rows"),
        ({"width": 0}, "above 0"),
        ({"sequences": 2}, "need `sequence`"),
        ({"width": 2**31}, "too large"),
        ({"cos": 8}, "cos must be aligned"),
        ({"mask": 0}, "mask is null"),
        ({"slots": 4}, "slots is not aligned"),
    ],
)
def test_nonsense_is_refused_before_it_reaches_the_device(change: dict[str, int], message: str) -> None:
    arrays = ("cos", "sin", "positions", "slots", "kv_len", "mask", "owner", "tail", "count", "groups", "arrived")
    good = dict.fromkeys((*arrays, "part_values", "part_sums"), 64) | {"sequence": 0}
    good |= {"rows": 2, "width": 8, "sequences": 1, "heads": 4, "kv_heads": 2, "capacity": 16, "dim": 64, "clusters": 1}
    _C.CudaAttention(**good)
    with pytest.raises(ValueError, match=message):
        _C.CudaAttention(**(good | change))
