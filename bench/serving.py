"""Compares OpenAI-compatible servers on the same prompts, one request at a time: SwiftSpec, vLLM, SGLang, TensorRT-LLM,
llama-server and others.

    python -m bench.serving --url NAME=http://host:port [--url ...] [--prompts FILE | --family FAMILY]

Every server answers every prompt as a stream before the next prompt begins, and each prompt begins with another server.
The records of --prompts are in the formats of bench/data/tasks.py, Spec-Bench and SPEED-Bench included. The turns of a
conversation follow each other, with the server's own answers between them.

The columns: tokens per second from the first chunk with text to the last one, relative to the first server, and of
whole requests; median TTFT; time between two chunks with text, of which a server with speculative decoding may send one
per round; output tokens; tokens per round; accepted tokens relative to drafted ones. The latter is low by construction
where the draft is a tree, so tokens per round compares servers. Both come from the responses (SwiftSpec, llama-server)
or from the increase of vLLM's counters in /metrics; other clients must not use the server meanwhile. Rates are medians
over the repeats, with the smallest and the largest one.

Output tokens are those in the `usage` of the responses; without it, chunks with text are counted, and a line states
that.

A repeat sends the same prompts again. Servers with a prefix cache find them in it, which shortens their TTFT. A server
whose drafter remembers earlier answers (suffix lookup, n-gram caches) drafts the same answer again, so that its rates
mean nothing; a line states where tokens per round rose. Measure it with --repeats 1, several times, and restart it
before each run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.common.completion_client import CompletionClient, Speculation, StreamedAnswer
from bench.data import tasks
from swiftspec.errors import UserError

Message = dict[str, str]
Found = Mapping[str, Sequence["Measurement"]]
REMEMBERS = 1.1  # ratio of the tokens per round of later repeats to those of the first, above which a line warns


@dataclass(frozen=True, slots=True)
class Measurement:
    """One answer: category of its prompt, number of the repeat, and of the conversation and its turn."""

    category: str
    repeat: int
    conversation: int
    turn: int
    answer: StreamedAnswer


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of several answers of a server. None: unknown, such as the TTFT of answers without text.

    `decode_rates`, `request_rates`: tokens per second of each repeat. Times are in milliseconds.
    """

    answers: int
    tokens: int
    counted: bool
    decode_rates: list[float]
    request_rates: list[float]
    ttft_ms: float | None
    gap_p50_ms: float | None
    gap_p90_ms: float | None
    speculation: Speculation | None

    @staticmethod
    def of(measurements: Sequence[Measurement]) -> Figures:
        answers = [each.answer for each in measurements]
        groups = [[each.answer for each in measurements if each.repeat == number] for number in _repeats(measurements)]
        gaps = sorted(gap for answer in answers for gap in answer.gaps)
        reports = [answer.speculation for answer in answers if answer.speculation is not None]
        return Figures(
            answers=len(answers),
            tokens=sum(answer.tokens for answer in answers),
            counted=all(answer.counted for answer in answers),
            decode_rates=[_rate((one.decode_tokens, one.decode_seconds) for one in group) for group in groups],
            request_rates=[_rate((one.tokens, one.seconds) for one in group) for group in groups],
            ttft_ms=_milliseconds(sorted(answer.arrivals[0] for answer in answers if answer.arrivals), 0.5),
            gap_p50_ms=_milliseconds(gaps, 0.5),
            gap_p90_ms=_milliseconds(gaps, 0.9),
            speculation=sum(reports, Speculation()) if len(reports) == len(answers) else None,
        )

    def cells(self) -> list[str]:
        """Returns the cells of a table's row, as in `COLUMNS`."""
        rounds = self.speculation or Speculation()
        return [
            _rates_cell(self.decode_rates), _rates_cell(self.request_rates), _cell(self.ttft_ms, ".0f"),
            _cell(self.gap_p50_ms, ".1f"), _cell(self.gap_p90_ms, ".1f"), str(self.tokens),
            _cell(rounds.tokens_per_round, ".2f"), _cell(rounds.accepted_share, ".1%"),
        ]  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        rounds = self.speculation
        return {
            "answers": self.answers, "tokens": self.tokens, "tokens_from_usage": self.counted,
            "decode_tokens_per_second": self.decode_rates, "request_tokens_per_second": self.request_rates,
            "ttft_p50_ms": self.ttft_ms, "chunk_gap_p50_ms": self.gap_p50_ms, "chunk_gap_p90_ms": self.gap_p90_ms,
            "tokens_per_round": rounds and rounds.tokens_per_round, "accepted_share": rounds and rounds.accepted_share,
        }  # fmt: skip


COLUMNS = (
    "tok/s, decoding", "tok/s, requests", "TTFT P50, ms", "chunk gap P50, ms", "P90, ms", "tokens", "tokens per round",
    "accepted",
)  # fmt: skip


def percentile(ordered: Sequence[float], share: float) -> float:
    """Returns a percentile of at least one sorted value, interpolated linearly. `share`: 0 to 1."""
    at = share * (len(ordered) - 1)
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])


def measure(
    clients: Sequence[CompletionClient], conversations: Sequence[tasks.Conversation], fields: Mapping[str, Any],
    repeats: int,
) -> dict[str, list[Measurement]]:  # fmt: skip
    """Sends every turn of the conversations to every server and returns the answers by the name of the server.

    `fields`: further fields of the requests.
    """
    found: dict[str, list[Measurement]] = {client.name: [] for client in clients}
    for repeat in range(repeats):
        for number, conversation in enumerate(conversations):
            first = (number + repeat) % len(clients)
            histories: dict[str, list[Message]] = {client.name: _opening(conversation) for client in clients}
            for turn, text in enumerate(conversation.turns):
                for client in [*clients[first:], *clients[:first]]:
                    messages = histories[client.name]
                    messages.append({"role": "user", "content": text})
                    answer = client.answer(messages, fields)
                    messages.append({"role": "assistant", "content": answer.text})
                    found[client.name].append(Measurement(conversation.category, repeat, number, turn, answer))
    return found


def report(found: Found) -> str:
    """Formats the answers as Markdown: a table of the servers, and one per server if there are several categories."""
    figures = {name: Figures.of(some) for name, some in found.items()}
    base = next(iter(figures.values())).decode_rates
    rows = []
    for name, each in figures.items():
        decoding, *others = each.cells()
        ratio = statistics.median(rate / plain if plain else 0.0 for rate, plain in zip(each.decode_rates, base))
        rows.append([name, decoding, f"{ratio:.2f}", *others])
    parts = [_table(["server", COLUMNS[0], "relative", *COLUMNS[1:]], rows)]
    for name, some in found.items():
        categories = list(dict.fromkeys(each.category for each in some))
        if len(categories) > 1:
            groups = {kind: [each for each in some if each.category == kind] for kind in categories} | {"all": some}
            lines = [[kind, *Figures.of(group).cells()] for kind, group in groups.items()]
            parts.append(f"{name}:\n\n" + _table(["category", *COLUMNS], lines))
    return "\n\n".join([*parts, *(note for name, some in found.items() for note in _notes(name, some))])


def _notes(name: str, measurements: Sequence[Measurement]) -> Iterator[str]:
    """Yields what limits the figures of a server."""
    if not Figures.of(measurements).counted:
        yield f"{name} sends no usage: its tokens are chunks with text, of which each may hold several tokens."
    parts = [[each for each in measurements if (each.repeat == 0) == first] for first in (True, False)]
    reports = [Figures.of(part).speculation or Speculation() for part in parts if part]
    ratios = [report.tokens_per_round for report in reports if report.tokens_per_round is not None]
    if len(ratios) == 2 and ratios[1] > REMEMBERS * ratios[0]:
        yield (
            f"{name} has {ratios[0]:.2f} tokens per round in the first repeat and {ratios[1]:.2f} in later ones: its "
            "drafter remembers answers. Use --repeats 1 and restart it before each run."
        )


def document(found: Found, clients: Sequence[CompletionClient], args: argparse.Namespace) -> dict[str, Any]:
    """Builds the JSON document: settings, machine, and for each server its figures and all answers."""
    hidden = {"json", "api_key", "url"}
    settings = {name: value for name, value in vars(args).items() if name not in hidden}
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    servers = [
        {
            "name": client.name, "url": client.url, "model": client.model,
            **Figures.of(found[client.name]).as_json(), "requests": [_request(each) for each in found[client.name]],
        }
        for client in clients
    ]  # fmt: skip
    return {"settings": {**settings, "prompts": args.prompts and args.prompts.name}, "machine": machine,
            "servers": servers}  # fmt: skip


def _request(measured: Measurement) -> dict[str, Any]:
    answer = measured.answer
    return {
        "category": measured.category, "repeat": measured.repeat, "conversation": measured.conversation,
        "turn": measured.turn, "tokens": answer.tokens, "seconds": answer.seconds,
        "ttft_seconds": answer.arrivals[0] if answer.arrivals else None, "decode_tokens": answer.decode_tokens,
        "decode_seconds": answer.decode_seconds, "text": answer.text,
    }  # fmt: skip


def _opening(conversation: tasks.Conversation) -> list[Message]:
    return [] if conversation.system is None else [{"role": "system", "content": conversation.system}]


def _repeats(measurements: Iterable[Measurement]) -> list[int]:
    return sorted({each.repeat for each in measurements})


def _rate(pairs: Iterable[tuple[int, float]]) -> float:
    """Returns the tokens per second of pairs of tokens and seconds; 0 if no time has passed."""
    listed = list(pairs)
    seconds = sum(each for _, each in listed)
    return sum(tokens for tokens, _ in listed) / seconds if seconds else 0.0


def _milliseconds(ordered: Sequence[float], share: float) -> float | None:
    return 1000 * percentile(ordered, share) if ordered else None


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _rates_cell(rates: Sequence[float]) -> str:
    if not any(rates):  # each answer came in one chunk, or without text
        return "-"
    spread = f" ({min(rates):.1f} .. {max(rates):.1f})" if len(rates) > 1 else ""
    return f"{statistics.median(rates):.1f}{spread}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def named_url(text: str) -> tuple[str, str]:
    """Parses NAME=URL, or a URL alone, whose name is its host and port."""
    name, separator, url = text.partition("=")
    if not separator or "/" in name:
        name, url = urlsplit(text).netloc, text
    if urlsplit(url).scheme not in ("http", "https") or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is neither NAME=http://HOST:PORT nor a URL")
    return name, url


def json_object(text: str) -> dict[str, Any]:
    """Parses a JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", type=named_url, action="append", required=True, metavar="NAME=URL",
                        help="server, with or without /v1; may be given several times")  # fmt: skip
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompts", type=Path, help="published task file (default: this project's prompts)")
    source.add_argument("--family", choices=tasks.FAMILIES, help="only this family of this project's prompts")
    parser.add_argument("--turns", choices=("first", "all"), default="all", help="turns of a conversation")
    parser.add_argument("--limit", type=int, help="number of conversations (default: all)")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--extra-body", type=json_object, default={}, metavar="JSON",
                        help="""further fields of every request, such as '{"ignore_eos": true}'""")  # fmt: skip
    parser.add_argument("--model", help="model of the requests (default: the first in each server's /v1/models)")
    endpoint = parser.add_mutually_exclusive_group()
    endpoint.add_argument("--chat", action="store_true", default=True, help="/v1/chat/completions (default)")
    endpoint.add_argument("--completions", dest="chat", action="store_false", help="/v1/completions, first turns only")
    parser.add_argument("--api-key", help="sent to every server")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    names = [name for name, _ in args.url]
    if len(set(names)) < len(names):
        parser.error("--url: each server needs a name of its own")
    if min(args.max_tokens, args.repeats, 1 if args.limit is None else args.limit) < 1:
        parser.error("--max-tokens, --repeats and --limit must be at least 1")
    return args


def selected_conversations(args: argparse.Namespace) -> list[tasks.Conversation]:
    """Returns the conversations that the command line selects. Raises UserError if they cannot be sent as texts."""
    found = tasks.own_conversations(args.family) if args.prompts is None else tasks.load_conversations(args.prompts)
    if args.turns == "first":
        found = [tasks.Conversation(each.turns[:1], each.category, each.system) for each in found]
    found = found[: args.limit]
    if not args.chat and any(len(each.turns) > 1 or each.system is not None for each in found):
        raise UserError("--completions sends one text without a system message; use --chat, or --turns first")
    return found


def main(argv: list[str] | None = None) -> None:
    """Measures the servers and prints the tables."""
    args = arguments(argv)
    fields = {"max_tokens": args.max_tokens, "temperature": args.temperature, **args.extra_body}
    try:
        conversations = selected_conversations(args)
        with ExitStack() as stack:
            clients = [
                stack.enter_context(CompletionClient(name, url, model=args.model, chat=args.chat, api_key=args.api_key))
                for name, url in args.url
            ]
            for client in clients:
                client.warm_up(fields)
            found = measure(clients, conversations, fields, args.repeats)
        print(report(found))
        if args.json is not None:
            args.json.write_text(json.dumps(document(found, clients, args), indent=1) + "\n", encoding="utf-8")
    except (UserError, OSError) as error:
        sys.exit(f"bench.serving: {error}")


if __name__ == "__main__":
    main()
