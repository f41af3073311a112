"""Records the two traces that the page can play without a model: swiftspec/serve/page/traces/.

    python -m tools.page_traces

Each trace is a race on a server: one prompt without a draft, then with speculation. `pair` runs the demo models on one
rank. `large` runs them on two ranks, one per model, with the emulated step times of a target of 70 billion parameters
and its draft on GPUs: rounds and tokens are real, step times are emulated.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "swiftspec" / "serve" / "page" / "traces"
REQUEST = {"prompt": "def read_lines(path):\n", "max_tokens": 128, "temperature": 0.6, "seed": 5}
TRACES = {  # server flags by name of the trace
    "pair": ["--mode", "serial", "--draft-steps", "4"],
    "large": ["--mode", "async", "--draft-steps", "3", "--speculative-config.emulate", "target=10.48ms,draft=3.25ms"],
}
MAX_FILE_BYTES = 300_000


def main() -> None:
    """Records both traces."""
    FOLDER.mkdir(exist_ok=True)
    for name, flags in TRACES.items():
        lines = last_requests([rounded(json.loads(line)) for line in record_race(flags)])
        file = FOLDER / f"{name}.jsonl"
        file.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines), encoding="utf-8")
        size = file.stat().st_size
        print(f"wrote {file.relative_to(ROOT)}: {len(lines)} lines, {size} bytes")
        assert size <= MAX_FILE_BYTES, f"larger than {MAX_FILE_BYTES} bytes; generate fewer tokens"


def record_race(flags: Sequence[str]) -> list[str]:
    """Runs the race twice on a server with these flags, the first time as a warm-up, and returns the lines of its
    trace."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.jsonl"
        ranks = [] if "async" not in flags else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [
            sys.executable, *ranks, "-m", "swiftspec.serve", "--port", "0", "--plan", "none", "--no-adapt",
            "--speculative-config.self_switch", "true", "--trace", str(file), *flags,
        ]  # fmt: skip
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as server:
            assert server.stderr is not None
            url = next(found[1] for line in server.stderr if (found := re.search(r"listening on (http://\S+)", line)))
            try:
                for more in ({"verify_batch": 1}, {}) * 2:
                    httpx.post(f"{url}/v1/completions", json={**REQUEST, **more}, timeout=120).raise_for_status()
            finally:
                server.terminate()
                server.stderr.read()
        return file.read_text(encoding="utf-8").splitlines()


def last_requests(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the header and the lines of the last two requests. The header keeps only the texts of their tokens."""
    head, *rest = lines
    texts = {token: text for line in lines for token, text in line.pop("texts", {}).items()}
    warm = max(line["request"] for line in rest) - 2
    kept = [{**line, "request": line["request"] - warm} for line in rest if line["request"] > warm]
    named = {str(token) for line in kept for token in token_ids_in(line)}
    return [{**head, "texts": {token: text for token, text in texts.items() if token in named}}, *kept]


def token_ids_in(value: Any, under: str = "") -> set[int]:
    """Returns the token ids in a trace line, or in one of its values with the key `under`."""
    if isinstance(value, dict):
        return {token for key, one in value.items() for token in token_ids_in(one, key)}
    return set(value) if under in ("tokens", "prompt") and isinstance(value, list) else set()


def rounded(line: dict[str, Any]) -> dict[str, Any]:
    """Returns a line with numbers rounded to the precision of the page."""
    return json.loads(json.dumps(line), parse_float=lambda text: round(float(text), 4 if "." in text else 0))


if __name__ == "__main__":
    main()
