"""Draft heads: their logits equal an independent computation, whatever the layout of the checkpoint and the number of
ranks; what does not fit is refused in a line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from swiftspec.backends.cpu import cpu
from swiftspec.backends.reference import reference
from swiftspec.errors import UserError
from swiftspec.file_io import read_object
from swiftspec.llm_engine import LLMEngine
from swiftspec.model.block_head import BlockHead
from swiftspec.model.draft_head import DraftHead
from swiftspec.model.head_loader import load_draft_head
from swiftspec.model.loader import load_model
from swiftspec.model.spec import DraftHeadSpec
from tests.model.architectures.test_families import new_cache
from tests.support.draft_heads import add_mtp, eagle3_forward, make_eagle3, rms_norm
from tests.support.gguf_files import gguf_name, write_gguf
from tests.support.thread_group import on_ranks
from tests.support.tiny_checkpoints import chain, make_checkpoint

TOKENS = [5, 17, 3, 29, 11, 8, 2, 30, 44, 1, 7, 9]
IDS = (1, 3, 6)  # layers whose inputs an EAGLE-3 head reads, of a target with six
LAYOUTS: dict[str, dict[str, Any]] = {
    "whole vocabulary": {},
    "part of the vocabulary": {"draft_vocab": 21},
    "own embedding": {"embedding": True},
    "norm before residual": {"norm_before_residual": True, "draft_vocab": 40},
    "speculators": {"speculators": True, "norm_before_residual": True, "draft_vocab": 40, "embedding": True},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    make_checkpoint(folder, layers=6, dtype=torch.float64)
    return folder


def states_of(target: Path, layers: tuple[int, ...]) -> Tensor:
    model = load_model(target, dtype=torch.float64, ops=reference, max_positions=64, hidden_layers=layers)
    hidden = model.forward(chain(TOKENS), new_cache(model, reference, 64)).hidden
    assert hidden is not None
    return hidden


def run(head: DraftHead | BlockHead, states: Tensor, ops: Any = reference) -> tuple[Tensor, Tensor]:
    """Logits and outputs of the rows with the second token and later ones, in two forwards."""
    rows, cache = head.project(states[:-1]), new_cache(head, ops, 64)
    found = list[Any]()
    for first, last in ((0, 4), (4, len(TOKENS) - 1)):
        cache.append_prefix(last - first)
        batch = replace(chain(TOKENS[1 + first : 1 + last], first), hidden=rows[first:last])
        found.append(head.forward(batch, cache))
    return torch.cat([each.logits for each in found]), torch.cat([each.hidden[:, 0] for each in found])


def eagle3(target: Path, folder: Path, layout: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The hidden states of the target, and logits and outputs of the head in plain torch."""
    tensors = make_eagle3(folder, layers=IDS, **layout)
    states = states_of(target, tuple(each - 1 for each in IDS))
    embedding = tensors.get("embed_tokens.weight")
    if embedding is None:
        embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    logits, outputs = eagle3_forward(
        tensors, embedding, TOKENS[1:], F.linear(states[:-1].flatten(1), tensors["fc.weight"]),
        norm_before_residual=layout.get("norm_before_residual", False),
        prefix="layers.0" if layout.get("speculators") else "midlayer",
    )  # fmt: skip
    if "d2t" in tensors:
        every = torch.full((len(logits), 64), -torch.inf, dtype=torch.float64)
        every[:, torch.arange(logits.shape[1]) + tensors["d2t"]] = logits
        assert torch.equal(every.isfinite()[0], tensors["t2d"])
        logits = every
    return states, logits, outputs


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_eagle3_equals_plain_torch(tmp_path: Path, target: Path, layout: dict[str, Any]) -> None:
    states, *want = eagle3(target, tmp_path, layout)
    head = load_draft_head(tmp_path, target, dtype=torch.float64, ops=reference, max_positions=64)
    torch.testing.assert_close([*run(head, states)], want, rtol=0, atol=1e-5)  # RoPE frequencies are float32 numbers


def test_mtp_equals_the_layers_of_transformers(tmp_path: Path) -> None:
    theirs = make_checkpoint(tmp_path, family="qwen3_5_text", dtype=torch.float64)
    tensors = add_mtp(tmp_path)
    states = states_of(tmp_path, (3,))
    want = mtp_forward(theirs, tensors, states[:-1, 0])
    head = load_draft_head(None, tmp_path, dtype=torch.float64, ops=reference, max_positions=64)
    torch.testing.assert_close([*run(head, states)], [*want], rtol=0, atol=1e-5)  # their norms compute in float32


def test_mtp_in_a_gguf_file(tmp_path: Path) -> None:
    """The layer after the last one of the target, with norms that are stored as 1 + weight."""
    folder, file = tmp_path / "hf", tmp_path / "model.gguf"
    theirs = make_checkpoint(folder, family="qwen3_5_text", dtype=torch.float32)
    tensors = add_mtp(folder)
    inner = {
        "fc": "eh_proj",
        "pre_fc_norm_embedding": "enorm",
        "pre_fc_norm_hidden": "hnorm",
        "norm": "shared_head_norm",
    }

    def with_mtp(writer: GGUFWriter) -> None:
        writer.add_nextn_predict_layers(1)
        writer.add_block_count(5)
        for name, tensor in tensors.items():
            stored = (tensor + (tensor.ndim == 1)).float().numpy()
            part = name.removeprefix("mtp.").removesuffix(".weight")
            layer = part.replace("layers.0.", "model.layers.4.")
            writer.add_tensor(
                f"blk.4.nextn.{inner[part]}.weight" if part in inner else gguf_name("qwen35", 5, f"{layer}.weight"),
                stored,
            )

    write_gguf(file, theirs, metadata=with_mtp)
    states, how = states_of(folder, (3,)), {"dtype": torch.float64, "ops": reference, "max_positions": 64}
    want, got = (run(load_draft_head(None, path, **how), states) for path in (folder, file))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)  # the file has float32 numbers
    write_gguf(file, theirs)
    with pytest.raises(UserError, match="has no MTP layer"):
        load_draft_head(None, file, **how)


@torch.no_grad()
def mtp_forward(theirs: PreTrainedModel, tensors: dict[str, Tensor], states: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and outputs of an MTP layer, by the layer of a model of transformers with the same weights."""
    model: Any = theirs.model
    layer = next(each for each in model.layers if hasattr(each, "self_attn"))
    prefix = "mtp.layers.0."
    layer.load_state_dict({name.removeprefix(prefix): part for name, part in tensors.items() if prefix in name})
    parts = [
        rms_norm(x, 1 + tensors[f"mtp.pre_fc_norm_{name}.weight"])
        for name, x in (("embedding", model.embed_tokens(torch.tensor(TOKENS[1:]))), ("hidden", model.norm(states)))
    ]
    x = F.linear(torch.cat(parts, -1), tensors["mtp.fc.weight"])[None]
    count = x.shape[1]
    mask = torch.full((count, count), -torch.inf, dtype=x.dtype).triu(1)[None, None]
    x = layer(x, position_embeddings=model.rotary_emb(x, torch.arange(count)[None]), attention_mask=mask)
    x = rms_norm(x[0] if isinstance(x, tuple) else x, 1 + tensors["mtp.norm.weight"])[0]
    head: Any = theirs.lm_head
    return head(x), x


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("layout", ["part of the vocabulary", "mtp"])
def test_shards_equal_the_whole(tmp_path: Path, target: Path, size: int, layout: str) -> None:
    path: Path | None = tmp_path / "head"
    if layout == "mtp":
        make_checkpoint(tmp_path, family="qwen3_5_text", dtype=torch.float64)
        add_mtp(tmp_path)
        path, target, layers = None, tmp_path, (3,)
    else:
        make_eagle3(tmp_path / "head", layers=IDS, **LAYOUTS[layout])
        layers = tuple(each - 1 for each in IDS)
    states = states_of(target, layers)
    load = load_draft_head
    how: dict[str, Any] = {"dtype": torch.float64, "ops": reference, "max_positions": 64}
    want = run(load(path, target, **how), states)
    parts = on_ranks(size, lambda group: run(load(path, target, group=group, **how), states))
    logits = torch.cat([part[0] for part in parts], 1)[:, :64]
    torch.testing.assert_close(logits, want[0], rtol=0, atol=1e-9)
    for _, outputs in parts:
        torch.testing.assert_close(outputs, want[1], rtol=0, atol=1e-9)


@pytest.mark.skipif(cpu.level() == "none", reason="there are no native operators here")
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-4), (torch.bfloat16, 0.5)])
def test_native_operators(tmp_path: Path, dtype: torch.dtype, atol: float) -> None:
    target, folder = tmp_path / "target", tmp_path / "head"
    make_checkpoint(target, layers=6, hidden_size=64, dtype=torch.float64)
    make_eagle3(folder, layers=IDS, hidden=64, target_hidden=64, draft_vocab=40)
    states = states_of(target, tuple(each - 1 for each in IDS))
    want = run(load_draft_head(folder, target, dtype=torch.float64, ops=reference, max_positions=64), states)
    got = run(load_draft_head(folder, target, dtype=dtype, ops=cpu, max_positions=64), states, cpu)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=0.05, atol=atol)


def test_a_whole_vocabulary_in_another_order(tmp_path: Path, target: Path) -> None:
    make_eagle3(tmp_path, layers=IDS)
    states = states_of(target, tuple(each - 1 for each in IDS))
    how: dict[str, Any] = {"dtype": torch.float64, "ops": reference, "max_positions": 64}
    want = run(load_draft_head(tmp_path, target, **how), states)[0]
    order = torch.arange(64).roll(9)
    edit_tensors(tmp_path, lambda all_: all_.update(d2t=order - torch.arange(64)))
    got = run(load_draft_head(tmp_path, target, **how), states)[0]
    torch.testing.assert_close(got[:, order], want, rtol=0, atol=1e-12)


def test_masked_tokens(tmp_path: Path, target: Path) -> None:
    make_eagle3(tmp_path, layers=IDS, draft_vocab=40)
    head = load_draft_head(tmp_path, target, dtype=torch.float64, ops=reference, max_positions=64)
    states = states_of(target, tuple(each - 1 for each in IDS))
    want = run(head, states)[0]
    chosen = want[0].isfinite().nonzero().flatten()[[2, 30]].tolist()
    missing = want[0].isinf().nonzero().flatten()[:1].tolist()
    masked = head.with_masked_tokens([*chosen, *missing])
    assert isinstance(masked, DraftHead)
    got = run(masked, states)[0]
    want[:, chosen] = -torch.inf
    assert torch.equal(got, want)


def test_layers_of_the_target() -> None:
    head = DraftHeadSpec("eagle3", target_hidden_size=8, draft_vocab_size=8)
    assert head.hidden_layers(32) == (1, 15, 28) and head.hidden_layers(7) == (1, 2, 3)
    assert replace(head, target_layer_ids=(1, 7)).hidden_layers(7) == (0, 6)
    with pytest.raises(UserError, match=r"layers \[2, 3, 3\], but its target has 6"):
        head.hidden_layers(6)


def change(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(read_object(file) | fields))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_vocab(folder: Path, size: int) -> None:
    change(folder, vocab_size=size)
    edit_tensors(folder, lambda all_: all_.update(t2d=torch.zeros(size, dtype=torch.bool)))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: change(folder, target_hidden_size=16), "reads hidden states of size 16"),
        (
            lambda folder: change(folder, eagle_aux_hidden_state_layer_ids=[1, 3, 9]),
            r"\[1, 3, 9\], but its target has 6",
        ),
        (lambda folder: change(folder, num_hidden_layers=2), "of 2 layers is not supported"),
        (lambda folder: change(folder, eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state"),
        (lambda folder: change_vocab(folder, 72), "no embedding, and that of target"),
        (lambda folder: edit_tensors(folder, lambda all_: all_.pop("d2t")), "d2t is missing"),
        (lambda folder: edit_tensors(folder, lambda all_: all_["d2t"].fill_(3).neg_()), "40 different tokens"),
        (lambda folder: edit_tensors(folder, lambda all_: all_.pop("fc.weight")), "fc.weight is missing"),
        (
            lambda folder: edit_tensors(folder, lambda all_: all_.update(extra=torch.ones(3))),
            "extra is not part of the architecture",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, target: Path, spoil: Callable[[Path], object], message: str
) -> None:
    make_eagle3(tmp_path, layers=IDS, draft_vocab=40)
    spoil(tmp_path)
    with pytest.raises(UserError, match=message):
        LLMEngine(target, tmp_path, dtype=torch.float64)


def test_other_refusals(tmp_path: Path, target: Path) -> None:
    make_eagle3(tmp_path, layers=IDS)
    with pytest.raises(UserError, match="is a draft head, which cannot run alone"):
        LLMEngine(tmp_path, dtype=torch.float64)
    with pytest.raises(UserError, match="has no MTP layer"):
        LLMEngine(target, "mtp", dtype=torch.float64)
