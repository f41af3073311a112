"""`LLMEngine`: builds the roles of a model pair and decodes token ids. `swiftspec.LLM` is text in, text out on top of
it."""

from __future__ import annotations

import logging
import signal
import time
from functools import partial
from pathlib import Path
from typing import Unpack

from swiftspec.builder.load_options import LoadOptions
from swiftspec.builder.models import Models
from swiftspec.builder.plan import Plan
from swiftspec.builder.ranks import run_until_shutdown, start_engine_rank
from swiftspec.builder.roles import ConnectDraft, build_roles
from swiftspec.builder.rules import Choices
from swiftspec.config import EngineConfig
from swiftspec.distributed.launch.config_check import report_startup_error
from swiftspec.distributed.launch.rendezvous import losses_at_the_end_ignored
from swiftspec.distributed.launch.world import World
from swiftspec.extras import require_extra
from swiftspec.model.checkpoint_files import Progress
from swiftspec.token_engine import TokenEngine


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
    UserError if they are invalid or differ between ranks, RankLost if rank 0 or the leader of this rank's group exits
    without shutting this rank down, and JobEnded if rank 0 has ended the job meanwhile."""
    with report_startup_error(world):
        plan = Plan.create(target, draft, config, world, options)
    config, models = plan.engine, Models.of(plan)
    models.set_thread_counts(config, set_torch_threads=options.get("set_torch_threads", True))
    with losses_at_the_end_ignored(world.rendezvous), models.device_errors_recorded(config):
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
