"""A target and a draft with random weights, tokenizer and chat template: complete model directories that are written
quickly."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

END, USER, BOT = SPECIAL = ("<|end|>", "<|user|>", "<|bot|>")
CORPUS = (
    "def add(a, b):\n    return a + b\n",
    "class Reader:\n    def read(self):\n        return self.text\n",
    "für été 中文",
)
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + ('user' if m.role == 'user' else 'bot') + '|>' + m.content + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"
)
VOCAB, HIDDEN, INNER, HEADS, KV_HEADS = 320, 32, 48, 4, 2
CONTEXT = 256


def byte_level_tokenizer(special: tuple[str, ...] = SPECIAL) -> Tokenizer:
    """A byte-level BPE of 300 tokens: special ones first, then the bytes, then merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """Like Llama 2: ▁ for a space, <0xE2> for a byte without a token."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁def",
        "▁a",
        "a",
        "b",
        "é",
        ".",
        "�",
    ]
    tokenizer = Tokenizer(
        models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in words[:3]])
    return tokenizer


def write_tokenizer(folder: Path, tokenizer: Tokenizer, template: str | None = TEMPLATE, **config: object) -> Path:
    """The tokenizer's files of a model directory."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    values: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, **config}
    if template is not None:
        values["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder


def write_model(folder: Path, weights: dict[str, torch.Tensor], **config: object) -> Path:
    """A Llama of one layer in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    fields: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float32", "eos_token_id": 0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(fields | config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def random_weights(seed: int) -> dict[str, torch.Tensor]:
    """Strong layers, so that greedy text does not repeat one token."""
    noise = torch.Generator().manual_seed(seed)
    inner, kv = INNER, HIDDEN * KV_HEADS // HEADS
    shapes = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (kv, HIDDEN), "self_attn.v_proj": (kv, HIDDEN)}
    shapes |= {"self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (inner, HIDDEN), "mlp.up_proj": (inner, HIDDEN)}
    shapes |= {"mlp.down_proj": (HIDDEN, inner)}
    weights = {f"model.layers.0.{name}.weight": shape for name, shape in shapes.items()}
    weights |= {"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    drawn = {
        n: torch.randn(s, generator=noise) * (1.0 if "embed" in n else 2 / s[1] ** 0.5) for n, s in weights.items()
    }
    norms = ("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm")
    return drawn | {f"{name}.weight": torch.ones(HIDDEN) for name in norms}


def make_pair(folder: Path) -> tuple[Path, Path]:
    """folder/target and folder/draft. The draft is the target with a little noise, so its acceptance rate is high."""
    tokenizer = byte_level_tokenizer()
    target, noise = random_weights(0), random_weights(1)
    draft = {name: weight + (0.02 * noise[name] if weight.ndim == 2 else 0) for name, weight in target.items()}
    for name, weights in (("target", target), ("draft", draft)):
        write_model(folder / name, weights)
        write_tokenizer(folder / name, tokenizer)
    return folder / "target", folder / "draft"
