"""Draws docs/chat.svg, a terminal chat with the demo models.

    python -m tools.chat_picture

Records a real session. On one processor its text is reproducible; the times and the rounds decoded without the draft
depend on the run. The picture has its own background, so that it is readable on light and dark pages, and loads no
font.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from swiftspec.cli.chat import Chat
from swiftspec.cli.config_sources import load_settings
from swiftspec.cli.terminal import StartupProgress
from swiftspec.startup.session import open_session

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "chat.svg"
WIDTH = 100  # columns
COMMAND = 'make chat ARGS="--seed 3 --temperature 0.5 --max-tokens 72"'
SETTINGS = {"seed": 3, "temperature": 0.5, "max_tokens": 72}
LINES = ("def read_lines(path):", "/set temperature 0", "def main(argv=None):")
FRAME = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {terminal_height}" role="img">
<title>A chat with the embedded pair in a terminal: accepted draft tokens are green and underlined</title>
<style>text {{ font: {char_height}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre }}
{styles}</style>
<defs>{lines}</defs>
<rect width="100%" height="100%" rx="8" fill="#0c0c0c"/>
<g transform="translate(9, 9)">{backgrounds}
{matrix}</g>
</svg>
"""


def typist(console: Console) -> Callable[[], str]:
    """Returns an input function that types LINES at the prompts and then ends the session."""
    waiting = iter(LINES)

    def ask() -> str:
        line = next(waiting, None)
        if line is None:
            raise EOFError
        console.print(Text(f">>> {line}"))
        return line

    return ask


def record() -> str:
    """Records the session's terminal output, control sequences included."""
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, color_system="standard", width=WIDTH, highlight=False)
    console.print(Text(f"$ {COMMAND}", "dim"))
    settings = load_settings(SETTINGS)
    session = open_session(settings, StartupProgress(quiet=True), warm_up=True)
    Chat(session, settings, console, typist(console)).run()
    return shown.getvalue().rstrip()


def draw(session: str) -> str:
    """Renders a recorded session as SVG."""
    console = Console(file=io.StringIO(), record=True, width=WIDTH)
    console.print(Text.from_ansi(session), "\n")
    return console.export_svg(code_format=FRAME, theme=MONOKAI, unique_id="chat")


def main() -> None:
    """Records the session and writes the picture."""
    PICTURE.write_text(draw(record()), encoding="utf-8")
    print(f"wrote {PICTURE.name}, {PICTURE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
