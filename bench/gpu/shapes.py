"""Model shapes of the GPU benchmarks, sharded for one rank of a group (model/shard.py).

Sizes that the number of ranks does not divide are padded with zeros. A sixth of a Llama-3 70B, for example, has 12
query heads, 3 key-value heads and 4,864 inputs of the down projection, and its kernels read the padding too.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from swiftspec.model.config_json import parse_config
from swiftspec.model.shard import Shard

GROUP = 128  # inputs per int4 group
GB = 1e9  # bytes
# hidden size, query heads, key-value heads, head dimension, intermediate size, vocabulary size
MODELS = {
    "Llama-3-70B": (8192, 64, 8, 128, 28672, 128256),
    "Llama-3-8B": (4096, 32, 8, 128, 14336, 128256),
    "Llama-3.2-3B": (3072, 24, 8, 128, 8192, 128256),
    "Llama-3.2-1B": (2048, 32, 8, 64, 8192, 128256),
    "Qwen2-72B": (8192, 64, 8, 128, 29568, 152064),
    "Qwen2-1.5B": (1536, 12, 2, 128, 8960, 151936),
}
LAYERS = {"Llama-3-70B": 80, "Llama-3-8B": 32, "Llama-3.2-3B": 28, "Llama-3.2-1B": 16}
# models and their TP sizes; the paper's Table 7 and models that fit on one GPU come first
SPLITS = [
    ("Llama-3-70B", 4), ("Llama-3-70B", 1), ("Llama-3.2-3B", 1), ("Llama-3.2-1B", 1), ("Llama-3-8B", 1),
    ("Llama-3-70B", 8), ("Llama-3.2-3B", 4), ("Llama-3-8B", 4), ("Llama-3.2-1B", 4), ("Llama-3-70B", 6),
    ("Llama-3-70B", 2), ("Llama-3-8B", 2), ("Llama-3.2-3B", 2), ("Llama-3.2-1B", 2), ("Llama-3-8B", 6),
    ("Llama-3.2-3B", 6), ("Llama-3.2-1B", 6), ("Llama-3-8B", 8), ("Llama-3.2-3B", 8), ("Llama-3.2-1B", 8),
    ("Qwen2-72B", 6), ("Qwen2-1.5B", 2),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class RankShape:
    """Sizes of one rank's shard of a model, padding included."""

    hidden: int
    heads: int
    kv_heads: int
    width: int  # head dimension
    inner: int  # intermediate size
    vocab: int
    o_group: int  # group size of O's int4 weights: smaller if a shard boundary is inside a group

    @staticmethod
    @functools.cache
    def of(model: str, tp: int) -> RankShape:
        """Returns the shape of the first of `tp` ranks. All ranks have the same shape."""
        hidden, heads, kv_heads, width, inner, vocab = MODELS[model]
        data = {
            "model_type": "llama", "hidden_act": "silu", "hidden_size": hidden, "num_hidden_layers": 1,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": width,
            "intermediate_size": inner, "vocab_size": vocab, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
            "quantization_config": {"quant_method": "awq", "group_size": GROUP},
        }  # fmt: skip
        shard = Shard.of(parse_config(data), 0, tp)
        o_group, layer = GROUP if tp == 1 else math.gcd(GROUP, width), shard.layers[0]
        down, head = layer.down.numel(), shard.vocab.numel()
        return RankShape(hidden, layer.num_heads, layer.kv_heads, width, down, head, o_group)

    def projection(self, op: str) -> tuple[int, int, int]:
        """Returns outputs, inputs and the inputs per int4 group (0: bfloat16) of a projection."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.width, self.hidden, GROUP),
            "o": (self.hidden, self.heads * self.width, self.o_group),
            "swiglu": (2 * self.inner, self.hidden, GROUP),
            "down": (self.hidden, self.inner, GROUP),
            "head": (self.vocab, self.hidden, 0),
        }[op]
