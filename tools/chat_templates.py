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
from swiftspec.serve.http.format.template_format import TemplateFormat, check_calls, derive_template_format
from swiftspec.text.template import TemplateRenderer

MAX_BYTES = 1 << 20
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}  # of templates that name them


def derived_format(renderer: TemplateRenderer, source: str) -> TemplateFormat:
    """Returns the format of a template without a tokenizer."""

    def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, begins_answer: bool) -> str:
        return renderer.render(source, messages, SPECIAL_TOKENS, MAX_BYTES, tools, False, begins_answer)

    found = derive_template_format(render, source, {})
    if found.tool_calls is not None:
        check_calls(render, found, range(1, 8))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line per template and the number of those whose tools are understood. Returns the exit code."""
    parser = argparse.ArgumentParser(description="What is understood of the chat templates in a folder.")
    parser.add_argument("folder", type=Path, help="Folder with *.jinja files.")
    folder = parser.parse_args(argv).folder
    renderer = TemplateRenderer(folder)
    understood = with_tools = 0
    for file in sorted(folder.glob("*.jinja")):
        source = file.read_text(encoding="utf-8")
        try:
            found = derived_format(renderer, source)
        except UserError as error:
            found = TemplateFormat(reason=str(error))
        has_tools = "tools" in source
        with_tools += has_tools
        understood += found.tool_calls is not None
        style = (
            found.tool_calls.style if found.tool_calls else f"not understood: {found.reason}" if has_tools else "none"
        )
        print(f"{file.stem}: tools: {style}; reasoning: {found.reasoning}; system messages: {found.system_messages}")
    print(f"tools of {understood} of {with_tools} templates are understood")
    renderer.close()
    return 0 if understood else 1


if __name__ == "__main__":
    sys.exit(main())
