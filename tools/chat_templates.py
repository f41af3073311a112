"""Prints what is understood of the chat templates in a folder, or why not. Rendered calls are read back in pieces.

python -m tools.chat_templates FOLDER
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swiftspec.errors import UserError
from swiftspec.serve.format.template_format import (
    Render,
    TemplateFormat,
    check_calls,
    derive_template_format,
)
from swiftspec.text.messages import SystemMessages, accepted_system_messages
from swiftspec.text.template import TemplateRenderer

MAX_BYTES = 1 << 20
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}  # of templates that name them


def template_render(renderer: TemplateRenderer, source: str) -> Render:
    """Returns the function that renders a template without a tokenizer."""

    def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, begins_answer: bool) -> str:
        return renderer.render(source, messages, SPECIAL_TOKENS, MAX_BYTES, tools, False, begins_answer)

    return render


def derived_format(render: Render, source: str) -> TemplateFormat:
    """Returns the format of a template, whose own calls are read back in pieces."""
    try:
        found = derive_template_format(render, source, {})
        if found.tool_calls is not None:
            check_calls(render, found, range(1, 8))
    except UserError as error:
        return TemplateFormat(reason=str(error))
    return found


def system_messages(render: Render) -> SystemMessages:
    """Returns where a template takes system messages."""
    return accepted_system_messages(lambda messages: render(messages, None, True))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line per template and the number of those whose tools are understood. Returns the exit code."""
    parser = argparse.ArgumentParser(description="What is understood of the chat templates in a folder.")
    parser.add_argument("folder", type=Path, help="Folder with *.jinja files.")
    folder = parser.parse_args(argv).folder
    renderer = TemplateRenderer(folder)
    understood = with_tools = 0
    for file in sorted(folder.glob("*.jinja")):
        source = file.read_text(encoding="utf-8")
        render = template_render(renderer, source)
        found = derived_format(render, source)
        has_tools = "tools" in source
        with_tools += has_tools
        understood += found.tool_calls is not None
        style = (
            found.tool_calls.style if found.tool_calls else f"not understood: {found.reason}" if has_tools else "none"
        )
        accepted = system_messages(render)
        print(f"{file.stem}: tools: {style}; reasoning: {found.reasoning}; system messages: {accepted}")
    print(f"tools of {understood} of {with_tools} templates are understood")
    renderer.close()
    return 0 if understood else 1


if __name__ == "__main__":
    sys.exit(main())
