"""Trains the demo models on the sources of the CPython standard library.

    python -m tools.demo.train tokenizer
    python -m tools.demo.train target --steps 1050 --decay 500 --int4-steps 150 --tests-share 0.1
    python -m tools.demo.quantize    # in a separate environment, see its docstring
    python -m tools.demo.train draft --steps 1500 --decay 750 --tests-share 0.1 --tokens 2048
    python -m tools.demo.evaluate

All results depend only on the seed and on the interpreter's standard library (Python 3.11). The corpus is defined in
`data.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from tools.demo.data import DEMO, IDS, ROOT, VOCAB, Windows, load_data, make_tokenizer, record, tidy_config

SHAPES: dict[str, dict[str, Any]] = {
    "target": {"hidden_size": 384, "num_hidden_layers": 8, "num_attention_heads": 6, "num_key_value_heads": 2,
               "head_dim": 64, "intermediate_size": 1024},
    "draft": {"hidden_size": 160, "num_hidden_layers": 2, "num_attention_heads": 5, "num_key_value_heads": 1,
              "head_dim": 32, "intermediate_size": 448},
}  # fmt: skip


def make_model(which: str, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, max_position_embeddings=2048, rms_norm_eps=1e-5, tie_word_embeddings=True,
        **IDS, **SHAPES[which],
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for name, p in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.zeros_(p)
    return model


def is_hidden_matrix(name: str) -> bool:
    return name.endswith("_proj.weight")


def make_optimizers(model: LlamaForCausalLM, lr: float) -> list[torch.optim.Optimizer]:
    named = list(model.named_parameters())
    matrices = [p for n, p in named if is_hidden_matrix(n)]
    tables = [p for n, p in named if not is_hidden_matrix(n) and p.ndim == 2]
    norms = [p for n, p in named if p.ndim == 1]
    muon = torch.optim.Muon(matrices, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": tables, "weight_decay": 0.05}, {"params": norms, "weight_decay": 0.0}]
    return [muon, torch.optim.AdamW(groups, lr=0.7 * lr, betas=(0.9, 0.95), fused=True)]


def int4_grid(w: torch.Tensor, group: int = 128) -> torch.Tensor:
    """Returns the weights rounded to AutoAWQ's int4 groups with zero points, by its min-max rule and without
    scaling."""
    g = w.reshape(-1, group)
    high, low = g.amax(1, keepdim=True), g.amin(1, keepdim=True)
    scale = ((high - low).clamp(min=1e-5) / 15).half().float()
    zero = (-torch.round(low / scale)).clamp(0, 15)
    return ((torch.round(g / scale) + zero).clamp(0, 15).sub_(zero) * scale).reshape(w.shape)


@contextlib.contextmanager
def on_int4_grid(model: LlamaForCausalLM, active: bool) -> Iterator[None]:
    """Replaces the matrices by their int4-rounded values inside the context, if `active`.

    Gradients of the rounded weights thus update the exact ones, so that the final rounding causes no loss.
    """
    kept = [(p, p.data) for n, p in model.named_parameters() if active and is_hidden_matrix(n)]
    for p, w in kept:
        p.data = int4_grid(w)
    yield
    for p, w in kept:
        p.data = w


@torch.no_grad()
def nats(model: LlamaForCausalLM, ids: np.ndarray, length: int, windows: int | None = None) -> float:
    """Returns the mean nats per token over disjoint windows of `length` tokens: all, or `windows` evenly spread."""
    starts = np.arange(0, len(ids) - length - 1, length)
    if windows is not None:
        starts = starts[np.linspace(0, len(starts) - 1, min(windows, len(starts))).astype(int)]
    total = 0.0
    for group in np.array_split(starts, math.ceil(len(starts) * length / 4096)):
        batch = torch.from_numpy(np.stack([ids[s : s + length + 1] for s in group]))
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        total += F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten()).item() * len(group)
    return total / len(starts)


def train(
    model: LlamaForCausalLM,
    batch_at: Callable[[int], torch.Tensor],
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    held_out: tuple[np.ndarray, float],
    args: argparse.Namespace,
) -> list[dict[str, float]]:
    """Trains with a learning rate that warms up, stays constant and decays to zero.

    `held_out`: tokens, and the factor from nats per token to bits per byte. Returns the training and held-out losses in
    nats per token, every 100 steps. Leaves int4-rounded weights in the model if `args.int4_steps` is not 0.
    """
    optimizers = make_optimizers(model, args.lr)
    base = [[g["lr"] for g in o.param_groups] for o in optimizers]
    checkpoint = args.work / f"{args.command}.pt"
    first, log, recent = 0, [], []
    if args.resume:
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for o, s in zip(optimizers, state["optimizers"], strict=True):
            o.load_state_dict(s)
        first, log = state["step"], state["log"]
    began = time.monotonic()
    for step in range(first, args.steps):
        factor = min(1.0, (step + 1) / 60, (args.steps - step) / args.decay)
        for o, lrs in zip(optimizers, base, strict=True):
            for g, lr in zip(o.param_groups, lrs, strict=True):
                g["lr"] = lr * factor
        with on_int4_grid(model, step >= args.steps - args.int4_steps):
            loss = loss_of(batch_at(step))
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for o in optimizers:
            o.step()
            o.zero_grad()
        recent.append(loss.item())
        done = step + 1
        if done % 20 == 0 or done == args.steps:
            pace = (time.monotonic() - began) / (done - first)
            print(f"step {done}/{args.steps} loss {np.mean(recent[-20:]):.4f} {pace:.3f} s/step", flush=True)
        if done % 100 == 0 or done == args.steps:
            with on_int4_grid(model, done > args.steps - args.int4_steps):
                held = nats(model, held_out[0], 256, 64)
            log.append({"step": done, "loss": round(float(np.mean(recent[-100:])), 4), "held_out": round(held, 4)})
            print(f"  held out {held:.4f} nats per token, {held * held_out[1]:.4f} bits per byte", flush=True)
            state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
            torch.save(state | {"step": done, "log": log}, checkpoint)
    for name, p in model.named_parameters():
        if args.int4_steps and is_hidden_matrix(name):
            p.data = int4_grid(p.data)
    return log


# -- commands


def save(model: Any, out: Path, work: Path, dtype: torch.dtype) -> None:
    model.to(dtype).save_pretrained(out)
    tidy_config(out)
    for file in sorted((work / "tokenizer").iterdir()):
        (out / file.name).write_bytes(file.read_bytes())


def length_at(step: int, args: argparse.Namespace) -> int:
    """Returns the window length of a step in tokens: short windows first, long ones while the learning rate decays."""
    left = (args.steps - step) / args.decay
    return 1024 if left < 0.6 else 512 if left < 1.2 else 256


def train_target(args: argparse.Namespace) -> None:
    windows, held_out = load_data(args)
    model = make_model("target", args.seed)

    def batch_at(step: int) -> torch.Tensor:
        return windows(step, args.tokens, length_at(step, args), share=min(1.0, (args.steps - step) / args.decay))

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    log = train(model, batch_at, loss_of, held_out, args)
    save(model, args.work / "target", args.work, torch.float32)
    record(
        "target", args, seed=args.seed, steps=args.steps, tokens_a_step=args.tokens, losses=log, shape=SHAPES["target"]
    )


@torch.no_grad()
def own_text(target: Any, windows: Windows, rows: int, seed: int) -> torch.Tensor:
    """Generates continuations of training files with the target, half of them greedy, half sampled."""
    torch.manual_seed(seed)
    parts = []
    for i, greedy in enumerate((True, False)):
        prompt = windows(1_000_000 + i, rows // 2 * 48, 48)[:, :48]
        how = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 0.8, "top_k": 0}
        how |= {"min_new_tokens": 209, "max_new_tokens": 209, "pad_token_id": 0}
        parts.append(target.generate(prompt, attention_mask=torch.ones_like(prompt), **how))
    return torch.cat(parts)


def train_draft(args: argparse.Namespace) -> None:
    windows, held_out = load_data(args)
    teacher = LlamaForCausalLM.from_pretrained(args.teacher or args.work / "target", dtype=torch.bfloat16).eval()
    model = make_model("draft", args.seed + 1)
    table = teacher.get_input_embeddings().weight.data.float()
    width = model.config.hidden_size
    table = table @ torch.linalg.svd(table, full_matrices=False).Vh[:width].T
    model.get_input_embeddings().weight.data = table * (0.02 / table.std())
    if not args.resume:
        began = time.monotonic()
        torch.save(own_text(teacher, windows, args.own_rows, args.seed), args.work / "own_text.pt")
        print(f"generating the target's own text took {time.monotonic() - began:.0f} s", flush=True)
    own = torch.load(args.work / "own_text.pt", weights_only=True)

    def batch_at(step: int) -> torch.Tensor:
        if step % 4 == 3:
            rows = np.random.default_rng((args.seed, step)).permutation(len(own))[: args.tokens // 256]
            return own[torch.from_numpy(rows)]
        return windows(step, args.tokens, length_at(step, args))

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        labels = batch[:, 1:].flatten()
        with torch.no_grad():
            wanted = teacher(input_ids=batch[:, :-1], use_cache=False).logits.float().flatten(0, 1)
            wanted = wanted.softmax(-1).mul_(0.9)
            wanted[torch.arange(len(labels)), labels] += 0.1
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), wanted)

    log = train(model, batch_at, loss_of, held_out, args)
    save(model, args.out / "draft", args.work, torch.bfloat16)
    record(
        "draft",
        args,
        seed=args.seed + 1,
        steps=args.steps,
        tokens_a_step=args.tokens,
        losses=log,
        shape=SHAPES["draft"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("command", choices=["tokenizer", "target", "draft"])
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "demo", help="folder of tokenizer, checkpoints and dense target"
    )
    parser.add_argument("--out", type=Path, default=DEMO, help="output folder for the pair and provenance.json")
    parser.add_argument("--teacher", type=Path, help="target to distil from (default: the one in --work)")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--steps", type=int, default=2600)
    parser.add_argument("--decay", type=int, default=800, help="last steps, in which the learning rate falls to zero")
    parser.add_argument("--int4-steps", type=int, default=0, help="last steps, trained with weights rounded to int4")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per step")
    parser.add_argument("--tests-share", type=float, default=0.2, help="share of windows from the library's tests")
    parser.add_argument("--own-rows", type=int, default=512, help="windows of target-generated text for the draft")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    {"tokenizer": make_tokenizer, "target": train_target, "draft": train_draft}[args.command](args)


if __name__ == "__main__":
    main()
