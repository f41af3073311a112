"""`LLM`: what a Python caller holds. It assembles the roles and decodes on them."""

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
    """Roles that decode requests, one or several (`at_once`) at a time, wherever their models are."""

    def __init__(
        self,
        roles: Roles,
        load_time: float = 0.0,
        writer: BackgroundWriter | None = None,
        pause: CancelCheck | None = None,
    ) -> None:
        """`load_time`: seconds until the models were there. `writer`: of what is kept for the next start. `pause`: what
        the runners of this process call while they read a prompt."""
        self.roles, self.load_time, self.writer = roles, load_time, writer
        self.config = roles.config
        self.engine = LockedEngine(roles.decoding, roles.limits, writer, pause)

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
    def max_num_seqs(self) -> int:
        """How many requests can be decoded side by side."""
        return self.config.num_sequences

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
    ) -> Generator[TokenChunk]:
        """Yields a chunk a round, as `Engine.stream` says; closing the iterator ends the request. While the prompt is
        read, which the first step does, `cancelled` is asked now and then: once it is true the stream just ends."""
        return self.engine.stream(prompt, sampling, cancelled)

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Decodes several prompts, as many at a time as the engine has room for (`at_once`); the others follow as
        places become free. `sampling`: one for all, or one for each.

        Returns their completions in the order of the prompts. A text depends on its prompt and its seed, not on the
        others. One whose logits are no numbers ends with the finish reason "error", and the others go on. Raises
        UserError, before anything is computed, where a request cannot be served.
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
        """As `generate_batch`; yields chunks as they come, each with the index of its prompt. `cancelled` is asked
        between rounds and while a prompt is read: a request that it names ends with the finish reason "abort"."""
        _, chunks = self.engine.batch(prompts, sampling, cancelled)
        return _numbered(chunks)

    def listen(self, listener: TraceListener | None) -> None:
        """From the next request on this hears, on the decoding thread and several rounds at a time, what a trace of it
        has; None: nobody does, and nothing is recorded. `observe.rounds.opened` makes a line of each, at any time and
        in any thread. See docs/reference/trace.md; arrays in a line are `observe.lines.plain`'s."""
        self.roles.recorder.listener = listener

    def close(self, *, will_restart: bool = False) -> None:
        """Sends the other ranks home and closes the trace; writes on at what is kept, for a second at most. Any later
        request raises UserError. `will_restart`: the ranks are to be started again, and so are not sent home."""
        self.engine.close()
        self.roles.close(will_restart=will_restart)
        if self.writer is not None:
            self.writer.close()


def _numbered(chunks: Generator[tuple[BatchRequest, TokenChunk]]) -> Generator[tuple[int, TokenChunk]]:
    with closing(chunks):
        for request, chunk in chunks:
            yield request.number, chunk


class LLM(LLMBase):
    """A target model and perhaps a draft, decoding requests one at a time, or several side by side (`at_once`).

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
    """What makes the drafter of a worker, where one is named."""
    worker = options.get("draft_worker")
    if worker is None:
        return None
    from swiftspec.builder.remote_roles import build_remote_drafter  # gRPC takes a while to import

    return partial(build_remote_drafter, worker, options.get("note") or (lambda line: None))


def serve_rank(
    world: World, target: str | Path, draft: str | Path | None, config: EngineConfig, **options: Unpack[LoadOptions]
) -> None:
    """The life of any rank but 0, until rank 0 leaves. Raises RankLost when that, or a group's leader, is just gone."""
    with report_startup_error(world):
        models = ModelPair.check(target, draft, config, world, options)
    rank = EngineRank(world, config, models, options.get("progress"))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 hears the user, and says when to leave
    try:
        if world.supervisor is not None:
            world.supervisor.on_ready()
        rank.run(traced=models.trace is not None)
        if models.cache is not None:
            models.cache.writer.resume()
            models.cache.writer.close()
    finally:
        signal.signal(signal.SIGINT, before)
