"""Session with a remote target: a worker runs the model and sends its tokenizer; no local target is needed."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from swiftspec.builder.load_options import LoadOptions
from swiftspec.errors import UserError
from swiftspec.settings.settings import Settings, resolve_choices
from swiftspec.startup.model_resolution import check_worker_settings, generation_defaults
from swiftspec.startup.reporter import StartupReporter
from swiftspec.startup.session import (
    Session,
    WeightProgress,
    check_draft_tokenizer,
    load_options,
    one_line_if_memory_ends,
    open_session,
)
from swiftspec.startup.worker_endpoints import draft_worker, target_worker
from swiftspec.text.codec import TOKENIZER_FILES, TextCodec, template_renderer
from swiftspec.text.hub import locate_model

if TYPE_CHECKING:
    from swiftspec.builder.remote_roles import RemoteTarget
    from swiftspec.distributed.launch.world import World


def open_local_or_remote(
    settings: Settings,
    phases: StartupReporter,
    world: World | None = None,
    *,
    warm_up: bool = False,
    render_chats: bool = True,
    on_located: Callable[[Path], None] = lambda target: None,
) -> Session:
    """Opens a session: with a remote target if --target-url is set, else with local models. Raises UserError if the
    settings are invalid or the models do not match.

    `warm_up`: see `open_session`; has no effect with a remote target.
    `render_chats`: see `open_session`.
    `on_located`: called with the path of the target, or of its tokenizer files, before models are loaded.
    """
    if settings.target_url is None:
        return open_session(settings, phases, world, warm_up=warm_up, render_chats=render_chats, on_located=on_located)
    check_worker_settings(settings, 1 if world is None else world.size)
    settings.make_plan(
        settings.draft_model is not None or settings.draft_url is not None
    )  # reports invalid settings before connecting
    phases.begin("target worker")
    from swiftspec.builder.remote_roles import RemoteTarget

    target, folder = RemoteTarget(target_worker(settings)), TemporaryDirectory(prefix="swiftspec-")
    try:
        for name, data in target.files().items():
            if name in TOKENIZER_FILES:  # a worker must not make this process write other files
                (Path(folder.name) / name).write_bytes(data)
        on_located(Path(folder.name))
        return _open(settings, phases, target, folder, render_chats=render_chats)
    except BaseException:
        folder.cleanup()
        raise


def _open(
    settings: Settings,
    phases: StartupReporter,
    target: RemoteTarget,
    folder: TemporaryDirectory[str],
    *,
    render_chats: bool,
) -> Session:
    path = Path(folder.name)
    defaults = generation_defaults(path)
    template = settings.chat_template_file
    renderer = template_renderer(path, template, start=render_chats and not settings.raw)
    phases.begin("tokenizers")
    codec = TextCodec(path, renderer, template)
    if codec.vocabulary.identity() != target.info.vocabulary:
        raise UserError(f"{target.connection.peer} sent a tokenizer that does not match its digest: restart the worker")
    draft = None if settings.draft_model is None or settings.mode == "ar" else locate_model(settings.draft_model)
    choices = settings.choices(draft is not None or settings.draft_url is not None)
    plan = resolve_choices(choices)
    plan.check_request(settings.sampling_params(defaults))
    phases.begin("libraries")
    importlib.import_module("torch")
    began = time.perf_counter()
    options, threads = _options(settings, phases, draft, codec)
    from swiftspec.builder.remote_roles import build_remote_roles
    from swiftspec.token_engine import TokenEngine

    with one_line_if_memory_ends():
        roles = build_remote_roles(target, draft, choices, path, **options)
    running = TokenEngine(roles, time.perf_counter() - began, note=phases.note)
    if running.roles.recorder.file is not None:
        running.roles.recorder.file.token_text = codec.trace_text
    phases.ready()
    drafts = settings.draft_model or settings.draft_url if plan.mode != "ar" else None
    about = target.info
    return Session(
        running,
        codec,
        model=about.name,
        draft_model=drafts,
        built_in=None,
        dtype=about.dtype,
        threads=threads,
        model_defaults=defaults,
        remote_target=target,
        tokenizer_folder=folder,
        warn=phases.warn,
    )


def _options(
    settings: Settings, phases: StartupReporter, draft: Path | None, codec: TextCodec
) -> tuple[LoadOptions, int]:
    """Returns the load options, including those of a local draft, and the number of threads of one operator."""
    trace = None if settings.trace is None else Path(settings.trace)
    if draft is None:
        worker = draft_worker(settings)
        return {"draft_worker": worker, "max_model_len": settings.max_model_len, "note": phases.note, "trace": trace}, 1
    masked = check_draft_tokenizer(codec, draft, phases)
    phases.begin("draft weights")
    from swiftspec.builder.hardware import thread_count

    options = load_options(settings)
    options["progress"] = WeightProgress(phases, "draft weights")
    options["note"] = phases.note
    options["masked_tokens"] = masked
    return options, thread_count(settings.threads, 1)
