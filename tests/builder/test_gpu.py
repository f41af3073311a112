"""Checks on a GPU before anything is loaded: which operators run a model there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftspec.backends.cuda import cuda
from swiftspec.backends.unfused import unfused
from swiftspec.builder import plan as assembled
from swiftspec.builder.load_options import select_operators
from swiftspec.builder.memory_estimate import BYTES_PER_GB
from swiftspec.builder.plan import Plan
from swiftspec.config import EngineConfig
from swiftspec.errors import UserError
from swiftspec.model.config_json import parse_config
from tests.support.tiny_checkpoints import make_checkpoint

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "torch_dtype": "bfloat16",
}  # fmt: skip
GPU = torch.device("cuda", 0)
BF16 = torch.bfloat16
AWQ: dict[str, Any] = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpu")
    make_checkpoint(path, dtype=BF16)
    return path


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU of 24 GB that the CUDA operators can use."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (int(23.5 * BYTES_PER_GB), int(24 * BYTES_PER_GB)))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    monkeypatch.setattr("swiftspec.backends.cuda.require_usable", torch.device)


def test_unsupported_models_use_torch_operators_with_a_message(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By GPU, dtype and heads; the message appears once per model. Requesting the CUDA operators by name raises."""

    def messages(**options: Any) -> list[str]:
        lines: list[str] = []
        wanted: Any = {"device": "cuda:0", "note": lines.append, **options}
        Plan.create(pair, None, EngineConfig("ar"), None, wanted)
        return lines

    assert messages(dtype=torch.float32) == [
        "the target runs on torch's own operators: the CUDA operators compute in bfloat16, not float32"
    ]
    [line] = messages()
    assert line.startswith("the target runs on torch's own operators: the CUDA operators need head dimension 64")
    assert messages(ops="unfused") == []
    with pytest.raises(UserError, match="need head dimension 64 or 128"):
        messages(ops="cuda")

    def too_old(device: Any) -> Any:
        raise UserError("the CUDA operators need compute capability 8.0 (Ampere) or more; T4 has 7.5")

    large = parse_config(LLAMA_8B).spec
    assert select_operators("auto", large, BF16, GPU) is cuda
    monkeypatch.setattr("swiftspec.backends.cuda.require_usable", too_old)
    assert select_operators("auto", large, BF16, GPU) is unfused
    with pytest.raises(UserError, match="T4 has 7"):
        select_operators("cuda", large, BF16, GPU)


def test_auto_that_ends_on_the_cpu_of_a_machine_with_a_gpu_is_reported(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the reason. A CPU that was asked for is not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(assembled, "why_gpu_unused", lambda: "the driver is too old")
    for device, count in (("auto", 1), ("cpu", 0)):
        lines: list[str] = []
        wanted: Any = {"device": device, "ops": "reference", "note": lines.append}
        assert Plan.create(pair, None, EngineConfig("ar"), None, wanted).device.type == "cpu"
        assert lines == ["the models run on the CPU although this machine has a GPU: the driver is too old"] * count


def test_awq_runs_in_bfloat16_on_a_gpu(pair: Path, tmp_path: Path) -> None:
    """AutoAWQ's configurations say float16, which the CUDA operators do not support; an unset dtype is auto, in Python
    as for the command."""
    config = json.loads((pair / "config.json").read_text())
    for name in ("torch_dtype", "dtype"):
        config.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(config | AWQ | {"torch_dtype": "float16"}))
    for dtype in (None, "auto"):
        options: Any = {"device": "cuda:0", "dtype": dtype, "ops": "unfused"}
        assert Plan.create(tmp_path, None, EngineConfig("ar"), None, options).dtype == BF16
