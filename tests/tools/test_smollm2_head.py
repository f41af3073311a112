"""The tool that trains an EAGLE-3 head for SmolLM2: its steps, loss, labels, training and checkpoint."""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from swiftspec.backends.reference import reference
from swiftspec.model.block_head import BlockHead
from swiftspec.model.draft_head import DraftHead
from swiftspec.model.head_loader import load_draft_head
from tests.model.architectures.test_families import new_cache
from tests.support.gguf_files import write_gguf
from tests.support.tiny_checkpoints import chain
from tools.smollm2_draft.q4_0 import round_matrices
from tools.smollm2_head import export, train
from tools.smollm2_head.loss import LinearCrossEntropy
from tools.smollm2_head.model import Eagle3Head

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 96, "tie_word_embeddings": True,
}  # fmt: skip
LAYERS, IDS = [0, 1, 2], torch.tensor([2, 3, 5, 8, 13, 21, 34, 55])


class Codec:
    """Codec of a vocabulary in which 1 begins a turn and 2 is the word "assistant"."""

    def __init__(self) -> None:
        self.vocab = {"<|im_start|>": 1}

    def encode(self, text: str) -> list[int]:
        return [2]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("target") / "target.gguf"
    write_gguf(file, LlamaForCausalLM(LlamaConfig(**SHAPE, initializer_range=0.3)))
    return file


def random_head(target: Path) -> Eagle3Head:
    head = train.make_head(target, IDS, torch.ones(len(LAYERS), 64), seed=1)
    for parameter in head.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return head


def exported(head: Eagle3Head, folder: Path, dtype: torch.dtype, *, int4: bool = False) -> Path:
    content: dict[str, Any] = {
        "shape": asdict(head.shape), "hidden_layers": LAYERS, "token_ids": IDS, "weights": head.state_dict(),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(export.config_of(content, int4=int4)))
    save_file(export.tensors_of(content, int4=int4, dtype=dtype), folder / "model.safetensors")
    return folder


def decoded(head: DraftHead | BlockHead, states: Tensor, tokens: list[int], drafted: int) -> list[Tensor]:
    """Logits of the draft vocabulary after a context of len(states) rows and after each of `drafted` drafted tokens."""
    rows, cache, logits = head.project(states), new_cache(head, reference, 32), list[Tensor]()
    for first, last in [(0, len(states)), *((at, at + 1) for at in range(len(states), len(states) + drafted))]:
        cache.append_prefix(last - first)
        output = head.forward(replace(chain(tokens[first:last], first), hidden=rows), cache)
        assert output.logits is not None
        assert output.hidden is not None
        rows = output.hidden[-1:, 0]
        logits.append(output.logits[-1, IDS])
    return logits


def test_the_steps_of_the_training_are_those_of_the_draft_head(tmp_path: Path, target: Path) -> None:
    head = random_head(target).double()
    torch.manual_seed(3)
    hidden, tokens = torch.randn(1, 9, len(LAYERS), 64, dtype=torch.float64), torch.randint(64, (1, 9))
    later = [torch.tensor([0, 2, 4, 5, 6]), torch.tensor([0, 4, 6])]
    with torch.no_grad():
        outputs = head(hidden, tokens, later)
        found = [head.lm_head(head.norm(states))[0] for states in outputs]
    loaded = load_draft_head(
        exported(head, tmp_path, torch.float64), target, dtype=torch.float64, ops=reference, max_positions=32
    )
    for row in (0, 4, 6):
        want = decoded(loaded, hidden[0, : row + 1], tokens[0].tolist(), 2)
        got = [found[0][row], found[1][int((later[0] == row).nonzero())], found[2][int((later[1] == row).nonzero())]]
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)  # RoPE frequencies are float32 numbers


def test_the_int4_checkpoint_computes_what_the_rounded_head_does(tmp_path: Path, target: Path) -> None:
    head = random_head(target)
    hidden, tokens = torch.randn(1, 5, len(LAYERS), 64), torch.randint(64, (1, 5))
    loaded = load_draft_head(
        exported(head, tmp_path, torch.float32, int4=True), target, dtype=torch.float32, ops=reference, max_positions=32
    )
    with torch.no_grad(), round_matrices(train.rounded_part(head), active=True):
        want = head.lm_head(head.norm(head(hidden, tokens, [])[0]))[0, -1]
    torch.testing.assert_close(decoded(loaded, hidden[0], tokens[0].tolist(), 0)[0], want, rtol=1e-4, atol=1e-4)


def test_the_loss_is_the_cross_entropy_with_its_gradients() -> None:
    torch.manual_seed(4)
    hidden, weight = (torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in ((150, 8), (20, 8)))
    ids = torch.stack([torch.randperm(20)[:3] for _ in range(150)])
    probs = torch.rand(150, 3, dtype=torch.float64).softmax(1)
    plain = -((hidden @ weight.T).log_softmax(1).gather(1, ids) * probs).sum()
    want = [plain, *torch.autograd.grad(3 * plain, (hidden, weight))]
    loss = LinearCrossEntropy.apply(hidden, weight, ids, probs, torch.float64)
    torch.testing.assert_close([loss, *torch.autograd.grad(3 * loss, (hidden, weight))], want)


def write_conversations(folder: Path) -> train.Conversations:
    """Three batches of conversations of a user turn and an answer, which repeats five tokens."""
    states = torch.randn(64, len(LAYERS), 64, generator=torch.Generator().manual_seed(5))  # of each token
    for number in range(3):
        tokens = torch.tensor([1, 7, 9, 1, 2, *([3, 5, 8, 13, 21] * 5)]).repeat(4, 1)
        ids = torch.stack((tokens, (tokens + 1) % 64), -1)
        log_probs = torch.tensor([0.9, 0.1]).log().half().expand(ids.shape).clone()
        batch = {"tokens": tokens.int(), "ids": ids.int(), "log_probs": log_probs, "hidden": states[tokens].bfloat16()}
        torch.save(batch, folder / f"001-{number:04}.pt")
    codec: Any = Codec()
    return train.Conversations(folder, codec)


def test_labels_are_the_later_tokens_of_answers(tmp_path: Path) -> None:
    data = write_conversations(tmp_path)
    column_of = torch.full((64,), -1)
    column_of[IDS] = torch.arange(len(IDS))
    (batch,) = data.held_out(16)
    rows = torch.tensor([2, 3, 10])
    counted, columns, probs = train.labels(batch, rows, 1, column_of)
    # the labels are the tokens at positions 5, 6 and 13; of their alternatives 4, 6 and 14 none is in the vocabulary
    assert counted.all()
    assert IDS[columns[:3, 0]].tolist() == batch["tokens"][0, [5, 6, 13]].tolist() == [3, 5, 13]
    assert probs[:, 0].tolist() == [1.0] * 12
    counted, _, _ = train.labels(batch, rows, 0, column_of)
    assert counted[0].tolist() == [False, True, True]  # position 4 is the header of the answer
    assert data.counts(64)[[7, 3]].tolist() == [0.0, pytest.approx(0.9 * 5 * 8, rel=1e-3)]


@pytest.mark.slow
def test_a_trained_head_predicts_a_repeated_text_at_every_step(tmp_path: Path, target: Path) -> None:
    data = write_conversations(tmp_path)
    args = argparse.Namespace(lr=3e-3, rows=4, seed=1, minutes=1.2, hidden_layers=LAYERS, out=tmp_path / "head.pt")
    head, seconds = train.make_head(target, IDS, data.scale, seed=1), itertools.count()
    train.train(head, data, IDS, args, lambda: float(next(seconds)))
    saved = torch.load(args.out, weights_only=True)
    head.fc.weight.data /= data.scale.flatten()
    torch.testing.assert_close(saved["weights"], dict(head.state_dict()))
    head.fc.weight.data *= data.scale.flatten()
    with round_matrices(train.rounded_part(head), active=True), torch.autocast("cpu", torch.bfloat16):
        assert min(train.agreement(head, data, IDS, 4)) > 0.9
