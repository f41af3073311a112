"""The native suffix index against an oracle that searches all texts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from swiftspec import _C
from tests.support.cases import examples

MAX_NODES = 24
MAX_CANDIDATES, ORDERS = 32, (2, 4, 8, 16)  # as in csrc/host/decoder/suffix_index.h
ACCEPTANCE = np.linspace(0.2, 0.95, _C.MAX_MATCH_TOKENS + 1, dtype=np.float32)
Text = list[int]
Nodes = tuple[list[int], list[int], list[int], list[float], list[float]]

texts = st.integers(1, 4).flatmap(
    lambda alphabet: st.lists(st.lists(st.integers(0, alphabet), min_size=1, max_size=60), min_size=1, max_size=4)
)
paths = st.lists(st.integers(0, 3), max_size=4)


def index_of(texts: list[Text], capacity: int = 1 << 12, queries: bool = False) -> _C.SuffixIndex:
    """Returns an index of the texts, of which the last is the latest. `queries`: query after every token, so that the
    index follows the longest match."""
    index = _C.SuffixIndex(capacity)
    for text in texts:
        index.begin_text()
        for token in text:
            index.append([token])
            if queries:
                index.query(MAX_NODES, ACCEPTANCE)
    return index


def occurrences(texts: list[Text], context: Text) -> dict[int, int]:
    """Returns by token the length of the longest match with the end of `context` before an occurrence of that token in
    `texts`, capped; 0 for a token that occurs only after other tokens."""
    found: dict[int, int] = {}
    for text in texts:
        for at in range(1, len(text)):
            length = 0
            limit = min(at, len(context), _C.MAX_MATCH_TOKENS)
            while length < limit and text[at - 1 - length] == context[-1 - length]:
                length += 1
            found[text[at]] = max(found.get(text[at], 0), length)
    return found


def path_to(nodes: Nodes, node: int) -> Text:
    """Returns the tokens from the root to a node, itself included. `node`: 1 for the first one."""
    path = []
    while node:
        path.append(nodes[0][node - 1])
        node = nodes[1][node - 1]
    return path[::-1]


def check_tree(nodes: Nodes) -> None:
    """Checks that the nodes form a tree of different siblings by descending weight."""
    tokens, parents, lengths, shares, weights = nodes
    assert len({*zip(parents, tokens, strict=True)}) == len(tokens), "two siblings have the same token"
    above = [0.0, *weights]
    for i, (parent, length, share) in enumerate(zip(parents, lengths, shares, strict=True), 1):
        assert 0 <= parent < i and 0 < share <= 1
        expected = above[parent] + math.log(float(ACCEPTANCE[length]) * share)
        assert above[i] == pytest.approx(expected, abs=1e-4)
    assert weights == sorted(weights, reverse=True)


@pytest.mark.parametrize("queries", [False, True])
@given(texts=texts, path=paths)
@settings(max_examples=examples(150))
def test_every_continuation_occurs_after_a_match_of_its_length(queries: bool, texts: list[Text], path: Text) -> None:
    nodes = index_of(texts, queries=queries).query(MAX_NODES, ACCEPTANCE, path)
    check_tree(nodes)
    for node, (token, length) in enumerate(zip(nodes[0], nodes[2], strict=True), 1):
        context = [*texts[-1], *path, *path_to(nodes, node)[:-1]]
        assert occurrences(texts, context)[token] >= length >= ORDERS[0]


@given(texts=texts, path=paths)
@settings(max_examples=examples(150))
def test_the_longest_match_is_found(texts: list[Text], path: Text) -> None:
    nodes = index_of(texts).query(MAX_NODES, ACCEPTANCE, path)
    if sum(map(len, texts)) <= MAX_CANDIDATES:
        longest = max(occurrences(texts, [*texts[-1], *path]).values(), default=0)
        first = [length for parent, length in zip(nodes[1], nodes[2], strict=True) if parent == 0]
        assert max(first, default=0) == (longest if longest >= ORDERS[0] else 0)


def test_shares_are_votes_of_the_fourth_power_of_the_match_length() -> None:
    index = index_of([[1, 2, 3, 9, 7, 2, 3, 8, 1, 2, 3]])
    tokens, parents, lengths, shares, _ = index.query(2, np.full_like(ACCEPTANCE, 0.99))
    assert (tokens, parents, lengths) == ([9, 7], [0, 1], [3, 4])
    assert shares == pytest.approx([81 / (81 + 16), 1.0])


def test_the_latest_of_equal_matches_comes_first() -> None:
    assert index_of([[1, 2, 5, 1, 2, 6, 1, 2]]).query(1, ACCEPTANCE)[0] == [6]


def test_no_match_crosses_the_border_of_a_text() -> None:
    assert index_of([[1, 2], [3, 4], [1, 2, 3]]).query(4, ACCEPTANCE)[0] == []
    assert index_of([[1, 2], [9, 1, 2]]).query(4, ACCEPTANCE)[0] == []


def test_an_empty_index_and_a_new_text_have_no_continuations() -> None:
    assert _C.SuffixIndex(8).query(4, ACCEPTANCE) == ([], [], [], [], [])
    assert index_of([[1, 2, 3], []]).query(4, ACCEPTANCE)[0] == []


@given(texts=texts, path=paths, capacity=st.sampled_from([8, 16, 64]))
@settings(max_examples=examples(150))
def test_the_oldest_tokens_are_evicted(texts: list[Text], path: Text, capacity: int) -> None:
    nodes = index_of(texts, capacity, queries=True).query(MAX_NODES, ACCEPTANCE, path)
    check_tree(nodes)
    whole: Text = []
    for text in texts:
        whole += [-1] * bool(whole) + text
    kept, current = [[]], whole[-capacity:]
    for token in current:
        if token < 0:
            kept.append([])
        else:
            kept[-1].append(token)
    for node, token in enumerate(nodes[0], 1):
        context = [*texts[-1], *path, *path_to(nodes, node)[:-1]]
        assert token in occurrences(kept, context)


def test_a_copy_is_followed_although_later_texts_contain_its_tokens() -> None:
    """The end of the copied text also occurs more often later, with another continuation."""
    source = [*range(100, 140), 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 50, 51]
    noise = [7] * 300
    index = index_of([source, noise, source[:-2]], queries=True)
    assert index.query(2, ACCEPTANCE)[0] == [50, 51]


def test_a_repeated_token_continues() -> None:
    tokens, parents, *_ = index_of([[5] * 100]).query(8, ACCEPTANCE)
    assert tokens == [5] * 8 and parents == [*range(8)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: _C.SuffixIndex(0), "capacity"),
        (lambda: _C.SuffixIndex(2**30), "capacity"),
        (lambda: _C.SuffixIndex(8).append([-1]), "negative"),
        (lambda: _C.SuffixIndex(8).query(0, ACCEPTANCE), "max_nodes"),
        (lambda: _C.SuffixIndex(8).query(1, ACCEPTANCE, [-3]), "negative"),
        (lambda: _C.SuffixIndex(8).query(1, ACCEPTANCE[1:]), "acceptance"),
    ],
)
def test_invalid_arguments_raise_value_error(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()


def test_the_acceptance_ranks_the_nodes() -> None:
    """Where only short matches are right, the shallow alternatives rank above the deep continuation."""
    falling: NDArray[np.float32] = np.linspace(0.9, 0.01, _C.MAX_MATCH_TOKENS + 1, dtype=np.float32)
    falling[4:] = 0.01
    index = index_of([[1, 2, 5, 6, 7, 8, 1, 2, 9, 1, 2]])
    assert {*index.query(2, falling)[0]} == {5, 9}
