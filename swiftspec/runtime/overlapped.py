"""Overlapped mode: both models on one GPU at the same time.

The target verifies on its own CUDA stream, driven by a thread, while the draft expands on another stream with a higher
priority. Without the priority, a large matrix product of the target, which fills the GPU, would delay every small
kernel of the draft.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.params import SamplingParams
from swiftspec.runtime.current_device import set_current_device
from swiftspec.runtime.drafter import Drafter, DrafterWrapper
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.verifier import LocalVerifier

DRAFT_STREAM_PRIORITY = -1  # CUDA priority of the draft's stream and graphs; below the default 0: scheduled first


class StreamContext:
    """A CUDA stream for one of the two models; no-op on other devices."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # weights may have been copied on another stream
            self._stream = torch.cuda.Stream(device, priority)

    def __call__(self) -> AbstractContextManager[object]:
        """Returns a context manager within which kernels are launched on this stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


class OverlappedDrafter(DrafterWrapper[LocalDrafter]):
    """A lookahead drafter that runs concurrently with the target on the same GPU."""

    def __init__(self, drafter: LocalDrafter) -> None:
        super().__init__(drafter)
        self._on_stream = StreamContext(drafter.runner.model.device, DRAFT_STREAM_PRIORITY)

    @property
    def draft_steps(self) -> int:
        """d, the number of expansions per round."""
        return self.inner.draft_steps

    @draft_steps.setter
    def draft_steps(self, steps: int) -> None:
        self.inner.draft_steps = steps

    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        with self._on_stream():
            return method(*args)


def warm_up(drafter: Drafter, verifier: LocalVerifier) -> None:
    """Runs one round with the two models one after the other, so that all kernels are loaded before the models run
    concurrently. CUDA loads a kernel at its first launch, which may wait for all work on the GPU and must not happen
    while the other model captures a graph."""
    start = RequestStart(0, (0, 0), SamplingParams(max_tokens=2, ignore_eos=True), 2)
    verifier.open(start)
    drafter.open(start)
    result = verifier.verify(drafter.propose())
    drafter.observe(result)
    verifier.settle()
    drafter.close()
    verifier.close()


class ThreadedVerifier:
    """A `Verifier` whose verifications run in a thread. Only one call is in progress at any time, so its state needs no
    lock. All its GPU work is on one stream and therefore ordered."""

    def __init__(self, verifier: LocalVerifier) -> None:
        self.verifier = verifier
        device = verifier.runner.model.device
        self._on_stream = StreamContext(device)
        self._thread = ThreadPoolExecutor(1, "verifier", set_current_device, (device,))
        self._running: Future[VerifyResult] | None = None

    @property
    def busy(self) -> float:
        return self.verifier.busy

    def open(self, start: RequestStart) -> int:
        with self._on_stream():
            return self.verifier.open(start)

    def submit(self, proposal: Proposal) -> ThreadedVerification:
        self._running = self._thread.submit(self._verify, proposal)
        return ThreadedVerification(self._running)

    def settle(self) -> None:
        with self._on_stream():
            self.verifier.settle()

    def close(self) -> None:
        """Ends the request. Waits for its verification, which is still running if the drafter has raised an error."""
        if self._running is not None:
            wait([self._running])
        with self._on_stream():
            self.verifier.close()

    def _verify(self, proposal: Proposal) -> VerifyResult:
        with self._on_stream():
            return self.verifier.verify(proposal)


class ThreadedVerification:
    """A `PendingVerification` in the thread of a `ThreadedVerifier`."""

    def __init__(self, running: Future[VerifyResult]) -> None:
        self._running = running

    def wait(self) -> VerifyResult:
        """Waits for the verification. Returns its result, or raises its exception."""
        return self._running.result()
