"""Settings of the GPU trial, and errors of a GPU while models are loaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swiftspec import llm_engine
from swiftspec.errors import UserError
from swiftspec.serve import __main__ as command_line
from swiftspec.serve.terminal import StartupProgress
from swiftspec.settings.settings import Settings
from swiftspec.startup import session


def test_verdicts_are_kept_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = session.load_options(Settings(gpu_trial="off", packed_cache="off"))
    assert options.get("gpu_trial") == "off" and options.get("trial_cache") == tmp_path / "swiftspec" / "gpu_trial"


@pytest.mark.parametrize(("incarnation", "wanted"), [(0, "again"), (1, "auto")])
def test_a_restarted_rank_does_not_repeat_its_trial(
    incarnation: int, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its verdict may have been lowered by the error that ended it."""
    found: list[str] = []
    monkeypatch.setattr(command_line, "join_launched_world", lambda *of: object())
    monkeypatch.setattr(session, "run_follower_rank", lambda settings, world: found.append(settings.gpu_trial))
    command: Any = SimpleNamespace(settings=Settings(gpu_trial="again"))
    supervisor: Any = SimpleNamespace(incarnation=incarnation, supervision=lambda: None)
    assert command_line.run_rank(command, False, supervisor) == 0
    assert found == [wanted]


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
    stands_in: Any = SimpleNamespace(size=1, target=None, draft=None, plan=None)
    with pytest.raises(kind):
        session._load_llm(Settings(), stands_in, stands_in, (), None, StartupProgress(quiet=True))
