"""The E models of Gemma 4: per-layer embeddings, and layers that share keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftspec.backends.cpu import cpu as host
from swiftspec.backends.reference import reference
from swiftspec.backends.unfused import unfused
from swiftspec.config import EngineConfig
from swiftspec.errors import UserError
from swiftspec.llm_engine import LLMEngine
from swiftspec.model.checkpoint_files import read_config
from swiftspec.model.loader import load_model
from swiftspec.params import SamplingParams
from tests.model.architectures import test_native_families as native
from tests.model.architectures.test_families import (
    GREEDY,
    TOKENS,
    expected,
    greedy_text,
    logits,
    text_by_transformers,
)
from tests.support.thread_group import on_ranks
from tests.support.tiny_checkpoints import chain, make_checkpoint, make_model, make_pair

SLIDING, FULL = "sliding_attention", "full_attention"
E_MODEL: dict[str, Any] = {  # the last three layers, of both kinds, share keys and values
    "family": "gemma4_text", "layers": 6, "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
    "num_kv_shared_layers": 3, "use_double_wide_mlp": True, "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64,
}  # fmt: skip
NATIVE = E_MODEL | {"head_dim": 16, "global_head_dim": 48, "sliding_window": 19, "hidden_size_per_layer_input": 24}
needs_native = pytest.mark.skipif(host.level() == "none", reason="there are no native operators here")


def test_logits_equal_those_of_transformers(tmp_path: Path) -> None:
    want = expected(make_checkpoint(tmp_path, dtype=torch.float64, **E_MODEL), TOKENS)
    for ops in (reference, unfused):
        torch.testing.assert_close(logits(tmp_path, ops), want, rtol=0, atol=1e-9)
    one, two = on_ranks(2, lambda group: logits(tmp_path, reference, group))
    assert torch.equal(one, two)
    torch.testing.assert_close(one, want, rtol=0, atol=1e-9)


def test_layers_that_share_keys_and_values_have_no_cache(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, **E_MODEL)
    mixers = read_config(tmp_path).spec.attention_mixers
    assert [mixer.shares_kv for mixer in mixers] == [False] * 3 + [True] * 3
    assert [layer.mlp.intermediate_size for layer in read_config(tmp_path).spec.layers] == [48] * 3 + [96] * 3
    model = load_model(tmp_path, ops=reference, max_positions=32)
    assert model.cache_shapes == ((2, 2, 8), (1, 2, 16)), "layers, KV heads and head dimension"
    assert [layer.cache_layer for layer in model.stack.layers] == [0, 0, 1, 0, 1, 0]


def test_unused_keys_and_values_of_a_checkpoint_are_not_read(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, dtype=torch.float64, **E_MODEL)
    before, file = logits(tmp_path, reference), tmp_path / "model.safetensors"
    tensors = load_file(file)
    unused = {f"model.layers.3.self_attn.{name}.weight": torch.ones(3) for name in ("k_proj", "v_proj", "k_norm")}
    save_file(tensors | unused, file)
    assert torch.equal(logits(tmp_path, reference), before)
    save_file(tensors | {"model.layers.2.self_attn.k_bias.weight": torch.ones(3)}, file)
    with pytest.raises(UserError, match="k_bias"):
        logits(tmp_path, reference)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_kv_shared_layers": 5}, "leaves no layer whose keys and values"),
        ({"vocab_size_per_layer_input": 63}, "vocab_size_per_layer_input 63 other than vocab_size 64"),
    ],
)
def test_unsupported_fields_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    make_model(**E_MODEL).config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    for name, value in fields.items():
        file.write_text(file.read_text().replace(f'"{name}": {E_MODEL[name]}', f'"{name}": {value}'))
    with pytest.raises(UserError, match=message):
        read_config(tmp_path)


@pytest.mark.parametrize("ops", [reference, pytest.param(host, marks=needs_native)], ids=["reference", "native"])
def test_a_prompt_without_logits_has_the_same_cache_and_hidden_states(tmp_path: Path, ops: Any) -> None:
    make_checkpoint(tmp_path, **NATIVE)
    model, keeps = (
        load_model(tmp_path, dtype=torch.float32, ops=ops, max_positions=64, hidden_layers=kept) for kept in ((), (5,))
    )
    every, few = native.new_cache(model, ops), native.new_cache(model, ops)
    model.forward(chain(TOKENS), every)
    assert model.forward(chain(TOKENS), few, head=False).logits is None
    caches: Any = zip(every.kinds, few.kinds, strict=True)
    assert all(torch.equal(one.k, two.k) and torch.equal(one.v, two.v) for one, two in caches)
    one, two = (keeps.forward(chain(TOKENS), few, head=head).hidden for head in (False, True))
    assert one is not None and two is not None and torch.equal(one, two)


def test_a_prompt_without_logits_skips_the_layers_that_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, **E_MODEL)
    model, calls, mlp = load_model(tmp_path, ops=reference, max_positions=64), list[int](), reference.mlp
    monkeypatch.setattr(reference, "mlp", lambda *args, **more: calls.append(1) or mlp(*args, **more))
    for head, layers in ((False, 3), (True, 6)):
        calls.clear()
        model.forward(chain(TOKENS), native.new_cache(model, reference), head=head)
        assert len(calls) == layers


@pytest.mark.slow
def test_greedy_text_equals_that_of_transformers(tmp_path: Path) -> None:
    shape: dict[str, Any] = E_MODEL | {"tie": False}
    target, draft = make_pair(tmp_path, **shape)
    want = text_by_transformers(make_model(dtype=torch.float64, seed=1, **shape), 48)
    options: dict[str, Any] = {"dtype": torch.float64, "max_model_len": 96}
    for ops in ("reference", "unfused"):
        assert LLMEngine(target, ops=ops, **options).generate(TOKENS, GREEDY).token_ids == want
        answer = LLMEngine(target, draft, EngineConfig("serial"), ops=ops, **options).generate(TOKENS, GREEDY)
        assert answer.token_ids == want and answer.stats.accepted > 5 and len(set(want)) > 5
    assert on_ranks(2, lambda group: greedy_text(target, group, 48)) == [want, want]
    with pytest.raises(UserError, match="not supported with shared KV layers"):
        LLMEngine(target, ops="reference", kv_cache_dtype="fp8", **options)


@needs_native
def test_native_forwards_are_as_accurate_as_the_reference_and_rows_are_independent(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, **NATIVE)
    whole = [len(native.TOKENS)]
    exact = native.logits(tmp_path, reference, torch.float64, whole)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.3)):
        ours = native.logits(tmp_path, host, dtype, whole)
        error = float((ours - exact).norm())
        other = float((native.logits(tmp_path, reference, dtype, whole) - exact).norm())
        assert error < 1.5 * other + 1e-5 and error < bound * float(exact.norm())
        singly = native.logits(tmp_path, host, dtype, [30, *range(31, 50), 70])
        assert torch.equal(singly, ours), "a row alone has the bits that it has in a batch"
        assert torch.equal(native.logits(tmp_path, host, dtype, whole, fused=False), ours)
    one, two = on_ranks(2, lambda group: native.logits(tmp_path, host, torch.float32, whole, group=group))
    assert torch.equal(one, two) and float((one - exact).norm()) < 1e-5 * float(exact.norm())


@needs_native
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.slow
def test_a_draft_does_not_change_the_native_text(tmp_path: Path, dtype: str) -> None:
    target, draft = make_pair(tmp_path, tie=False, **NATIVE)
    options: dict[str, Any] = {"dtype": dtype, "max_model_len": 128}
    for temperature in (0.0, 0.9):
        sampling = SamplingParams(temperature=temperature, seed=5, max_tokens=64, ignore_eos=True)
        want = LLMEngine(target, **options).generate(native.TOKENS[:20], sampling).token_ids
        answer = LLMEngine(target, draft, EngineConfig("serial"), **options).generate(native.TOKENS[:20], sampling)
        assert answer.token_ids == want and answer.stats.accepted > 5 and len(set(want)) > 5
