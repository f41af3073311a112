"""Bytes that a round must read at least, and the share of the copy speed that a decode reaches with them."""

from __future__ import annotations

from swiftspec.builder.memory_estimate import MemoryEstimate


def forward_bytes(model: MemoryEstimate, context: int) -> float:
    """Returns the bytes of a model's weights, and of keys and values of `context` tokens, each read once. The embedding
    table is left out: a forward reads a few rows of it."""
    spec = model.config.spec
    embedding = spec.vocab_size * spec.hidden_size * model.dtype.itemsize
    return model.weights - embedding + context * model.kv_token


def round_share(
    speed: dict[str, float],
    target: MemoryEstimate,
    draft: MemoryEstimate | None,
    *,
    forwards: int,
    context: int,
    copy: float,
) -> dict[str, float]:
    """Returns what a decode at `speed`, as `decode` in step.py returns it, reads per round.

    `forwards`: those of the draft per round. `context`: mean number of tokens. `copy`: copy speed in GB/s. The result
    has the gigabytes of a round, and their share of what a copy moves in the time of a round. Several rows of a forward
    count once, so the share is a lower bound.
    """
    moved = forward_bytes(target, context)
    if draft is not None:
        moved += forwards * forward_bytes(draft, context)
    seconds = speed["tok/round"] / speed["tok/s"]
    return {"round GB": moved / 1e9, "of copy": moved / 1e9 / seconds / copy}
