"""Block heads (DFlash): the logits of a block equal an independent computation, with any kind of attention, operators
and number of ranks; what does not fit is refused in a line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from swiftspec.backends.cpu import cpu
from swiftspec.backends.reference import reference
from swiftspec.backends.unfused import unfused
from swiftspec.builder.memory_estimate import MemoryEstimate
from swiftspec.config import EngineConfig
from swiftspec.errors import UserError
from swiftspec.file_io import read_object
from swiftspec.llm_engine import LLMEngine
from swiftspec.model.block_head import BlockHead
from swiftspec.model.config_json import parse_config
from swiftspec.model.draft_head import DraftHead
from swiftspec.model.head_loader import load_draft_head
from swiftspec.model.loader import load_model
from swiftspec.model.spec import BlockSpec, DraftHeadSpec
from tests.model.architectures.test_families import new_cache
from tests.support.draft_heads import dflash_forward, make_dflash
from tests.support.thread_group import on_ranks
from tests.support.tiny_checkpoints import chain, make_checkpoint

TOKENS = [5, 17, 3, 29, 11, 8, 2, 30, 44, 1, 7, 9]  # the last one is the root
IDS, SIZE, MASK = (0, 2, 3), 6, 63
CONTEXT = len(TOKENS) - 1
BLOCK = [TOKENS[-1], *[MASK] * (SIZE - 1)]
SLIDING: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "use_sliding_window": True,
    "sliding_window": 5,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "causal in dflash_config": {"dflash_config": {"causal": True}},
    "sliding windows": SLIDING,
    "biased logits": {"dflash_config": {"output_multiplier": 0.25, "final_logit_softcapping": 3.0}},
    "scaled embedding": {"dflash_config": {"input_embedding_scale": 2.5}},
}
# shapes of z-lab/Qwen3-4B-DFlash-b16 and z-lab/Qwen3.5-4B-DFlash, whose block size is in another place
QWEN3_4B: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 16, "attention_bias": False,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2560, "intermediate_size": 9728, "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960, "max_window_layers": 5, "num_attention_heads": 32, "num_hidden_layers": 5,
    "num_key_value_heads": 8, "num_target_layers": 36, "rms_norm_eps": 1e-6, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False,
    "vocab_size": 151936, "dtype": "bfloat16",
}  # fmt: skip
QWEN3_5_4B: dict[str, Any] = QWEN3_4B | {
    "block_size": None, "intermediate_size": 9216, "num_hidden_layers": 6, "num_target_layers": 32,
    "dflash_config": {"block_size": 16, "mask_token_id": 248077, "target_layer_ids": [1, 5, 9, 13, 17, 21, 25, 29]},
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"], "max_position_embeddings": 262144,
    "max_window_layers": 6, "rope_theta": None, "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
    "sliding_window": 4096, "use_sliding_window": True, "vocab_size": 248320,
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    make_checkpoint(folder, layers=6, dtype=torch.float64)
    return folder


def states_of(target: Path) -> Tensor:
    """The hidden states of the verified positions."""
    model = load_model(target, dtype=torch.float64, ops=reference, max_positions=64, hidden_layers=IDS)
    hidden = model.forward(chain(TOKENS[:-1]), new_cache(model, reference, 64)).hidden
    assert hidden is not None
    return hidden


def run(head: DraftHead | BlockHead, states: Tensor, ops: Any = reference, depth: int = SIZE - 1) -> Tensor:
    """The logits of a block after the verified positions, which are written in two forwards."""
    rows, cache = head.project(states), new_cache(head, ops, 64)
    for first, last in ((0, 4), (4, len(rows))):
        cache.append_prefix(last - first)
        head.forward(replace(chain([0] * (last - first), first), hidden=rows[first:last]), cache, head=False)
    cache.append_tree(SIZE)
    block = replace(chain(BLOCK, len(rows)), num_logits=depth)
    logits = head.forward(replace(block, mask=torch.ones_like(block.mask)), cache).logits
    assert logits is not None
    return logits


def expected(target: Path, tensors: dict[str, Tensor], states: Tensor, variant: str) -> Tensor:
    weights, given = load_file(target / "model.safetensors"), VARIANTS[variant]
    at, keys = torch.arange(CONTEXT, CONTEXT + SIZE)[:, None], torch.arange(CONTEXT + SIZE)
    full = torch.ones(SIZE, CONTEXT + SIZE, dtype=torch.bool)
    causal = keys <= at
    layers = [causal if variant.startswith("causal") else full] * 3
    if variant == "sliding windows":
        window = causal & (at - keys < 5)
        layers = [window, full, window]
    more = given.get("dflash_config", {})
    embedding = weights["model.embed_tokens.weight"] * more.get("input_embedding_scale", 1.0)
    logits = dflash_forward(tensors, embedding, weights["lm_head.weight"], states, BLOCK, layers)
    if "final_logit_softcapping" in more:
        logits = 3.0 * torch.tanh(logits * 0.25 / 3.0)
    return logits


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("ops", [reference, unfused], ids=["reference", "unfused"])
def test_logits_equal_plain_torch(tmp_path: Path, target: Path, variant: str, ops: Any) -> None:
    tensors, states = make_dflash(tmp_path, **VARIANTS[variant]), states_of(target)
    head = load_draft_head(tmp_path, target, dtype=torch.float64, ops=ops, max_positions=64)
    want = expected(target, tensors, states, variant)
    torch.testing.assert_close(run(head, states, ops), want, rtol=0, atol=1e-5)  # RoPE frequencies are float32 numbers
    torch.testing.assert_close(run(head, states, ops, depth=2), want[:2], rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [2, 3])
def test_shards_equal_the_whole(tmp_path: Path, target: Path, size: int) -> None:
    make_dflash(tmp_path, **SLIDING)
    states = states_of(target)
    how: dict[str, Any] = {"dtype": torch.float64, "ops": reference, "max_positions": 64}
    want = run(load_draft_head(tmp_path, target, **how), states)
    parts = on_ranks(size, lambda group: run(load_draft_head(tmp_path, target, group=group, **how), states))
    torch.testing.assert_close(torch.cat([*parts], 1)[:, :64], want, rtol=0, atol=1e-9)


@pytest.mark.skipif(cpu.level() == "none", reason="there are no native operators here")
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-4), (torch.bfloat16, 0.5)])
@pytest.mark.parametrize("variant", ["full", "sliding windows"])
def test_native_operators(tmp_path: Path, dtype: torch.dtype, atol: float, variant: str) -> None:
    target, folder = tmp_path / "target", tmp_path / "head"
    make_checkpoint(target, layers=6, hidden_size=64, dtype=torch.float64)
    make_dflash(folder, hidden=64, **VARIANTS[variant])
    states = states_of(target)
    want = run(load_draft_head(folder, target, dtype=torch.float64, ops=reference, max_positions=64), states)
    got = run(load_draft_head(folder, target, dtype=dtype, ops=cpu, max_positions=64), states, cpu)
    torch.testing.assert_close(got.double(), want, rtol=0.05, atol=atol)


def test_masked_tokens(tmp_path: Path, target: Path) -> None:
    make_dflash(tmp_path)
    head = load_draft_head(tmp_path, target, dtype=torch.float64, ops=reference, max_positions=64)
    states = states_of(target)
    want = run(head, states)
    masked = head.with_masked_tokens([3, 40])
    assert isinstance(masked, BlockHead)
    want[:, [3, 40]] = -torch.inf
    assert torch.equal(run(masked, states), want)


def test_published_configurations() -> None:
    spec = parse_config(QWEN3_4B).spec
    assert spec.draft_head is not None and not spec.tie_word_embeddings
    assert spec.draft_head.block == BlockSpec(16, 151669, causal=False, target_layers=36)
    assert spec.draft_head.hidden_layers(36) == (1, 9, 17, 25, 33)
    assert spec.layer.attention.qk_norm == "head" and spec.layer.attention.window is None
    spec = parse_config(QWEN3_5_4B).spec
    assert spec.draft_head is not None and spec.draft_head.block == BlockSpec(16, 248077, False, 32)
    assert [layer.attention.window for layer in spec.layers] == [4096] * 5 + [None]
    assert spec.layers[0].attention.rope.theta == 1e7 and len(spec.draft_head.hidden_layers(32)) == 8


@pytest.mark.parametrize("ranks", [1, 2])
def test_memory(ranks: int) -> None:
    """The projection of the target's states is whole on every rank, as the embedding is."""
    hidden, inner, vocab, kv, q = 2560, 9728, 151936, 2048, 4096
    layer = (q + kv) * hidden + hidden * q + 3 * inner * hidden
    shared = 5 * layer + 5 * kv * hidden + vocab * hidden
    whole = 5 * hidden * hidden + vocab * hidden
    found = MemoryEstimate(parse_config(QWEN3_4B), torch.bfloat16, 8192, ranks, ops=unfused).weights
    assert found == pytest.approx(2 * (shared / ranks + whole), rel=0.001)


def test_layers_of_the_target() -> None:
    block = BlockSpec(6, 63, target_layers=7)
    head = DraftHeadSpec("dflash", target_hidden_size=8, draft_vocab_size=64, target_layer_ids=(1, 5), block=block)
    assert head.hidden_layers(7) == (1, 5)
    with pytest.raises(UserError, match="that of a target with 7 layers, but its target has 6"):
        head.hidden_layers(6)
    with pytest.raises(UserError, match=r"layers \[1, 6\], but those of 0..5"):
        replace(head, target_layer_ids=(1, 6)).hidden_layers(7)


def change(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    data = read_object(file)
    more = fields.pop("dflash_config", {})
    file.write_text(json.dumps({**data, **fields, "dflash_config": {**data["dflash_config"], **more}}))


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: change(folder, target_hidden_size=16), "reads hidden states of size 16"),
        (lambda folder: change(folder, num_target_layers=7), "a target with 7 layers, but its target has 6"),
        (lambda folder: change(folder, dflash_config={"target_layer_ids": [1, 3, 5]}), r"\[1, 3, 5\], but those of 0"),
        (lambda folder: change(folder, dflash_config={"target_layer_ids": None}), "target_layer_ids is missing"),
        (lambda folder: change(folder, dflash_config={"mask_token_id": None}), "mask_token_id is missing"),
        (lambda folder: change(folder, dflash_config={"mask_token_id": 64}), "mask_token_id must be"),
        (lambda folder: change(folder, block_size=1), "block_size must be"),
        (lambda folder: change(folder, dflash_config={"selector_rank": 8}), "'selector_rank' of dflash_config is not"),
        (lambda folder: change(folder, dflash_config={"use_swa": True}), "with use_swa is not supported"),
        (lambda folder: change(folder, add_swa_attention_sink_bias=True), "sink_bias is not supported"),
        (lambda folder: change(folder, dflash_config={"use_aux_hidden_state": False}), "without auxiliary hidden"),
        (lambda folder: change(folder, is_neox_style=False), "interleaved RoPE"),
        (lambda folder: change(folder, draft_vocab_size=40), "a part of the vocabulary"),
        (lambda folder: change(folder, speculators_model_type="dflash"), "library speculators"),
        (lambda folder: change(folder, **SLIDING, is_causal=False), "sliding windows that are not causal"),
        (lambda folder: change(folder, **SLIDING | {"use_sliding_window": False}), "use_sliding_window excludes"),
        (lambda folder: change(folder, vocab_size=72), "the embedding of target"),
        (lambda folder: change(folder, architectures=["DFlash2DraftModel"]), "'DFlash2DraftModel' is not supported"),
        (lambda folder: edit_tensors(folder, lambda all_: all_.pop("fc.weight")), "fc.weight is missing"),
        (
            lambda folder: edit_tensors(folder, lambda all_: all_.update(mask_embedding=torch.ones(32))),
            "mask_embedding is not part of the architecture",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, target: Path, spoil: Callable[[Path], object], message: str
) -> None:
    make_dflash(tmp_path)
    spoil(tmp_path)
    with pytest.raises(UserError, match=message):
        LLMEngine(target, tmp_path, dtype=torch.float64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "async"}, "not supported in mode async"), ({"mode": "smc"}, "not supported in mode smc"),
        ({"verify": "reject"}, "not supported with verify reject"),
    ],
)  # fmt: skip
def test_configurations_without_draft_heads(
    tmp_path: Path, target: Path, options: dict[str, Any], message: str
) -> None:
    make_dflash(tmp_path)
    given: dict[str, Any] = {"mode": "serial", **options}
    plan = EngineConfig(**given)
    with pytest.raises(UserError, match=message):
        LLMEngine(target, tmp_path, plan if plan.mode != "async" else replace(plan, draft_tp=0), dtype=torch.float64)
    with pytest.raises(UserError, match="is a draft head, which cannot run alone"):
        LLMEngine(tmp_path, dtype=torch.float64)
