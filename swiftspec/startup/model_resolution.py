"""Model resolution: locates the models that the settings name and selects the plan, before the models are loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftspec.builder.rules import Choices
from swiftspec.config import EngineConfig
from swiftspec.drafter_kinds import DRAFT_WORDS, MTP_HEAD
from swiftspec.errors import UserError
from swiftspec.extras import require_extra
from swiftspec.file_io import Fields, expand_user, is_file, is_folder, read_object
from swiftspec.model.checkpoint_files import read_config
from swiftspec.params import SamplingParams
from swiftspec.settings.flags import SETTINGS, flag_name
from swiftspec.settings.settings import Settings, UsageError, check_usage, resolve_choices
from swiftspec.startup.built_in_models import BuiltInModels, built_in_models
from swiftspec.startup.reporter import DOWNLOAD, StartupReporter
from swiftspec.text.codec import TextCodec, has_tokenizer
from swiftspec.text.hub import locate_model, locate_small_files, needs_download

if TYPE_CHECKING:
    from swiftspec.observe.step_time_emulation import StepTimeEmulation
    from swiftspec.profiles.store import ProfileKey

GENERATION_CONFIG_NAMES = {  # name in generation_config.json: name of the setting
    flag.setting.from_model: flag.name for flag in SETTINGS.values() if flag.setting.from_model is not None
}


# Raises UserError if models cannot run; takes their folders, which have at least the configurations, and the
# configuration of the engine or the choices for it.
ConfigCheck = Callable[[Path, Path | None, EngineConfig | Choices], object]


@dataclass(frozen=True, slots=True)
class ResolvedModels:
    """The located models, and what the settings choose for the engine.

    `model`, `draft_model`: names as the user gave them; HOST:PORT for a draft that a worker runs.
    `target`, `draft`: directories or GGUF files; `draft` is None if a worker runs the draft, and with suffix lookup. It
    is "mtp" for the MTP layer in the checkpoint of the target.
    In mode ar `draft_model` and `draft` are None.
    `choices`: with the values of a profile. `plan`: the configuration that follows without reading the models.
    `built_in`: the models that run if the settings name none; None if they name a target.
    """

    model: str
    draft_model: str | None
    target: Path
    draft: Path | None
    choices: Choices
    plan: EngineConfig
    built_in: BuiltInModels | None = None

    @property
    def generation_config(self) -> Path:
        """Where `generation_defaults` finds the default sampling values."""
        return self.target if self.built_in is None else self.built_in.generation_config

    @staticmethod
    def resolve(
        settings: Settings, ranks: int, phases: StartupReporter, check_configs: ConfigCheck | None = None
    ) -> ResolvedModels:
        """Locates the models, downloads them from the hub if needed, and selects the plan for `ranks` ranks. Raises
        UserError if a model is missing or the plan is invalid. `check_configs`: called before weights are downloaded;
        raises UserError if the models cannot run."""
        check_worker_settings(settings, ranks)
        if settings.target_url is not None:
            check_usage({"target worker", "local command"})
        built_in = built_in_models(settings.model)
        model, draft_model = _model_names(settings, built_in)
        path_name = None if draft_model in DRAFT_WORDS else draft_model
        local = expand_user(model)
        if settings.revision is not None and (is_folder(local) or is_file(local)):
            check_usage({"revision", "model on disk"})
        drafts = draft_model is not None or settings.draft_url is not None
        choices = settings.choices(drafts, ranks)
        plan = resolve_choices(choices)  # reports invalid settings before a download
        requested_emulation(settings)
        announce = partial(phases.begin, DOWNLOAD)
        named = [(model, settings.revision), *([] if path_name is None else [(path_name, None)])]
        check_before_download(named, choices, check_configs)
        target = locate_model(model, settings.revision, announce)
        draft = None if path_name is None else locate_model(path_name, None, announce)
        for path in (target, draft):
            if path is not None:
                read_config(path)  # reports a directory without a model early
        if draft is None and settings.plan not in ("auto", "none"):
            settings.check_features(None, has_draft=False)
        if draft is not None and settings.mode != "ar":
            choices = apply_profile(settings, target, draft, choices, phases)
            plan = resolve_choices(choices)
        if draft_model == MTP_HEAD:
            draft = Path(MTP_HEAD)
        if plan.mode == "ar":
            draft_model, draft = None, None
        elif plan.draft_remote:
            draft_model = settings.draft_url
        return ResolvedModels(model, draft_model, target, draft, choices=choices, plan=plan, built_in=built_in)


def check_before_download(
    named: Sequence[tuple[str, str | None]], config: EngineConfig | Choices, check: ConfigCheck | None
) -> None:
    """Judges models before their weights are downloaded, by their small files, which it downloads: configuration,
    format of the weights, what `check` checks, and tokenizers. Raises UserError if they cannot run.
    `named`: names and revisions of the target, and of the draft if there is one."""
    if not any(needs_download(*each) for each in named):
        return
    small = [locate_small_files(*each) for each in named]
    if all(folder is None for folder in small):  # GGUF files
        return
    folders = [folder or locate_model(*each) for folder, each in zip(small, named, strict=True)]
    for folder in folders:
        read_config(folder)
    target, *drafts = folders
    if check is not None:
        check(target, drafts[0] if drafts else None, config)
    codec = TextCodec(target)
    for draft in drafts:
        if has_tokenizer(draft):
            codec.vocabulary.check_draft(TextCodec(draft).vocabulary)


def apply_profile(settings: Settings, target: Path, draft: Path, choices: Choices, phases: StartupReporter) -> Choices:
    """Returns the choices with mode, split and tree shape from a matching profile, and prints the profile's file.
    Returns them unchanged if no profile matches.

    Raises UserError if a profile given by --plan is damaged, or measured on another machine or pair. Such profiles in
    ./profiles are skipped with a note.
    """
    folder, named = Path("profiles"), settings.plan not in ("auto", "none")
    no_tree = settings.mode == "smc" or settings.max_num_seqs > 1
    if settings.plan == "none" or no_tree or not (named or any(folder.glob("*.json"))):
        return choices
    from swiftspec.profiles import store

    ranks = choices.ranks or 1
    key = profile_key(settings, target, draft, ranks)
    if named:
        file = Path(settings.plan)
        profile = store.load(file)
        reason = key.difference(profile["key"])
        if reason is not None:
            raise UserError(f"--plan {file} cannot be used: {reason}; measure again with `python -m swiftspec.profile`")
    else:
        profile, file, reasons = store.find(folder, key)
        for reason in reasons:
            phases.note(reason)
    given = settings.model_fields_set
    fixed = {name: getattr(settings, name) for name in store.PLAN_FIELDS if name in given}
    run = None if profile is None else store.best_run(profile, fixed)
    if run is None and named:
        flags = " with ".join(["", *(f"{flag_name(name)} {value}" for name, value in fixed.items())])
        raise UsageError(f"--plan {settings.plan} has no lossless run{flags}; remove one of these flags")
    if run is None:
        return choices
    filled = settings.choices(True, ranks, store.plan_settings(run["plan"]), str(file))
    try:
        resolve_choices(filled)
    except UserError as error:  # `resolve` has checked the settings alone, so the profile causes the error
        if named:
            raise UserError(f"--plan {file} cannot be used: {error}") from None
        phases.note(f"{file} is not used: {error}")
        return choices
    phases.note(f"plan: {store.plan_title(run['plan'])} of {file}, measured at {store.median_speed(run):.0f} tok/s")
    return filled


def profile_key(settings: Settings, target: Path, draft: Path, ranks: int) -> ProfileKey:
    """Returns the key of a profile of this pair on this machine. Raises UserError if the device is not available."""
    from swiftspec.builder.hardware import resolve_device, resolve_dtype
    from swiftspec.profiles import store

    device = resolve_device(settings.device)
    dtype = str(resolve_dtype(settings.dtype, read_config(target).dtype, settings.ops, device)).removeprefix("torch.")
    emulate = requested_emulation(settings)
    return store.ProfileKey.of(device.type, ranks, target, draft, dtype=dtype, ops=settings.ops, emulate=emulate)


def _model_names(settings: Settings, built_in: BuiltInModels | None) -> tuple[str, str | None]:
    """Returns the names of target and draft."""
    if built_in is None:
        assert settings.model is not None
        return settings.model, settings.draft_model
    draft = str(built_in.draft) if settings.draft_url is None else None
    return str(built_in.target), settings.draft_model or draft


def check_worker_settings(settings: Settings, ranks: int) -> None:
    """Raises UserError if --target-url or --draft-url contradicts another setting or the number of ranks, or gRPC is
    not installed."""
    url = "target_url" if settings.target_url is not None else "draft_url"
    if getattr(settings, url) is None:
        return
    settings.check_features(settings.mode, ranks=ranks)
    require_extra("network", flag_name(url))


def requested_emulation(settings: Settings) -> StepTimeEmulation | None:
    """Returns the step times that `emulate` requests; None if it is not set. Raises UserError if its value is
    invalid."""
    from swiftspec.profiles import emulation

    return None if settings.emulate is None else emulation.parse_emulation(settings.emulate)


def generation_defaults(path: Path) -> dict[str, Any]:
    """Returns the default sampling values of a model by setting name, from its generation_config.json. `do_sample:
    false` becomes temperature 0. Returns an empty dict if the file is missing; raises UserError if it is invalid."""
    file = path / "generation_config.json"
    if not is_file(file):
        return {}
    fields = Fields(read_object(file))
    try:
        given = {name: ours for name, ours in GENERATION_CONFIG_NAMES.items() if fields.data.get(name) is not None}
        whole = {name for name, ours in given.items() if SETTINGS[ours].value_type in (int, int | None)}
        values: dict[str, Any] = {ours: fields.integer(name) for name, ours in given.items() if name in whole}
        values |= {given[name]: fields.number(name, ge=-1e9, le=1e9) for name in given if name not in whole}
        if not fields.boolean("do_sample", True):
            values["temperature"] = 0.0
        SamplingParams(**values)
    except UserError as error:
        raise UserError(f"{file} cannot be used: {error}") from None
    return values
