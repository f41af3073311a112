"""The command line: one flag per setting, from the table of flags.py, and what belongs to a single run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, get_origin

from swiftspec import __version__
from swiftspec.serve.settings.config_sources import load_settings
from swiftspec.serve.settings.settings import Flag, Settings, UsageError, env_name, flag_name

DESCRIPTION = """\
Decode one request as fast as this machine allows: a small draft model guesses a tree of tokens, the target checks it,
and the text is exactly the target's. In a terminal it opens a chat; with --prompt, --prompt-file or text on standard
input it prints one answer and leaves. With no flag at all it runs the small code model that comes with it. With --port
it serves clients, and a page that shows the draft tree; `replay FILE` serves that page for a trace, without a model."""
USAGE = """python -m swiftspec.serve [flags]
       python -m swiftspec.serve replay FILE [--host H] [--port N]
       python -m swiftspec.serve worker draft|target [--model M] [--listen HOST:PORT] [flags]
       python -m swiftspec.serve generate --target-url HOST:PORT [--draft-url HOST:PORT] --prompt TEXT [flags]"""
PRECEDENCE = "Precedence: flag > environment variable > --config file > default."


@dataclass(frozen=True, slots=True)
class ParsedCommand:
    """A parsed command line: the settings, and what only this run is about."""

    settings: Settings
    prompt: str | None
    prompt_file: Path | None
    json: bool


class CommandParser(argparse.ArgumentParser):
    """Complains in one line, like everything else here."""

    def error(self, message: str) -> NoReturn:
        words = message.removeprefix("argument ").replace(": expected one argument", " needs a value", 1)
        raise UsageError(f"{words} (--help lists the flags)")


def parse_command(argv: Sequence[str] | None = None, kind: type[Settings] = Settings) -> ParsedCommand:
    """Reads the command line and the layers below it. Raises UsageError; leaves through SystemExit after --help."""
    parser = build_parser(kind)
    given = vars(parser.parse_args(argv))
    prompt, prompt_file, config = (given.pop(name, None) for name in ("prompt", "prompt_file", "config"))
    as_json = given.pop("json", False)
    if prompt is not None and prompt_file is not None:
        raise UsageError("--prompt and --prompt-file exclude each other")
    settings = load_settings(given, None if config is None else Path(config), kind)
    return ParsedCommand(settings, prompt, None if prompt_file is None else Path(prompt_file), as_json)


def build_parser(kind: type[Settings] = Settings) -> argparse.ArgumentParser:
    """A parser whose result holds only what was given, as text."""
    parser = CommandParser(
        prog="swiftspec",
        usage=USAGE,
        description=DESCRIPTION,
        epilog=PRECEDENCE,
        formatter_class=_Formatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
    )
    add_run_flags(parser.add_argument_group("this run"))
    groups: dict[str, Any] = {}
    for flag in kind.table.flags.values():
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        _add(groups[flag.group], flag)
    return parser


def add_run_flags(group: Any) -> list[argparse.Action]:
    """Adds the flags that are no settings: what only this run is about."""
    final = "The same from a file; one final newline is dropped unless --raw."
    return [
        group.add_argument("--prompt", metavar="TEXT", help="Answer this and leave."),
        group.add_argument("--prompt-file", metavar="FILE", help=final),
        group.add_argument(
            "--json", action="store_true", help="Print one JSON object: text, tokens, timings, metrics."
        ),
        group.add_argument("--config", metavar="FILE.yaml", help="Settings by long flag name, such as `top-p: 0.9`."),
        group.add_argument("--version", action="version", version=f"swiftspec {__version__}", help="Show the version."),
        group.add_argument("-h", "--help", action="help", help="Show this page."),
    ]


def _add(group: Any, flag: Flag) -> None:
    text = f"{flag.setting.help} [default: {flag.default_text}] [env: {env_name(flag.name)}]"
    options: dict[str, Any] = {"dest": flag.name, "help": text.replace("%", "%%")}
    if flag.value_type is bool:
        options["action"] = argparse.BooleanOptionalAction
    else:
        options["metavar"] = flag.metavar
        if get_origin(flag.value_type) is list:
            options["action"] = "append"
    group.add_argument(flag_name(flag.name), **options)


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, max_help_position=30, **options)
