"""Every family on the reference and the library operators: logits in float64 equal to those of transformers, and greedy
text in the modes ar and serial and on two ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForImageTextToText

from swiftspec.backends.reference import reference
from swiftspec.backends.unfused import unfused
from swiftspec.cache.delta import DeltaCache
from swiftspec.cache.kv import KVCache
from swiftspec.cache.model_cache import ModelCache
from swiftspec.config import EngineConfig
from swiftspec.errors import UserError
from swiftspec.llm_engine import LLMEngine
from swiftspec.model.checkpoint_files import read_config
from swiftspec.model.loader import load_model
from swiftspec.model.tensor_parallel import TensorParallelGroup
from swiftspec.model.transformer import Transformer
from swiftspec.params import SamplingParams
from tests.support.cases import fast_first
from tests.support.thread_group import on_ranks
from tests.support.tiny_checkpoints import (
    ALL_FAMILIES,
    HYBRIDS,
    OTHER_FAMILIES,
    ROPES,
    chain,
    make_checkpoint,
    make_model,
    make_pair,
)

CAPACITY = 64
TOKENS = [5, 17, 3, 29, 11, 8, 2, 30, 44, 1, 7, 9, 60, 3, 3, 21, 50, 33, 4, 6]
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


@contextmanager
def float64_throughout() -> Iterator[None]:
    """transformers computes its norms and routers in float32 whatever the dtype of the model; here in float64."""
    narrow, narrow_to, narrow_type, softmax = Tensor.float, Tensor.to, Tensor.type, functional.softmax

    def to(x: Tensor, *args: Any, **options: Any) -> Tensor:
        wanted = args[0] if args else options.get("dtype")
        return x if x.dtype == torch.float64 and wanted == torch.float32 else narrow_to(x, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", lambda x: x if x.dtype == torch.float64 else narrow(x))
        patch.setattr(Tensor, "to", to)
        patch.setattr(Tensor, "type", lambda x, kind: x if x.dtype == torch.float64 else narrow_type(x, kind))
        patch.setattr(functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim))
        yield


def expected(model: Any, tokens: list[int]) -> Tensor:
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):  # angles are computed in float32 by both
            buffer.data = buffer.data.float()
    with torch.no_grad(), float64_throughout():
        return model(torch.tensor([tokens])).logits[0]


def logits(path: Path, ops: Any, group: TensorParallelGroup | None = None, positions: int = CAPACITY) -> Tensor:
    """Logits of TOKENS: the first as a chunk, the next one alone, then the rest."""
    model = load_model(path, dtype=torch.float64, ops=ops, max_positions=positions, group=group)
    cache = new_cache(model, ops)
    rows: list[Tensor] = []
    for first, last in ((0, 7), (7, 8), (8, len(TOKENS))):
        out = model.forward(chain(TOKENS[first:last], first), cache).logits
        assert out is not None
        rows.append(out)
    return gathered(torch.cat(rows), model)


def gathered(local: Tensor, model: Transformer) -> Tensor:
    """The logits of the whole vocabulary."""
    if model.group is None:
        return local
    return torch.cat(model.group.all_gather(local).unbind(0), -1)[:, : model.spec.vocab_size]


def greedy_text(path: Path, group: TensorParallelGroup, count: int) -> list[int]:
    """Greedy text of one rank of a group."""
    length = len(TOKENS) + count
    model = load_model(path, dtype=torch.float64, ops=reference, max_positions=length, group=group)
    cache, tokens = new_cache(model, reference, length), list(TOKENS)
    first = 0
    while len(tokens) < length:
        out = model.forward(chain(tokens[first:], first), cache).logits
        assert out is not None
        first = len(tokens)
        tokens.append(int(gathered(out[-1:], model).argmax()))
    return tokens[len(TOKENS) :]


def new_cache(model: Transformer, ops: Any, capacity: int = CAPACITY) -> ModelCache:
    kv, *further = (KVCache(*shape, capacity, ops.make_slot_mover, dtype=model.dtype) for shape in model.cache_shapes)
    delta = None
    if model.delta_shape is not None:
        delta = DeltaCache(model.delta_shape, capacity, ops, dtype=model.stream_dtype)
    return ModelCache(kv, further=further, delta=delta)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_logits_equal_those_of_transformers(tmp_path: Path, family: str) -> None:
    want = expected(make_checkpoint(tmp_path, family=family, dtype=torch.float64), TOKENS)
    for ops in (reference, unfused):
        torch.testing.assert_close(logits(tmp_path, ops), want, rtol=0, atol=1e-9)
    one, two = on_ranks(2, lambda group: logits(tmp_path, reference, group))
    assert torch.equal(one, two)
    torch.testing.assert_close(one, want, rtol=0, atol=1e-9)


def test_longrope_beyond_the_trained_length(tmp_path: Path) -> None:
    """The context decides, not the length of a text."""
    theirs = make_checkpoint(tmp_path, family="phi3", dtype=torch.float64)
    tokens = [(7 * i * i + i) % 64 for i in range(70)]
    model = load_model(tmp_path, dtype=torch.float64, ops=reference, max_positions=128)
    cache = new_cache(model, reference, capacity=80)
    torch.testing.assert_close(model.forward(chain(tokens), cache).logits, expected(theirs, tokens), rtol=0, atol=1e-9)


MULTIMODAL = {
    "Mistral3ForConditionalGeneration": "ministral3",
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Gemma4ForConditionalGeneration": "gemma4_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text",
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("old", [False, True], ids=["transformers 5", "transformers 4"])
@pytest.mark.parametrize("architecture", MULTIMODAL)
def test_the_text_model_of_a_multimodal_checkpoint(tmp_path: Path, architecture: str, old: bool) -> None:
    """Tensors of other modalities are not read, and one of the text model that is unknown is an error."""
    theirs = make_checkpoint(tmp_path / "text", family=MULTIMODAL[architecture], dtype=torch.float64)
    text = json.loads((tmp_path / "text" / "config.json").read_text())
    tensors = load_file(tmp_path / "text" / "model.safetensors")
    head = "language_model.lm_head" if old else "lm_head"
    root = "language_model.model" if old else "model.language_model"
    named = {
        name.replace("lm_head", head) if name.startswith("lm_head") else f"{root}{name.removeprefix('model')}": tensor
        for name, tensor in tensors.items()
    }
    path = tmp_path / "multimodal"
    path.mkdir()
    shared = {"architectures": [architecture], "dtype": text.pop("dtype"), "eos_token_id": text.pop("eos_token_id")}
    (path / "config.json").write_text(json.dumps({**shared, "text_config": text, "vision_config": {}}))
    save_file(named | {"vision_tower.patch.weight": torch.zeros(3)}, path / "model.safetensors")
    torch.testing.assert_close(logits(path, reference), expected(theirs, TOKENS), rtol=0, atol=1e-9)
    assert read_config(path).eos_token_ids == (2,) and read_config(path).dtype == "float64"
    save_file(named | {f"{root}.layers.0.more.weight": torch.zeros(3)}, path / "model.safetensors")
    with pytest.raises(UserError, match=r"layers\.0\.more\.weight is not part of the architecture"):
        logits(path, reference)


SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_text_in_a_vision_model(tmp_path: Path, kind: str) -> None:
    """As transformers writes it, and with the text model's fields and tensors as the first files of Qwen2-VL have them:
    as those of a model alone."""
    sections = [2, 1, 1]
    text = {**SMALL, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}}
    text |= {"head_dim": 8} if kind == "qwen3_vl" else {}
    vision = {"depth": 1, "hidden_size": 32, "embed_dim": 32, "num_heads": 2, "out_hidden_size": 32}
    config = AutoConfig.for_model(kind, text_config=text, vision_config=vision, tie_word_embeddings=False)
    torch.manual_seed(0)
    theirs = AutoModelForImageTextToText.from_config(config).to(torch.float64).eval()
    theirs.save_pretrained(tmp_path / "new")
    want = expected(theirs, TOKENS)
    torch.testing.assert_close(logits(tmp_path / "new", reference), want, rtol=0, atol=1e-9)
    (tmp_path / "old").mkdir()
    data = json.loads((tmp_path / "new" / "config.json").read_text())
    flat = {key: value for key, value in data.pop("text_config").items() if key != "model_type"}
    flat |= {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": sections}}
    del flat["rope_parameters"]
    (tmp_path / "old" / "config.json").write_text(json.dumps({**flat, **data}))
    tensors = load_file(tmp_path / "new" / "model.safetensors")
    named = {name.replace("model.language_model.", "model.").replace("model.visual", "visual"): tensor
             for name, tensor in tensors.items()}  # fmt: skip
    save_file(named, tmp_path / "old" / "model.safetensors")
    assert any(name.startswith("model.layers.0") for name in named)
    torch.testing.assert_close(logits(tmp_path / "old", reference), want, rtol=0, atol=1e-9)


def text_by_transformers(model: Any, count: int) -> list[int]:
    """Greedy text without a cache."""
    tokens = list(TOKENS)
    for _ in range(count):
        tokens.append(int(expected(model, tokens)[-1].argmax()))
    return tokens[len(TOKENS) :]


@pytest.mark.parametrize("family", fast_first(["gemma3_text", *(f for f in ALL_FAMILIES if f != "gemma3_text")], 1))
def test_greedy_text_in_every_mode(tmp_path: Path, family: str) -> None:
    """48 tokens as transformers generates them: without and with a draft tree, with either operators; on two ranks."""
    # tied embeddings repeat a token; longrope of transformers depends on the length of the text
    shape: dict[str, Any] = {"family": family, "tie": False, "seed": 1}
    if family == "phi3":
        shape["rope"] = {**ROPES["default"], "partial_rotary_factor": 0.75}
    theirs = make_model(dtype=torch.float64, **shape)
    target, draft = make_pair(tmp_path, **shape)
    want = text_by_transformers(theirs, 48)
    options: dict[str, Any] = {"dtype": torch.float64, "max_model_len": 96}
    for ops in ("reference", "unfused"):
        assert LLMEngine(target, ops=ops, **options).generate(TOKENS, GREEDY).token_ids == want
        answer = LLMEngine(target, draft, EngineConfig("serial"), ops=ops, **options).generate(TOKENS, GREEDY)
        assert answer.token_ids == want and answer.stats.accepted > 5 and len(set(want)) > 5
    assert on_ranks(2, lambda group: greedy_text(target, group, 48)) == [want, want]


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_a_float8_cache_holds_every_key_and_value(tmp_path: Path, family: str) -> None:
    target, draft = make_pair(tmp_path, family=family)
    options: dict[str, Any] = {"dtype": torch.float64, "max_model_len": 96, "ops": "reference", "kv_cache_dtype": "fp8"}
    if family in ("olmo2", "olmo3") or family in HYBRIDS:
        reason = "gated delta layers" if family in HYBRIDS else "without a norm before attention"
        with pytest.raises(UserError, match=reason):
            LLMEngine(target, **options)
        return
    want = LLMEngine(target, **options).generate(TOKENS, GREEDY).token_ids
    assert LLMEngine(target, draft, EngineConfig("serial"), **options).generate(TOKENS, GREEDY).token_ids == want
