"""Settings of the GPU trial, and errors of a GPU while models are loaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swiftspec import llm_engine
from swiftspec.cli.terminal import StartupProgress
from swiftspec.errors import UserError
from swiftspec.settings.settings import Settings
from swiftspec.startup import session


def test_verdicts_are_kept_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = session.load_options(Settings(gpu_trial="off", packed_cache="off"))
    assert options.get("gpu_trial") == "off" and options.get("trial_cache") == tmp_path / "swiftspec" / "gpu_trial"


@pytest.mark.parametrize(
    ("text", "kind"),
    [("linear: an illegal memory access was encountered", RuntimeError), ("CUDA out of memory", UserError)],
)
def test_an_illegal_access_is_no_lack_of_memory(
    text: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*of: Any, **options: Any) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(llm_engine, "LLMEngine", fail)
    stands_in: Any = SimpleNamespace(size=1, target=None, draft=None, choices=None)
    with pytest.raises(kind):
        session._load_llm(Settings(), stands_in, stands_in, (), None, StartupProgress(quiet=True))
