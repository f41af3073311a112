"""Session of a command: a loaded model pair with its tokenizer, which answers one prompt at a time."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from swiftspec.builder.rules import Choices
from swiftspec.config import EngineConfig
from swiftspec.drafter_kinds import MTP_HEAD
from swiftspec.errors import UserError
from swiftspec.file_io import expand_user
from swiftspec.model.checkpoint_files import read_config
from swiftspec.model.vocabulary import describe_masked
from swiftspec.params import SamplingParams
from swiftspec.settings.rank_plan import acceptance_advice, synthetic_advice
from swiftspec.settings.settings import Settings
from swiftspec.startup.built_in_models import BuiltInModels, chat_template_file
from swiftspec.startup.model_resolution import ResolvedModels, generation_defaults, requested_emulation
from swiftspec.startup.reporter import LOG, LogReporter, StartupReporter
from swiftspec.startup.worker_endpoints import draft_worker
from swiftspec.text.codec import ChatMessage, TextCodec, has_tokenizer, template_renderer
from swiftspec.text.harmony import HarmonyCodec, ShownText, harmony_markers
from swiftspec.text.stream import TextStream

if TYPE_CHECKING:
    from swiftspec.builder.load_options import LoadOptions
    from swiftspec.builder.remote_roles import RemoteTarget
    from swiftspec.distributed.launch.world import World
    from swiftspec.engine import TokenChunk
    from swiftspec.llm_engine import LLMEngine
    from swiftspec.token_engine import TokenEngine


@dataclass(frozen=True, slots=True)
class Session:
    """A loaded model pair and its tokenizer."""

    llm: TokenEngine
    codec: TextCodec
    model: str
    draft_model: str | None
    built_in: BuiltInModels | None  # None if the settings name a target
    dtype: str
    threads: int
    model_defaults: Mapping[str, Any]  # sampling values of the target's generation_config.json
    packed_cache: str | None = None  # if given
    remote_target: RemoteTarget | None = None
    tokenizer_folder: TemporaryDirectory[str] | None = None  # contains the tokenizer files of a remote target
    warn: Callable[[str], None] = LOG.warning  # receives the warnings of `close`
    wrap_chunks: Callable[[Iterator[TokenChunk]], Iterator[TokenChunk]] = lambda chunks: chunks  # wraps each answer

    def encode(self, text: str, settings: Settings, system: str | None = None) -> list[int]:
        """Encodes a single prompt: as raw text with --raw, otherwise as the only turn of a chat. `system`: the system
        prompt of the chat."""
        if settings.raw:
            return self.codec.encode(text, self.llm.max_model_len)
        messages = [] if system is None else [{"role": "system", "content": system}]
        return self.encode_chat([*messages, {"role": "user", "content": text}])

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Encodes a conversation with the chat template. Raises PromptTooLong if it cannot fit the context."""
        return self.codec.encode_chat(messages, self.llm.max_model_len)

    def sampling_params(self, settings: Settings) -> SamplingParams:
        """Returns the sampling parameters of an answer. With guidance, encodes the negative prompt like a single
        prompt."""
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
        """Starts decoding one answer and returns its text as a stream. The statistics are in `llm.stats`.

        `wrap`: applied to the iterator over the engine's chunks; may end it early. `overrides`: fields of
        SamplingParams that replace those of the settings. Raises UserError if the prompt is empty or does not fit the
        context.
        """
        sampling = replace(self.sampling_params(settings), **overrides)
        chunks = wrap(self.wrap_chunks(self.llm.stream(prompt, sampling)))
        if settings.raw:
            return TextStream(chunks, self.codec, sampling.stop, prompt[-16:])
        markers = harmony_markers(self.codec, self.codec.template_source()) if self.codec.has_template else {}
        if not markers:
            return TextStream(chunks, self.codec, sampling.stop)
        codec = HarmonyCodec(self.codec, markers)
        return TextStream(chunks, codec, sampling.stop, view=ShownText(codec.prompt_end(prompt)))

    def close(self, *, will_restart: bool = False) -> None:
        """Shuts down the other ranks (see `LLMEngine.close`) and the template process, and deletes temporary files.
        Warns if the trace or the packed weights are incomplete."""
        try:
            self.llm.close(will_restart=will_restart)
        finally:
            self.codec.close()
            if self.tokenizer_folder is not None:
                self.tokenizer_folder.cleanup()
        writer = self.llm.writer
        if writer is not None and writer.error is not None and self.packed_cache is not None:
            self.warn(f"packed_cache {self.packed_cache} is incomplete; the next start packs again: {writer.error}")
        trace = self.llm.roles.recorder.file
        if trace is not None and trace.error is not None:
            self.warn(f"--trace {trace.path} is incomplete: {trace.error}")


def open_session(
    settings: Settings,
    phases: StartupReporter,
    world: World | None = None,
    *,
    warm_up: bool = False,
    render_chats: bool = True,
    on_located: Callable[[Path], None] = lambda target: None,
) -> Session:
    """Locates, checks and loads the models that the settings name. Raises UserError if the settings are invalid or the
    models do not match.

    `warm_up`: decode two tokens before returning.
    `render_chats`: start the process that renders chat templates; in a server the front end does that.
    `on_located`: called with the target's path once the models are located, before they are loaded.
    """
    ranks, check = 1 if world is None else world.size, MemoryCheck(settings, world)
    with nullcontext() if world is None else _startup_errors_reported(world):
        resolved = ResolvedModels.resolve(settings, ranks, phases, check)
    on_located(resolved.target)
    defaults = generation_defaults(resolved.generation_config)
    sampling = settings.sampling_params(defaults)  # invalid settings are reported before the weights are loaded
    resolved.plan.check_request(sampling)
    codec, masked = _load_tokenizer(settings, resolved, phases, start_renderer=render_chats and not settings.raw)
    _print_advice(settings, resolved, sampling, world, phases)
    llm = _load_llm(settings, resolved, codec, masked, world, phases)
    if warm_up:
        phases.begin("warm-up")
        with one_line_if_memory_ends():
            _warm_up(llm, sampling, phases)
    phases.ready()
    return Session(
        llm,
        codec,
        model=resolved.model,
        draft_model=resolved.draft_model,
        built_in=resolved.built_in,
        dtype=str(llm.dtype).removeprefix("torch."),
        threads=llm.threads,
        model_defaults=defaults,
        packed_cache=settings.packed_cache,
        warn=phases.warn,
    )


@dataclass(frozen=True, slots=True)
class MemoryCheck:
    """A `ConfigCheck`: whether the models run on the GPU of this rank, and fit its memory. `side`: the model of a
    worker; None for a pair."""

    settings: Settings
    world: World | None
    side: Literal["target", "draft"] | None = None

    def __call__(self, target: Path, draft: Path | None, config: EngineConfig | Choices) -> None:
        from swiftspec.builder.hardware import resolve_device
        from swiftspec.builder.plan import Plan

        if resolve_device(self.settings.device).type != "cuda":
            return
        options = load_options(self.settings)
        options["gpu_trial"] = "off"  # runs once the weights are here
        if self.side is not None:
            options |= {"only": self.side, "sessions": self.settings.max_sessions}
            draft = target if self.side == "draft" else None
        Plan.create(target, draft, config, self.world, options)


def _startup_errors_reported(world: World) -> AbstractContextManager[None]:
    """Returns `report_startup_error(world)`, whose import takes a while."""
    from swiftspec.distributed.launch.config_check import report_startup_error

    return report_startup_error(world)


@contextmanager
def one_line_if_memory_ends() -> Iterator[None]:
    """Context manager that raises UserError instead of an error that memory ran out, also in a CUDA graph's capture."""
    from swiftspec.backends.cuda.devices import is_out_of_gpu_memory

    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_gpu_memory(error):
            raise
        raise UserError(
            "not enough memory for these models: use a smaller --max-model-len, or --dtype bfloat16"
        ) from None


def _warm_up(llm: LLMEngine, sampling: SamplingParams, phases: StartupReporter) -> None:
    """Decodes two tokens with the sampling parameters that requests have by default. Raises NonFiniteLogits if the
    target's logits are not finite; prints a warning if it must be the draft's, because it proposes nothing."""
    trees = llm.config.mode in ("serial", "async") and llm.config.verify_batch > 1 and llm.config.has_draft_model
    sampling = replace(sampling, max_tokens=2, ignore_eos=True)
    if trees:  # a given shape keeps the draft in use, whatever was measured
        sampling = replace(sampling, verify_batch=llm.config.verify_batch)
    stats = llm.generate([0], sampling).stats
    if trees and stats.drafted == 0 and stats.drafter_lost is None:
        phases.warn(f"{llm.draft_model} proposes no tokens, so its logits are not finite: check the draft's weights")


def _load_tokenizer(
    settings: Settings, resolved: ResolvedModels, phases: StartupReporter, *, start_renderer: bool
) -> tuple[TextCodec, tuple[int, ...]]:
    """Imports torch and loads the target's tokenizer. Returns it with the tokens that the draft must not propose.
    Raises UserError if the draft has other ordinary tokens."""
    template = chat_template_file(settings.model, settings.chat_template_file)
    renderer = template_renderer(resolved.target, template, start=start_renderer)
    phases.begin("libraries")
    importlib.import_module("torch")  # takes most of the startup time of small models
    phases.begin("tokenizers")
    codec = TextCodec(resolved.target, renderer, template)
    if resolved.draft is None or resolved.draft_model == MTP_HEAD:
        return codec, ()
    return codec, check_draft_tokenizer(codec, resolved.draft, phases)


def check_draft_tokenizer(codec: TextCodec, draft: Path, phases: StartupReporter) -> tuple[int, ...]:
    """Returns the tokens that the draft must not propose, and prints a note if there are special ones among them, or if
    the draft has no tokenizer. Raises UserError if the draft has other ordinary tokens than the target. `codec`: that
    of the target."""
    config = read_config(draft)
    if not has_tokenizer(draft):
        if config.spec.draft_head is None:
            phases.note(f"{draft} has no tokenizer: the draft must have been trained with the target's")
        return ()
    ours, theirs = codec.vocabulary, TextCodec(draft).vocabulary
    ours.check_draft(theirs)
    masked = ours.masked_tokens(theirs, config.spec.vocab_size)
    line = describe_masked(masked, ours.added, theirs.added)
    if line is not None:
        phases.note(line)
    return masked


def _print_advice(
    settings: Settings, resolved: ResolvedModels, sampling: SamplingParams, world: World | None, phases: StartupReporter
) -> None:
    """Prints warnings about slow settings, and notes on settings without effect."""
    from swiftspec.builder.hardware import resolve_device
    from swiftspec.distributed.launch.world import available_cores

    if world is not None and not world.spin:
        phases.warn(f"{world.local_size} ranks share this machine's cores and slow each other down: start fewer ranks")
    plan = resolved.plan
    for advice in (settings.guidance_note(), acceptance_advice(plan, sampling), synthetic_advice(plan)):
        if advice is not None:
            phases.warn(advice)
    cpus = len(available_cores())
    if (settings.threads or 0) > cpus:
        phases.warn(
            f"--threads {settings.threads} exceeds the {cpus} available CPUs, which is slow: use at most {cpus}"
        )
    for line in settings.ignored_settings(resolved.plan.mode, resolve_device(settings.device).type):
        phases.note(line)


def _load_llm(
    settings: Settings,
    resolved: ResolvedModels,
    codec: TextCodec,
    masked: tuple[int, ...],
    world: World | None,
    phases: StartupReporter,
) -> LLMEngine:
    """Loads the models. `masked`: tokens that the draft must not propose. Raises UserError if there is not enough
    memory."""
    phases.begin("target weights")
    from swiftspec.llm_engine import LLMEngine

    options = load_options(settings)
    options |= {"vocab_size": codec.size, "progress": WeightProgress(phases), "note": phases.note}
    options["masked_tokens"] = masked
    if (worker := options.get("draft_worker")) is not None:
        options["draft_worker"] = replace(worker, vocabulary=codec.vocabulary.identity())
    with one_line_if_memory_ends():
        llm = LLMEngine(resolved.target, resolved.draft, resolved.choices, world=world, **options)
    if llm.roles.recorder.file is not None:
        llm.roles.recorder.file.token_text = codec.trace_text
    return llm


def run_follower_rank(settings: Settings, world: World) -> None:
    """Runs a rank other than 0 until rank 0 shuts it down. Raises UserError if the settings or models are invalid, as
    rank 0 does, and RankLost if a rank fails."""
    from swiftspec import llm_engine

    with _startup_errors_reported(world):
        # also here, since on another machine this rank downloads weights, too
        check = MemoryCheck(settings, world)
        found = ResolvedModels.resolve(settings, world.size, LogReporter(), check)
    llm_engine.serve_rank(world, found.target, found.draft, found.choices, **load_options(settings))


def load_options(settings: Settings) -> LoadOptions:
    """Returns the options for loading the models. Raises UserError if there is no home directory for a path that begins
    with `~`."""
    return {
        "dtype": settings.dtype,
        "device": settings.device,
        "threads": settings.threads,
        "max_model_len": settings.max_model_len,
        "prefix_cache_memory": settings.prefix_cache_memory,
        "share_device": settings.share_gpus,
        "ops": settings.ops,
        "activations": settings.activations,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "head": settings.head,
        "emulate": requested_emulation(settings),
        "trace": None if settings.trace is None else Path(settings.trace),
        "packed_cache": _packed_cache_folder(settings),
        "gpu_trial": settings.gpu_trial,
        "trial_cache": _user_cache("gpu_trial"),
        "draft_worker": draft_worker(settings),
    }


def _packed_cache_folder(settings: Settings) -> Path | None:
    """Returns the directory below which packed weights are stored; None if they are not stored (`packed_cache="off"`,
    or no home directory)."""
    if settings.packed_cache is not None:
        return None if settings.packed_cache == "off" else expand_user(settings.packed_cache)
    return _user_cache("")


def _user_cache(name: str) -> Path | None:
    """Returns the folder `name` below that of SwiftSpec in the user's cache directory; None if there is no home
    directory."""
    try:
        return expand_user(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "swiftspec" / name
    except UserError:
        return None


class WeightProgress:
    """Progress callback of loading: shows bytes and rate of the weights, and the number of captured CUDA graphs. The
    weight loader does not pass the name of the model, so a call with `done` 0 begins the next one of `names`."""

    def __init__(self, phases: StartupReporter, *names: str) -> None:
        """`names`: titles of the phases in loading order; target weights and draft weights by default."""
        self._phases, self._names = phases, names or ("target weights", "draft weights")
        self._models, self._began = 0, 0.0

    def __call__(self, what: str, done: int, count: int) -> None:
        from swiftspec.runtime.graph_capture import CAPTURE_PHASE  # imports torch

        if what == CAPTURE_PHASE:
            self._phases.begin(what, f"{done} of {count}")
            return
        if done == 0:
            self._models, self._began = self._models + 1, time.monotonic()
        rate = done / max(time.monotonic() - self._began, 1e-3)
        step = f"{done / 1e9:.1f} of {count / 1e9:.1f} GB, {rate / 1e9:.1f} GB/s"
        self._phases.begin(self._names[min(self._models, len(self._names)) - 1], step)
