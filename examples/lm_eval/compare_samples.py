"""Compares the log-likelihoods of two runs of lm-evaluation-harness with --log_samples.

    python examples/lm_eval/compare_samples.py TASK FOLDER OTHER_FOLDER

The folders are those of --output_path. Prints the largest and the mean difference of the log-likelihoods, and for
multiple-choice items in how many of them the runs agree whether the choice is the greedy continuation.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def responses(folder: Path, task: str) -> list[Any]:
    """Returns the responses of the newest run in a folder, in the order of the documents."""
    file = max(folder.rglob(f"samples_{task}_*.jsonl"), key=lambda path: path.stat().st_mtime)
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [response[0] for line in sorted(lines, key=lambda line: line["doc_id"]) for response in line["resps"]]


def main() -> None:
    task, one, other = sys.argv[1], *map(Path, sys.argv[2:])
    pairs = list(zip(responses(one, task), responses(other, task), strict=True))
    if isinstance(pairs[0][0], list):  # log-likelihood, and whether the continuation is greedy
        agreeing = sum(a[1] == b[1] for a, b in pairs)
        print(f"greedy: {agreeing} of {len(pairs)} agree")
        pairs = [(a[0], b[0]) for a, b in pairs]
    differences = [abs(float(a) - float(b)) for a, b in pairs]
    print(f"difference of {len(pairs)} log-likelihoods: at most {max(differences):.2g}", end=", ")
    print(f"mean {sum(differences) / len(differences):.2g}")


if __name__ == "__main__":
    main()
