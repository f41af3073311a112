"""Both models on one GPU at the same time: the target verifies on a stream of its own, fed by a thread, while the draft
grows on another, whose kernels go first. Without that a long product of the target, which fills the GPU, would hold up
every small kernel of the draft."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext

import torch

from swiftspec.config import EngineConfig
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.params import SamplingParams
from swiftspec.runtime.ahead_drafter import AheadDrafter
from swiftspec.runtime.executors import TreeExecutor
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.runner import Runner
from swiftspec.runtime.verifier import LocalVerifier
from swiftspec.tree.children import ChildSelector
from swiftspec.tree.tree import DraftTree

DRAFT_STREAM_PRIORITY = (
    -1
)  # the priority of a stream, and of the graphs captured on it, whose kernels go before those of others


class StreamContext:
    """A stream of its own for one of the two models; none where it is not on a GPU."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # what was loaded is there, whatever stream it came on
            self._stream = torch.cuda.Stream(device, priority)

    def __call__(self) -> AbstractContextManager[object]:
        """To be entered around whatever is to run there."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


class OverlappedDrafter(AheadDrafter):
    """The draft beside the target."""

    def __init__(
        self,
        runner: Runner,
        executors: Sequence[TreeExecutor],
        tree: DraftTree,
        children: ChildSelector,
        config: EngineConfig,
    ) -> None:
        super().__init__(runner, executors, tree, children, config)
        self._on_stream = StreamContext(runner.model.device, DRAFT_STREAM_PRIORITY)

    def open(self, opening: RequestStart) -> None:
        with self._on_stream():
            super().open(opening)

    def propose(self) -> Proposal:
        with self._on_stream():
            return super().propose()

    def grow(self) -> None:
        with self._on_stream():
            super().grow()

    def observe(self, result: VerifyResult) -> None:
        with self._on_stream():
            super().observe(result)

    def close(self) -> None:
        with self._on_stream():
            super().close()


def warm_up(drafter: LocalDrafter, verifier: LocalVerifier) -> None:
    """A round of both, one after the other, before they run at the same time: a kernel is loaded when it is launched
    first, which may wait for all that runs on the GPU, and must not fall into the other's capture."""
    opening = RequestStart(0, (0, 0), SamplingParams(max_tokens=2, ignore_eos=True), 2)
    verifier.open(opening)
    drafter.open(opening)
    result = verifier.verify(drafter.propose())
    drafter.observe(result)
    verifier.settle()
    drafter.close()
    verifier.close()


class ThreadedVerifier:
    """A `Verifier` whose forward goes on while its caller does something else. Between two calls nothing of it runs but
    that, so what it holds needs no lock. All that it does on a GPU is on one stream, so in order."""

    def __init__(self, verifier: LocalVerifier) -> None:
        self.verifier = verifier
        self._on_stream = StreamContext(verifier.runner.model.device)
        self._thread = ThreadPoolExecutor(1, "verifier")
        self._running: Future[VerifyResult] | None = None

    @property
    def busy(self) -> float:
        return self.verifier.busy

    def open(self, opening: RequestStart) -> int:
        with self._on_stream():
            return self.verifier.open(opening)

    def submit(self, proposal: Proposal) -> ThreadedVerification:
        self._running = self._thread.submit(self._verify, proposal)
        return ThreadedVerification(self._running)

    def settle(self) -> None:
        with self._on_stream():
            self.verifier.settle()

    def close(self) -> None:
        """After an error of the drafter's a forward may still be under way."""
        if self._running is not None:
            wait([self._running])
        with self._on_stream():
            self.verifier.close()

    def _verify(self, proposal: Proposal) -> VerifyResult:
        with self._on_stream():
            return self.verifier.verify(proposal)


class ThreadedVerification:
    """A verification that runs, or has ended."""

    def __init__(self, running: Future[VerifyResult]) -> None:
        self._running = running

    def wait(self) -> VerifyResult:
        """Raises what the verification has raised."""
        return self._running.result()
