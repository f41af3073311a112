"""An engine that plays what a test wrote, behind the HTTP application, and a server in a thread for real clients."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from swiftspec.serve.http.app import create_app
from swiftspec.serve.http.engine_link.engine import Ask, State
from swiftspec.serve.http.engine_link.frames import Choice, Chunk, Done, Likelihood, Prompt, Ready
from swiftspec.serve.text.codec import TextCodec

TIMINGS = {
    "cache_n": 3, "prompt_n": 7, "prompt_ms": 2.0, "predicted_n": 5, "predicted_ms": 4.0, "draft_n": 9,
    "draft_n_accepted": 4,
}  # fmt: skip
SPECULATION = {
    "num_spec_steps": 3, "num_draft_tokens": 9, "num_accepted_draft_tokens": 4, "num_accepted_tokens_per_pos": [3, 1],
}  # fmt: skip
METRICS = {
    "time_to_first_token_ms": 2.5, "generation_time_ms": 4.0, "speculative_decoding": SPECULATION, "mode": "serial",
    "target_busy": 0.5, "draft_busy": 0.25,
}  # fmt: skip
READY = Ready("target", "draft", 256, 320, [0], {}, {"mode": "serial"}, 1.0)


def likelihoods(tokens: Sequence[int], count: int) -> list[Likelihood]:
    """As an engine gives them: the token itself first."""
    tops = [[(token, -0.5), *((other, -2.0 - other) for other in range(1, 30))][:count] for token in tokens]
    return [Likelihood(-0.5, top) for top in tops]


@dataclass
class Player:
    """Plays `text` in rounds of `size` tokens, or raises what is in `raises` after `after` rounds. `hold` stops it
    after that many rounds until its client leaves. `asks` says what it was asked, `closed` which of them were
    cancelled, and `stopped` which were ended early."""

    codec: TextCodec
    text: str = "def add(a, b):\n    return a + b\n"
    size: int = 3
    reason: str = "stop"
    more: dict[str, Any] = field(default_factory=dict)
    choices: list[tuple[str, str, float]] = field(default_factory=list)  # text, finish reason and weight of each
    raises: Exception | None = None
    after: int = 0
    hold: int | None = None
    about: Ready | None = READY
    state: State = field(default_factory=lambda: State("ready", "", 0, 0))
    asks: list[Ask] = field(default_factory=list)
    closed: list[Ask] = field(default_factory=list)
    stopped: list[Ask] = field(default_factory=list)
    holding: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)

    def tokens(self, text: str | None = None) -> list[int]:
        return list(self.codec.tokenizer.encode(self.text if text is None else text, add_special_tokens=False))

    def prepare(self, **values: Any) -> None:
        """Back to the beginning, with what is to be played next."""
        self.__dict__.update(replace(Player(self.codec), **values).__dict__)

    async def answer(self, ask: Ask) -> AsyncGenerator[Prompt | Chunk | Done, bool | None]:
        self.asks.append(ask)
        ended = False
        try:
            if "prompt_logprobs" in ask.sampling:
                yield Prompt(1, likelihoods(ask.prompt[1:], ask.sampling["prompt_logprobs"]))
            tokens = self.tokens()
            cut = tokens[: ask.sampling["max_tokens"]]
            rounds = [cut[at : at + self.size] for at in range(0, len(cut), self.size)]
            for number, part in enumerate(rounds):
                if self.raises is not None and number == self.after:
                    raise self.raises
                if number == self.hold:
                    self.holding.set()
                    await asyncio.Event().wait()
                last = number + 1 == len(rounds)
                reason = None if not last else self.reason if cut == tokens else "length"
                scores = likelihoods(part, ask.sampling["logprobs"]) if "logprobs" in ask.sampling else None
                if (yield Chunk(1, part, len(part) - 1, scores, reason)):
                    self.stopped.append(ask)
                    break
            ended = True
            choices = () if ask.choices is None else self.choices
            told = [Choice(self.tokens(text), why, weight) for text, why, weight in choices]
            yield Done(1, TIMINGS, METRICS, self.more, told)
        finally:
            if not ended:
                self.closed.append(ask)
                self.cancelled.set()


def application(player: Player, **options: Any) -> FastAPI:
    """The application around it; it serves one model, by two names."""
    return create_app(player, lambda: player.codec, ["toy", "other"], **options)


@contextlib.contextmanager
def serving(app: ASGIApp, port: int = 0) -> Iterator[str]:
    """The address of a server in a thread of this process."""
    listener = socket.create_server(("127.0.0.1", port))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    """Waits for something that another thread does, looking often."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.002)
