"""Draft heads as checkpoints in their published formats, and their computation in plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from swiftspec.file_io import read_object

Tensors = dict[str, Tensor]


def _random(noise: torch.Generator, *shape: int, scale: float | None = None) -> Tensor:
    drawn = torch.randn(shape, generator=noise, dtype=torch.float64)
    return (1 + 0.3 * drawn) if len(shape) == 1 else (scale or 1.5 / shape[-1] ** 0.5) * drawn


def _layer(
    noise: torch.Generator, prefix: str, hidden: int, inputs: int, heads: int, kv_heads: int, dim: int
) -> Tensors:
    inner = 48
    shapes = {
        "self_attn.q_proj": (heads * dim, inputs), "self_attn.k_proj": (kv_heads * dim, inputs),
        "self_attn.v_proj": (kv_heads * dim, inputs), "self_attn.o_proj": (hidden, heads * dim),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    return {f"{prefix}.{name}.weight": _random(noise, *shape) for name, shape in shapes.items()}


def make_eagle3(
    folder: Path, *, vocab: int = 64, draft_vocab: int = 64, hidden: int = 32, target_hidden: int = 32, seed: int = 3,
    layers: tuple[int, ...] = (), embedding: bool = False, speculators: bool = False,
    norm_before_residual: bool = False, **config: Any,
) -> Tensors:  # fmt: skip
    """Writes a random EAGLE-3 head, by default without an embedding, and returns its tensors. `layers`: ids of the
    target's layers. `speculators`: in the layout of the library speculators."""
    noise, heads, kv_heads = torch.Generator().manual_seed(seed), 4, 2
    prefix = "layers.0" if speculators else "midlayer"
    tensors = _layer(noise, prefix, hidden, 2 * hidden, heads, kv_heads, hidden // heads)
    tensors |= {
        f"{prefix}.hidden_norm.weight": _random(noise, hidden),
        "norm.weight": _random(noise, hidden),
        "fc.weight": _random(noise, hidden, (len(layers) or 3) * target_hidden),
        "lm_head.weight": _random(noise, draft_vocab, hidden),
    }
    if embedding:
        tensors["embed_tokens.weight"] = _random(noise, vocab, hidden, scale=1.0)
    if draft_vocab < vocab:
        chosen = torch.randperm(vocab, generator=noise)[:draft_vocab].sort().values
        tensors["d2t"] = chosen - torch.arange(draft_vocab)
        tensors["t2d"] = torch.isin(torch.arange(vocab), chosen)
    inner: dict[str, Any] = {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": 48, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "num_hidden_layers": 1, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "hidden_act": "silu", "dtype": "float64",
    }  # fmt: skip
    outer: dict[str, Any] = {"draft_vocab_size": draft_vocab, "norm_before_residual": norm_before_residual}
    if target_hidden != hidden:
        outer["target_hidden_size"] = target_hidden
    if layers:
        outer["eagle_aux_hidden_state_layer_ids"] = [*layers]
    if speculators:
        about = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
        whole = {**about, "transformer_layer_config": inner, **outer, **config}
    else:
        whole = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **inner, **outer, **config}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(whole))
    save_file(tensors, folder / "model.safetensors")
    return tensors


def add_mtp(target: Path, *, seed: int = 4) -> Tensors:
    """Adds a random MTP layer to the checkpoint of a Qwen3.5 or Qwen3-Next, and returns its tensors."""
    (file,) = target.glob("*.safetensors")
    tensors, config = load_file(file), read_object(target / "config.json")
    noise, hidden = torch.Generator().manual_seed(seed), config["hidden_size"]
    index = config["layer_types"].index("full_attention")
    root = next(name for name in tensors if name.endswith("embed_tokens.weight")).removesuffix("embed_tokens.weight")
    added = {}
    for name, tensor in tensors.items():
        if name.startswith(f"{root}layers.{index}."):
            drawn = _random(noise, *tensor.shape).to(tensor.dtype)
            added[name.replace(f"{root}layers.{index}.", "mtp.layers.0.")] = drawn - 1 if drawn.ndim == 1 else drawn
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        added[f"mtp.{name}.weight"] = _random(noise, hidden).sub(1).to(torch.float64)
    added["mtp.fc.weight"] = _random(noise, hidden, 2 * hidden)
    save_file(tensors | added, file, {"format": "pt"})
    return added


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def rope(x: Tensor, theta: float = 10000.0, begin: int = 0) -> Tensor:
    """RoPE of x [heads, positions, dim], from position `begin` on."""
    half = x.shape[-1] // 2
    angles = torch.arange(begin, begin + x.shape[1], dtype=x.dtype)[:, None] * theta ** (
        -torch.arange(half, dtype=x.dtype) / half
    )
    first, second = x.chunk(2, -1)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


def eagle3_forward(
    tensors: Tensors, embedding: Tensor, tokens: list[int], states: Tensor, *, norm_before_residual: bool = False,
    prefix: str = "midlayer",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Logits [rows, draft vocab] and output states [rows, hidden] of a causal sequence, in the dtype of the tensors.
    `states` [rows, hidden]: projected hidden states, or outputs of the head."""
    own = {name.removeprefix(f"{prefix}."): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, own[f"{name}.weight"])

    normed = rms_norm(states, own["hidden_norm.weight"])
    x = torch.cat((rms_norm(embedding[tokens], own["input_layernorm.weight"]), normed), -1)
    q, k, v = (linear(x, f"self_attn.{name}_proj").unflatten(-1, (-1, 8)).transpose(0, 1) for name in "qkv")
    times = q.shape[0] // k.shape[0]
    mixed = F.scaled_dot_product_attention(
        rope(q), rope(k).repeat_interleave(times, 0), v.repeat_interleave(times, 0), is_causal=True
    )
    hidden = (normed if norm_before_residual else states) + linear(mixed.transpose(0, 1).flatten(1), "self_attn.o_proj")
    y = rms_norm(hidden, own["post_attention_layernorm.weight"])
    hidden = hidden + linear(F.silu(linear(y, "mlp.gate_proj")) * linear(y, "mlp.up_proj"), "mlp.down_proj")
    return F.linear(rms_norm(hidden, tensors["norm.weight"]), tensors["lm_head.weight"]), hidden


def make_dflash(
    folder: Path, *, vocab: int = 64, hidden: int = 32, layers: int = 3, seed: int = 5,
    ids: tuple[int, ...] = (0, 2, 3), block_size: int = 6, mask_token: int = 63,
    dflash_config: dict[str, Any] | None = None, **config: Any,
) -> Tensors:  # fmt: skip
    """Writes a random DFlash head in the layout of z-lab, and returns its tensors. `ids`: the target's layers."""
    noise, heads, kv_heads, dim = torch.Generator().manual_seed(seed), 4, 2, hidden // 4
    tensors: Tensors = {
        "fc.weight": _random(noise, hidden, len(ids) * hidden),
        "hidden_norm.weight": _random(noise, hidden),
        "norm.weight": _random(noise, hidden),
    }
    for index in range(layers):
        prefix = f"layers.{index}"
        tensors |= _layer(noise, prefix, hidden, hidden, heads, kv_heads, dim)
        tensors |= {f"{prefix}.self_attn.{name}_norm.weight": _random(noise, dim) for name in "qk"}
    whole: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": block_size, "vocab_size": vocab,
        "hidden_size": hidden, "intermediate_size": 48, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": dim, "num_hidden_layers": layers, "layer_types": ["full_attention"] * layers,
        "num_target_layers": 6, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "hidden_act": "silu", "dtype": "float64", "tie_word_embeddings": True,
        "dflash_config": {"mask_token_id": mask_token, "target_layer_ids": [*ids], **(dflash_config or {})},
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(whole | config))
    save_file(tensors, folder / "model.safetensors")
    return tensors


def dflash_forward(
    tensors: Tensors, embedding: Tensor, lm_head: Tensor, states: Tensor, block: list[int],
    visible: list[Tensor],
) -> Tensor:  # fmt: skip
    """Logits [positions, vocab] of all positions of a block but the first one, in the dtype of the tensors. `states`
    [context, layers, hidden]: hidden states of the target. `visible`: for each layer [positions, context + positions]
    bool, which keys a position attends to."""
    count, hidden = len(states), embedding[block]
    rows = rms_norm(F.linear(states.flatten(1), tensors["fc.weight"]), tensors["hidden_norm.weight"])
    for index, seen in enumerate(visible):
        prefix = f"layers.{index}."
        own = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
        x = rms_norm(hidden, own["input_layernorm.weight"])
        every = torch.cat((rows, x))
        q, k, v = (
            F.linear(part, own[f"self_attn.{name}_proj.weight"]).unflatten(-1, (-1, 8)).transpose(0, 1)
            for name, part in (("q", x), ("k", every), ("v", every))
        )
        q = rope(rms_norm(q, own["self_attn.q_norm.weight"]), begin=count)
        k = rope(rms_norm(k, own["self_attn.k_norm.weight"])).repeat_interleave(2, 0)
        scores = (q @ k.mT / 8**0.5).masked_fill(~seen, -torch.inf)
        mixed = (scores.softmax(-1) @ v.repeat_interleave(2, 0)).transpose(0, 1).flatten(1)
        hidden = hidden + F.linear(mixed, own["self_attn.o_proj.weight"])
        y = rms_norm(hidden, own["post_attention_layernorm.weight"])
        gate, up = (F.linear(y, own[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        hidden = hidden + F.linear(F.silu(gate) * up, own["mlp.down_proj.weight"])
    return F.linear(rms_norm(hidden[1:], tensors["norm.weight"]), lm_head)
