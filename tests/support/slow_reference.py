"""A slow reference of the algorithm, without cache, masks and arrays. A context's distribution is one ordinary
forward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Path = tuple[int, ...]
LogProbs = Callable[[Sequence[int]], list[float]]  # of the token after a context


def rounds(
    target: LogProbs,
    draft: LogProbs,
    prompt: Sequence[int],
    tokens: int,
    *,
    bs: int,
    w: int,
    d: int,
    ahead: bool = False,
    worth: float | None = None,
) -> tuple[list[int], int]:
    """Greedy decoding with a draft tree (paper section 3.1): the text and the number of target forwards.

    With `ahead` False the tree expands between two verifications. With `ahead` it expands during them, so that a
    proposal comes from the expansions of the previous round, and once more if fewer than bs nodes are left; and with
    `worth`, while that share of the best leaves' probability is more than a d-th of the best nodes'.
    """
    text = list(prompt)
    tree: dict[Path, float] = {(): 0.0}  # path from below the root -> log-probability, in order of creation
    expanded: set[Path] = set()
    count = 0
    k = max(bs, w)
    while len(text) < len(prompt) + tokens:
        now = d if not ahead or count == 0 else 1 if len(tree) < bs else 0
        for _ in range(now):
            _expand(tree, expanded, text, draft, w, k)
        while worth is not None and _worth(tree, expanded, bs, w, d, worth):
            _expand(tree, expanded, text, draft, w, k)
        proposal = set(sorted(tree, key=lambda path: -tree[path])[:bs])
        for _ in range(d if ahead else 0):
            _expand(tree, expanded, text, draft, w, k)
        path: Path = ()
        while True:
            scores = target([*text, *path])
            path = (*path, max(range(len(scores)), key=scores.__getitem__))
            if path not in proposal:
                break
        count += 1
        text += path
        base = tree.get(path, 0.0)
        below = {p: v - base for p, v in tree.items() if p[: len(path)] == path}
        tree = {p[len(path) :]: v for p, v in below.items()} or {(): 0.0}
        expanded = {p[len(path) :] for p in expanded if p[: len(path)] == path}
    return text[len(prompt) : len(prompt) + tokens], count


def _worth(tree: dict[Path, float], expanded: set[Path], bs: int, w: int, d: int, worth: float) -> bool:
    nodes = sorted(tree.values(), reverse=True)[:bs]
    leaves = sorted((value for path, value in tree.items() if path not in expanded), reverse=True)[:w]
    return worth * sum(map(math.exp, leaves)) > sum(map(math.exp, nodes)) / d


def _expand(tree: dict[Path, float], expanded: set[Path], text: list[int], draft: LogProbs, w: int, k: int) -> None:
    leaves = sorted((p for p in tree if p not in expanded), key=lambda p: -tree[p])[:w]
    for leaf in leaves:
        scores = draft([*text, *leaf])
        expanded.add(leaf)
        for token in sorted(range(len(scores)), key=lambda t: -scores[t])[:k]:
            tree[(*leaf, token)] = tree[leaf] + scores[token]
