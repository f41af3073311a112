"""The libraries of people's clients, imported when a test first uses one: that takes seconds, which every worker would
spend while it collects."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import anthropic as anthropic
    import openai as openai
else:

    class _Later:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):  # pytest looks at everything that a file of tests has
                raise AttributeError(name)
            return getattr(importlib.import_module(self._name), name)

    anthropic, openai = _Later("anthropic"), _Later("openai")
