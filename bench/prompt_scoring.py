"""Speed of prompt scoring: log-probabilities of a prompt compared with the prefill of a prompt of the same length.

    python -m bench.prompt_scoring --url http://localhost:8000 [--lengths 64,512] [--requests 8]

Every request has another random prompt, so that no prefix cache has it, and the kinds of requests alternate. `prefill`
generates one token without log-probabilities; the others generate none and return the log-probabilities of the prompt,
by `echo` with `logprobs` or by `prompt_logprobs`. Prints prompt tokens per second, from the request to the end of the
response (median and best), and the median time relative to `prefill`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

TIMEOUT_S = 600.0
VOCABULARY = range(1000, 4000)  # token ids that every vocabulary has, without special tokens at its start
KINDS: dict[str, dict[str, Any]] = {
    "prefill": {"max_tokens": 1, "temperature": 0},
    "echo, logprobs 1": {"max_tokens": 0, "echo": True, "logprobs": 1},
    "echo, logprobs 5": {"max_tokens": 0, "echo": True, "logprobs": 5},
    "prompt_logprobs 0": {"max_tokens": 0, "prompt_logprobs": 0},
}
Send = Callable[[Mapping[str, Any]], float]  # sends a request and returns its seconds


def measure(send: Send, length: int, requests: int, prompts: random.Random) -> dict[str, list[float]]:
    """Returns the seconds of the requests of each kind. `length`: tokens of a prompt."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(requests):
        first = number % len(KINDS)
        for kind in [*KINDS][first:] + [*KINDS][:first]:
            prompt = prompts.choices(VOCABULARY, k=length)
            found[kind].append(send({"prompt": prompt, **KINDS[kind]}))
    return found


def rows(length: int, found: Mapping[str, Sequence[float]]) -> list[str]:
    """Formats the rows of one length of prompts."""
    base = statistics.median(found["prefill"])
    return [
        f"| {length} | {kind} | {length / statistics.median(times):.0f} | {length / min(times):.0f}"
        f" | {statistics.median(times) / base:.2f} |"
        for kind, times in found.items()
    ]


def main(argv: list[str] | None = None) -> None:
    """Measures the kinds of requests and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="server, without /v1")
    parser.add_argument("--lengths", type=lambda text: [int(word) for word in text.split(",")], default=[64, 512])
    parser.add_argument("--requests", type=int, default=8, help="requests of each kind")
    args = parser.parse_args(argv)
    prompts = random.Random()  # another run must not find its prompts in the prefix cache
    with httpx.Client(base_url=args.url, timeout=TIMEOUT_S) as client:

        def send(body: Mapping[str, Any]) -> float:
            began = time.perf_counter()
            client.post("/v1/completions", json=body).raise_for_status()
            return time.perf_counter() - began

        print("| prompt | request | tok/s | best | time relative to prefill |\n|---|---|---|---|---|")
        try:
            for length in args.lengths:
                measure(send, length, 1, prompts)  # warm-up
                print(*rows(length, measure(send, length, args.requests, prompts)), sep="\n", flush=True)
        except httpx.HTTPError as error:
            sys.exit(f"bench.prompt_scoring: {args.url}: {str(error).partition(chr(10))[0]}")


if __name__ == "__main__":
    main()
