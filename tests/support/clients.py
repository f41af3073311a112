"""Client libraries, imported when a test first uses one: importing takes seconds, which every pytest worker would spend
during collection."""

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
            if name.startswith("_"):  # pytest inspects all attributes of a test module
                raise AttributeError(name)
            return getattr(importlib.import_module(self._name), name)

    anthropic, openai = _Later("anthropic"), _Later("openai")
