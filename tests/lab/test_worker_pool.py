"""The engines that a pool of ranks builds one after the other: their context and their memory."""

from __future__ import annotations

import gc
import weakref
from typing import Any, ClassVar

import pytest

from bench.data.heldout import DEMO
from swiftspec.builder.load_options import LoadOptions
from swiftspec.config import EngineConfig
from swiftspec.lab import worker_pool
from swiftspec.lab.worker_pool import EngineBuild, Pair, RankPool
from swiftspec.model.checkpoint_files import read_config

AR = EngineBuild(EngineConfig("ar"))


class CyclicEngine:
    """Stands in for an `LLMEngine`: only the garbage collector frees it. `alive`: the earlier ones at its
    construction."""

    built: ClassVar[weakref.WeakSet[CyclicEngine]] = weakref.WeakSet()

    def __init__(self, *models: Any, **options: Any) -> None:
        self.alive, self.options, self.itself = len(self.built), options, self
        self.built.add(self)

    def close(self) -> None:
        """Nothing to close."""


@pytest.mark.slow
def test_memory_is_free_before_the_next_engine_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "LLMEngine", CyclicEngine)
    pool, alive = RankPool(Pair(DEMO / "target", DEMO / "draft", {}), None), list[int]()
    gc.disable()
    try:
        for _ in range(3):
            with pool.engine(AR) as llm:
                assert isinstance(llm, CyclicEngine)
                alive.append(llm.alive)
            del llm
    finally:
        gc.enable()
    assert alive == [0, 0, 0]


@pytest.mark.slow
def test_the_context_is_that_of_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "LLMEngine", CyclicEngine)
    longest = read_config(DEMO / "target").max_position_embeddings

    def context(of: int | None, options: LoadOptions) -> int | None:
        pool = RankPool(Pair(DEMO / "target", DEMO / "draft", options), None)
        pool.context = of
        with pool.engine(AR) as llm:
            assert isinstance(llm, CyclicEngine)
            return llm.options["max_model_len"]

    assert [context(of, {}) for of in (None, 300, longest + 1)] == [None, 300, longest]
    assert context(300, {"max_model_len": 400}) == 400, "the user's limit"
