"""bench/serving.py: order of requests, conversations, and the figures of the tables."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import serving
from bench.common.completion_client import Speculation, StreamedAnswer
from bench.data.tasks import Conversation
from bench.serving import Figures, Measurement, percentile, report
from tests.support.openai_server import OpenAIServer, chat_stream, openai_server


def answer(tokens: int, seconds: float, *arrivals: float, counted: bool = True, rounds: int = 0) -> StreamedAnswer:
    speculation = Speculation(rounds, 3 * rounds, rounds) if rounds else None
    return StreamedAnswer("text", tokens, counted, 1, seconds, arrivals, speculation)


def measurement(answer: StreamedAnswer, category: str = "all", repeat: int = 0) -> Measurement:
    return Measurement(category, repeat, 0, 0, answer)


def test_percentiles_are_interpolated() -> None:
    assert [percentile([1.0, 2.0, 4.0], share) for share in (0.0, 0.5, 0.75, 1.0)] == [1.0, 2.0, 3.0, 4.0]
    assert percentile([5.0], 0.9) == 5.0


def test_figures_are_ratios_of_sums() -> None:
    found = Figures.of([
        measurement(answer(11, 4.0, 1.0, 2.0, 3.0, rounds=2)), measurement(answer(5, 4.0, 2.0, 4.0, rounds=6)),
        measurement(answer(9, 2.0, 0.5, 2.5, rounds=4), repeat=1),
    ])  # fmt: skip
    assert found.decode_rates == [14 / 4, 8 / 2] and found.request_rates == [16 / 8, 9 / 2]
    assert (found.tokens, found.ttft_ms, found.gap_p50_ms) == (25, 1000.0, 1500.0)
    assert found.speculation == Speculation(12, 36, 12)
    assert found.cells() == ["3.8 (3.5 .. 4.0)", "3.2 (2.0 .. 4.5)", "1000", "1500.0", "2000.0", "25", "2.00", "33.3%"]


def test_unknown_figures_are_dashes() -> None:
    empty = Figures.of([measurement(answer(0, 1.0)), measurement(answer(3, 1.0, 0.5, rounds=2))])
    assert empty.cells() == ["-", "1.5", "500", "-", "-", "3", "-", "-"]


def test_tables_of_servers_and_categories() -> None:
    slow = [measurement(answer(11, 4.0, 1.0, 5.0), "qa"), measurement(answer(5, 4.0, 2.0, 4.0), "rag")]
    fast = [measurement(answer(11, 2.0, 0.5, 2.5, counted=False), "qa"), measurement(answer(5, 2.0, 1.0, 2.0), "rag")]
    lines = report({"slow": slow, "fast": fast}).splitlines()
    assert [line for line in lines if line.startswith(("| slow", "| fast"))] == [
        "| slow | 2.3 | 1.00 | 2.0 | 1500 | 3000.0 | 3800.0 | 16 | - | - |",
        "| fast | 4.7 | 2.00 | 4.0 | 750 | 1500.0 | 1900.0 | 16 | - | - |",
    ]
    assert [line.split(" | ")[0] for line in lines if line.startswith(("| qa", "| rag", "| all"))] == [
        "| qa", "| rag", "| all"
    ] * 2  # fmt: skip
    assert lines[-1].startswith("fast sends no usage")
    assert report({"one": slow[:1]}).count("\n") == 2, "one category needs no second table"


def test_a_server_that_remembers_answers_gets_a_warning() -> None:
    def repeats(*rounds: int) -> list[Measurement]:
        return [
            measurement(replace(answer(9, 2.0, 1.0, 2.0), speculation=Speculation(each, 9, 8)), repeat=number)
            for number, each in enumerate(rounds)
        ]

    text = report({"same": repeats(8, 8, 8), "remembers": repeats(8, 4, 4), "once": repeats(8)})
    assert [line for line in text.splitlines() if "tokens per round in the first" in line] == [
        "remembers has 2.00 tokens per round in the first repeat and 3.00 in later ones: its drafter remembers "
        "answers. Use --repeats 1 and restart it before each run."
    ]


@pytest.fixture
def servers() -> Any:
    """Two servers that append their names to one list, and answer with their name and the number of messages."""
    order: list[str] = []

    def script(name: str) -> Any:
        def reply(body: dict[str, Any]) -> tuple[int, bytes]:
            order.append(name)
            return 200, chat_stream([name, str(len(body["messages"]))], {"usage": {"completion_tokens": 4}})

        return reply

    with ExitStack() as stack:
        yield {name: stack.enter_context(openai_server(script(name))) for name in ("a", "b")}, order


def test_servers_alternate_and_conversations_continue(
    servers: tuple[dict[str, OpenAIServer], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running, order = servers
    prompts = tmp_path / "question.jsonl"
    records: list[dict[str, Any]] = [
        {"question_id": 1, "category": "mt_bench", "turns": ["One?", "Two?"]},
        {"question_id": 2, "category": "rag", "messages": [{"role": "user", "content": "Three?"}]},
    ]
    prompts.write_text("\n".join(map(json.dumps, records)))
    urls = [flag for name, server in running.items() for flag in ("--url", f"{name}={server.url}/v1/")]
    serving.main([*urls, "--prompts", str(prompts), "--repeats", "2", "--json", str(tmp_path / "out.json")])
    assert "".join(order) == "ab" + "abab" + "ba" + "baba" + "ab", "warm-up, then the two conversations, twice"
    sent = [body["messages"] for _, body in running["b"].requests[1:4]]
    assert [[message["content"] for message in messages] for messages in sent] == [
        ["One?"], ["One?", "b1", "Two?"], ["Three?"]
    ]  # fmt: skip
    assert {(body["temperature"], body["max_tokens"]) for _, body in running["a"].requests[1:]} == {(0.0, 128)}
    found = json.loads((tmp_path / "out.json").read_text())["servers"]
    assert [(each["name"], each["model"], each["tokens"], len(each["requests"])) for each in found] == [
        ("a", "toy", 24, 6), ("b", "toy", 24, 6)
    ]  # fmt: skip
    assert capsys.readouterr().out.count("| mt_bench |") == 2


def test_a_failure_is_one_line(servers: tuple[dict[str, OpenAIServer], list[str]]) -> None:
    server = servers[0]["a"]
    server.script = lambda _: (429, b'{"error": {"message": "the queue is full"}}')
    with pytest.raises(SystemExit) as caught:
        serving.main(["--url", f"x={server.url}"])
    assert caught.value.code == f"bench.serving: x ({server.url}): /v1/chat/completions: 429 the queue is full"


def test_completions_take_single_texts(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text(json.dumps({"category": "c", "turns": ["One?", "Two?"]}))
    flags = ["--url", "http://localhost:1", "--completions", "--prompts", str(tmp_path / "q.jsonl")]
    with pytest.raises(SystemExit, match="use --chat, or --turns first"):
        serving.main(flags)
    args = serving.arguments([*flags, "--turns", "first"])
    assert serving.selected_conversations(args) == [Conversation(["One?"], "c")] and args.url[0][0] == "localhost:1"


@pytest.mark.parametrize(
    "flags",
    [["--url", "localhost:1"], ["--url", "x=http://h:1", "--url", "x=http://h:2"],
     ["--url", "http://h:1", "--extra-body", "[1]"], ["--url", "http://h:1", "--repeats", "0"]],
)  # fmt: skip
def test_invalid_flags(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        serving.arguments(flags)
    assert caught.value.code == 2
