"""SwiftSpec: low-latency speculative decoding of one request.

from swiftspec import LLM, AsyncEngine, SamplingParams
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swiftspec.config import EngineConfig
    from swiftspec.errors import UserError
    from swiftspec.llm import LLM
    from swiftspec.params import SamplingParams, StructuredOutputsParams
    from swiftspec.serve.async_engine import AsyncEngine
    from swiftspec.serve.link.engine_client import (
        GenerationFailedError,
        InvalidRequestError,
        RequestRejectedError,
    )
    from swiftspec.text.outputs import CompletionOutput, RequestOutput, TextChunk

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "EngineConfig",
    "GenerationFailedError",
    "InvalidRequestError",
    "RequestOutput",
    "RequestRejectedError",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextChunk",
    "UserError",
    "__version__",
]
_MODULES = {
    "LLM": "swiftspec.llm",
    "AsyncEngine": "swiftspec.serve.async_engine",
    "CompletionOutput": "swiftspec.text.outputs",
    "EngineConfig": "swiftspec.config",
    "GenerationFailedError": "swiftspec.serve.link.engine_client",
    "InvalidRequestError": "swiftspec.serve.link.engine_client",
    "RequestOutput": "swiftspec.text.outputs",
    "RequestRejectedError": "swiftspec.serve.link.engine_client",
    "SamplingParams": "swiftspec.params",
    "StructuredOutputsParams": "swiftspec.params",
    "TextChunk": "swiftspec.text.outputs",
    "UserError": "swiftspec.errors",
}


def __getattr__(name: str) -> Any:
    """Imports an exported name on first access, because importing torch takes seconds."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
