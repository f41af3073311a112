"""Sequence groups for resampling operators, and the expected results; with and without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import torch
from torch import Tensor

from swiftspec.backends.reference import resampling
from swiftspec.backends.reference.resampling import PATH_HEADER_WORDS, Resample, ResamplingState

ALWAYS = 2.0  # a threshold that no effective sample size reaches


def groups_of(log_weights: Tensor, slots: int, words: int, seed: int) -> ResamplingState:
    """Groups with these weights [G, N] on the CPU, in which all rows differ."""
    dice = torch.Generator().manual_seed(seed)
    count = log_weights.shape[:2]
    path = torch.randint(2**40, (*count, words), generator=dice)
    path[..., 0] = torch.randint(words - PATH_HEADER_WORDS + 1, count, generator=dice)
    mask, ends = (torch.rand(*count, width, generator=dice) < 0.5 for width in (slots, 2))
    books = [torch.rand(count[0], dtype=torch.float64, generator=dice) for _ in range(2)]
    counted = [torch.randint(9, (count[0],), generator=dice) for _ in range(2)]
    return ResamplingState(log_weights.to(torch.float64, copy=True), mask, ends, path, *books, *counted)


def on(device: torch.device | str, groups: ResamplingState) -> ResamplingState:
    """A copy on that device."""
    return ResamplingState(**{name: tensor.to(device, copy=True) for name, tensor in groups.fields().items()})


def assert_agreement(found: ResamplingState, wanted: ResamplingState, bits: bool = False) -> None:
    """Compares bitwise, except logarithms and effective sample sizes unless `bits`, since math libraries differ."""
    for field in fields(ResamplingState):
        ours, theirs = getattr(found, field.name).cpu(), getattr(wanted, field.name).cpu()
        if field.name == "path":
            used = torch.arange(theirs.shape[-1]) < PATH_HEADER_WORDS + theirs[..., :1]
            ours, theirs = ours.where(used, 0), theirs.where(used, 0)
        if bits or field.name not in ("log_z", "ess"):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True, msg=field.name)
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, equal_nan=True, msg=field.name)


def checked(
    operator: Resample, groups: ResamplingState, uniform: Tensor, threshold: float, width: int, device: str
) -> ResamplingState:
    """Runs an operator and checks that its result equals the reference's."""
    found, wanted = on(device, groups), on("cpu", groups)
    operator(found, uniform.to(device), threshold, width)
    resampling.resample(wanted, uniform, threshold, width)
    assert_agreement(found, wanted)
    assert torch.equal(found.mask[..., width:].cpu(), groups.mask[..., width:]), "beyond the window nothing is copied"
    return found


def shares_of(count: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to distribute `parts` parts among `count` particles."""
    if count == 1:
        yield (parts,)
        return
    for first in range(parts + 1):
        for rest in shares_of(count - 1, parts - first):
            yield (first, *rest)


def check_by_enumeration(operator: Resample, count: int, parts: int, device: str) -> None:
    """By enumeration, in one call: weights in whole parts, with a random number per case. Over these a particle gets
    exactly its share of the copies; a copied particle keeps its row; the mean of the weights is recorded."""
    shares = torch.tensor([*shares_of(count, parts)], dtype=torch.float64)
    log_weights = (shares.log() - 3).repeat_interleave(parts, 0)
    uniform = ((torch.arange(parts, dtype=torch.float64) + 0.5) / parts).repeat(len(shares))
    groups = groups_of(log_weights, 8, 9, 1)
    groups.path[..., 1] = torch.arange(count)
    found = checked(operator, groups, uniform, ALWAYS, 8, device)
    source = found.path[..., 1].cpu()
    copies = torch.nn.functional.one_hot(source, count).sum(1).view(len(shares), parts, count).sum(1)
    assert torch.equal(copies.double(), count * shares)
    assert torch.equal(source.gather(1, source), source)
    booked = (found.log_z.cpu() - groups.log_z).exp() * count
    torch.testing.assert_close(booked, torch.full_like(booked, parts).mul_(torch.tensor(-3.0).double().exp()))
