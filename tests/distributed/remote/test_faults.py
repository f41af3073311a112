"""A worker that is silent for a while, slow, or sends invalid responses never causes a wrong token or a hang; errors
are one line."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from swiftspec.builder.load_options import WorkerAddress
from swiftspec.distributed.remote import failover, served_roles
from swiftspec.distributed.remote.reconnector import MAX_DELAY_S
from swiftspec.distributed.remote.session_messages import Answer
from swiftspec.distributed.remote.worker import WorkerServer
from swiftspec.distributed.transport.grpc import client
from swiftspec.errors import UserError
from swiftspec.llm_engine import LLMEngine
from swiftspec.messages import VerifyResult
from swiftspec.observe.step_time_emulation import StepTimeEmulation, StepTimes
from swiftspec.params import SamplingParams
from swiftspec.token_engine import TokenEngine
from tests.support.relay import Direction, Relay
from tests.support.tiny_checkpoints import make_checkpoint, make_pair
from tests.support.workers import OPTIONS, StartedWorker, client_on_workers, started

PROMPT = [5, 17, 3, 29, 11, 8, 2, 30]
SAMPLED = SamplingParams(temperature=0.8, seed=1234, max_tokens=40, ignore_eos=True)
MODES = ["serial", "async"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def plain(pair: tuple[Path, Path]) -> list[int]:
    return LLMEngine(pair[0], None, **OPTIONS).generate(PROMPT, SAMPLED).token_ids


@pytest.fixture(scope="module")
def both(pair: tuple[Path, Path]) -> Iterator[dict[str, StartedWorker]]:
    with started("target", pair[0]) as target, started("draft", pair[1]) as draft:
        yield {"target": target, "draft": draft}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the timeout of a draft worker."""
    for name, seconds in (("FIRST_PROPOSAL_TIMEOUT_S", 0.2), ("MIN_TIMEOUT_S", 0.05), ("MAX_TIMEOUT_S", 0.1)):
        monkeypatch.setattr(failover, name, seconds)


@contextmanager
def relayed(worker: StartedWorker, **named: Any) -> Iterator[tuple[Relay, WorkerAddress]]:
    """The worker behind a relay that can stall the connection."""
    with Relay(("127.0.0.1", worker.port), Direction(0.0)) as relay:
        yield relay, replace(worker.client_address(**named), url="{}:{}".format(*relay.address))


@contextmanager
def slow(side: Any, model: Path, seconds: float) -> Iterator[StartedWorker]:
    """A worker whose steps take this long."""
    step = StepTimes(((1, 1, seconds),))
    with started(side, model, options={"emulate": StepTimeEmulation(**{side: step})}) as worker:
        yield worker


def until_it_drafts(running: TokenEngine, plain: list[int]) -> None:
    """Repeats requests until the draft worker is used again. Every text is the target's own."""
    until = time.monotonic() + 2 * MAX_DELAY_S
    while True:
        answer = running.generate(PROMPT, SAMPLED)
        assert answer.token_ids == plain
        if answer.stats.accepted > 0 and answer.stats.drafter_lost is None:
            return
        assert time.monotonic() < until, answer.stats.drafter_lost


@pytest.mark.parametrize("mode", MODES)
def test_a_draft_that_is_silent_for_a_while_costs_speed_only(
    both: dict[str, StartedWorker], plain: list[int], impatient: None, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    with (
        relayed(both["draft"]) as (wire, draft),
        client_on_workers(both["target"].client_address(), draft, mode=mode, draft_steps=2) as running,
    ):
        stream = running.stream(PROMPT, SAMPLED)
        text = [*next(stream).token_ids]
        wire.stall()
        text += [token for chunk in stream for token in chunk.token_ids]
        assert text == plain and running.stats.drafter_lost is not None
        monkeypatch.undo()  # on a busy machine, later proposals would be late, too
        wire.resume()
        until_it_drafts(running, plain)


@pytest.mark.parametrize("mode", MODES)
def test_decoding_continues_after_a_target_was_silent_for_a_while(
    both: dict[str, StartedWorker], plain: list[int], mode: str
) -> None:
    with (
        relayed(both["target"]) as (wire, target),
        client_on_workers(target, both["draft"].client_address(), mode=mode, draft_steps=2) as running,
    ):
        stream = running.stream(PROMPT, SAMPLED)
        text = [*next(stream).token_ids]
        wire.stall()
        Timer(0.3, wire.resume).start()
        assert [*text, *(token for chunk in stream for token in chunk.token_ids)] == plain


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_silent_target_is_an_error_within_the_timeout_and_can_be_retried(
    both: dict[str, StartedWorker], plain: list[int], mode: str
) -> None:
    with (
        relayed(both["target"], timeout=0.4) as (wire, target),
        client_on_workers(target, both["draft"].client_address(), mode=mode, draft_steps=2) as running,
    ):
        stream = running.stream(PROMPT, SAMPLED)
        next(stream)
        wire.stall()
        with pytest.raises(UserError, match=r"--target-url \S+ did not answer in time: send the request again"):
            list(stream)
        wire.resume()
        assert running.generate(PROMPT, SAMPLED).token_ids == plain


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_slow_draft_costs_speed_only(
    pair: tuple[Path, Path], both: dict[str, StartedWorker], plain: list[int], impatient: None, mode: str
) -> None:
    with (
        slow("draft", pair[1], 0.3) as draft,
        client_on_workers(both["target"].client_address(), draft.client_address(), mode=mode, draft_steps=1) as running,
    ):
        assert running.generate(PROMPT, SAMPLED).token_ids == plain and running.stats.outages


@pytest.mark.slow
def test_a_target_that_is_too_slow_is_an_error_within_the_timeout(
    pair: tuple[Path, Path], both: dict[str, StartedWorker], plain: list[int]
) -> None:
    """A target that is only slow is waited for."""
    short = replace(SAMPLED, max_tokens=4)
    with slow("target", pair[0], 0.2) as target:
        with client_on_workers(target.client_address(), both["draft"].client_address(), draft_steps=2) as running:
            assert running.generate(PROMPT, short).token_ids == plain[:4]
        with (
            client_on_workers(
                target.client_address(timeout=0.1), both["draft"].client_address(), draft_steps=2
            ) as running,
            pytest.raises(UserError, match="did not answer in time"),
        ):
            running.generate(PROMPT, short)


def invalid_responses(name: str, result: VerifyResult) -> VerifyResult:
    """Responses that a target must not send."""
    match name:
        case "an old round":
            return replace(result, round=result.round - 1)
        case "another request":
            return replace(result, request=result.request + 1)
        case "another place":
            return replace(result, prefix_len=result.prefix_len + 1)
        case "a token that was not proposed":
            return replace(result, path=(0, 1), tokens=(63, 9))
        case _:
            return replace(result, tokens=(*result.tokens[:-1], 64))


@pytest.mark.parametrize(
    "name", ["an old round", "another request", "another place", "a token that was not proposed", "no token"]
)
def test_an_invalid_response_of_a_target_gives_no_token(
    both: dict[str, StartedWorker], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pack = served_roles.pack_scored_result
    monkeypatch.setattr(served_roles, "pack_scored_result", lambda result: pack(invalid_responses(name, result)))
    with (
        client_on_workers(
            both["target"].client_address(), both["draft"].client_address(), mode="serial", draft_steps=2
        ) as running,
        pytest.raises(UserError, match=r"--target-url \S+ sent an invalid result: .*") as caught,
    ):
        list(running.stream(PROMPT, SAMPLED))
    assert "\n" not in str(caught.value)


def duplicating(monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    """Makes workers of this side send every answer twice."""
    answers = WorkerServer.answers

    def doubled(server: WorkerServer) -> Iterator[Answer]:
        for answer in answers(server):
            yield from [answer] * (2 if server._worker.side == side else 1)

    monkeypatch.setattr(WorkerServer, "answers", doubled)


def test_a_duplicate_response_of_a_target_is_refused(
    both: dict[str, StartedWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    duplicating(monkeypatch, "target")
    with (
        client_on_workers(
            both["target"].client_address(), both["draft"].client_address(), mode="serial", draft_steps=2
        ) as running,
        pytest.raises(UserError, match="an invalid result"),
    ):
        list(running.stream(PROMPT, SAMPLED))


@pytest.mark.parametrize("mode", MODES)
def test_a_duplicate_response_of_a_draft_costs_speed_at_most(
    both: dict[str, StartedWorker], plain: list[int], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    duplicating(monkeypatch, "draft")
    with client_on_workers(
        both["target"].client_address(), both["draft"].client_address(), mode=mode, draft_steps=2
    ) as running:
        for _ in range(2):
            assert running.generate(PROMPT, SAMPLED).token_ids == plain


def test_another_tokenizer_or_version_is_refused_at_the_start(
    pair: tuple[Path, Path], both: dict[str, StartedWorker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, vocab=64)
    target = both["target"].client_address()
    with (
        started("draft", tmp_path, tokenizer=bytes(31) + b"x") as draft,
        pytest.raises(UserError, match=r"--draft-url \S+ does not match this target: the ordinary tokens"),
        client_on_workers(target, draft.client_address()),
    ):
        pass
    monkeypatch.setattr(client, "PROTOCOL_VERSION", 1)
    for models in ((target, None), (pair[0], both["draft"].client_address())):
        with (
            pytest.raises(UserError, match="uses protocol version 8, not 1"),
            client_on_workers(*models),
        ):
            pass
