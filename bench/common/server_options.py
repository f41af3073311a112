"""Options, server flags, prompts and output shared by the benchmarks of a server."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from bench.data.heldout import DEMO, read_prompts

EMULATE = "--speculative-config.emulate"


def options(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the flags --steps, --requests, --tokens and --json. `doc`: its description."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default="full,2,5", type=lambda text: text.split(","))
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--json", type=Path)
    return parser


def flags(steps: str) -> list[str]:
    """Returns the server flags for rounds of a fixed shape with emulated step times.

    `steps`: milliseconds of a target step; a draft step takes a twentieth of that. "full" disables the emulation.
    """
    fixed = ["--plan", "none", "--threads", "1", "--prefix-cache-memory", "0", "--no-adapt"]
    return fixed if steps == "full" else [*fixed, EMULATE, f"target={steps}ms,draft={float(steps) / 20:g}ms"]


def prompts(requests: int) -> list[list[int]]:
    """Returns `requests` held-out prompts of 64 tokens each."""
    texts = read_prompts(AutoTokenizer.from_pretrained(DEMO / "target"))
    return [text[:64] for text in texts[:requests]]


def write(file: Path | None, rows: list[dict[str, Any]]) -> None:
    """Writes the rows as JSON if a file is given."""
    if file is not None:
        file.write_text(json.dumps({"machine": os.uname().machine, "rows": rows}, indent=1), encoding="utf-8")
