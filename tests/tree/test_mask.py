"""Invariant 3: a mask row contains the node's ancestors and itself, by brute force from the parents."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from swiftspec.tree import mask


@st.composite
def forests(draw: st.DrawFn) -> list[int]:
    size = draw(st.integers(1, 24))
    return [draw(st.integers(-1, node - 1)) for node in range(size)]


@given(forests())
def test_rows_are_ancestors_and_self(parents: list[int]) -> None:
    rows = mask.from_parents(parents)
    for node in range(len(parents)):
        ancestry, at = set(), node
        while at >= 0:
            ancestry.add(at)
            at = parents[at]
        assert set(np.flatnonzero(rows[node]).tolist()) == ancestry


def test_a_chain_is_causal() -> None:
    assert (mask.from_parents([-1, 0, 1, 2]) == mask.causal(4)).all()


@given(st.integers(1, 5), st.integers(1, 600))
def test_padding_adds_visible_columns_on_the_left(n: int, width: int) -> None:
    rows = np.zeros((n, width), dtype=np.bool_)
    padded = mask.pad_left(rows)
    extra = padded.shape[1] - width
    assert padded[:, :extra].all() and not padded[:, extra:].any()
    assert padded.shape[1] in mask.MASK_WIDTHS or padded.shape[1] % mask.MASK_WIDTHS[-1] == 0
    assert extra < max(8, width)  # never more than twice as wide


def test_the_number_of_fixed_widths_is_small() -> None:
    shapes = {mask.pad_left(np.zeros((1, w), dtype=np.bool_)).shape[1] for w in range(1, 257)}
    assert len(shapes) <= 10
