"""Overhead of HTTP: streams of the server compared with the same session in process.

    python -m bench.serve [--steps full,2,5] [--requests 6] [--tokens 256] [--json out.json]

For each of --steps ("full": without emulation; otherwise the emulated milliseconds of a target step, with a twentieth
of that for a draft step) a server and a session in another process answer the same held-out prompts greedily,
alternately. Prints for both the tokens per second of whole requests, from the request to the last byte; for the server
also the time to the first byte minus the engine's time to the first token, and how much slower text under a JSON schema
is than free text, per token and per round.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from bench.common import server_options
from bench.data.heldout import ROOT

SCHEMA = {
    "type": "array", "minItems": 200,
    "items": {
        "type": "object", "required": ["name", "size", "tags"], "additionalProperties": False,
        "properties": {
            "name": {"type": "string", "maxLength": 24}, "size": {"type": "integer"},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
        },
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Answer:
    """Measurements of one request, in tokens, rounds and seconds.

    `seconds`: until the end of the answer. `first`: until the first byte. `engine_first`: until the first token
    according to the engine.
    """

    tokens: int
    rounds: int
    seconds: float
    first: float
    engine_first: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@contextmanager
def session(flags: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Starts a process that answers prompts from its standard input (`answer_here`)."""
    child = subprocess.Popen(
        [sys.executable, "-m", "bench.serve", "--answer-here", *flags],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        child.stdout.readline()
        yield child
    finally:
        child.communicate()


def answer_here(flags: list[str]) -> None:
    """Decodes in this process: answers each line of standard input, a JSON list [token ids of the prompt, number of
    tokens].

    Prints an `Answer` as JSON for each line.
    """
    from swiftspec.cli.arguments import parse_command
    from swiftspec.cli.terminal import StartupProgress
    from swiftspec.params import SamplingParams
    from swiftspec.startup.session import open_session
    from swiftspec.text.stream import TextStream

    opened = open_session(parse_command(flags).settings, StartupProgress(quiet=True), warm_up=True)
    print("ready", flush=True)
    for line in sys.stdin:
        prompt, tokens = json.loads(line)
        began = time.perf_counter()
        first = 0.0
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        stream = TextStream(opened.llm.stream(prompt, sampling), opened.codec)
        for _ in stream:
            first = first or time.perf_counter() - began
        stats = opened.llm.stats
        took = time.perf_counter() - began
        print(json.dumps(asdict(Answer(stats.tokens, stats.rounds, took, first, stats.first_token_time))), flush=True)
    opened.close()


@contextmanager
def server(flags: Sequence[str], ranks: int = 1) -> Iterator[str]:
    """Starts a server and yields its address."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"] if ranks > 1 else []
    process = subprocess.Popen(
        [sys.executable, "-m", *torchrun, "swiftspec.serve", "--port", "0", *flags],
        cwd=ROOT, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        url = next(found[1] for line in process.stderr if (found := re.search(r"listening on (\S+)", line)))
        yield url
    finally:
        process.terminate()
        process.communicate()


def over_http(url: str, prompt: list[int], tokens: int, more: dict[str, Any] | None = None) -> Answer:
    """Streams one answer from the server with curl and returns its measurements.

    curl needs little CPU time. `more`: additional fields of the request.
    """
    asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    command = ["curl", "-sNf", f"{url}/v1/completions", "-H", "Content-Type: application/json", "-d", "@-"]
    done = subprocess.run(
        [*command, "-w", "%{stderr}%{time_starttransfer} %{time_total}"],
        input=json.dumps(asked | (more or {})), capture_output=True, text=True, check=True,
    )  # fmt: skip
    first, took = map(float, done.stderr.split())
    last = json.loads([line for line in done.stdout.splitlines() if line.startswith("data: {")][-1][6:])
    rounds = last["metrics"]["speculative_decoding"]["num_spec_steps"]
    engine_first = last["metrics"]["time_to_first_token_ms"] / 1e3
    return Answer(last["timings"]["predicted_n"], rounds, took, first, engine_first)


def measure(steps: str, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Measures one row of the table. `steps`: one of --steps. `tokens`: tokens per answer."""
    flags = server_options.flags(steps)
    schema = {"response_format": {"type": "json_schema", "json_schema": {"name": "list", "schema": SCHEMA}}}
    found: dict[str, list[Answer]] = {"session": [], "http": [], "schema": []}
    with session(flags) as child, server(flags) as url:
        over_http(url, prompts[0], 8, schema)  # compiles the grammar, once
        for prompt in prompts:
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(json.dumps([prompt, tokens]) + "\n")
            child.stdin.flush()
            found["session"].append(Answer(**json.loads(child.stdout.readline())))
            found["http"].append(over_http(url, prompt, tokens))
            found["schema"].append(over_http(url, prompt, tokens, schema))
    rate = {name: sum(a.tokens for a in some) / sum(a.seconds for a in some) for name, some in found.items()}
    per_round = {name: 1e3 * sum(a.seconds for a in some) / sum(a.rounds for a in some) for name, some in found.items()}
    return {
        "steps": steps, "tokens_per_second": rate, "http_share": rate["http"] / rate["session"],
        "first_byte_overhead_ms": statistics.median(1e3 * (a.first - a.engine_first) for a in found["http"]),
        "ms_per_round": per_round, "schema_slower": 1 - rate["schema"] / rate["http"],
        "schema_round_slower": per_round["schema"] / per_round["http"] - 1,
        "answers": {name: [asdict(a) for a in some] for name, some in found.items()},
    }  # fmt: skip


def main() -> None:
    """Measures and prints the rows."""
    args = server_options.options(__doc__).parse_args()
    prompts = server_options.prompts(args.requests)
    rows = []
    print("steps   session tok/s   http tok/s   share   first byte   schema tok/s   slower   round slower")
    for steps in args.steps:
        row = measure(steps, prompts, args.tokens)
        rows.append(row)
        rate = row["tokens_per_second"]
        print(
            f"{steps:>5} {rate['session']:>15.1f} {rate['http']:>12.1f} {row['http_share']:>7.1%}"
            f" {row['first_byte_overhead_ms']:>9.2f} ms {rate['schema']:>14.1f} {row['schema_slower']:>8.1%}"
            f" {row['schema_round_slower']:>15.1%}",
            flush=True,
        )
    server_options.write(args.json, rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--answer-here"]:
        answer_here(sys.argv[2:])
    else:
        main()
