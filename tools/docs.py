"""Writes the pages of docs/ that are made from the code, or tells which of them are out of date.

    python -m tools.docs            writes them
    python -m tools.docs --check    exit code 1 where a page is not what the code says now

Another page is a function that returns its text, and a line in PAGES.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from swiftspec.serve.cli import PRECEDENCE, run_flags
from swiftspec.serve.flags import GROUPS, Flag, Table
from swiftspec.serve.settings import env_name, flag_name

ROOT = Path(__file__).resolve().parent.parent
FLAGS_HEAD = f"""\
<!-- Made by `python -m tools.docs`: do not edit. -->
# The flags of `python -m swiftspec.serve`

Every flag but those of a single run is a setting: it can also be given by its environment variable, or in the YAML file
that `--config` names, where its key is the flag without the dashes in front, such as `top-p: 0.9`.
{PRECEDENCE}
"""


def flags_page() -> str:
    """Every flag, by group: values, default, environment variable."""
    once = [
        (_code(f"{', '.join(action.option_strings)} {action.metavar or ''}".rstrip()), str(action.help))
        for action in run_flags(argparse.ArgumentParser(add_help=False))
    ]
    parts = [FLAGS_HEAD, "## a single run\n", table(("flag", "what it does"), once)]
    head = ("flag", "what it does", "values", "default", "environment variable")
    for group in GROUPS:
        rows = [_row(flag) for flag in Table().flags.values() if flag.group == group]
        parts += [f"## {group}\n", table(head, rows)]
    return "\n".join(parts)


def _row(flag: Flag) -> tuple[str, ...]:
    name, variable = flag_name(flag.name), _code(env_name(flag.name))
    if flag.kind is bool:
        shown, values = f"{_code(name)}, {_code('--no-' + name[2:])}", "on or off"
    elif flag.choices:
        shown, values = _code(name), ", ".join(map(_code, flag.choices))
    else:
        shown, values = _code(f"{name} {flag.metavar}"), f"must {flag.setting.rule}" if flag.setting.rule else ""
    return shown, str(flag.setting.help), values, flag.shown, variable


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    cells = ([cell.replace("|", r"\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def _code(text: str) -> str:
    return f"`{text}`"


PAGES: dict[str, Callable[[], str]] = {"docs/reference/flags.md": flags_page}


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Writes the pages of docs/ that are made from the code."""
    parser = argparse.ArgumentParser(prog="python -m tools.docs", description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where a page is out of date")
    check = parser.parse_args(argv).check
    stale = 0
    for name, page in PAGES.items():
        file, text = root / name, page()
        if file.is_file() and file.read_text(encoding="utf-8") == text:
            continue
        if check:
            print(f"{name} is out of date: python -m tools.docs writes it")
            stale = 1
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            print(f"wrote {name}")
    return stale


if __name__ == "__main__":
    sys.exit(main())
