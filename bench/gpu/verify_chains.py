"""Verification of chains on a GPU: the CUDA operator against the reference in torch. Not run on a GPU.

    python -m bench.gpu.verify_chains [--batch 16] [--steps 5] [--vocab 128256]

Prints microseconds per call in a CUDA graph, and the time in which a device copy reads as many bytes. The logits of few
requests stay in the L2 cache, as they do after a forward.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from bench.gpu.timing import copy_speed, graph_timer
from swiftspec.backends.cuda import chains as cuda_chains
from swiftspec.backends.reference import chains
from swiftspec.backends.reference.noise import counters, gumbel, row_bits
from swiftspec.backends.reference.sampling import Scores

DEVICE = "cuda"


def noise_of(keys: Tensor, vocab: int) -> Tensor:
    """Returns the Gumbel noise of noise keys [...], float32 [..., vocab]."""
    return gumbel(row_bits(keys, counters(range(vocab), keys.device)), torch.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--vocab", type=int, default=128256)
    args = parser.parse_args()
    batch, steps, vocab = args.batch, args.steps, args.vocab
    dice = torch.Generator().manual_seed(1)
    target = (3 * torch.randn(batch, steps + 1, vocab, generator=dice)).to(DEVICE)
    draft = target[:, :steps] + torch.randn(batch, steps, vocab, generator=dice).to(DEVICE)
    tokens = draft.argmax(-1)
    uniforms = torch.rand(batch, steps, generator=dice).to(DEVICE)
    keys = torch.randint(-(2**31), 2**31, (batch, steps + 1), generator=dice).to(torch.int32).to(DEVICE)
    first, plain = keys[:, 0].contiguous(), Scores()
    calls: list[tuple[str, int, Callable[[], object], Callable[[], object]]] = [
        (
            "match", target.nbytes, lambda: cuda_chains.match_chains(target, vocab, tokens, keys, plain),
            lambda: chains.accept_matching_prefix((target + noise_of(keys, vocab)).argmax(-1), tokens),
        ),
        (
            "reject", target.nbytes + draft.nbytes,
            lambda: cuda_chains.reject_chains(target, draft, tokens, uniforms, first),
            lambda: chains.verify_by_rejection(target, draft, tokens, uniforms, noise_of(first, vocab)),
        ),
    ]  # fmt: skip
    bandwidth = copy_speed(DEVICE)  # GB/s
    for name, size, operator, torch_reference in calls:
        ours, theirs = (graph_timer([call]) for call in (operator, torch_reference))
        print(f"{name:6} {ours:9.1f} us, in torch {theirs:9.1f} us; a copy of {size / 1e6:.0f} MB: "
              f"{size / (1e3 * bandwidth):.1f} us")  # fmt: skip


if __name__ == "__main__":
    main()
