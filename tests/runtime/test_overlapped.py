"""Both models concurrently in one process. On a CPU there are no streams; tests/gpu/test_graph.py uses them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from threading import Event, Lock
from typing import Any

import pytest
import torch

from swiftspec.backends.reference import reference
from swiftspec.builder.rules import Choices, Resolution
from swiftspec.config import EngineConfig
from swiftspec.decode import decode
from swiftspec.errors import UserError
from swiftspec.llm_engine import LLMEngine
from swiftspec.messages import Proposal, VerifyResult
from swiftspec.model.loader import load_model
from swiftspec.params import SamplingParams
from swiftspec.runtime.drafter import NoDrafter
from swiftspec.runtime.executors.graph import CudaCapture
from swiftspec.runtime.overlapped import (
    DRAFT_STREAM_PRIORITY,
    OverlappedDrafter,
    StreamContext,
    ThreadedVerifier,
    warm_up,
)
from swiftspec.runtime.runner import Runner
from swiftspec.runtime.verifier import LocalVerifier
from swiftspec.settings.settings import Settings
from tests.support.proposals import draft_proposal
from tests.support.roles import make_drafter, make_runner, make_verifier, request_start
from tests.support.tiny_checkpoints import make_checkpoint

PROMPT = [5, 17, 3, 29, 11]
SAMPLED = SamplingParams(temperature=0.8, seed=7, repetition_penalty=1.1, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("beside")
    make_checkpoint(path, dtype=torch.float64)
    return path


def runner(checkpoint: Path) -> Runner:
    model = load_model(checkpoint, dtype=torch.float64, ops=reference, max_positions=192)
    return make_runner(model, reference, context=128, tree_slots=64)


def rounds(checkpoint: Path, sampling: SamplingParams, *, overlapped: bool) -> list[tuple[Proposal, VerifyResult]]:
    plan = EngineConfig("async", verify_batch=4, draft_leaves=3, draft_steps=2, draft_tp=0)
    verifier: Any = make_verifier(runner(checkpoint))
    verifier = ThreadedVerifier(verifier) if overlapped else verifier
    drafter: Any = make_drafter(runner(checkpoint), plan)
    drafter = OverlappedDrafter(drafter) if overlapped else drafter
    for role in (drafter, verifier):
        role.open(request_start(PROMPT, sampling))
    found = list(islice(decode(drafter, verifier), 15))
    for role in (drafter, verifier):
        role.close()
    return found


def test_a_warm_up_does_not_change_the_state(checkpoint: Path) -> None:
    def tokens(warm: bool) -> list[tuple[int, ...]]:
        plan = EngineConfig("async", verify_batch=4, draft_leaves=3, draft_steps=2, draft_tp=0)
        verifier, drafter = make_verifier(runner(checkpoint)), make_drafter(runner(checkpoint), plan)
        if warm:
            warm_up(drafter, verifier)
        for role in (drafter, verifier):
            role.open(request_start(PROMPT, SAMPLED))
        return [tuple(result.tokens) for _, result in islice(decode(drafter, verifier), 8)]

    assert tokens(True) == tokens(False)


class Streams:
    """A stand-in for torch's streams that records how they were created and where work runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[int] = []
        self.now = 0
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
        monkeypatch.setattr(torch.cuda, "Stream", self.make)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)

    def make(self, device: Any = None, priority: int = 0) -> int:
        self.made.append(priority)
        return priority

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before


def test_the_draft_has_priority_on_a_shared_gpu(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All work of its roles is on a stream with a higher priority, and so are the kernels of its graphs."""
    streams = Streams(monkeypatch)
    plan = EngineConfig("async", verify_batch=4, draft_leaves=3, draft_steps=2, draft_tp=0)
    drafter = make_drafter(runner(checkpoint), plan)
    overlapped = OverlappedDrafter(drafter)
    overlapped._on_stream = StreamContext(torch.device("cuda"), DRAFT_STREAM_PRIORITY)
    forward, seen = drafter.runner.model.forward, []
    monkeypatch.setattr(drafter.runner.model, "forward", lambda *a, **k: seen.append(streams.now) or forward(*a, **k))
    verifier = make_verifier(runner(checkpoint))
    for role in (overlapped, verifier):
        role.open(request_start(PROMPT, SAMPLED))
    assert len(list(islice(decode(overlapped, verifier), 4))) == 4
    assert set(seen) == {DRAFT_STREAM_PRIORITY} and len(seen) > 4 and streams.now == 0
    for priority in (DRAFT_STREAM_PRIORITY, 0):
        CudaCapture(Lock(), torch.device("cuda", 0), priority)
    assert streams.made == [DRAFT_STREAM_PRIORITY, DRAFT_STREAM_PRIORITY, 0]


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0), SAMPLED], ids=["greedy", "sampled"])
def test_overlapped_rounds_equal_serial_ones(checkpoint: Path, sampling: SamplingParams) -> None:
    """The output is the target's."""
    ours = rounds(checkpoint, sampling, overlapped=True)
    assert ours == rounds(checkpoint, sampling, overlapped=False)
    text = [token for _, result in ours for token in result.tokens]
    drafter, alone = NoDrafter(), make_verifier(runner(checkpoint))
    for role in (drafter, alone):
        role.open(request_start(PROMPT, sampling))
    plain = [token for _, result in islice(decode(drafter, alone), len(text)) for token in result.tokens]
    assert text == plain


class Waits(LocalVerifier):
    """A target that is not ready before the draft has expanded."""

    def __init__(self, verifier: LocalVerifier) -> None:
        super().__init__(verifier.runner, verifier.executors)
        self.began, self.expanded = Event(), Event()

    def wait(self) -> VerifyResult:
        self.began.set()
        assert self.expanded.wait(10), "nobody grew meanwhile"
        return super().wait()


def test_the_draft_expands_while_the_target_verifies(checkpoint: Path) -> None:
    target = Waits(make_verifier(runner(checkpoint)))

    class Grows(NoDrafter):
        def grow(self) -> None:
            assert target.began.wait(10)
            target.expanded.set()

    verifier, drafter = ThreadedVerifier(target), Grows()
    for role in (drafter, verifier):
        role.open(request_start(PROMPT, SAMPLED))
    assert len(list(islice(decode(drafter, verifier), 3))) == 3
    verifier.close()


def test_an_exception_is_raised_to_the_waiting_caller_and_close_waits(checkpoint: Path) -> None:
    target = Waits(make_verifier(runner(checkpoint)))
    verifier = ThreadedVerifier(target)
    verifier.open(request_start(PROMPT, SAMPLED))
    proposal = draft_proposal(1, 0, len(PROMPT) + 5, (PROMPT[-1],), (-1,))  # of another prefix
    target.expanded.set()
    with pytest.raises(AssertionError, match="differ in prefix length"):
        verifier.submit(proposal).wait()
    target.began.clear()
    target.expanded.clear()
    verifier.submit(draft_proposal(1, 0, len(PROMPT) - 1, (PROMPT[-1],), (-1,)))
    assert target.began.wait(10)
    target.expanded.set()
    verifier.close()
    assert target.runner.cache.tree_len == 0, "the forward came before the end"


def test_one_rank_runs_both_models_only_on_a_gpu(checkpoint: Path) -> None:
    given = {"mode": "async"}
    for choices in (
        Choices(given, "draft", 1),
        Choices({**given, "draft_tp": 1}, "draft", 1, overlaps=lambda: True),
    ):
        with pytest.raises(UserError, match="nproc-per-node 2"):
            Resolution(choices)
    assert EngineConfig("async", draft_tp=0).num_ranks == 1
    settings = Settings.model_validate({"mode": "async", "device": "cuda"})
    assert settings.make_plan(has_draft=True).draft_tp == 0
    with pytest.raises(UserError, match="draft_tp"):
        EngineConfig("async", target_tp=2, draft_tp=0)
    with pytest.raises(UserError, match="not supported on a CPU"):
        LLMEngine(checkpoint, checkpoint, EngineConfig("async", draft_tp=0))
