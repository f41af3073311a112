"""Trains an EAGLE-3 head for SmolLM2-135M-Instruct on conversations with hidden states.

    python -m tools.smollm2_head.train SmolLM2-135M-Instruct.Q4_1.gguf --minutes 40

The LM head starts as rows of the target's embedding, and the layer as the target's last one, without the embedding's
half of queries, keys and values. The loss is the cross entropy to the target's distribution over the draft vocabulary,
at tokens of answers, in STEPS successive forwards of the head (training-time test of EAGLE-3). The last part trains
with the matrices of the layer and of the LM head rounded to int4 in groups of 32.

Some channels of the hidden states are a hundred times as large as others. The projection therefore learns on channels
of mean square 1, and the file has its weights divided by the channels' scales.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from swiftspec.model.checkpoint_files import read_config
from swiftspec.model.gguf.families import GGUF_NAMES
from swiftspec.model.gguf.tensors import GgufTensors
from swiftspec.model.spec import AttentionSpec, ModelSpec
from swiftspec.text.codec import TextCodec
from tools.smollm2_draft.conversations import Roles
from tools.smollm2_draft.q4_0 import round_matrices
from tools.smollm2_head.loss import LinearCrossEntropy
from tools.smollm2_head.model import Eagle3Head, HeadShape

STEPS = 3
STEP_WEIGHT = 0.8
"""Weight of a step's loss, relative to that of the step before."""
LATER_SHARE = 0.5
"""Share of the rows that the steps after the first compute."""
WARM_UP_STEPS = 50
ROUNDED_SHARE = 0.25
"""Share of training, at its end, with rounded matrices."""
MAX_GAP = 1500
"""Largest gap, in tokens, that is added to the positions of half of the batches, so that long distances occur."""
EVALUATION_STEPS, EVALUATION_ROWS = 150, 16
Batch = dict[str, Tensor]


class Conversations:
    """The batches that `smollm2_draft.conversations` wrote with hidden states, mapped from their files; the last is
    held out."""

    def __init__(self, folder: Path, codec: TextCodec) -> None:
        self.files: list[Batch] = [
            torch.load(file, weights_only=True, mmap=True) for file in sorted(folder.glob("*.pt"))
        ]
        if len(self.files) < 2:
            raise SystemExit(f"{folder}: fewer than two batches; run tools.smollm2_draft.conversations longer")
        for file in self.files:
            roles, tokens = Roles(codec, len(file["tokens"])), file["tokens"].long()
            file["answering"] = torch.zeros(tokens.shape, dtype=torch.bool)
            for position in range(1, tokens.shape[1]):
                roles.update(tokens[:, position - 1])
                file["answering"][:, position] = roles.answering
        # root mean square of each channel of the hidden states; the first token of a text is an outlier
        some = self.files[0]["hidden"][:8, 4:-1].float()
        self.scale = some.pow(2).mean((0, 1)).sqrt().clamp_min(1e-3)

    def counts(self, vocab: int) -> Tensor:
        """Returns how often the target predicts each token in answers, as a sum of probabilities."""
        total = torch.zeros(vocab)
        for file in self.files[:-1]:
            here = file["answering"]
            total.index_add_(0, file["ids"][here].flatten(), file["log_probs"][here].float().exp().flatten())
        return total

    def batches(self, rows: int, seed: int) -> Iterator[Batch]:
        """Yields batches of `rows` conversations without end, each conversation once per epoch, with hidden states
        divided by `scale`."""
        dice = torch.Generator().manual_seed(seed)
        every = [(file, row) for file in range(len(self.files) - 1) for row in range(len(self.files[file]["tokens"]))]
        while True:
            order = torch.randperm(len(every), generator=dice).tolist()
            for start in range(0, len(order) - rows + 1, rows):
                chosen = [every[index] for index in order[start : start + rows]]
                batch = {name: torch.stack([self.files[f][name][r] for f, r in chosen]) for name in self.files[0]}
                yield batch | {"hidden": batch["hidden"] / self.scale}

    def held_out(self, rows: int) -> Iterator[Batch]:
        """Yields held-out conversations in batches of `rows`."""
        for start in range(0, EVALUATION_ROWS, rows):
            batch = {name: part[start : start + rows] for name, part in self.files[-1].items()}
            yield batch | {"hidden": batch["hidden"] / self.scale}


def head_shape(spec: ModelSpec, draft_vocab: int, layers: int) -> HeadShape:
    """Returns the shape of a head whose layer is like the target's last one."""
    mixer, mlp = spec.layers[-1].mixer, spec.layers[-1].mlp
    assert isinstance(mixer, AttentionSpec)
    return HeadShape(
        spec.vocab_size, draft_vocab, spec.hidden_size, mlp.intermediate_size, mixer.num_heads, mixer.num_kv_heads,
        mixer.head_dim, spec.norm_eps, mixer.rope.theta, layers,
    )  # fmt: skip


def make_head(target: Path, token_ids: Tensor, scale: Tensor, seed: int) -> Eagle3Head:
    """Builds a head with weights of the target: the state starts as that of the last layer which is read. `scale`: of
    the hidden states, [layers, hidden]."""
    torch.manual_seed(seed)
    spec, tensors, names = read_config(target).spec, GgufTensors(target), GGUF_NAMES
    shape = head_shape(spec, len(token_ids), len(scale))
    hidden, prefix = shape.hidden_size, names.layer(len(spec.layers) - 1)

    def copy(weight: Tensor, name: str, columns: slice = slice(None)) -> None:
        part = weight.data[..., columns]
        part.copy_(tensors.take(f"{name}.weight", *part.shape))

    head = Eagle3Head(shape, tensors.take(f"{names.embedding}.weight", shape.vocab_size, hidden))
    layer = head.midlayer
    attention, mlp = layer.self_attn, layer.mlp
    for linear, name in ((attention.q_proj, names.q), (attention.k_proj, names.k), (attention.v_proj, names.v)):
        copy(linear.weight, f"{prefix}.{name}", slice(hidden, None))
    copied = {
        names.o: attention.o_proj, names.gate: mlp.gate_proj, names.up: mlp.up_proj, names.down: mlp.down_proj,
        names.input_norm: layer.hidden_norm, names.mlp_norm: layer.post_attention_layernorm,
    }  # fmt: skip
    for name, module in copied.items():
        copy(module.weight, f"{prefix}.{name}")
    copy(head.norm.weight, names.norm)
    head.fc.weight.data.mul_(0.1)
    head.fc.weight.data[:, -hidden:] += scale[-1].diag()
    head.lm_head.weight.data = head.embedding[token_ids].clone()
    return head


def labels(batch: Batch, rows: Tensor, step: int, column_of: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns which of `rows` count [sequences, rows], and for these the columns of the target's most probable tokens
    and their probabilities among the draft vocabulary [counted rows, k].

    Counted are tokens of answers whose most probable alternative is in the draft vocabulary. Row i has the hidden state
    of position i; its label in step s, counted from 0, is the token at position i + 2 + s.
    """
    columns = column_of[batch["ids"][:, rows + 2 + step].long()]
    counted = batch["answering"][:, rows + 2 + step] & (columns[..., 0] >= 0)
    columns, log_probs = columns[counted], batch["log_probs"][:, rows + 2 + step][counted].float()
    probs = log_probs.exp() * (columns >= 0)
    return counted, columns.clamp_min(0), probs / probs.sum(1, keepdim=True)


def later_rows(count: int, share: float, dice: torch.Generator | None = None) -> list[Tensor]:
    """Returns a random `share` of those `count` rows whose labels of all steps exist, for each step after the first."""
    usable = count - (STEPS - 1)
    chosen = torch.randperm(usable, generator=dice)[: int(usable * share)].sort().values
    return [chosen] * (STEPS - 1)


def loss_of(
    head: Eagle3Head, batch: Batch, column_of: Tensor, later: list[Tensor], positions: Tensor | None = None
) -> tuple[Tensor, float]:
    """Returns the weighted sum of the steps' losses, and the loss of the first step. `later`: as `later_rows`."""
    total, first = torch.zeros(()), 0.0
    inputs = batch["hidden"][:, :-2], batch["tokens"][:, 1:-1].long()
    every = torch.arange(inputs[1].shape[1])
    for step, (rows, states) in enumerate(zip([every, *later], head(*inputs, later, positions), strict=True)):
        counted, columns, probs = labels(batch, rows, step, column_of)
        hidden = head.norm(states[counted])
        summed = LinearCrossEntropy.apply(hidden, head.lm_head.weight, columns, probs, torch.bfloat16)
        mean = summed / max(len(hidden), 1)
        total, first = total + STEP_WEIGHT**step * mean, first if step else mean.item()
    return total, first


@torch.no_grad()
def agreement(head: Eagle3Head, data: Conversations, token_ids: Tensor, rows: int) -> list[float]:
    """Returns for each step how often the head's most probable token is the target's, in held-out answers."""
    hits, count = torch.zeros(STEPS), torch.zeros(STEPS)
    for batch in data.held_out(rows):
        inputs = batch["hidden"][:, :-2], batch["tokens"][:, 1:-1].long()
        every = torch.arange(inputs[1].shape[1])
        later = later_rows(len(every), 1.0)
        for step, (own, states) in enumerate(zip([every, *later], head(*inputs, later), strict=True)):
            here = batch["answering"][:, own + 2 + step]
            best = head.lm_head(head.norm(states[here])).argmax(-1)
            hits[step] += (token_ids[best] == batch["ids"][:, own + 2 + step, 0][here]).sum()
            count[step] += len(best)
    return (hits / count).tolist()


def make_optimizer(head: Eagle3Head, lr: float) -> torch.optim.Optimizer:
    """`lr`: of the matrices of the layer and the projection; the LM head has half of it."""
    named = list(head.named_parameters())
    groups = [
        {"params": [p for n, p in named if p.ndim == 2 and n != "lm_head.weight"], "lr": lr, "weight_decay": 0.02},
        {"params": [p for n, p in named if p.ndim == 1], "lr": lr, "weight_decay": 0.0},
        {"params": [head.lm_head.weight], "lr": lr / 2, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def random_positions(rows: int, dice: torch.Generator) -> Tensor:
    """Returns ascending positions with a gap at a random row in half of the cases."""
    cut, gap, coin = (int(torch.randint(top, (), generator=dice)) for top in (rows, MAX_GAP, 2))
    return torch.arange(rows) + (torch.arange(rows) >= cut) * gap * coin


def rounded_part(head: Eagle3Head) -> nn.Module:
    """Returns the modules whose matrices are int4 in the file; the projection is not, because of the scales."""
    return nn.ModuleList([head.midlayer, head.lm_head])


def save(head: Eagle3Head, token_ids: Tensor, scale: Tensor, layers: list[int], out: Path) -> None:
    """Writes the weights to a new file, which then replaces `out`."""
    weights = head.state_dict()
    weights["fc.weight"] = weights["fc.weight"] / scale.flatten()
    content = {"shape": asdict(head.shape), "hidden_layers": layers, "token_ids": token_ids, "weights": weights}
    torch.save(content, out.with_suffix(".tmp"))
    out.with_suffix(".tmp").replace(out)


def train(
    head: Eagle3Head, data: Conversations, token_ids: Tensor, args: argparse.Namespace,
    clock: Callable[[], float] = time.monotonic,
) -> None:  # fmt: skip
    """Trains for `args.minutes`; the learning rate falls to zero over the last 70 % of them."""
    optimizer = make_optimizer(head, args.lr)
    rates = [group["lr"] for group in optimizer.param_groups]
    dice = torch.Generator().manual_seed(args.seed)
    column_of = torch.full((head.shape.vocab_size,), -1)
    column_of[token_ids] = torch.arange(len(token_ids))
    began, done, recent = clock(), 0.0, list[float]()
    for step, batch in enumerate(data.batches(args.rows, args.seed), 1):
        factor = min(step / WARM_UP_STEPS, 1.0, (1 - done) / 0.7)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        rounded = done > 1 - ROUNDED_SHARE
        with round_matrices(rounded_part(head), active=rounded), torch.autocast("cpu", torch.bfloat16):
            count = batch["tokens"].shape[1] - 2
            later, positions = later_rows(count, LATER_SHARE, dice), random_positions(count, dice)
            total, first = loss_of(head, batch, column_of, later, positions)
            total.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent = [*recent[-99:], first]
        done = (clock() - began) / (60 * args.minutes)
        if step % EVALUATION_STEPS == 0 or done >= 1:
            with round_matrices(rounded_part(head), active=rounded), torch.autocast("cpu", torch.bfloat16):
                found = " ".join(f"{share:.3f}" for share in agreement(head, data, token_ids, args.rows))
            print(f"{done:.0%} step {step} loss {sum(recent) / len(recent):.3f} agreement {found}", flush=True)
            save(head, token_ids, data.scale, args.hidden_layers, args.out)
        if done >= 1:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target", type=Path, help="GGUF file of SmolLM2-135M-Instruct")
    parser.add_argument("--conversations", type=Path, default=Path("build/smollm2_head/conversations"))
    parser.add_argument("--hidden-layers", type=int, nargs="+", default=[1, 14, 26], help="as for the conversations")
    parser.add_argument("--out", type=Path, default=Path("build/smollm2_head/head.pt"), help="output weights")
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--rows", type=int, default=2, help="conversations per step")
    parser.add_argument("--draft-vocab", type=int, default=6144, help="tokens of the LM head")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    data = Conversations(args.conversations, TextCodec(args.target))
    counts = data.counts(read_config(args.target).spec.vocab_size)
    token_ids = counts.topk(args.draft_vocab).indices.sort().values
    covered = counts[token_ids].sum() / counts.sum()
    print(f"{len(data.files) - 1} batches; {covered:.1%} of the answers are in the draft vocabulary", flush=True)
    head = make_head(args.target, token_ids, data.scale, args.seed)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    train(head, data, token_ids, args)


if __name__ == "__main__":
    main()
