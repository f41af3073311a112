"""The same weights in other engines, for comparison: transformers, and llama.cpp where it is installed."""

from __future__ import annotations

import importlib.util
import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from swiftspec.model.files import read_config
from swiftspec.model.formats import awq, format_of

CONTEXT = 2048  # tokens of prompt and answer that llama.cpp makes room for


def load_transformers(path: Path, dtype: torch.dtype) -> Any:
    """A transformers model with a checkpoint's weights, int4 ones dequantised.

    transformers itself reads AWQ only through another library, and would compute the same products.
    """
    import transformers

    data = json.loads((path / "config.json").read_text())
    data.pop("quantization_config", None)
    config = transformers.AutoConfig.for_model(**data)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    result = model.load_state_dict(dense_state(path, dtype), strict=False, assign=True)
    model.tie_weights()
    missing = set(result.missing_keys) - ({"lm_head.weight"} if config.tie_word_embeddings else set())
    assert not missing and not result.unexpected_keys, f"not loaded: {missing or result.unexpected_keys}"
    return model.eval()


def dense_state(path: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every weight of a checkpoint by its Hugging Face name, dense, in `dtype`; AutoAWQ "gemm" matrices unpacked."""
    layout = format_of(read_config(path))
    raw: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        raw |= load_file(file)
    state: dict[str, torch.Tensor] = {}
    for name, tensor in raw.items():
        module, _, kind = name.rpartition(".")
        if kind == "qweight":
            assert isinstance(layout, awq.Awq)
            int4 = awq.from_awq(tensor, raw[f"{module}.qzeros"], raw[f"{module}.scales"], layout.group_size)
            state[f"{module}.weight"] = int4.dequantize(dtype)
        elif kind not in ("qzeros", "scales"):
            state[name] = tensor.to(dtype)
    return state


def write_dense(path: Path, folder: Path, dtype: torch.dtype) -> None:
    """A checkpoint with the same weights, dense, in `folder`."""
    for file in path.glob("*.json"):
        shutil.copy(file, folder)
    data = json.loads((path / "config.json").read_text())
    data.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(data))
    save_file(dense_state(path, dtype), folder / "model.safetensors")


def has_llama_cpp() -> bool:
    """Whether llama.cpp's Python package is here, and the one that writes its files."""
    return all(importlib.util.find_spec(name) is not None for name in ("llama_cpp", "gguf"))


class LlamaCpp:
    """A GGUF file in llama.cpp. Driven through the C interface: two calls a token, so that Python hardly counts."""

    def __init__(self, file: Path, threads: int, temperature: float, seed: int) -> None:
        import llama_cpp  # pyright: ignore[reportMissingImports] # optional

        self._c: Any = llama_cpp
        self._llama = self._c.Llama(
            str(file),
            n_ctx=CONTEXT,
            n_batch=CONTEXT,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=True,  # never slower here, by a fifth faster at q8_0
            verbose=False,
        )
        self._sampler = self._c.llama_sampler_chain_init(self._c.llama_sampler_chain_default_params())
        steps = [self._c.llama_sampler_init_greedy()]
        if temperature:
            steps = [self._c.llama_sampler_init_temp(temperature), self._c.llama_sampler_init_dist(seed)]
        for step in steps:
            self._c.llama_sampler_chain_add(self._sampler, step)

    def generate(self, prompt: list[int], max_tokens: int) -> tuple[list[int], float]:
        """Exactly `max_tokens` new tokens from an empty cache, and the seconds that all but the first took."""
        self._c.llama_memory_clear(self._c.llama_get_memory(self._llama.ctx), False)
        tokens = [self._next(prompt)]
        prefilled = time.perf_counter()
        while len(tokens) < max_tokens:
            tokens.append(self._next(tokens[-1:]))
        return tokens, time.perf_counter() - prefilled

    def _next(self, tokens: list[int]) -> int:
        """The token after `tokens`, which follow those that the cache holds."""
        ids = (self._c.llama_token * len(tokens))(*tokens)
        failed = self._c.llama_decode(self._llama.ctx, self._c.llama_batch_get_one(ids, len(tokens)))
        assert not failed, f"llama_decode: {failed}"
        return self._c.llama_sampler_sample(self._sampler, self._llama.ctx, -1)
