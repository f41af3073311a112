"""`LLM`: what a Python caller holds. It assembles the roles and decodes on them."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, Unpack

import numpy as np
import torch

from swiftspec.assemble.models import Models
from swiftspec.assemble.options import Options
from swiftspec.assemble.roles import MakeDrafter, Roles, assemble
from swiftspec.backends.cpu.cache import Writer
from swiftspec.config import EngineConfig
from swiftspec.distributed.facts import telling
from swiftspec.distributed.patient import Outage
from swiftspec.distributed.rank import Rank
from swiftspec.distributed.world import World
from swiftspec.engine import Chunk, Completion, Decoding, Engine, Limits, Stats
from swiftspec.errors import UserError, shown
from swiftspec.messages import Opening
from swiftspec.observe.recorder import Listener
from swiftspec.params import SamplingParams
from swiftspec.runtime.pause import Cancelled, Pause
from swiftspec.setting import meant, require
from swiftspec.smc.decoding import ParticleDecoding, Request

Piece = TypeVar("Piece")


class Beside(Protocol):
    """Work that needs the machine, too, but has time."""

    def rest(self) -> None: ...
    def go(self) -> None: ...


class OneAtATime(Engine):
    """An engine that any thread may call, one at a time: another is told so.

    A stream that is open belongs to the thread that last asked it for a chunk; that thread may begin another request,
    which ends this one. Once closed, every call raises UserError.
    """

    def __init__(
        self, decoding: Decoding, limits: Limits, beside: Beside | None = None, pause: Pause | None = None
    ) -> None:
        """`beside`: work that rests while a request runs. `pause`: what its runners call while they read a prompt."""
        super().__init__(decoding, limits)
        self._beside, self._pause = beside, pause if pause is not None else Pause()
        self._lock = threading.RLock()  # held while a round is decoded
        self._open: tuple[Generator[Any], int] | None = None  # a request that has begun and not ended, and its thread
        self._closed = False

    def stream(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Generator[Chunk]:
        """As `Engine.stream`. Token ids may be numpy's or torch's. `cancelled` is asked now and then while the prompt
        is read, from this thread: once it is true the stream ends, without a chunk."""
        sampling = sampling if sampling is not None else SamplingParams()
        require(isinstance(sampling, SamplingParams), f"sampling takes SamplingParams, not {shown(sampling)}")
        with self._turn():
            return self._rounds(super().stream(token_ids(prompt), sampling), cancelled)

    def batch(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        cancelled: Callable[[int], bool] = lambda index: False,
    ) -> tuple[list[Request], Generator[tuple[int, Chunk]]]:
        """Requests side by side: what becomes of each, and their chunks. Raises UserError before anything is computed,
        where one of them cannot be served or the decoding takes one at a time."""
        decoding = self.decoding
        if not isinstance(decoding, ParticleDecoding):
            raise UserError("only mode smc decodes several requests at a time: generate them one after the other")
        requests = [self._request(*each) for each in enumerate(each_with(prompts, sampling))]
        with self._turn():
            return requests, self._rounds(
                self._batch(decoding, requests, cancelled), lambda: cancelled(decoding.reading)
            )

    def _request(self, index: int, asked: tuple[Sequence[int], SamplingParams]) -> Request:
        prompt, sampling = asked
        try:
            prompt = token_ids(prompt)
            self.limits.check(prompt, sampling)
        except UserError as error:
            raise UserError(f"request {index} of the batch: {error}") from None
        opening = Opening(index, prompt, sampling, len(prompt))
        return Request(opening, self._ends(prompt, sampling), Stats(prompt_tokens=len(prompt)))

    def _batch(
        self, decoding: ParticleDecoding, requests: Sequence[Request], cancelled: Callable[[int], bool]
    ) -> Generator[tuple[int, Chunk]]:
        """The chunks of all, until a later request ends them."""
        self._requests += 1
        mine = self._requests
        with closing(decoding.batch(requests, cancelled)) as chunks:
            for index, chunk in chunks:
                self.stats = requests[index].stats
                yield index, chunk
                require(self._requests == mine, "this batch was ended by a later request: read it to its end first")

    def close(self) -> None:
        """Waits for the round under way, if any, and ends its request."""
        with self._lock:
            self._closed = True
            if self._open is not None:
                self._open[0].close()

    def _rounds(self, chunks: Generator[Piece], cancelled: Callable[[], bool]) -> Generator[Piece]:
        """The chunks, each decoded in this stream's turn."""
        if self._beside is not None:
            self._beside.rest()
        try:
            while True:
                with self._turn(chunks), _short_of_memory():
                    self._open = chunks, threading.get_ident()
                    self._pause.cancelled = cancelled
                    try:
                        chunk = next(chunks, None)
                    except Cancelled:
                        return
                if chunk is None:
                    return
                yield chunk
        finally:
            with self._lock:
                chunks.close()
                if self._open is not None and self._open[0] is chunks:
                    self._open = None
                if self._beside is not None and self._open is None:
                    self._beside.go()

    @contextmanager
    def _turn(self, mine: Generator[Any] | None = None) -> Iterator[None]:
        """Keeps other threads out. Raises UserError where one of them is being served, or the engine is closed."""
        taken = self._lock.acquire(blocking=False)
        try:
            others = self._open is not None and self._open[0] is not mine and self._open[1] != threading.get_ident()
            busy = "another thread's request is being served: one engine serves one at a time"
            require(taken and not others, busy)
            require(not self._closed, "this engine is closed: make another")
            yield
        finally:
            if taken:
                self._lock.release()


def token_ids(prompt: Sequence[int]) -> tuple[int, ...]:
    """A prompt's, which may be numpy's or torch's. Raises UserError on what is none."""
    tokens = prompt.tolist() if isinstance(prompt, np.ndarray | torch.Tensor) else prompt
    return meant("the prompt", tuple[int, ...], tokens)


def each_with(
    prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams] | None
) -> list[tuple[Sequence[int], SamplingParams]]:
    """Each prompt and its sampling parameters. Raises UserError where there is not one for each, or one for all."""
    if sampling is None or isinstance(sampling, SamplingParams):
        return [(prompt, sampling or SamplingParams()) for prompt in prompts]
    several = isinstance(sampling, Sequence) and all(isinstance(each, SamplingParams) for each in sampling)
    require(several, f"sampling takes SamplingParams, or one for each prompt, not {shown(sampling)}")
    same = len(sampling) == len(prompts)
    require(
        same, f"there are {len(sampling)} sampling parameters for {len(prompts)} prompts: give one, or one for each"
    )
    return [*zip(prompts, sampling, strict=True)]


@contextmanager
def _short_of_memory() -> Iterator[None]:
    """Says in one line that a request found no memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        raise UserError("not enough memory for this request: take a smaller max_model_len, or no guidance") from None


class Running:
    """Roles that decode one request at a time, wherever their models are."""

    def __init__(
        self, roles: Roles, load_time: float = 0.0, writer: Writer | None = None, pause: Pause | None = None
    ) -> None:
        """`load_time`: seconds until the models were there. `writer`: of what is kept for the next start. `pause`: what
        the runners of this process call while they read a prompt."""
        self.roles, self.load_time, self.writer = roles, load_time, writer
        self.config = roles.config
        self.engine = OneAtATime(roles.decoding, roles.limits, writer, pause)

    @property
    def stats(self) -> Stats:
        """What the request begun last has cost so far."""
        return self.engine.stats

    @property
    def outages(self) -> Sequence[Outage]:
        """The times in the request begun last in which the draft group was away."""
        return self.roles.outages

    @property
    def max_model_len(self) -> int:
        return self.roles.limits.max_model_len

    @property
    def vocab_size(self) -> int:
        return self.roles.limits.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.roles.limits.eos_token_ids

    def generate(self, prompt: Sequence[int], sampling: SamplingParams | None = None) -> Completion:
        """Decodes to the end. Raises UserError on a prompt that is empty or does not fit."""
        return self.engine.generate(prompt, sampling)

    def stream(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Generator[Chunk]:
        """Yields a chunk a round, as `Engine.stream` says; closing the iterator ends the request. While the prompt is
        read, which the first step does, `cancelled` is asked now and then: once it is true the stream just ends."""
        return self.engine.stream(prompt, sampling, cancelled)

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Decodes several prompts side by side, in mode smc: as many at a time as there are groups (`smc_groups`), each
        with its own particles; the others follow as places become free. `sampling`: one for all, or one for each.

        Returns their completions in the order of the prompts. A text depends on its prompt and its seed, not on the
        others. Raises UserError, before anything is computed, in another mode or where a request cannot be served.
        """
        requests, chunks = self.engine.batch(prompts, sampling)
        tokens: list[list[int]] = [[] for _ in requests]
        for index, chunk in chunks:
            tokens[index] += chunk.token_ids
        stats = [request.stats for request in requests]
        return [
            Completion(text, each.finish_reason or "length", each) for text, each in zip(tokens, stats, strict=True)
        ]

    def stream_batch(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        cancelled: Callable[[int], bool] = lambda index: False,
    ) -> Generator[tuple[int, Chunk]]:
        """As `generate_batch`; yields chunks as they come, each with the index of its prompt. `cancelled` is asked
        between rounds and while a prompt is read: a request that it names ends without a last chunk."""
        return self.engine.batch(prompts, sampling, cancelled)[1]

    def listen(self, listener: Listener | None) -> None:
        """From the next request on this hears, on the decoding thread and several rounds at a time, what a trace of it
        has; None: nobody does, and nothing is recorded. `observe.rounds.opened` makes a line of each, at any time and
        in any thread. See docs/reference/trace.md; arrays in a line are `observe.lines.plain`'s."""
        self.roles.recorder.listener = listener

    def close(self, *, comes_again: bool = False) -> None:
        """Sends the other ranks home and closes the trace; writes on at what is kept, for a second at most. Any later
        request raises UserError. `comes_again`: the ranks are to be started again, and so are not sent home."""
        self.engine.close()
        self.roles.close(comes_again=comes_again)
        if self.writer is not None:
            self.writer.close()


class LLM(Running):
    """A target model and perhaps a draft, decoding one request at a time.

    With a `world` this is its rank 0, and the other ranks run `serve_rank` with the same arguments. Raises UserError
    where a model cannot be loaded or the pair does not fit.
    """

    def __init__(
        self,
        target: str | Path,
        draft: str | Path | None = None,
        config: EngineConfig | None = None,
        *,
        world: World | None = None,
        **options: Unpack[Options],
    ) -> None:
        config = config if config is not None else EngineConfig(mode="serial" if draft is not None else "ar")
        with telling(world):
            models = Models.check(target, draft, config, world, options)
        began = time.perf_counter()
        roles = assemble(models, config, world, options.get("progress"), _drafter_elsewhere(options))
        writer = None if models.cache is None else models.cache.writer
        super().__init__(roles, time.perf_counter() - began, writer, models.pause)


def _drafter_elsewhere(options: Options) -> MakeDrafter | None:
    """What makes the drafter of a worker, where one is named."""
    worker = options.get("draft_worker")
    if worker is None:
        return None
    from swiftspec.assemble.elsewhere import remote_drafter  # gRPC takes a while to import

    return partial(remote_drafter, worker, options.get("note") or (lambda line: None))


def serve_rank(
    world: World, target: str | Path, draft: str | Path | None, config: EngineConfig, **options: Unpack[Options]
) -> None:
    """The life of any rank but 0, until rank 0 leaves. Raises RankLost when that, or a group's leader, is just gone."""
    with telling(world):
        models = Models.check(target, draft, config, world, options)
    rank = Rank(world, config, models, options.get("progress"))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 hears the user, and says when to leave
    try:
        if world.keeping is not None:
            world.keeping.ready()
        rank.follow(traced=models.trace is not None)
        if models.cache is not None:
            models.cache.writer.go()
            models.cache.writer.close()
    finally:
        signal.signal(signal.SIGINT, before)
