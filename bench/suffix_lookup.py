"""Microseconds of suffix lookup per round: 4 tokens are appended and 16 nodes are queried.

    python -m bench.suffix_lookup [--tokens 20000] [--rounds 2000]

Prints one line per kind of text: the shortest and the longest of three repetitions.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence

from swiftspec import _C
from swiftspec.tree.match_acceptance import MatchAcceptance

ROUND_TOKENS, NODES, REPEATS, VOCAB = 4, 16, 3, 49152


def make_texts(tokens: int) -> dict[str, list[int]]:
    """Returns a text of each kind, twice as long as `tokens`: random ones and degenerate ones."""
    draw = random.Random(0)
    count = range(2 * tokens)
    return {
        "random tokens": [draw.randrange(VOCAB) for _ in count],
        "4 different tokens": [draw.randrange(4) for _ in count],
        "period of 30 tokens": [i % 30 for i in count],
        "one token": [5 for _ in count],
    }


def round_microseconds(text: Sequence[int], tokens: int, rounds: int) -> float:
    """Returns the mean time of a round after a text of `tokens` tokens."""
    index, table = _C.SuffixIndex(2 * tokens), MatchAcceptance(_C.MAX_MATCH_TOKENS).table
    index.begin_text()
    index.append(text[:tokens])
    following = [text[tokens + i : tokens + i + ROUND_TOKENS] for i in range(0, rounds * ROUND_TOKENS, ROUND_TOKENS)]
    began = time.perf_counter()
    for chunk in following:
        index.append(chunk)
        index.query(NODES, table)
    return 1e6 * (time.perf_counter() - began) / rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000, help="tokens of the text before the first round")
    parser.add_argument("--rounds", type=int, default=2000)
    args = parser.parse_args()
    for kind, text in make_texts(max(args.tokens, args.rounds * ROUND_TOKENS)).items():
        times = [round_microseconds(text, args.tokens, args.rounds) for _ in range(REPEATS)]
        print(f"{kind:<20} {min(times):6.1f} .. {max(times):.1f} us per round")


if __name__ == "__main__":
    main()
