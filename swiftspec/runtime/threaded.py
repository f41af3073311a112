"""Both models on one GPU at the same time: the target verifies on a stream of its own, fed by a thread, while the draft
grows on the caller's."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext

import torch

from swiftspec.messages import Opening, Proposal, VerifyResult
from swiftspec.runtime.verifier import LocalVerifier


class ThreadedVerifier:
    """A `Verifier` whose forward goes on while its caller does something else. Between two calls nothing of it runs but
    that, so what it holds needs no lock. All that it does on a GPU is on one stream, so in order."""

    def __init__(self, verifier: LocalVerifier) -> None:
        self.verifier = verifier
        device = verifier.runner.model.device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # what was loaded is there, whatever stream it came on
            self._stream = torch.cuda.Stream(device)
        self._thread = ThreadPoolExecutor(1, "verifier")
        self._running: Future[VerifyResult] | None = None

    @property
    def busy(self) -> float:
        return self.verifier.busy

    def open(self, opening: Opening) -> int:
        with self._on_stream():
            return self.verifier.open(opening)

    def submit(self, proposal: Proposal) -> ThreadedPending:
        self._running = self._thread.submit(self._verify, proposal)
        return ThreadedPending(self._running)

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

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


class ThreadedPending:
    """A verification that runs, or has ended."""

    def __init__(self, running: Future[VerifyResult]) -> None:
        self._running = running

    def wait(self) -> VerifyResult:
        """Raises what the verification has raised."""
        return self._running.result()
