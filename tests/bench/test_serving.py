"""bench/serving.py: order of requests, conversations, and the figures of the tables."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bench import serving
from bench.common.completion_client import Speculation, StreamedAnswer
from bench.serving import Figures, Measurement, percentile
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
