"""What is quantised when target and draft are loaded on a CPU, by formats, sizes and options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from swiftspec.builder.load_options import Side
from swiftspec.builder.models import Models
from swiftspec.builder.plan import MAX_INT16_HIDDEN_SIZE, Plan
from swiftspec.config import EngineConfig
from swiftspec.model.formats.int8 import LoadTimeQuantization

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 8,
    "intermediate_size": 256, "vocab_size": 64, "torch_dtype": "bfloat16",
}  # fmt: skip
INT4 = {"quant_method": "awq", "bits": 4, "group_size": 128}
FLOAT8 = {"quant_method": "fp8"}


class LoadedError(Exception):
    """Ends a load. `quantization`: what the loader was asked for."""

    def __init__(self, quantization: LoadTimeQuantization) -> None:
        super().__init__()
        self.quantization = quantization


def load(path: Path, /, *, quantization: LoadTimeQuantization, **_: Any) -> NoReturn:
    raise LoadedError(quantization)


@pytest.mark.parametrize(
    ("side", "large", "stored", "options", "expected"),
    [
        ("target", True, INT4, {}, (1, "int8", 2)),
        ("target", False, INT4, {}, (2, None)),
        ("target", True, FLOAT8, {}, (1, None)),
        ("target", True, None, {}, (1, None)),
        ("target", True, INT4, {"activations": "int16"}, (2, None)),
        ("target", True, INT4, {"activations": "native"}, (0, None)),
        ("target", True, INT4, {"dtype": torch.float32}, (0, None)),
        ("target", True, INT4, {"head": "native"}, (1, None)),
        ("target", True, INT4, {"head": "int4"}, (1, "int4")),
        ("target", False, None, {"head": "int8"}, (2, "int8", 2)),
        ("draft", True, None, {}, (1, "int8", 1)),
        ("draft", False, INT4, {"activations": "int16"}, (2, "int8", 2)),
        ("draft", False, INT4, {"activations": "native"}, (0, None)),
    ],
)
def test_quantisation_at_load(
    tmp_path: Path, side: Side, large: bool, stored: Any, options: Any, expected: tuple[Any, ...]
) -> None:
    hidden = MAX_INT16_HIDDEN_SIZE * (2 if large else 1)
    config = CONFIG | {"hidden_size": hidden, "quantization_config": stored}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = EngineConfig("ar" if side == "target" else "serial")
    draft = tmp_path if side == "draft" else None
    given: Any = {"device": "cpu", "dtype": torch.bfloat16, "load": load, **options}
    models = Models.of(Plan.create(tmp_path, draft, plan, None, given))
    with pytest.raises(LoadedError) as caught:
        models.load_side(side, plan, None, None)
    found = caught.value.quantization
    assert (found.activations, found.head, found.head_activations)[: len(expected)] == expected
