"""Rejection of chains in a batch against the loop over rows that it replaces: time and memory, in one run.

    python -m bench.verify [--batch 64] [--steps 5] [--vocab 128256] [--repeats 3] [--gpu]

Both get logits that are shaped already and give the same law; the loop is the textbook one, on probabilities of
everything. Times are this thread's CPU time; memory is what the operators allocate beyond their input at their peak.
With --gpu, instead, the CUDA operator and the batched form in torch, microseconds a call within a graph, and what the
bytes alone take at the speed of a copy; few requests' logits stay in the L2, as after a forward. Not run on a GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench.gpu.timing import copy_speed, graph_timer
from swiftspec.smc import chain_verification as verify


def loop(target: Tensor, draft: Tensor, tokens: Tensor, coins: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax of everything, then row by row and position by position."""
    p, q = target.softmax(-1), draft.softmax(-1)
    count = torch.zeros(len(tokens), dtype=torch.int64)
    bonus = torch.zeros(len(tokens), dtype=torch.int64)
    for b in range(len(tokens)):
        for k in range(tokens.shape[1]):
            token = tokens[b, k]
            if coins[b, k].item() * q[b, k, token].item() >= p[b, k, token].item():
                left = (p[b, k] - q[b, k]).clamp(min=0)
                bonus[b] = torch.multinomial(left / left.sum(), 1).item()
                break
            count[b] += 1
        else:
            bonus[b] = torch.multinomial(p[b, -1], 1).item()
    return count, bonus


def measure(act: Callable[[], object], repeats: int) -> tuple[float, float]:
    """The least seconds of a run, and the most MiB that one holds at a time."""
    best = float("inf")
    for _ in range(repeats):
        began = time.thread_time()
        act()
        best = min(best, time.thread_time() - began)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        act()
    assert seen.profiler is not None and seen.profiler.kineto_results is not None
    held = peak = 0
    for event in sorted(seen.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()  # type: ignore[attr-defined] # torch's stub lacks it
            peak = max(peak, held)
    return best, peak / 2**20


def on_gpu(target: Tensor, draft: Tensor, tokens: Tensor, coins: Tensor, gumbel: Tensor) -> None:
    """Prints what a call takes on a GPU, by `reject` and by `match`."""
    from swiftspec.chains.cuda import ChainVerifier

    target, draft, tokens, coins, gumbel = (x.cuda() for x in (target, draft, tokens, coins, gumbel))
    batch, steps = tokens.shape
    chains = ChainVerifier(batch, steps, "cuda")
    keys = torch.randint(-(2**31), 2**31, (batch, steps + 1), dtype=torch.int32, device="cuda")
    copy, both = copy_speed("cuda"), target.nbytes + draft.nbytes
    for name, moved, ours, theirs in (
        (
            "reject",
            both,
            lambda: chains.reject(target, draft, tokens, coins, keys),
            lambda: verify.reject(target, draft, tokens, coins, gumbel),
        ),
        (
            "match",
            target.nbytes,
            lambda: chains.match(target, tokens, keys),
            lambda: verify.match(target, tokens, gumbel[:, None]),
        ),
    ):
        floor, took = moved / (1e3 * copy), [graph_timer([act]) for act in (ours, theirs)]
        print(f"{name:8} {took[0]:9.1f} us, in torch {took[1]:9.1f} us; {moved / 1e6:.0f} MB take {floor:.1f} us")


def main() -> None:
    """Prints both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gpu", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    noise = torch.Generator().manual_seed(1)
    target = torch.randn(args.batch, args.steps + 1, args.vocab, generator=noise) * 3
    draft = target[:, :-1] + torch.randn(args.batch, args.steps, args.vocab, generator=noise)
    tokens = torch.stack([torch.multinomial(rows.softmax(-1), 1, generator=noise) for rows in draft])[..., 0]
    coins = torch.rand(args.batch, args.steps, generator=noise)
    gumbel = -torch.rand(args.batch, args.vocab, generator=noise).clamp_min_(1e-30).log().neg().log()
    if args.gpu:
        on_gpu(target, draft, tokens, coins, gumbel)
        return
    ours = verify.reject(target, draft, tokens, coins, gumbel).count
    assert (ours == loop(target, draft, tokens, coins)[0]).double().mean() > 0.95  # but for rounding at a coin's edge
    batched = measure(lambda: verify.reject(target, draft, tokens, coins, gumbel), args.repeats)
    looped = measure(lambda: loop(target, draft, tokens, coins), args.repeats)
    one = measure(lambda: verify.reject(target[:1], draft[:1], tokens[:1], coins[:1], gumbel[:1]), args.repeats)
    accepted = float(ours.double().mean())
    print(f"{args.batch} x {args.steps} x {args.vocab}, float32, {accepted:.2f} of {args.steps} accepted")
    for name, (seconds, mib) in (("batched", batched), ("loop", looped), ("batched, one row", one)):
        print(f"{name:18} {1000 * seconds:9.1f} ms  {mib:8.1f} MiB beyond the input")
    print(
        f"the loop takes {looped[0] / batched[0]:.2f} times as long and {looped[1] / batched[1]:.1f} times the memory"
    )


if __name__ == "__main__":
    main()
