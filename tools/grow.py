"""Places a small model in a large shape so that it computes the same function: speed like the large, text of the small.

    python -m tools.grow swiftspec/demo/target Llama-3-8B build/grown-8b [--dtype int4] [--seed 0]

The shape is one of SHAPES or a config.json. What is the same, and how (D hidden size, hd width of a head; ' is large):

- The residual stream carries the small model's D columns and exact zeros in the others, so a mean of squares over D'
  is D / D' of what it was. Norm weights are multiplied by sqrt(D / D'), and so is epsilon by D / D'.
- hd' = s hd: small dimension d is large dimension s d, which keeps RoPE's pairs together and their angles alike under
  the small model's theta and scaling. These replace the shape's own. Query rows are multiplied by sqrt(s), because
  scores are divided by sqrt(hd').
- Query heads that a large key-value head has too many of attend to true values, and O does not hear them; key-value
  heads that the small model lacks hold zero values.
- Layers are spread over the large number; the others have random weights, but V and up give exact zeros there.
- Tokens beyond the small vocabulary get logits far below the others. One column of the residual stream holds the same
  small constant after every token; no layer hears or changes it (its weight is 0 in their norms), and the head's rows
  beyond the vocabulary take it times MASK. The constant's square stands for half of epsilon.

All else is random (tools/place.py), so nothing can be left out or compressed. Int4 keeps the codes, scales and zero
points of an int4 model, but for the query rows' scales, which are rounded to fp16 again; a dense model is rounded to
nearest, in groups that its columns are spread over, and is then not quite the same: good enough for a draft. Dense
weights multiplied by what is no power of two are rounded once more, too.

The configuration keeps the small model's family, biases, longest context and end tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from swiftspec.errors import UserError
from swiftspec.model.config import ModelConfig
from swiftspec.model.linear import AWQ_ORDER, DenseWeight, Weight, pack_int4, unpack_int4
from swiftspec.model.loader import read_model
from swiftspec.model.transformer import LayerWeights, ModelWeights, Ops, Transformer
from tools.place import FREE, GROUP, LOUD, SILENT, Filler, Maps, place, spread

MASK = -(2.0**22)  # times the normed constant: below -100 as long as the residual's root mean square is below 1e3
FIELDS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "tie_word_embeddings",
)  # fmt: skip
SHAPES: dict[str, tuple[int | bool, ...]] = {
    "Llama-3.2-1B": (2048, 16, 32, 8, 64, 8192, 128256, True),
    "Llama-3.2-3B": (3072, 28, 24, 8, 128, 8192, 128256, True),
    "Llama-3-8B": (4096, 32, 32, 8, 128, 14336, 128256, False),
    "Llama-3-70B": (8192, 80, 64, 8, 128, 28672, 128256, False),
}
Kind = Literal["int4", "bf16", "f32"]
DTYPES = {"int4": torch.bfloat16, "bf16": torch.bfloat16, "f32": torch.float32}


def read_shape(shape: str) -> dict[str, Any]:
    """The sizes that FIELDS name, of a shape's name or a config.json."""
    if shape in SHAPES:
        return dict(zip(FIELDS, SHAPES[shape], strict=True))
    if not Path(shape).is_file():
        raise UserError(f"{shape}: neither {', '.join(SHAPES)} nor the path of a config.json")
    data = json.loads(Path(shape).read_text(encoding="utf-8"))
    config = ModelConfig.from_dict(data)
    sizes = (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim)
    rest = (config.intermediate_size, config.vocab_size, config.tie_word_embeddings)
    return dict(zip(FIELDS, sizes + rest, strict=True))


def grown_config(small: ModelConfig, sizes: dict[str, Any], kind: Kind) -> dict[str, Any]:
    """The config.json of the small model in the large shape."""
    share = small.hidden_size / sizes["hidden_size"]
    rope: dict[str, Any] = {"rope_theta": small.rope.theta, "rope_type": small.rope.kind}
    if small.rope.kind != "default":
        rope |= {"factor": small.rope.factor}
    if small.rope.kind == "llama3":
        rope |= {"low_freq_factor": small.rope.low_freq_factor, "high_freq_factor": small.rope.high_freq_factor}
        rope |= {"original_max_position_embeddings": small.rope.original_max_position}
    family = "Llama" if small.family == "llama" else "Qwen2"
    quant = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": GROUP, "zero_point": True}
    return sizes | {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": small.family,
        "hidden_act": "silu",
        "rms_norm_eps": small.rms_norm_eps * share / (2 if sizes["vocab_size"] > small.vocab_size else 1),
        "rope_parameters": rope,
        "max_position_embeddings": small.max_position_embeddings,
        "attention_bias": small.family == "llama" and small.qkv_bias,
        "mlp_bias": small.mlp_bias,
        "eos_token_id": list(small.eos_token_ids),
        "torch_dtype": str(DTYPES[kind]).removeprefix("torch."),
        **({"quantization_config": quant} if kind == "int4" else {}),
    }


@dataclass(frozen=True, slots=True)
class Grown:
    """A small model in a large shape; `weights` makes the matrices one after the other."""

    small: ModelConfig
    large: ModelConfig
    source: ModelWeights
    maps: Maps
    filler: Filler

    @staticmethod
    def of(path: str | Path, sizes: dict[str, Any], kind: Kind, device: torch.device | str, seed: int) -> Grown:
        """Raises UserError where the model does not fit the shape."""
        small, source = read_model(path)
        large = ModelConfig.from_dict(grown_config(small, sizes, kind))
        spare = large.hidden_size - small.hidden_size
        if large.vocab_size < small.vocab_size or (large.vocab_size > small.vocab_size and spare < 1):
            raise UserError(f"{path}: the vocabulary may only grow, and only together with the hidden size")
        if large.tie_word_embeddings and not small.tie_word_embeddings:
            raise UserError(f"{path}: its head is not its embedding, which this shape demands")
        if large.hidden_size % GROUP or large.intermediate_size % GROUP or large.num_heads * large.head_dim % GROUP:
            raise UserError(f"the sizes of the shape must be multiples of {GROUP}")
        noise = torch.Generator(device).manual_seed(seed)
        return Grown(small, large, source, place(small, large), Filler(noise, DTYPES[kind], kind == "int4"))

    @property
    def constant(self) -> int | None:
        """The column of the residual stream that is the same after every token, if there are tokens to mask."""
        if self.large.vocab_size == self.small.vocab_size:
            return None
        return int((self.maps.hidden == SILENT).nonzero()[0])

    def weights(self) -> ModelWeights:
        """Embedding and head now, a layer when it is asked for."""
        known, constant, filler = self.small.vocab_size, self.constant, replace(self.filler, int4=False)
        rows = torch.cat((torch.arange(known), torch.full((self.large.vocab_size - known,), FREE)))
        columns = self.maps.hidden  # a known token's row is zero where it is not the small model's
        embedding = filler.dense_matrix(DenseWeight(self.source.embedding), rows, columns)
        if constant is not None:
            embedding[:known, constant] = (self.small.rms_norm_eps * self.small.hidden_size / 2) ** 0.5
            embedding[known:, constant] = MASK  # nobody reads it as an embedding
        head = embedding
        if not self.large.tie_word_embeddings:
            columns = self.maps.input.clone()
            if constant is not None:
                columns[constant] = LOUD
            head = filler.dense_matrix(self.source.head, rows, columns)
            if constant is not None:
                head[known:, constant] = MASK
        return ModelWeights(embedding, self.layers(), self._norm(self.source.norm, 1.0), DenseWeight(head))

    def layers(self) -> Iterator[LayerWeights]:
        """All of the large model's, the small one's among them."""
        layers = iter(self.source.layers)
        for number in spread(self.small.num_layers, self.large.num_layers, FREE).tolist():
            yield self._layer(next(layers) if number >= 0 else None)

    def _layer(self, source: LayerWeights | None) -> LayerWeights:
        matrix, maps = self.filler.matrix, self.maps
        gain = torch.ones(maps.qkv.shape[0])
        gain[: maps.o.shape[0]] = (self.large.head_dim / self.small.head_dim) ** 0.5
        if source is None:
            source, maps = self._nothing(), maps.blank()
        return LayerWeights(
            input_norm=self._norm(source.input_norm, 0.0),
            qkv=matrix(source.qkv, maps.qkv, maps.input, gain),
            o=matrix(source.o, maps.hidden, maps.o),
            post_norm=self._norm(source.post_norm, 0.0),
            gate_up=matrix(source.gate_up, maps.gate_up, maps.input),
            down=matrix(source.down, maps.hidden, maps.down),
        )

    def _nothing(self) -> LayerWeights:
        """What a blank layer takes: biases of zero, and of the matrices not a row."""
        config = self.small
        heads, kv_heads, inner = config.num_heads, config.num_kv_heads, config.intermediate_size

        def weight(rows: int, columns: int, bias: bool) -> Weight:
            return DenseWeight(torch.zeros(rows, columns), torch.zeros(rows) if bias else None)

        return LayerWeights(
            input_norm=torch.ones(config.hidden_size),
            qkv=weight((heads + 2 * kv_heads) * config.head_dim, config.hidden_size, config.qkv_bias),
            o=weight(config.hidden_size, heads * config.head_dim, config.o_bias),
            post_norm=torch.ones(config.hidden_size),
            gate_up=weight(2 * inner, config.hidden_size, config.mlp_bias),
            down=weight(config.hidden_size, inner, config.mlp_bias),
        )

    def _norm(self, source: Tensor, constant: float) -> Tensor:
        """[D'] float32, `constant` for the column of that name."""
        columns = self.maps.hidden
        weight = torch.where(columns < 0, 1.0, source.float()[columns.clamp_min(0)])
        weight *= (self.small.hidden_size / self.large.hidden_size) ** 0.5
        if self.constant is not None:
            weight[self.constant] = constant
        return weight.to(self.filler.device)


def load(
    path: str | Path,
    sizes: dict[str, Any],
    kind: Kind,
    *,
    device: torch.device | str,
    ops: Ops,
    max_positions: int,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Transformer:
    """The grown model as model/loader.py would load it, made on the device: nothing is written, nothing held twice."""
    grown = Grown.of(path, sizes, kind, device, seed)
    return Transformer(grown.large, grown.weights(), ops, device, dtype or DTYPES[kind], max_positions)


def write_config(path: str | Path, sizes: dict[str, Any], kind: Kind, out: Path) -> None:
    """The grown model's config.json, and the small model's tokenizer if it has one."""
    out.mkdir(parents=True, exist_ok=True)
    config = grown_config(ModelConfig.from_dir(path), sizes, kind)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (Path(path) / name).is_file():
            shutil.copy(Path(path) / name, out / name)


def write(path: str | Path, sizes: dict[str, Any], kind: Kind, out: Path, device: str = "cpu", seed: int = 0) -> None:
    """The grown model as a checkpoint, a file for each layer: AutoAWQ "gemm" in int4."""
    grown = Grown.of(path, sizes, kind, device, seed)
    write_config(path, sizes, kind, out)
    weights, where, count = grown.weights(), dict[str, str](), grown.large.num_layers
    rest = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.norm}
    if not grown.large.tie_word_embeddings:
        rest["lm_head.weight"] = weights.head.dequantize(DTYPES[kind])
    files = itertools.chain([rest], (_named(grown.large, i, layer) for i, layer in enumerate(weights.layers)))
    for number, tensors in enumerate(files):
        file = f"model-{number:05}-of-{count:05}.safetensors"
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, out / file)
        where |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": where}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _named(config: ModelConfig, number: int, layer: LayerWeights) -> dict[str, Tensor]:
    """A layer's tensors by their Hugging Face names."""
    q, kv, inner = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.intermediate_size
    prefix = f"model.layers.{number}"
    modules: list[tuple[str, Weight, int, int]] = [
        ("self_attn.q_proj", layer.qkv, 0, q),
        ("self_attn.k_proj", layer.qkv, q, q + kv),
        ("self_attn.v_proj", layer.qkv, q + kv, q + 2 * kv),
        ("self_attn.o_proj", layer.o, 0, config.hidden_size),
        ("mlp.gate_proj", layer.gate_up, 0, inner),
        ("mlp.up_proj", layer.gate_up, inner, 2 * inner),
        ("mlp.down_proj", layer.down, 0, config.hidden_size),
    ]
    tensors = {
        f"{prefix}.input_layernorm.weight": layer.input_norm,
        f"{prefix}.post_attention_layernorm.weight": layer.post_norm,
    }
    for name, weight, start, stop in modules:
        tensors |= {f"{prefix}.{name}.{part}": tensor for part, tensor in _parts(weight, start, stop).items()}
    return tensors


def _parts(weight: Weight, start: int, stop: int) -> dict[str, Tensor]:
    """Rows start to stop of a matrix as a file holds them."""
    tensors = {} if weight.bias is None else {"bias": weight.bias[start:stop]}
    if isinstance(weight, DenseWeight):
        return tensors | {"weight": weight.weight[start:stop]}
    words = slice(start // 8, stop // 8)
    for name, packed in (("qweight", weight.packed), ("qzeros", weight.zeros)):
        tensors[name] = pack_int4(unpack_int4(packed[:, words]), AWQ_ORDER)
    return tensors | {"scales": weight.scales[:, start:stop]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory of the small model")
    parser.add_argument("shape", help=f"{', '.join(SHAPES)}, or a config.json")
    parser.add_argument("out", type=Path, help="directory to write")
    parser.add_argument("--dtype", choices=list(DTYPES), default="int4")
    parser.add_argument("--device", default="cpu", help="where the weights are made")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    args = parser.parse_args()
    try:
        write(args.model, read_shape(args.shape), args.dtype, args.out, args.device, args.seed)
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
