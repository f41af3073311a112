"""The table of settings: the front end's own are declared here, the engine's at the fields of params.py and config.py.

Flags, environment variables, YAML keys, --help and docs/reference/flags.md come from it, so a new setting is one entry.
Importing this must stay cheap (no torch, no transformers): `--help` goes through here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

from swiftspec.config import (
    DRAFT,
    LOOKAHEAD,
    MODES,
    PARTICLES,
    POPULATION,
    SPECULATION,
    TREE,
    EngineConfig,
    PopulationConfig,
)
from swiftspec.params import SAMPLING, STOPPING, SamplingParams
from swiftspec.settings_schema import DataclassInstance, Setting, declared_settings, setting

MODELS, SERVER, NETWORK = "models", "server", "workers: models on other machines or devices"
GROUPS = (MODELS, SERVER, NETWORK, SPECULATION, PARTICLES, SAMPLING, STOPPING)  # as they follow each other in --help
RENAMED_SETTINGS = {"kept_memory": "prefix_cache_memory"}  # old name: new name
UNSUPPORTED_PARTS = {  # what a mode does otherwise: a setting that shapes it is refused
    "ar": (POPULATION,), "serial": (POPULATION,), "async": (POPULATION,), "smc": (TREE, LOOKAHEAD),
}  # fmt: skip
IGNORED_PARTS = {
    "ar": (DRAFT, TREE, LOOKAHEAD),
    "serial": (LOOKAHEAD,),
    "async": (),
    "smc": (),
}  # and just goes without: a word
MAX_THREADS = 8  # rounds are short: more threads wait for each other longer than they compute


@dataclass
class CommandSettings:
    """What only the front end knows: the models, how they run, and what it works out itself before it makes a config.

    Some of the latter bear the name of a config's field that they fill in `Settings.make_plan`: the mode and the split
    may be left open here, and --self-switch is on unless rounds must not follow the clock.
    """

    model: str | None = setting(
        None, "The target model: a Hugging Face directory or hub id, safetensors.", MODELS, "PATH|HUB_ID",
        "the embedded code model", profile=True,
    )  # fmt: skip
    draft_model: str | None = setting(
        None, "The draft model: same tokenizer, much smaller.", MODELS, "PATH|HUB_ID",
        "the embedded one with the embedded target", profile=True, applies_to=DRAFT,
    )  # fmt: skip
    revision: str | None = setting(
        None, "Branch, tag or commit of --model when that is a hub id.", MODELS, "NAME", "main"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = setting(
        "auto", "Type of activations and dense weights.", MODELS, profile=True,
        default_text="auto: bfloat16 for 16-bit weights where the CPU has it, else the checkpoint's",
    )  # fmt: skip
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "Where the models run.", MODELS, profile=True,
        default_text="auto: cuda where PyTorch finds an NVIDIA GPU, else cpu",
    )  # fmt: skip
    share_gpus: bool = setting(False, "Let several ranks run on one GPU.", MODELS)
    max_model_len: int | None = setting(
        None, "Longest context in tokens, prompt and answer together.", MODELS, "N", "what the target was made for",
        profile=True,
    )  # fmt: skip
    prefix_cache_memory: int = setting(
        1024, "Memory for the keys and values of earlier texts, of both models and all ranks: a request reads only what"
        " is new to it. 0: nothing is kept.", MODELS, "MIB", ge=0, le=2**30,
    )  # fmt: skip
    threads: int | None = setting(
        None, "CPU threads inside one operation.", MODELS, "N",
        f"the rank's share of the physical cores, at most {MAX_THREADS}", ge=1, le=1024, profile=True,
    )  # fmt: skip
    ops: Literal["auto", "reference", "unfused", "cuda"] = setting(
        "auto", "Operators: plain torch; its libraries, int4 as int4; or the CUDA kernels.", MODELS,
        default_text="auto: the fastest that fit",
    )  # fmt: skip
    activations: Literal["auto", "int8", "native"] = setting(
        "auto", "How rows meet int4 weights on a CPU: rounded to int8, with exact integer sums, or in --dtype.", MODELS,
        default_text="auto: int8 under bfloat16, else native",
    )  # fmt: skip
    kv_cache_dtype: Literal["auto", "fp8"] = setting(
        "auto", "Type of stored keys and values. fp8: float8 e4m3, half the memory; on a GPU, or with --ops reference.",
        MODELS, default_text="auto: as --dtype",
    )  # fmt: skip
    head: Literal["auto", "int8", "int4", "native"] = setting(
        "auto", "Round a dense vocabulary projection at load; int8 on a CPU only.", MODELS,
        default_text="auto: the draft's: int8 where activations are, int4 on the CUDA operators",
    )  # fmt: skip
    emulate: str | None = setting(
        None, "Take at least these step times, as a large pair would: target=10.48ms,draft=3.25ms; names of the"
        " paper's Table 1 (target=llama3-70b,draft=llama3-3b); or a .json file by TP size and rows.", MODELS, "SPEC",
        "off", profile=True,
    )  # fmt: skip
    trace: str | None = setting(
        None, "Record every round of both lanes here; read it with `python -m swiftspec.profile trace`.", MODELS,
        "FILE.jsonl", "off",
    )  # fmt: skip
    packed_cache: str | None = setting(
        None, "Where a CPU's packed weights are kept for the next start, which maps them.", MODELS, "DIR|off",
        "the user's cache folder", profile=True,
    )  # fmt: skip
    raw: bool = setting(False, "Continue the prompt as it stands: no chat template.", MODELS)

    port: int | None = setting(
        None, "Serve over HTTP on this port: OpenAI's API and Anthropic's. 0: any free one.", SERVER, "N", "off",
        ge=0, le=65535,
    )  # fmt: skip
    host: str = setting("127.0.0.1", "The address to listen on. 0.0.0.0: all; take an API key then.", SERVER, "ADDRESS")
    served_model_name: str | None = setting(
        None, "What clients call the model.", SERVER, "NAME", "as --model has it, else swiftspec-demo"
    )
    api_key: tuple[str, ...] = setting(
        (), "Only clients with this key are served; several may be given. Others on this machine can read it off the"
        " command line: rather set the environment variable.", SERVER, "KEY", "none",
    )  # fmt: skip
    max_queue: int = setting(8, "Requests that may wait; more are refused (429).", SERVER, "N", ge=0, le=10_000)
    queue_timeout: float = setting(
        30.0, "Longest wait in the queue before a request is refused (429).", SERVER, "SECONDS", ge=0.1, le=86_400
    )
    request_timeout: float | None = setting(
        None, "Longest time of a request once it is decoded.", SERVER, "SECONDS", "none", ge=0.1, le=86_400
    )
    drain_timeout: float = setting(
        20.0, "After Ctrl-C or SIGTERM the request under way may take so long to end; a second one ends at once.",
        SERVER, "SECONDS", ge=0, le=86_400,
    )  # fmt: skip
    otlp_endpoint: str | None = setting(
        None, "Send a span for each request, and for each exchange with a worker, to this OpenTelemetry collector, such"
        " as http://localhost:4318.", SERVER, "URL", "off",
    )  # fmt: skip

    draft_url: str | None = setting(
        None, "The draft runs at this worker (`swiftspec worker draft`). While that is away the target decodes alone.",
        NETWORK, "HOST:PORT", "off", applies_to=DRAFT,
    )  # fmt: skip
    target_url: str | None = setting(
        None, "The target runs at this worker (`swiftspec worker target`), and no model is needed here.", NETWORK,
        "HOST:PORT", "off",
    )  # fmt: skip
    remote_timeout: float = setting(
        20.0, "Longest wait for a target's worker: for a round so long, for a prompt ten times.", NETWORK, "SECONDS",
        ge=0.1, le=86_400,
    )  # fmt: skip
    listen: str | None = setting(
        None, "Where a worker listens. Open to other machines it needs --tls-cert, --tls-key and --token.", NETWORK,
        "HOST:PORT", "127.0.0.1:7070, a draft 7071",
    )  # fmt: skip
    max_sessions: int = setting(
        4, "Orchestrators that a worker serves at once, each with a cache; the one that rested longest makes room.",
        NETWORK, "N", ge=1, le=1024,
    )  # fmt: skip
    session_idle: float = setting(
        600.0, "A session that rests so long gives up its memory.", NETWORK, "SECONDS", ge=1, le=10_000_000
    )
    token: str | None = setting(
        None, "What a client of a worker must show; @FILE: it stands in that file. Others on this machine can read it"
        " off the command line: rather set the environment variable.", NETWORK, "TOKEN|@FILE", "none",
    )  # fmt: skip
    tls_cert: str | None = setting(None, "A worker's certificate, PEM.", NETWORK, "FILE", "none: no TLS")
    tls_key: str | None = setting(None, "Its private key, PEM.", NETWORK, "FILE", "none")
    tls_ca: str | None = setting(
        None, "Certificates that vouch for a worker, PEM. Other machines are reached over TLS in any case.", NETWORK,
        "FILE", "the system's",
    )  # fmt: skip

    mode: str | None = setting(
        None, "async: the draft group grows the tree while the target group verifies. serial: in turns, on one group."
        " ar: one token per forward, no draft. smc: weighted particles in place of verification, approximate.",
        SPECULATION, choices=MODES,
        default_text="without a draft ar; async on several ranks or with a worker; else serial",
    )  # fmt: skip
    plan: str = setting(
        "auto", "Fill what is open of mode, split and tree from a profile of this machine and pair: the one in"
        " ./profiles where there is one (auto), or this one.", SPECULATION, "auto|none|FILE.json",
    )  # fmt: skip
    target_tp: int | None = setting(
        None, "Ranks that share the target model.", SPECULATION, "X", "the ranks that the draft leaves", ge=1
    )
    draft_tp: int | None = setting(
        None, "Ranks that share the draft.", SPECULATION, "Y", "a quarter of the ranks, at least 1", ge=1
    )
    self_switch: bool = setting(
        True, "Decode plainly for a while where that is measured to be faster than the draft's help. With --verify"
        " reject only if given: its text follows the rounds.", SPECULATION, order=1, applies_to=TREE,
    )  # fmt: skip
    adapt: bool = setting(
        True, "While serving, let d and bs follow what is measured, where not given here.", SPECULATION, order=1,
        applies_to=TREE,
    )  # fmt: skip
    negative_prompt: str | None = setting(
        None, "What to guide away from; it stands in for the whole prompt.", SAMPLING, "TEXT", "an empty one", order=1
    )


@dataclass(frozen=True, slots=True)
class Flag:
    """A setting as a person gives it."""

    name: str
    setting: Setting
    value_type: Any  # the type of its value
    default: Any
    default_text: str  # the default in words
    config: type[DataclassInstance] | None  # the engine's config whose field it fills as it is; None: the front end's

    @property
    def group(self) -> str:
        return self.setting.group

    @property
    def metavar(self) -> str:
        """The word for its value: its choices, where nothing else is said."""
        return self.setting.metavar or "|".join(self.choices)

    @property
    def choices(self) -> list[str]:
        """The words that it can be; empty where it can be anything."""
        return list(_literal_choices(self.value_type))


@dataclass(frozen=True, slots=True)
class SettingsTable:
    """Where settings are declared, and the flags that come of it, in the order of --help."""

    command: type[CommandSettings] = CommandSettings
    engine: type[EngineConfig] = EngineConfig
    population: type[PopulationConfig] = PopulationConfig
    sampling: type[SamplingParams] = SamplingParams
    flags: dict[str, Flag] = field(init=False)

    def __post_init__(self) -> None:
        found = list(_declared_flags(self.command, None))
        for config in (self.engine, self.population, self.sampling):
            found += _declared_flags(config, config)
        found.sort(key=lambda flag: (GROUPS.index(flag.group), flag.setting.order))
        object.__setattr__(self, "flags", {flag.name: flag for flag in found})


def _declared_flags(source: type[DataclassInstance], config: type[DataclassInstance] | None) -> Iterator[Flag]:
    """The fields of a dataclass that have a help text, as flags."""
    hints = get_type_hints(source)
    for item, declaration in declared_settings(source):
        if declaration.help is None:
            continue
        default: Any = item.default if item.default_factory is MISSING else item.default_factory()
        shown = declaration.default_text or _default_text(default)
        if declaration.from_model is not None:
            shown, default = f"the model's own, else {declaration.default_text or f'{default:g}'}", None
        elif isinstance(default, tuple):
            default = list(default)
        kind = _value_type(hints[item.name], declaration)
        if default is None:
            kind = kind | None
        yield Flag(item.name, declaration, kind, default, shown, config)


def _value_type(hint: Any, declaration: Setting) -> Any:
    """The type of a flag's value: one of its choices, or what the field holds. A flag given again makes a list."""
    if declaration.choices:
        return Literal[declaration.choices]
    return list[get_args(hint)[0]] if get_origin(hint) is tuple else hint


def _default_text(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return str(default)


def _literal_choices(kind: Any) -> Iterator[str]:
    """The words of a Literal, or of `Literal | None`."""
    for part in get_args(kind):
        if isinstance(part, str):
            yield part
        else:
            yield from _literal_choices(part)
