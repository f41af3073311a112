"""Distils the draft for SmolLM2-135M-Instruct from its conversations.

    python -m tools.smollm2_draft.train SmolLM2-135M-Instruct.Q4_1.gguf --minutes 40

The embedding, which is also the LM head, starts as the target's, projected to the draft's width. Training minimises the
cross entropy to the target's distribution over its TRAINED_TOP tokens. The softmax runs over the tokens that occur in a
batch's targets and a random sample of the others (sampled softmax), which costs a fifth of the whole vocabulary. The
last part trains with weights rounded to Q4_0, the type of the file.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from swiftspec.model.checkpoint_files import read_config
from swiftspec.model.gguf.families import GGUF_NAMES
from swiftspec.model.gguf.tensors import GgufTensors
from tools.smollm2_draft.q4_0 import round_matrices

SHAPE: dict[str, Any] = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2,
                         "head_dim": 32, "intermediate_size": 512}  # fmt: skip
TRAINED_TOP = 8
"""Most probable tokens of the target per position that the loss uses; the more, the larger the softmax."""
WARM_UP_STEPS = 100
ROUNDED_SHARE = 0.25
"""Share of training, at its end, with rounded weights."""
LONG_SHARE = 0.3
"""Share of training, at its end, in which four conversations are one sequence, so that distances up to the draft's
context occur."""


class Conversations:
    """The batches that `conversations.py` wrote; the last is held out."""

    def __init__(self, folder: Path) -> None:
        batches = [torch.load(file, weights_only=True) for file in sorted(folder.glob("*.pt"))]
        if len(batches) < 2:
            raise SystemExit(f"{folder}: fewer than two batches; run tools.smollm2_draft.conversations longer")
        self.train = {name: torch.cat([batch[name] for batch in batches[:-1]]) for name in batches[0]}
        self.held_out: dict[str, Tensor] = batches[-1]

    def batch(self, dice: torch.Generator, rows: int, joined: int) -> dict[str, Tensor]:
        """Returns `rows` random conversations, `joined` of them in each sequence."""
        chosen = torch.randint(len(self.train["tokens"]), (rows,), generator=dice)
        parts = {name: part[chosen] for name, part in self.train.items()}
        parts |= {name: parts[name][..., :TRAINED_TOP] for name in ("ids", "log_probs")}
        return {name: part.reshape(rows // joined, -1, *part.shape[2:]) for name, part in parts.items()}


def target_embedding(target: Path) -> Tensor:
    """Returns the embedding of a GGUF file (vocabulary, hidden size) in float32."""
    spec = read_config(target).spec
    return GgufTensors(target).take(f"{GGUF_NAMES.embedding}.weight", spec.vocab_size, spec.hidden_size)


def make_draft(target: Path, counts: Tensor, seed: int) -> LlamaForCausalLM:
    """Builds the draft. The projection of the target's embedding keeps most of the tokens that occur often."""
    torch.manual_seed(seed)
    table = target_embedding(target)
    config = LlamaConfig(
        vocab_size=len(table), max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, **SHAPE,
    )  # fmt: skip
    draft = LlamaForCausalLM(config)
    for name, parameter in draft.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.zeros_(parameter)
    weighted = table * (counts + 0.1).sqrt()[:, None]
    _, vectors = torch.linalg.eigh(weighted.T @ weighted)
    projected = table @ vectors[:, -config.hidden_size :]
    draft.get_input_embeddings().weight.data = projected * (0.02 / projected.std())
    return draft


def make_optimizer(draft: LlamaForCausalLM, lr: float) -> torch.optim.Optimizer:
    """`lr`: of the matrices in the layers; the embedding, which starts near its values, has half of it."""
    named = list(draft.named_parameters())
    groups = [
        {"params": [p for n, p in named if n.endswith("_proj.weight")], "lr": lr, "weight_decay": 0.1},
        {"params": [p for n, p in named if "embed_tokens" in n], "lr": lr / 2, "weight_decay": 0.0},
        {"params": [p for _, p in named if p.ndim == 1], "lr": lr, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def soft_cross_entropy(hidden: Tensor, table: Tensor, batch: dict[str, Tensor], sampled: int) -> Tensor:
    """Returns the mean cross entropy to the target's distribution, renormalised over the tokens in `batch`.

    hidden: (sequences, length, width) after the final norm. The logits of the `sampled` random tokens are raised by the
    logarithm of the number of tokens that each stands for.
    """
    wanted = batch["ids"][:, 1:].long()
    given = wanted.any(-1).flatten()  # not at the first token of a conversation
    known = torch.zeros(len(table), dtype=torch.bool)
    known[wanted.flatten()] = True
    inside, outside = known.nonzero()[:, 0], (~known).nonzero()[:, 0]
    outside = outside[torch.randint(len(outside), (sampled,))]
    columns = torch.empty(len(table), dtype=torch.long)
    columns[inside] = torch.arange(len(inside))
    logits = hidden[:, :-1].flatten(0, 1) @ table[torch.cat([inside, outside])].T
    raised = torch.zeros(logits.shape[1])
    raised[len(inside) :] = math.log((len(table) - len(inside)) / sampled)
    log_probs = (logits + raised).log_softmax(-1)
    weights = batch["log_probs"][:, 1:].float().softmax(-1).flatten(0, 1)
    return -(log_probs.gather(1, columns[wanted].flatten(0, 1)) * weights).sum(1)[given].mean()


@torch.no_grad()
def agreement(draft: LlamaForCausalLM, batch: dict[str, Tensor]) -> tuple[float, float]:
    """Returns how often the target's most probable token is the draft's first, and one of the draft's first four."""
    best = batch["ids"][:, 1:, 0].long()
    first = among = 0.0
    for tokens, wanted in zip(batch["tokens"].long().split(8), best.split(8), strict=True):
        top = draft(input_ids=tokens[:, :-1], use_cache=False).logits.topk(4).indices
        hits = top == wanted[:, :, None]
        first += hits[:, :, 0].sum().item()
        among += hits.sum().item()
    return first / best.numel(), among / best.numel()


def train(draft: LlamaForCausalLM, data: Conversations, args: argparse.Namespace) -> None:
    """Trains for `args.minutes`; the learning rate falls to zero over the last 60 % of them."""
    optimizer = make_optimizer(draft, args.lr)
    rates = [group["lr"] for group in optimizer.param_groups]
    dice = torch.Generator().manual_seed(args.seed)
    held_out = {name: part[:: args.held_out_stride] for name, part in data.held_out.items()}
    began, step, recent, done = time.monotonic(), 0, [], 0.0
    while done < 1:
        factor = min((step + 1) / WARM_UP_STEPS, 1.0, (1 - done) / 0.6)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        batch = data.batch(dice, args.rows, 4 if done > 1 - LONG_SHARE else 1)
        with round_matrices(draft, active=done > 1 - ROUNDED_SHARE):
            hidden = draft.model(input_ids=batch["tokens"].long(), use_cache=False).last_hidden_state
            loss = soft_cross_entropy(hidden, draft.model.embed_tokens.weight, batch, args.sampled)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent, step = [*recent[-99:], loss.item()], step + 1
        done = (time.monotonic() - began) / (60 * args.minutes)
        if step % 500 == 0 or done >= 1:
            with round_matrices(draft, active=done > 1 - ROUNDED_SHARE):
                first, among = agreement(draft, held_out)
            mean = sum(recent) / len(recent)
            print(f"{done:.0%} step {step} loss {mean:.3f} first {first:.3f} first four {among:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target", type=Path, help="GGUF file of SmolLM2-135M-Instruct")
    parser.add_argument("--conversations", type=Path, default=Path("build/smollm2_draft/conversations"))
    parser.add_argument("--out", type=Path, default=Path("build/smollm2_draft/draft.pt"), help="output weights")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rows", type=int, default=4, help="conversations per step")
    parser.add_argument("--sampled", type=int, default=1024, help="random tokens in the softmax")
    parser.add_argument("--lr", type=float, default=2.5e-3)
    parser.add_argument("--held-out-stride", type=int, default=4, help="use every n-th held-out conversation")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    data = Conversations(args.conversations)
    counts = torch.bincount(data.train["ids"].flatten(), minlength=read_config(args.target).spec.vocab_size).float()
    draft = make_draft(args.target, counts, args.seed)
    train(draft, data, args)
    torch.save({"config": draft.config.to_dict(), "weights": draft.state_dict()}, args.out)


if __name__ == "__main__":
    main()
