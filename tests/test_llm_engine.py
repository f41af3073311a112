"""The Python API of an engine: concurrent callers, closed engines and invalid arguments."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swiftspec.builder.models import Models
from swiftspec.builder.rules import resolve_config
from swiftspec.config import EngineConfig
from swiftspec.errors import UserError
from swiftspec.llm_engine import LLMEngine
from swiftspec.messages import VerifyResult
from swiftspec.params import SamplingParams
from tests.support.tiny_checkpoints import make_checkpoint

PROMPT = [5, 17, 3, 29]
FREE = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
BUSY = "another thread's request is being served"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    make_checkpoint(folder / "target", seed=0)
    make_checkpoint(folder / "draft", seed=1, layers=1)
    return folder / "target", folder / "draft"


def in_thread(act: Callable[[], Any]) -> Any:
    """The result of `act` in a separate thread, or its exception."""
    got: list[Any] = []

    def run() -> None:
        try:
            got.append(act())
        except UserError as error:
            got.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return got[0]


def reports_busy(llm: LLMEngine) -> bool:
    """Whether another thread receives the error for a busy engine, with each method."""
    generated = in_thread(lambda: llm.generate(PROMPT, FREE))
    streamed = in_thread(lambda: next(llm.stream(PROMPT, FREE)))
    return all(isinstance(got, UserError) and BUSY in str(got) for got in (generated, streamed))


@pytest.mark.parametrize("mode", ["ar", "serial"])
def test_a_call_from_a_second_thread_raises(pair: tuple[Path, Path], mode: str) -> None:
    """In the middle of a forward, and between two rounds; the answer of the first caller is unchanged."""
    llm = LLMEngine(*pair, EngineConfig(mode=mode), dtype=torch.float64)
    want, busy = llm.generate(PROMPT, FREE).token_ids, []

    def ask(began: float, rows: int) -> None:
        busy.append(reports_busy(llm))

    parts: Any = llm.roles.inner_roles
    parts.verifier.runner.hooks.append(ask)
    got: list[int] = []
    for chunk in llm.stream(PROMPT, FREE):
        got += chunk.token_ids
        busy.append(reports_busy(llm) or chunk.finish_reason is not None)
    assert got == want and len(busy) > 10 and all(busy)
    parts.verifier.runner.hooks.clear()
    assert in_thread(lambda: llm.generate(PROMPT, FREE)).token_ids == want, "nobody is served any more"


def test_many_threads_get_correct_answers_or_an_error(pair: tuple[Path, Path]) -> None:
    llm = LLMEngine(*pair, EngineConfig(mode="serial"), dtype=torch.float64)
    want = {seed: llm.generate(PROMPT, SamplingParams(seed=seed, max_tokens=9)).token_ids for seed in range(4)}
    wrong: list[object] = []
    served = []

    def call(seed: int) -> None:
        for _ in range(30):
            try:
                got = llm.generate(PROMPT, SamplingParams(seed=seed, max_tokens=9)).token_ids
            except UserError as error:
                wrong.extend([] if BUSY in str(error) else [error])
            except BaseException as error:
                wrong.append(error)
            else:
                served.append(seed)
                wrong.extend([] if got == want[seed] else [got])

    threads = [threading.Thread(target=call, args=(seed,)) for seed in want]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and served


def test_a_stream_may_be_read_by_successive_threads(pair: tuple[Path, Path]) -> None:
    """As a web server's thread pool does."""
    llm = LLMEngine(pair[0], dtype=torch.float64)
    want = llm.generate(PROMPT, FREE).token_ids
    stream, got = llm.stream(PROMPT, FREE), list[int]()
    while (chunk := in_thread(lambda: next(stream, None))) is not None:
        got += chunk.token_ids
    assert got == want


def test_a_dropped_stream_releases_the_engine(pair: tuple[Path, Path]) -> None:
    llm = LLMEngine(pair[0], dtype=torch.float64)
    stream = llm.stream(PROMPT, FREE)
    next(stream)
    assert reports_busy(llm)
    stream.close()
    assert len(in_thread(lambda: llm.generate(PROMPT, FREE)).token_ids) == 24


@pytest.mark.parametrize("trace", [False, True])
def test_every_call_after_close_raises(pair: tuple[Path, Path], tmp_path: Path, trace: bool) -> None:
    llm = LLMEngine(*pair, dtype=torch.float64, trace=tmp_path / "trace.jsonl" if trace else None)
    stream = llm.stream(PROMPT, FREE)
    next(stream)
    llm.close()
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate(PROMPT, FREE), lambda: llm.stream(PROMPT, FREE), lambda: next(stream),
        lambda: llm.generate([]),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(UserError, match="this engine is closed"):
            call()
    llm.close()


PROMPTS: list[Any] = [
    np.array(PROMPT), np.array(PROMPT, np.uint8), torch.tensor(PROMPT), tuple(PROMPT), [np.int32(t) for t in PROMPT],
    [torch.tensor(t) for t in PROMPT],
]  # fmt: skip


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: type(prompt).__name__ + type(prompt[0]).__name__)
def test_prompts_of_other_types_are_converted(pair: tuple[Path, Path], prompt: Sequence[int]) -> None:
    llm = LLMEngine(pair[0], dtype=torch.float64)
    assert llm.generate(prompt, FREE).token_ids == llm.generate(PROMPT, FREE).token_ids


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1.5], "prompt token: expected a whole number, not 1.5"),
        ([5, True], "prompt token: expected a whole number, not True"),
        ("abc", "prompt token: expected a whole number, not 'abc'"),
        ([[5, 6]], r"prompt token: expected a whole number, not \[5, 6\]"),
        (np.array([1.0]), "prompt token: expected a whole number, not 1.0"),
        (None, "prompt token: expected a whole number, not None"),
        ([10**5000], "the prompt contains a token outside"),
        ([-1], "the prompt contains a token outside"),
        (["x" * 1000], r"not 'x{59}\.\.\.x{9}'"),
    ],
)
def test_invalid_prompts_are_refused(pair: tuple[Path, Path], prompt: Any, message: str) -> None:
    llm = LLMEngine(pair[0], dtype=torch.float64)
    with pytest.raises(UserError, match=message):
        llm.generate(prompt, FREE)
    with pytest.raises(UserError, match=r"sampling must be SamplingParams, not \{'top_k': 3\}"):
        llm.generate(PROMPT, {"top_k": 3})  # type: ignore[arg-type]
    with pytest.raises(UserError, match="stop_token_ids contains a token outside"):
        llm.generate(PROMPT, SamplingParams(stop_token_ids=(64,)))


def test_a_bias_of_integers_is_accepted(pair: tuple[Path, Path]) -> None:
    llm = LLMEngine(*pair, dtype=torch.float64)
    numbers: list[Any] = [{17: 5.0}, {17: 5}, {np.int64(17): np.float32(5)}, {torch.tensor(17): torch.tensor(5)}]
    texts = [llm.generate(PROMPT, SamplingParams(logit_bias=bias, max_tokens=9)).token_ids for bias in numbers]
    assert texts.count(texts[0]) == 4


def test_a_failed_allocation_is_one_line(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLMEngine(pair[0], dtype=torch.float64)
    parts: Any = llm.roles.inner_roles

    def full() -> VerifyResult:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(parts.verifier, "wait", full)
        with pytest.raises(UserError, match="not enough memory for this request"):
            llm.generate(PROMPT, FREE)
    assert len(llm.generate(PROMPT, FREE).token_ids) == 24


def test_the_draft_is_judged_by_the_rounds_of_every_request(pair: tuple[Path, Path]) -> None:
    """One by one, in a batch, and of a request that is closed early or cancelled."""
    llm = LLMEngine(*pair, EngineConfig("serial", verify_batch=3, draft_steps=2), dtype=torch.float64)
    judged = llm._monitor
    llm.generate(PROMPT, FREE)
    rounds = judged.rounds
    llm.generate_batch([PROMPT, PROMPT], FREE)
    assert judged.rounds == 3 * rounds > 0
    stream = llm.stream(PROMPT, FREE)
    next(stream)
    stream.close()
    assert judged.rounds == 3 * rounds + 1
    asked = list[int]()
    *_, (_, last) = llm.stream_batch([PROMPT], FREE, lambda index: asked.append(index) or len(asked) == 3)
    assert last.finish_reason == "abort" and judged.rounds == 3 * rounds + 3


def test_a_draft_worker_gets_the_leaves_that_every_worker_accepts() -> None:
    apart = EngineConfig("async", draft_remote=True)
    assert {resolve_config(apart, "draft", device).draft_leaves for device in ("cuda", "cpu")} == {4}
    assert resolve_config(EngineConfig("async"), "draft", "cuda").draft_leaves == 8


def test_an_error_of_the_gpu_is_recorded(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """For the verdict of its next start (tests/builder/test_gpu_trial.py)."""
    llm, found = LLMEngine(*pair, dtype=torch.float64), list[Exception]()

    def fail(*of: Any) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(Models, "record_device_error", lambda models, error, plan: found.append(error))
    monkeypatch.setattr(type(llm.decoding), "open", fail)
    with pytest.raises(RuntimeError, match="launch failure") as raised:
        llm.generate(PROMPT, FREE)
    assert found == [raised.value]
