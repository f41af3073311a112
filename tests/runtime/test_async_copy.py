"""Copies from device to host."""

from __future__ import annotations

import torch

from swiftspec.runtime.async_copy import HostCopies


def test_only_a_copy_that_was_read_is_used_again() -> None:
    copies, source = HostCopies(), torch.arange(3)
    first = copies.start(source)
    source += 1
    second = copies.start(source)
    values = second.read()
    assert values.tolist() == [1, 2, 3] and first.read().tolist() == [0, 1, 2]
    source += 1
    assert {id(copies.start(source)), id(copies.start(source))} == {id(first), id(second)}
    assert values.tolist() == [1, 2, 3], "what was read belongs to the caller"
    assert copies.start(source.double()) not in (first, second)
