"""The pair of models that one process serves: found, checked, loaded, and asked one prompt at a time."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from swiftspec.errors import UserError
from swiftspec.params import SamplingParams
from swiftspec.serve.hardware import (
    available_cpus,
    packed_cache_folder,
    resolve_device,
    resolve_dtype,
    set_thread_counts,
)
from swiftspec.serve.model_resolution import ResolvedModels, generation_defaults, requested_emulation
from swiftspec.serve.rank_plan import acceptance_advice
from swiftspec.serve.settings.settings import Settings
from swiftspec.serve.stdio import warn
from swiftspec.serve.terminal import StartupProgress
from swiftspec.serve.text.codec import ChatMessage, TextCodec, check_same_vocabulary, may_have_template
from swiftspec.serve.text.stream import TextStream
from swiftspec.serve.text.template import TemplateRenderer
from swiftspec.serve.worker_endpoints import draft_worker

if TYPE_CHECKING:
    from swiftspec.builder.load_options import LoadOptions
    from swiftspec.distributed.launch.world import World
    from swiftspec.engine import TokenChunk
    from swiftspec.llm import LLMBase


@dataclass(frozen=True, slots=True)
class Session:
    """A loaded pair. `embedded`: it is the one that comes with SwiftSpec."""

    llm: LLMBase
    codec: TextCodec
    model: str
    draft_model: str | None
    uses_demo_models: bool
    dtype: str
    threads: int
    model_defaults: Mapping[str, Any]  # sampling values of the target's generation_config.json
    packed_cache: str | None = None  # where the user wants packed weights to be kept
    tokenizer_folder: TemporaryDirectory[str] | None = None  # the tokenizer of a target elsewhere
    wrap_chunks: Callable[[Iterator[TokenChunk]], Iterator[TokenChunk]] = lambda chunks: chunks  # looks at each answer

    def encode(self, text: str, settings: Settings) -> list[int]:
        """One prompt alone: as it stands with --raw, else as the only turn of a chat."""
        if settings.raw:
            return self.codec.encode(text, self.llm.max_model_len)
        return self.encode_chat([{"role": "user", "content": text}])

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """A conversation through the chat template. Raises TooLong on one that cannot fit the context."""
        return self.codec.encode_chat(messages, self.llm.max_model_len)

    def sampling_params(self, settings: Settings) -> SamplingParams:
        """How an answer is sampled. A negative prompt becomes tokens as a prompt alone does."""
        if settings.guidance_scale == 1:
            return settings.sampling_params(self.model_defaults)
        return settings.sampling_params(self.model_defaults, self.encode(settings.negative_prompt or "", settings))

    def answer(
        self,
        prompt: Sequence[int],
        settings: Settings,
        wrap: Callable[[Iterator[TokenChunk]], Iterator[TokenChunk]] = lambda chunks: chunks,
        **overrides: Any,
    ) -> TextStream:
        """The stream of one answer; its cost is in `llm.stats`. `watch` wraps the engine's chunks and may end them.
        `other`: sampling values that are not as the settings have them. Raises UserError on a prompt that is empty or
        does not fit."""
        sampling = replace(self.sampling_params(settings), **overrides)
        chunks = wrap(self.wrap_chunks(self.llm.stream(prompt, sampling)))
        return TextStream(chunks, self.codec, sampling.stop, prompt[-16:] if settings.raw else ())

    def close(self, *, will_restart: bool = False) -> None:
        """Sends the other ranks home, or see `LLM.close`, and ends what was started for this session. Says so if the
        trace is not whole."""
        try:
            self.llm.close(will_restart=will_restart)
        finally:
            self.codec.close()
            if self.tokenizer_folder is not None:
                self.tokenizer_folder.cleanup()
        writer = self.llm.writer
        if writer is not None and writer.error is not None and self.packed_cache is not None:
            warn(f"--packed-cache {self.packed_cache} is not complete, and the next start packs again: {writer.error}")
        trace = self.llm.roles.recorder.file
        if trace is not None and trace.error is not None:
            warn(f"--trace {trace.path} is not whole: {trace.error}")


def open_session(
    settings: Settings,
    phases: StartupProgress,
    world: World | None = None,
    *,
    warm_up: bool = False,
    render_chats: bool = True,
    on_resolved: Callable[[ResolvedModels], None] = lambda found: None,
) -> Session:
    """Finds, checks and loads the models that the settings name, and tells once they are found. `renders`: chats are
    written here, which in a server the front end does. Raises UserError on whatever does not fit."""
    found = ResolvedModels.resolve(settings, 1 if world is None else world.size, phases)
    on_resolved(found)
    defaults = generation_defaults(found.target)
    sampling = settings.sampling_params(defaults)  # nonsense shows before the weights are read
    found.plan.check_request(sampling)
    renderer = TemplateRenderer(found.target)
    if render_chats and not settings.raw and may_have_template(found.target):
        renderer.start()  # its imports take as long as ours
    phases.begin("libraries")
    importlib.import_module("torch")  # most of a small pair's start
    phases.begin("tokenizers")
    codec = TextCodec(found.target, renderer)
    if found.draft is not None:
        check_same_vocabulary(codec, TextCodec(found.draft))

    if world is not None and not world.spin:
        phases.warn(f"{world.local_size} ranks share this machine's cores and will wait for each other: start fewer")
    for note in (settings.guidance_note(), acceptance_advice(found.plan, sampling)):
        if note is not None:
            phases.warn(note)
    cpus = len(available_cpus())
    if (settings.threads or 0) > cpus:
        phases.warn(f"--threads {settings.threads} on {cpus} CPUs: threads wait for each other, take {cpus} at most")
    for line in settings.ignored_settings(found.plan.mode):
        phases.note(line)
    if settings.share_gpus and resolve_device(settings.device) == "cpu":
        phases.note("--share-gpus does nothing: the models run on the CPU")
    phases.begin("target weights")
    from swiftspec.llm import LLM

    options, dtype, threads = load_options(settings, found.target, world)
    options |= {"vocab_size": codec.size, "progress": WeightProgress(phases), "note": phases.note}
    if (worker := options.get("draft_worker")) is not None:
        options["draft_worker"] = replace(worker, tokenizer=codec.digest)
    try:
        llm = LLM(found.target, found.draft, found.plan, world=world, **options)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        raise UserError("not enough memory for these models: take a smaller --max-model-len, or --dtype") from None
    if llm.roles.recorder.file is not None:
        llm.roles.recorder.file.token_text = lambda token: codec.token_text([token])
    if warm_up:
        phases.begin("warm-up")
        llm.generate([0], SamplingParams(max_tokens=2, ignore_eos=True))
    phases.ready()
    embedded = settings.model is None
    return Session(
        llm, codec, found.model, found.draft_model, embedded, dtype, threads, defaults, settings.packed_cache
    )


def run_follower_rank(settings: Settings, world: World) -> None:
    """What every rank but 0 does, until rank 0 leaves. Raises UserError as that would, and RankLost."""
    from swiftspec import llm
    from swiftspec.distributed.launch.config_check import report_startup_error

    with report_startup_error(world):
        found = ResolvedModels.resolve(settings, world.size, StartupProgress(quiet=True))
        options, _, _ = load_options(settings, found.target, world)
    llm.serve_rank(world, found.target, found.draft, found.plan, **options)


def load_options(settings: Settings, target: Path, world: World | None) -> tuple[LoadOptions, str, int]:
    """How to load the models; dtype and threads by name and number, for whoever tells the user."""
    import torch

    device = resolve_device(settings.device)
    dtype = resolve_dtype(settings, target, device)
    threads = set_thread_counts(settings, target, dtype, device, 1 if world is None else world.local_size)
    options: LoadOptions = {
        "dtype": getattr(torch, dtype),
        "device": device,
        "max_model_len": settings.max_model_len,
        "prefix_cache_memory": settings.prefix_cache_memory,
        "share_device": settings.share_gpus,
        "ops": settings.ops,
        "activations": settings.activations,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "head": settings.head,
        "emulate": requested_emulation(settings),
        "trace": None if settings.trace is None else Path(settings.trace),
        "packed_cache": packed_cache_folder(settings),
        "draft_worker": draft_worker(settings),
    }
    return options, dtype, threads


class WeightProgress:
    """The loader tells of bytes; whose they are follows from the order, in which each begins with none."""

    def __init__(self, phases: StartupProgress, *names: str) -> None:
        """`names`: of the phases, in that order; those of a pair if left out."""
        self._phases, self._names = phases, names or ("target weights", "draft weights")
        self._models, self._began = 0, 0.0

    def __call__(self, what: str, done: int, count: int) -> None:
        if done == 0:
            self._models, self._began = self._models + 1, time.monotonic()
        rate = done / max(time.monotonic() - self._began, 1e-3)
        step = f"{done / 1e9:.1f} of {count / 1e9:.1f} GB, {rate / 1e9:.1f} GB/s"
        self._phases.begin(self._names[min(self._models, len(self._names)) - 1], step)
