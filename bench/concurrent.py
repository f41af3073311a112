"""Total tokens per second of several clients in one process: one request at a time, concurrent trees, and `ar`.

    python -m bench.concurrent [--model demo] [--draft-model suffix] [--clients 1 2 4 8] [--turns 3] [--json out.json]
    python -m bench.concurrent --url llama.cpp=http://127.0.0.1:8080    with a server of the same model

Each client sends its next request when the previous one has ended. Two kinds of text: `fresh`, questions answered at
temperature 0.7 (models without a chat template continue source code), and `copy`, where the answer repeats most of the
prompt, so that suffix lookup pays. No prompt occurs twice in an engine, because suffix lookup would find its earlier
answer.

The engines, and the servers of --url, alternate within each of the turns, in another order each time. A row gives the
median of the turns with the smallest and the largest value. Every answer has `--max-tokens` tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import sysconfig
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from bench.common.completion_client import CompletionClient, Speculation, StreamedAnswer
from bench.serving import named_url
from swiftspec import LLM, SamplingParams
from swiftspec.batching.batch_request import BatchRequest
from swiftspec.distributed.launch.world import available_cores
from swiftspec.errors import UserError

KINDS = ("fresh", "copy")
FRESH = {"temperature": 0.7, "top_p": 0.95}
CODE_CHARACTERS = 500
STYLES = (
    "Explain {0} to a child.", "Write a short story about {0}.", "Give five facts about {0}.", "Why does {0} matter?",
    "Describe the history of {0}.", "Write a letter to a friend about {0}.", "What should a beginner know of {0}?",
    "Compare {0} with {1}.", "Write a poem about {0} and {1}.", "How are {0} and {1} connected?",
)  # fmt: skip
TOPICS = (
    "volcanoes", "sailing", "bread", "bees", "the moon", "chess", "glaciers", "violins", "trains", "gardens", "maps",
    "rivers", "clocks", "paper", "salt", "bridges", "owls", "deserts", "tea", "silk", "mathematics", "lighthouses",
    "bicycles", "coral reefs", "opera", "wheat", "mountains", "printing", "kites", "radio", "winter", "horses",
)  # fmt: skip
FIELDS = ("name", "city", "age", "role", "team", "email", "level", "room", "shift", "badge")


@dataclass
class System(ABC):
    """An engine or a server, and its measured rates, by kind of text and number of clients."""

    name: str
    rates: dict[tuple[str, int], list[float]] = field(default_factory=dict, init=False)
    rounds: dict[tuple[str, int], list[float]] = field(default_factory=dict, init=False)

    @abstractmethod
    def serve(self, clients: int, prompts: Sequence[str], samplings: Sequence[SamplingParams]) -> float:
        """Answers the prompts, at most `clients` of them at a time. Returns the tokens per round of a request."""


@dataclass
class Engine(System):
    """An engine in this process. `chat`: whether prompts are messages of a chat."""

    llm: LLM
    chat: bool

    def serve(self, clients: int, prompts: Sequence[str], samplings: Sequence[SamplingParams]) -> float:
        engine, running = self.llm.llm_engine, 0
        waiting = iter(enumerate(zip([self._ids(prompt) for prompt in prompts], samplings)))
        requests: list[BatchRequest] = []

        def next_request() -> BatchRequest | None:
            nonlocal running
            if running == clients or (found := next(waiting, None)) is None:
                return None
            running += 1
            request = engine.request(found[0], *found[1])
            requests.append(request)
            return request

        while len(requests) < len(prompts):
            for _, chunk in engine.run_batch(next_request, lambda request: False):
                running -= chunk.finish_reason is not None
        return sum(each.stats.tokens for each in requests) / sum(each.stats.rounds for each in requests)

    def _ids(self, prompt: str) -> list[int]:
        tokenizer = self.llm.get_tokenizer()
        if not self.chat:
            return tokenizer(prompt)["input_ids"]
        message = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False)["input_ids"]


@dataclass
class Server(System):
    """An OpenAI-compatible server, which must accept `ignore_eos`."""

    client: CompletionClient

    def serve(self, clients: int, prompts: Sequence[str], samplings: Sequence[SamplingParams]) -> float:
        with ThreadPoolExecutor(clients) as pool:
            answers = [*pool.map(self._answer, prompts, samplings)]
        if any(answer.tokens != params.max_tokens for answer, params in zip(answers, samplings, strict=True)):
            raise UserError(f"{self.name}: an answer is shorter than max_tokens although ignore_eos is set")
        speculation = sum((answer.speculation or Speculation() for answer in answers), Speculation())
        return speculation.tokens_per_round or 1.0

    def _answer(self, prompt: str, params: SamplingParams) -> StreamedAnswer:
        fields = {name: getattr(params, name) for name in ("temperature", "top_p", "seed", "max_tokens", "ignore_eos")}
        return self.client.answer([{"role": "user", "content": prompt}], fields)


def code_texts(characters: int) -> Iterator[str]:
    """Yields different pieces of the standard library of the running Python, in whole lines."""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        text = "".join(lines[len(lines) // 2 :])
        if len(text) > characters:
            yield text[: text.rindex("\n", 0, characters) + 1]


def questions(draw: random.Random) -> Iterator[str]:
    """Yields different questions."""
    pairs = [(style, *draw.sample(TOPICS, 2)) for style in STYLES for _ in range(40)]
    draw.shuffle(pairs)
    yield from dict.fromkeys(style.format(first, second) for style, first, second in pairs)


def copying(draw: random.Random) -> Iterator[str]:
    """Yields tasks whose answers repeat most of the prompt: alternately JSON and code with one change."""
    for code in code_texts(CODE_CHARACTERS):
        people = [
            {name: f"{draw.choice(TOPICS)} {draw.randrange(1000)}" for name in draw.sample(FIELDS, 5)} for _ in range(4)
        ]
        yield f"Repeat this JSON, with 100 as the value of every age:\n{json.dumps(people, indent=1)}"
        yield f"Repeat this code, with a comment before the first function:\n```python\n{code}```"


class Prompts:
    """Different prompts of each kind. The same sequence for each system."""

    def __init__(self, completes_code: bool) -> None:
        draw = random.Random(0)
        if completes_code:
            texts = list(code_texts(CODE_CHARACTERS))
            draw.shuffle(texts)
            half = len(texts) // 2
            copies = (f"{text}\n# A copy of this:\n{text[:80]}" for text in texts[half:])
            self._texts: dict[str, Iterator[str]] = {"fresh": iter(texts[:half]), "copy": copies}
        else:
            self._texts = {"fresh": questions(draw), "copy": copying(draw)}

    def take(self, kind: str, count: int) -> list[str]:
        """Returns the next `count` prompts. Raises UserError if there are no more different ones."""
        found = [*islice(self._texts[kind], count)]
        if len(found) < count:
            raise UserError(f"there are too few different prompts ({kind}): use fewer turns or requests")
        return found


def samplings(kind: str, count: int, max_tokens: int, first_seed: int) -> list[SamplingParams]:
    values: dict[str, Any] = FRESH if kind == "fresh" else {"temperature": 0.0}
    return [SamplingParams(**values, seed=first_seed + i, max_tokens=max_tokens, ignore_eos=True) for i in range(count)]


def measure(systems: Sequence[System], prompts: Prompts, args: argparse.Namespace) -> None:
    for system in systems:
        system.serve(2, prompts.take("fresh", 2), samplings("fresh", 2, 32, 0))
    for turn in range(args.turns):
        for kind in KINDS:
            for clients in args.clients:
                count = max(clients, args.requests)
                taken, params = prompts.take(kind, count), samplings(kind, count, args.max_tokens, 1000 * turn)
                first = (turn + clients) % len(systems)
                for system in [*systems[first:], *systems[:first]]:
                    began = time.perf_counter()
                    rounds = system.serve(clients, taken, params)
                    rate = count * args.max_tokens / (time.perf_counter() - began)
                    system.rates.setdefault((kind, clients), []).append(rate)
                    system.rounds.setdefault((kind, clients), []).append(rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the built-in model")
    parser.add_argument("--draft-model", help="default: that of the built-in model")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--requests", type=int, default=2, help="least number of requests of a measurement")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--systems", nargs="+", default=["one", "trees", "ar"], choices=["one", "trees", "ar"])
    parser.add_argument("--url", type=named_url, action="append", default=[], metavar="NAME=URL", help="another server")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    common = {"model": args.model, "max_model_len": 1024, "threads": len(available_cores())}
    options: dict[str, dict[str, Any]] = {
        "one": {"max_num_seqs": 1, "draft_model": args.draft_model},
        "trees": {"max_num_seqs": args.max_num_seqs, "draft_model": args.draft_model},
        "ar": {"max_num_seqs": args.max_num_seqs, "mode": "ar"},
    }
    try:
        engines = {name: LLM(**common, **options[name]) for name in args.systems}
        chat = all(llm.session.codec.has_template for llm in engines.values())  # others continue source code
        systems: list[System] = [Engine(name, llm, chat) for name, llm in engines.items()]
        with ExitStack() as stack:
            for name, url in args.url:
                client = CompletionClient(name, url, model=None, chat=chat, api_key=None)
                systems.append(Server(name, stack.enter_context(client)))
            measure(systems, Prompts(completes_code=not chat), args)
    except UserError as error:
        sys.exit(f"bench.concurrent: {error}")
    print(f"load {os.getloadavg()[0]:.1f}; total tokens/s at " + ", ".join(map(str, args.clients)) + " clients")
    for kind in KINDS:
        for system in systems:
            row = [system.rates[kind, clients] for clients in args.clients]
            cells = [f"{statistics.median(cell):.0f} ({min(cell):.0f}..{max(cell):.0f})" for cell in row]
            rounds = [f"{statistics.median(system.rounds[kind, clients]):.2f}" for clients in args.clients]
            print(f"{kind:6} {system.name:9}", *cells, "tokens per round", *rounds, flush=True)
    if args.json is not None:
        rates = {s.name: [[*key, *cell] for key, cell in s.rates.items()] for s in systems}
        args.json.write_text(json.dumps(rates), encoding="utf-8")


if __name__ == "__main__":
    main()
