"""The pair of models that one process serves: found, checked, loaded, and asked one prompt at a time."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftspec.config import EngineConfig
from swiftspec.errors import UserError
from swiftspec.files import Fields, expanded, is_file, is_folder, read_object
from swiftspec.model.files import read_config
from swiftspec.params import SamplingParams
from swiftspec.serve.machine import cache_folder, cpus_here, device_of, dtype_of, use_threads
from swiftspec.serve.plan import mismatch
from swiftspec.serve.settings import Settings, UsageError, flag_name
from swiftspec.serve.stream import TextStream
from swiftspec.serve.streams import warn
from swiftspec.serve.template import Renderer
from swiftspec.serve.terminal import Phases
from swiftspec.serve.text import Message, TextCodec, check_pair, locate, may_have_template

if TYPE_CHECKING:
    from swiftspec.assemble.options import Options
    from swiftspec.distributed.world import World
    from swiftspec.engine import Chunk
    from swiftspec.llm import LLM
    from swiftspec.observe.emulate import Emulation

DEMO = Path(__file__).resolve().parent.parent / "demo"
FROM_MODEL = {  # names in generation_config.json and ours
    flag.setting.from_model: flag.name for flag in Settings.table.flags.values() if flag.setting.from_model is not None
}


@dataclass(frozen=True, slots=True)
class Session:
    """A loaded pair. `embedded`: it is the one that comes with SwiftSpec."""

    llm: LLM
    codec: TextCodec
    model: str
    draft_model: str | None
    embedded: bool
    dtype: str
    threads: int
    defaults: Mapping[str, Any]  # sampling values of the target's generation_config.json
    kept_in: str | None = None  # where the user wants packed weights to be kept

    def encode(self, text: str, settings: Settings) -> list[int]:
        """One prompt alone: as it stands with --raw, else as the only turn of a chat."""
        if settings.raw:
            return self.codec.encode(text, self.llm.max_model_len)
        return self.encode_chat([{"role": "user", "content": text}])

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """A conversation through the chat template. Raises TooLong on one that cannot fit the context."""
        return self.codec.encode_chat(messages, self.llm.max_model_len)

    def sampling(self, settings: Settings) -> SamplingParams:
        """How an answer is sampled. A negative prompt becomes tokens as a prompt alone does."""
        if settings.guidance_scale == 1:
            return settings.sampling(self.defaults)
        return settings.sampling(self.defaults, self.encode(settings.negative_prompt or "", settings))

    def answer(
        self,
        prompt: Sequence[int],
        settings: Settings,
        watch: Callable[[Iterator[Chunk]], Iterator[Chunk]] = lambda chunks: chunks,
    ) -> TextStream:
        """The stream of one answer; its cost is in `llm.stats`. `watch` wraps the engine's chunks and may end them.
        Raises UserError on a prompt that is empty or does not fit."""
        sampling = self.sampling(settings)
        chunks = watch(self.llm.stream(prompt, sampling))
        return TextStream(chunks, self.codec, sampling.stop, prompt[-16:] if settings.raw else ())

    def close(self) -> None:
        """Sends the other ranks home and ends what was started for this session. Says so if the trace is not whole."""
        try:
            self.llm.close()
        finally:
            self.codec.close()
        writer = self.llm.writer
        if writer is not None and writer.trouble is not None and self.kept_in is not None:
            warn(f"--packed-cache {self.kept_in} is not complete, and the next start packs again: {writer.trouble}")
        log = self.llm.roles.log
        if log is not None and log.lost is not None:
            warn(f"--trace {log.file} is not whole: {log.lost}")


@dataclass(frozen=True, slots=True)
class Found:
    """The pair that the settings name, and how it is to run. The draft's are None in mode ar."""

    model: str
    draft_model: str | None
    target: Path
    draft: Path | None
    plan: EngineConfig

    @staticmethod
    def of(settings: Settings, ranks: int, phases: Phases) -> Found:
        """Finds the models, here or on the hub. Raises UserError where there is none, or the plan makes no sense."""
        model, draft_model = _names(settings)
        if settings.revision is not None and is_folder(expanded(model)):
            raise UsageError(f"--revision {settings.revision} is of a hub id, and {model} is a directory: leave it out")
        plan = settings.make_plan(draft_model is not None, ranks)  # nonsense shows before anything is fetched
        _emulation(settings)
        if not all(is_folder(expanded(name)) for name in (model, draft_model) if name is not None):
            phases.begin("download")
        target = locate(model, settings.revision)
        draft = None if draft_model is None else locate(draft_model)
        for path in (target, draft):
            if path is not None:
                read_config(path)  # what is no model shows at once
        if settings.plan not in ("auto", "none"):
            _check_plan(settings, draft)
        if draft is not None and settings.mode != "ar":
            plan = planned(settings, target, draft, ranks, phases).make_plan(True, ranks)
        if plan.mode == "ar":
            draft_model, draft = None, None
        return Found(model, draft_model, target, draft, plan)


def open_session(
    settings: Settings,
    phases: Phases,
    world: World | None = None,
    *,
    warm_up: bool = False,
    tell: Callable[[Found], None] = lambda found: None,
) -> Session:
    """Finds, checks and loads the models that the settings name, and tells once they are found. Raises UserError on
    whatever does not fit."""
    found = Found.of(settings, 1 if world is None else world.size, phases)
    tell(found)
    defaults = generation_defaults(found.target)
    sampling = settings.sampling(defaults)  # nonsense shows before the weights are read
    found.plan.check_request(sampling)
    renderer = Renderer(found.target)
    if not settings.raw and may_have_template(found.target):
        renderer.start()  # its imports take as long as ours
    phases.begin("libraries")
    importlib.import_module("torch")  # most of a small pair's start
    phases.begin("tokenizers")
    codec = TextCodec(found.target, renderer)
    if found.draft is not None:
        check_pair(codec, TextCodec(found.draft))

    if world is not None and not world.spin:
        phases.warn(f"{world.local_size} ranks share this machine's cores and will wait for each other: start fewer")
    for note in (settings.note(), mismatch(found.plan, sampling)):
        if note is not None:
            phases.warn(note)
    cpus = len(cpus_here())
    if (settings.threads or 0) > cpus:
        phases.warn(f"--threads {settings.threads} on {cpus} CPUs: threads wait for each other, take {cpus} at most")
    for line in settings.idle(found.plan.mode):
        phases.note(line)
    if settings.share_gpus and device_of(settings.device) == "cpu":
        phases.note("--share-gpus does nothing: the models run on the CPU")
    phases.begin("target weights")
    from swiftspec.llm import LLM

    options, dtype, threads = load_options(settings, found.target, world)
    options |= {"vocab_size": codec.size, "progress": _Weights(phases)}
    try:
        llm = LLM(found.target, found.draft, found.plan, world=world, **options)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        raise UserError("not enough memory for these models: take a smaller --max-model-len, or --dtype") from None
    if warm_up:
        phases.begin("warm-up")
        llm.generate([0], SamplingParams(max_tokens=2, ignore_eos=True))
    phases.ready()
    embedded = settings.model is None
    return Session(
        llm, codec, found.model, found.draft_model, embedded, dtype, threads, defaults, settings.packed_cache
    )


def serve_rank(settings: Settings, world: World) -> None:
    """What every rank but 0 does, until rank 0 leaves. Raises UserError as that would, and RankLost."""
    from swiftspec import llm
    from swiftspec.distributed.facts import telling

    with telling(world):
        found = Found.of(settings, world.size, Phases(quiet=True))
        options, _, _ = load_options(settings, found.target, world)
    llm.serve_rank(world, found.target, found.draft, found.plan, **options)


def load_options(settings: Settings, target: Path, world: World | None) -> tuple[Options, str, int]:
    """How to load the models; dtype and threads by name and number, for whoever tells the user."""
    import torch

    device = device_of(settings.device)
    dtype = dtype_of(settings, target, device)
    threads = use_threads(settings, target, dtype, device, 1 if world is None else world.local_size)
    options: Options = {
        "dtype": getattr(torch, dtype),
        "device": device,
        "max_model_len": settings.max_model_len,
        "kept_memory": settings.kept_memory,
        "share_device": settings.share_gpus,
        "ops": settings.ops,
        "activations": settings.activations,
        "head": settings.head,
        "emulate": _emulation(settings),
        "trace": None if settings.trace is None else Path(settings.trace),
        "packed_cache": cache_folder(settings),
    }
    return options, dtype, threads


def planned(settings: Settings, target: Path, draft: Path, ranks: int, phases: Phases) -> Settings:
    """The settings with what is open of mode, split and tree filled in from a profile, and a word on which. Raises
    UserError where a profile is named and is damaged, or not of this machine and pair. One that only lies in ./profiles
    is passed over then, with a note."""
    folder, named = Path("profiles"), settings.plan not in ("auto", "none")
    if settings.plan == "none" or settings.mode == "smc" or not (named or any(folder.glob("*.json"))):
        return settings
    from swiftspec.profiles import store

    device = device_of(settings.device)
    dtype, emulate = dtype_of(settings, target, device), _emulation(settings)
    key = store.Key.of(device, ranks, target, draft, dtype, settings.ops, emulate)
    if named:
        file = Path(settings.plan)
        profile = store.load(file)
        reason = key.difference(profile["key"])
        if reason is not None:
            raise UserError(f"--plan {file} is refused: {reason}; measure here with `python -m swiftspec.profile`")
    else:
        profile, file, reasons = store.find(folder, key)
        for reason in reasons:
            phases.note(reason)
    fixed = {name: getattr(settings, name) for name in store.PLAN if name in settings.model_fields_set}
    run = None if profile is None else store.best(profile, fixed)
    if run is None and named:
        given = " with ".join(["", *(f"{flag_name(name)} {value}" for name, value in fixed.items())])
        raise UsageError(f"--plan {settings.plan} has no run{given} whose text is the target's: leave one of them out")
    if run is None:
        return settings
    open_ = {name: value for name, value in store.settings_of(run["plan"]).items() if name not in fixed}
    filled = settings.model_copy(update=open_)
    filled.model_fields_set.difference_update(open_)  # nobody insists on what was measured
    try:
        filled.make_plan(True, ranks)
    except UserError as error:  # the settings alone make one, so it is the profile that does not fit
        if named:
            raise UserError(f"--plan {file} is refused: {error}") from None
        phases.note(f"{file} is not used: {error}")
        return settings
    phases.note(f"plan: {store.title(run['plan'])} of {file}, measured at {store.speed(run):.0f} tok/s")
    return filled


def _check_plan(settings: Settings, draft: Path | None) -> None:
    """Raises UsageError where a named profile could fill nothing in."""
    why = None
    if draft is None:
        why = "fills in what shapes a draft, and there is no draft model: name one with --draft-model"
    elif settings.mode in ("ar", "smc"):
        why = f"fills in what shapes a draft tree, which mode {settings.mode} has not"
    if why is not None:
        raise UsageError(f"--plan {settings.plan} {why}; or leave it out")


class _Weights:
    """The loader tells of bytes; whose they are follows from the order, in which each begins with none."""

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        self._models, self._began = 0, 0.0

    def __call__(self, what: str, done: int, count: int) -> None:
        if done == 0:
            self._models, self._began = self._models + 1, time.monotonic()
        rate = done / max(time.monotonic() - self._began, 1e-3)
        step = f"{done / 1e9:.1f} of {count / 1e9:.1f} GB, {rate / 1e9:.1f} GB/s"
        self._phases.begin("target weights" if self._models == 1 else "draft weights", step)


def _names(settings: Settings) -> tuple[str, str | None]:
    """Target and draft as the settings name them; the embedded pair where they name no target."""
    if settings.model is not None:
        return settings.model, settings.draft_model
    target = DEMO / "target"
    if not (target / "config.json").is_file():
        raise UserError(f"the embedded models are missing ({target}): name yours with --model and --draft-model")
    return str(target), settings.draft_model or str(DEMO / "draft")


def _emulation(settings: Settings) -> Emulation | None:
    """The step times that are asked for. Raises UserError on nonsense, at whatever point it is first asked."""
    from swiftspec.profiles import emulation

    return None if settings.emulate is None else emulation.parse(settings.emulate)


def generation_defaults(path: Path) -> dict[str, Any]:
    """The sampling values that a checkpoint's generation_config.json sets. do_sample false means greedy."""
    file = path / "generation_config.json"
    if not is_file(file):
        return {}
    fields = Fields(read_object(file))
    try:
        given = {name: ours for name, ours in FROM_MODEL.items() if fields.data.get(name) is not None}
        whole = {name for name, ours in given.items() if Settings.table.flags[ours].kind in (int, int | None)}
        values: dict[str, Any] = {ours: fields.whole(name) for name, ours in given.items() if name in whole}
        values |= {given[name]: fields.number(name, least=-1e9, most=1e9) for name in given if name not in whole}
        if not fields.flag("do_sample", True):
            values["temperature"] = 0.0
        SamplingParams(**values)
    except UserError as error:
        raise UserError(f"{file} cannot be used: {error}") from None
    return values
