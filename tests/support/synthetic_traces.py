"""Synthetic traces, for the page, which is tested without models."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]
WORDS = ("def", " ", "\n", "    ", "return", " x", "self", "(", ")", ":", "=", " if", "else", "0", "1", "\t")


def head(**more: Any) -> Line:
    """The first line."""
    facts = {"mode": "serial", "target_tp": 1, "draft_tp": 1, "verify_batch": 8, "draft_leaves": 4, "draft_steps": 3}
    return {"swiftspec_trace": 1, **facts, "texts": {str(at): word for at, word in enumerate(WORDS)}, **more}


def random_tree(rng: random.Random, root: int, steps: int = 3, leaves: int = 4, children: int = 8) -> Line:
    """A tree like a draft's: the most likely leaves get children, repeatedly."""
    tree: Line = {"tokens": [root], "parents": [-1], "logprobs": [0.0], "expanded": [0]}
    for _ in range(steps):
        open_ = [at for at, expanded in enumerate(tree["expanded"]) if not expanded]
        for parent in sorted(open_, key=lambda at: -tree["logprobs"][at])[:leaves]:
            tree["expanded"][parent] = 1
            shares = [rng.random() ** 4 for _ in range(children)]
            for token, share in zip(rng.sample(range(len(WORDS)), children), shares):
                tree["tokens"].append(token)
                tree["parents"].append(parent)
                tree["logprobs"].append(round(tree["logprobs"][parent] + math.log(share / sum(shares)), 4))
                tree["expanded"].append(0)
    return tree


def best_nodes(tree: Line, count: int) -> Line:
    """The best nodes of a tree, as a proposal."""
    best = sorted(sorted(range(len(tree["tokens"])), key=lambda at: -tree["logprobs"][at])[:count])
    place = {node: at for at, node in enumerate(best)}
    parents = [place.get(tree["parents"][node], -1) for node in best]
    return {"tokens": [tree["tokens"][node] for node in best], "parents": parents}


def rounds(request: int, count: int, seconds: float = 0.005, seed: int = 0, bs: int = 8) -> list[Line]:
    """`count` rounds of a request, `seconds` seconds each."""
    rng, root, lines = random.Random(seed), 0, list[Line]()
    for number in range(count):
        tree = random_tree(rng, root)
        proposal = best_nodes(tree, bs)
        path = [0]
        while path[-1] in proposal["parents"] and rng.random() < 0.7:
            path.append(proposal["parents"].index(path[-1]))
        own = rng.randrange(len(WORDS))
        tokens = [*(proposal["tokens"][at] for at in path[1:]), own]
        proposal["p"] = [None, *(round(rng.random(), 3) for _ in proposal["tokens"][1:])]
        began = 100.0 + number * seconds
        half = began + seconds / 2
        draft = {"forwards": [[began, half, 4]], "tree": tree, "nodes": len(tree["tokens"])}
        lines.append({
            "request": request, "round": number, "wait": [began, half], "proposal": proposal, "path": path,
            "tokens": tokens, "target": {"verify": [half, began + seconds], "forward": seconds / 3},
            **({"draft": draft} if bs > 1 else {}),
        })  # fmt: skip
        root = own
    return lines


def request(number: int, lines: Sequence[Line], prompt: Sequence[int] = (0, 1), **sampling: Any) -> list[Line]:
    """The lines of a request: begin, rounds, end."""
    tokens = sum(len(line["tokens"]) for line in lines)
    begin = {"request": number, "begin": {"at": 99.9, "prompt": list(prompt), "sampling": sampling}}
    return [begin, *lines, {"request": number, "end": {"at": 999.0, "reason": "length", "tokens": tokens}}]


def race(count: int = 40) -> list[Line]:
    """The same tokens by autoregressive decoding and in rounds of a tree."""
    fast = rounds(2, count)
    tokens = [token for line in fast for token in line["tokens"]]
    plain = rounds(1, len(tokens), 0.004, bs=1)
    root = 0
    for line, token in zip(plain, tokens):
        line |= {"tokens": [token], "path": [0], "proposal": {"tokens": [root], "parents": [-1]}}
        root = token
    return [*request(1, plain), *request(2, fast)]


def write(file: Path, lines: Sequence[Line]) -> Path:
    """Writes a trace file."""
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file
