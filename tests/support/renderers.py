"""One process that renders chat templates, for all tests of a run."""

from __future__ import annotations

from pathlib import Path

from swiftspec.text.template import TemplateRenderer


class SharedRenderer(TemplateRenderer):
    """Stays open, since a process takes a second to start. test_template.py starts separate ones."""

    def close(self) -> None:
        """Does nothing: the next codec uses the process too."""


SHARED_RENDERER = SharedRenderer(Path())


def shared_renderer(model: Path) -> TemplateRenderer:
    """Returns the process's renderer, which then names `model` in its messages."""
    SHARED_RENDERER.model = model
    return SHARED_RENDERER
