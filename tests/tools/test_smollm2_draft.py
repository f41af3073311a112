"""The tool that makes the draft for SmolLM2: rounding, loss, whose turn it is, and the file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from swiftspec.backends.reference import reference
from swiftspec.model.loader import load_model
from swiftspec.runtime.runner import Runner
from swiftspec.text.codec import TextCodec
from tests.support.gguf_files import write_gguf
from tools.smollm2_draft import export
from tools.smollm2_draft.conversations import Roles
from tools.smollm2_draft.q4_0 import round_matrices, round_q4_0
from tools.smollm2_draft.train import soft_cross_entropy

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "intermediate_size": 96, "tie_word_embeddings": True,
}  # fmt: skip


def tiny(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, initializer_range=0.3))


def test_rounding_is_that_of_gguf() -> None:
    weights = torch.randn(8, 96)
    weights[3, 32:64] = 0
    kind = gguf.GGMLQuantizationType.Q4_0
    want = gguf.quants.dequantize(gguf.quants.quantize(weights.numpy(), kind), kind)
    np.testing.assert_array_equal(round_q4_0(weights).numpy(), want)


def test_the_file_computes_what_the_rounded_model_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "target.gguf", tiny(0))
    draft, tokens = tiny(1), [3, 9, 27, 1, 5]
    torch.save({"config": draft.config.to_dict(), "weights": draft.state_dict()}, tmp_path / "draft.pt")
    out = tmp_path / "out" / "draft.gguf"
    argv = ["export", str(tmp_path / "target.gguf"), "--draft", str(tmp_path / "draft.pt"), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", argv)
    export.main()
    with torch.no_grad(), round_matrices(draft, active=True):
        want = draft(torch.tensor([tokens])).logits[0]
    model = load_model(out, dtype=torch.float32, ops=reference, max_positions=16)
    runner = Runner(model, reference, 64, context=16, tree_slots=1)
    torch.testing.assert_close(runner.logits(runner.chain_batch(tokens)), want, rtol=1e-4, atol=1e-4)
    ours, theirs = TextCodec(out), TextCodec(tmp_path / "target.gguf")
    assert ours.vocabulary.identity() == theirs.vocabulary.identity()


def test_the_loss_is_the_cross_entropy_to_the_renormalised_distribution() -> None:
    torch.manual_seed(2)
    hidden, table = torch.randn(2, 4, 8), torch.randn(20, 8)
    ids = torch.stack([torch.randperm(20)[:3] for _ in range(8)]).view(2, 4, 3).int()
    ids[1, 2] = 0  # the first token of a conversation
    batch = {"ids": ids, "log_probs": torch.randn(2, 4, 3).half()}
    log_probs = (hidden @ table.T).log_softmax(-1)
    terms = []
    for row, position in [(0, 1), (0, 2), (0, 3), (1, 1), (1, 3)]:
        wanted = batch["log_probs"][row, position].float().softmax(-1)
        terms.append(-(wanted * log_probs[row, position - 1, ids[row, position].long()]).sum())
    others = 20 - len(ids[:, 1:].unique())
    assert others > 0
    losses = [soft_cross_entropy(hidden, table, batch, 400) for _ in range(20)]  # the sampled others vary
    torch.testing.assert_close(torch.stack(losses).mean(), torch.stack(terms).mean(), rtol=0.02, atol=0)


def test_the_role_changes_with_the_header_of_a_turn() -> None:
    class Codec:
        def __init__(self) -> None:
            self.vocab = {"<|im_start|>": 1}

        def encode(self, text: str) -> list[int]:
            return [520, 9531] if text == "assistant" else [4093]

    codec: Any = Codec()
    roles = Roles(codec, 2)
    answering = []
    for tokens in ([1, 1], [4093, 520], [5, 9531], [1, 7], [520, 1], [9531, 4093]):
        roles.update(torch.tensor(tokens))
        answering.append(roles.answering.tolist())
    assert answering == [[False, False], [False, True], [False, True], [False, True], [True, True], [True, False]]
