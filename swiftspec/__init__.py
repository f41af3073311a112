"""SwiftSpec: low-latency speculative decoding of one request.

from swiftspec import LLM, AsyncEngine, EngineConfig, SamplingParams
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swiftspec.config import EngineConfig
    from swiftspec.llm import LLM
    from swiftspec.params import SamplingParams
    from swiftspec.serve.async_engine import AsyncEngine

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncEngine", "EngineConfig", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Imports an exported name on first access, because importing torch takes seconds."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = {
        "LLM": "swiftspec.llm", "AsyncEngine": "swiftspec.serve.async_engine", "EngineConfig": "swiftspec.config",
        "SamplingParams": "swiftspec.params",
    }  # fmt: skip
    return getattr(importlib.import_module(homes[name]), name)
