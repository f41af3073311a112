"""`LLM`, the Python entry point: builds the roles of a model pair and decodes token ids."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Unpack

from swiftspec.backends.cpu.packed_weight_cache import BackgroundWriter
from swiftspec.builder.load_options import LoadOptions
from swiftspec.builder.locked_engine import LockedEngine
from swiftspec.builder.model_pair import ModelPair
from swiftspec.builder.roles import MakeRemoteDrafter, Roles, build_roles
from swiftspec.config import EngineConfig
from swiftspec.distributed.draft.failover import Outage
from swiftspec.distributed.launch.config_check import report_startup_error
from swiftspec.distributed.launch.world import World
from swiftspec.distributed.rank_startup import EngineRank
from swiftspec.engine import Completion, Stats, TokenChunk
from swiftspec.observe.recorder import TraceListener
from swiftspec.params import SamplingParams
from swiftspec.runtime.cancellation import CancelCheck
from swiftspec.smc.decoding import BatchRequest


class LLMBase:
    """Decodes requests on given roles, one at a time or up to `max_num_seqs` concurrently.

    The roles can be local models, ranks of a job, or workers.
    """

    def __init__(
        self,
        roles: Roles,
        load_time: float = 0.0,
        writer: BackgroundWriter | None = None,
        pause: CancelCheck | None = None,
    ) -> None:
        """`load_time`: seconds that loading took. `writer`: writes packed weights to the disk cache after the first
        request."""
        self.roles, self.load_time, self.writer = roles, load_time, writer
        self.config = roles.config
        self.engine = LockedEngine(roles.decoding, roles.limits, writer, pause)

    @property
    def stats(self) -> Stats:
        """Costs of the most recent request so far."""
        return self.engine.stats

    @property
    def outages(self) -> Sequence[Outage]:
        """Intervals of the most recent request during which the draft group was unavailable."""
        return self.roles.outages

    @property
    def max_model_len(self) -> int:
        return self.roles.limits.max_model_len

    @property
    def max_num_seqs(self) -> int:
        """Maximum number of concurrently decoded requests."""
        return self.config.num_sequences

    @property
    def vocab_size(self) -> int:
        return self.roles.limits.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.roles.limits.eos_token_ids

    def generate(self, prompt: Sequence[int], sampling: SamplingParams | None = None) -> Completion:
        """Decodes one request to its end and returns the completion.

        Raises UserError if the prompt is empty or exceeds the context.
        """
        return self.engine.generate(prompt, sampling)

    def stream(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Generator[TokenChunk]:
        """Streams one request: yields the verified tokens of each round. Closing the iterator ends the request.

        The first step of the iterator prefills the prompt. It calls `cancelled` before each prompt chunk and ends the
        stream without a chunk when that returns true.
        """
        return self.engine.stream(prompt, sampling, cancelled)

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Decodes several prompts, at most `max_num_seqs` concurrently, and returns completions in the order of
        prompts.

        `sampling` is one set of parameters for all prompts or one per prompt. A text depends on its own prompt and seed
        only. A request with non-finite logits ends with finish reason "error" without affecting the others. Raises
        UserError before any computation if a request cannot be served.
        """
        requests, chunks = self.engine.batch(prompts, sampling)
        tokens: list[list[int]] = [[] for _ in requests]
        for request, chunk in chunks:
            tokens[request.number] += chunk.token_ids
        stats = [request.stats for request in requests]
        return [
            Completion(text, each.finish_reason or "length", each) for text, each in zip(tokens, stats, strict=True)
        ]

    def stream_batch(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        cancelled: Callable[[int], bool] = lambda index: False,
    ) -> Generator[tuple[int, TokenChunk]]:
        """Streams several prompts: like `generate_batch`, but yields (prompt index, chunk) pairs.

        `cancelled(index)` is called between rounds and during prefill; a request for which it returns true ends with
        finish reason "abort".
        """
        _, chunks = self.engine.batch(prompts, sampling, cancelled)
        return _numbered(chunks)

    def listen(self, listener: TraceListener | None) -> None:
        """Sets the trace listener from the next request on, or removes it with None, which stops recording.

        The listener is called on the decoding thread with the records of several rounds. Functions in
        `observe.round_records` and `observe.trace_format` convert records to trace lines in any thread; see
        docs/reference/trace.md.
        """
        self.roles.recorder.listener = listener

    def close(self, *, will_restart: bool = False) -> None:
        """Shuts the other ranks down, closes the trace and flushes the packed-weight cache for at most one second.

        Later requests raise UserError. `will_restart` leaves the other ranks running, since they will be restarted.
        """
        self.engine.close()
        self.roles.close(will_restart=will_restart)
        if self.writer is not None:
            self.writer.close()


def _numbered(chunks: Generator[tuple[BatchRequest, TokenChunk]]) -> Generator[tuple[int, TokenChunk]]:
    with closing(chunks):
        for request, chunk in chunks:
            yield request.number, chunk


class LLM(LLMBase):
    """A target model and optionally a draft model, loaded and ready to decode token ids.

    Decodes one request at a time, or up to `max_num_seqs` concurrently. With a `world` this object is rank 0, and the
    other ranks run `serve_rank` with the same arguments. Raises UserError if a model cannot be loaded or the pair does
    not fit together.
    """

    def __init__(
        self,
        target: str | Path,
        draft: str | Path | None = None,
        config: EngineConfig | None = None,
        *,
        world: World | None = None,
        **options: Unpack[LoadOptions],
    ) -> None:
        config = config if config is not None else EngineConfig(mode="serial" if draft is not None else "ar")
        with report_startup_error(world):
            models = ModelPair.check(target, draft, config, world, options)
        began = time.perf_counter()
        roles = build_roles(models, config, world, options.get("progress"), _drafter_elsewhere(options))
        writer = None if models.cache is None else models.cache.writer
        super().__init__(roles, time.perf_counter() - began, writer, models.cancel_check)


def _drafter_elsewhere(options: LoadOptions) -> MakeRemoteDrafter | None:
    """Factory of the remote drafter; None without a draft worker."""
    worker = options.get("draft_worker")
    if worker is None:
        return None
    from swiftspec.builder.remote_roles import build_remote_drafter  # gRPC takes a while to import

    return partial(build_remote_drafter, worker, options.get("note") or (lambda line: None))


def serve_rank(
    world: World, target: str | Path, draft: str | Path | None, config: EngineConfig, **options: Unpack[LoadOptions]
) -> None:
    """Runs any rank except 0 until rank 0 closes its `LLM`. Raises RankLost if rank 0 or a group leader disappears."""
    with report_startup_error(world):
        models = ModelPair.check(target, draft, config, world, options)
    rank = EngineRank(world, config, models, options.get("progress"))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles interrupts and ends the other ranks
    try:
        if world.supervisor is not None:
            world.supervisor.on_ready()
        rank.run(traced=models.trace is not None)
        if models.cache is not None:
            models.cache.writer.resume()
            models.cache.writer.close()
    finally:
        signal.signal(signal.SIGINT, before)
