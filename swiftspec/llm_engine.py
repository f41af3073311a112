"""`LLMEngine`: builds the roles of a model pair and decodes token ids. `swiftspec.LLM` is text in, text out on top of
it."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Unpack

import torch

from swiftspec.backends.cpu.packed_weight_cache import BackgroundWriter
from swiftspec.batching.batch_request import BatchRequest
from swiftspec.builder.load_options import LoadOptions
from swiftspec.builder.locked_engine import LockedEngine
from swiftspec.builder.models import Models
from swiftspec.builder.plan import Plan
from swiftspec.builder.ranks import run_until_shutdown, start_engine_rank
from swiftspec.builder.roles import ConnectDraft, Roles, build_roles
from swiftspec.builder.rules import Choices
from swiftspec.config import EngineConfig
from swiftspec.distributed.launch.config_check import report_startup_error
from swiftspec.distributed.launch.world import World
from swiftspec.distributed.remote.failover import Outage
from swiftspec.engine import Completion, Stats, TokenChunk
from swiftspec.extras import require_extra
from swiftspec.model.checkpoint_files import Progress
from swiftspec.observe.draft_monitor import DraftMonitor
from swiftspec.observe.recorder import TraceListener
from swiftspec.params import SamplingParams
from swiftspec.runtime.cancellation import CancelCheck

CPU = torch.device("cpu")


class TokenEngine:
    """Decodes token ids with roles that are already built: the decoding interface of `LLMEngine`.

    The roles run local models, lead the ranks of a job, or call workers. Decodes one request at a time, or up to
    `max_num_seqs` concurrently.
    """

    def __init__(
        self,
        roles: Roles,
        load_time: float = 0.0,
        writer: BackgroundWriter | None = None,
        pause: CancelCheck | None = None,
        note: Callable[[str], object] = lambda line: None,
    ) -> None:
        """`load_time`: seconds that loading took.
        `writer`: background thread that writes packed weights to the disk cache between requests; None without a disk
        cache.
        `pause`: cancellation check that the runners of the roles call before each prefill chunk.
        `note`: receives a line if hardly any token of the draft is accepted.
        """
        self.roles, self.load_time, self.writer = roles, load_time, writer
        self.config = roles.config
        monitor, models = DraftMonitor(note), roles.models
        self.device = CPU if models is None else models.options.device
        self.engine = LockedEngine(
            roles.decoding,
            roles.limits,
            background=writer,
            cancel_check=pause,
            on_finished=lambda stats: monitor.add_rounds(stats.verified),
            device=self.device,
            on_device_error=lambda error: None if models is None else models.record_device_error(error, roles.config),
        )

    @property
    def stats(self) -> Stats:
        """Statistics of the latest request, updated while it runs."""
        return self.engine.stats

    @property
    def outages(self) -> Sequence[Outage]:
        """Intervals of the latest request during which a draft in another process was unavailable."""
        return self.roles.outages

    @property
    def max_model_len(self) -> int:
        """Maximum number of prompt and output tokens of a request."""
        return self.roles.limits.max_model_len

    @property
    def max_num_seqs(self) -> int:
        """Maximum number of concurrently decoded requests."""
        return self.config.num_sequences

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary that target and draft share; token ids are below it."""
        return self.roles.limits.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-text tokens of the target, which end an output unless `ignore_eos` is set."""
        return self.roles.limits.eos_token_ids

    def generate(self, prompt: Sequence[int], sampling: SamplingParams | None = None) -> Completion:
        """Decodes one request to its end and returns the completion.

        Raises UserError if the request cannot be served, for example because the prompt is empty or exceeds the
        context.
        """
        return self.engine.generate(prompt, sampling)

    def stream(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Generator[TokenChunk]:
        """Streams one request: yields the verified tokens of each round. Closing the iterator ends the request.

        The first step of the iterator prefills the prompt. It calls `cancelled` before each prefill chunk; if that
        returns True, the stream ends without yielding anything.
        """
        return self.engine.stream(prompt, sampling, cancelled)

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Decodes several prompts, at most `max_num_seqs` concurrently, and returns completions in the order of
        prompts.

        `sampling` is one set of parameters for all prompts or one per prompt. The output of a prompt depends only on
        that prompt and its parameters, not on the other prompts. A request with non-finite logits ends with finish
        reason "error" without affecting the others. Raises UserError before any computation if a request cannot be
        served.
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

        `cancelled(index)` is called between rounds and before each prefill chunk; a request for which it returns True
        ends with finish reason "abort".
        """
        _, chunks = self.engine.batch(prompts, sampling, cancelled)
        return _numbered(chunks)

    def listen(self, listener: TraceListener | None) -> None:
        """Sets the listener that receives trace records, from the next request on. None removes the listener.

        The listener is called on the decoding thread with the records of several rounds. Functions in
        `observe.trace_format` convert records to trace lines in any thread; see
        docs/reference/trace.md.
        """
        self.roles.recorder.listener = listener

    def close(self, *, will_restart: bool = False) -> None:
        """Ends the running request, shuts the other ranks down, closes the trace and continues writing the disk cache
        of packed weights for at most one second.

        Later requests raise UserError. `will_restart`: only disconnects from the other ranks, because a supervisor is
        about to restart this rank and its followers.
        """
        self.engine.close()
        self.roles.close(will_restart=will_restart)
        if self.writer is not None:
            self.writer.close()


def _numbered(chunks: Generator[tuple[BatchRequest, TokenChunk]]) -> Generator[tuple[int, TokenChunk]]:
    with closing(chunks):
        for request, chunk in chunks:
            yield request.number, chunk


class LLMEngine(TokenEngine):
    """A target model and optionally a draft model, loaded and ready to decode token ids.

    Decodes one request at a time, or up to `max_num_seqs` concurrently. The mode defaults to serial with a draft and to
    ar without one. With a `world`, which describes the ranks of a job, this process is rank 0, and the
    other ranks run `serve_rank` with the same arguments. Raises UserError if a model cannot be loaded or the two models
    are not compatible.

    Without options, dtype, operators and numbers of threads are those of `swiftspec serve`. This includes the number of
    torch's CPU threads, which holds for the whole process and stays after `close`: 1 if the models run on the native
    operators. `set_torch_threads=False` leaves it unchanged. Notices, such as models that run on torch's own operators,
    go to `note`, by default to the logger "swiftspec" as warnings.

    `model`: folder of the target.
    `draft_model`: folder of the draft, address of its worker, "mtp" for the MTP layer in the target's checkpoint
    (`runtime/head_drafter.py`), or "suffix" for suffix lookup, which needs no draft model
    (`runtime/suffix_drafter.py`); None without a draft.
    `dtype`: torch dtype of both models.
    `threads`: CPU threads of one operator.
    """

    def __init__(
        self,
        target: str | Path,
        draft: str | Path | None = None,
        config: EngineConfig | Choices | None = None,
        *,
        world: World | None = None,
        **options: Unpack[LoadOptions],
    ) -> None:
        note = options.get("note") or _log
        options = {**options, "note": note}
        with report_startup_error(world):
            plan = Plan.create(target, draft, config, world, options)
        self.plan, config, models = plan, plan.engine, Models.of(plan)
        models.set_thread_counts(config, set_torch_threads=options.get("set_torch_threads", True))
        began = time.perf_counter()
        with models.device_errors_recorded(config):
            roles = build_roles(models, config, world, options.get("progress"), _drafter_elsewhere(options))
        writer = None if models.cache is None else models.cache.writer
        super().__init__(roles, time.perf_counter() - began, writer, models.cancel_check, note)
        worker = options.get("draft_worker")
        self.model = Path(target)
        self.dtype, self.threads = plan.dtype, plan.threads
        self.draft_model = worker.url if worker is not None else None if draft is None else str(draft)


def _drafter_elsewhere(options: LoadOptions) -> ConnectDraft | None:
    """Returns what connects to the draft worker, or None if the options name none. Raises UserError if
    gRPC is not installed."""
    worker = options.get("draft_worker")
    if worker is None:
        return None
    require_extra("network", worker.flag)
    from swiftspec.builder.remote_roles import build_remote_drafter  # gRPC takes a while to import

    return partial(build_remote_drafter, worker, options.get("note") or _log)


def _log(line: str) -> None:
    """Default `note`: logs a warning, which Python prints on stderr unless logging is configured."""
    logging.getLogger("swiftspec").warning(line)


def serve_rank(
    world: World,
    target: str | Path,
    draft: str | Path | None,
    config: EngineConfig | Choices,
    **options: Unpack[LoadOptions],
) -> None:
    """Loads and runs a rank other than rank 0 until rank 0 closes its `LLMEngine`. Takes the same arguments. Raises
    UserError if they are invalid or differ between ranks, and RankLost if rank 0 or the leader of this rank's group
    exits without shutting this rank down."""
    with report_startup_error(world):
        plan = Plan.create(target, draft, config, world, options)
    config, models = plan.engine, Models.of(plan)
    models.set_thread_counts(config, set_torch_threads=options.get("set_torch_threads", True))
    with models.device_errors_recorded(config):
        _run_rank(world, config, models, options.get("progress"))


def _run_rank(world: World, config: EngineConfig, models: Models, progress: Progress | None) -> None:
    rank = start_engine_rank(world, config, models, progress)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles interrupts and ends the other ranks
    try:
        if world.supervisor is not None:
            world.supervisor.on_ready()
        run_until_shutdown(rank, traced=models.options.loading.trace is not None)
        if models.cache is not None:
            models.cache.writer.resume()
            models.cache.writer.close()
    finally:
        signal.signal(signal.SIGINT, before)
