"""Sampling parameters of any kind, and whole requests: with a draft the text equals that of autoregressive decoding."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import fields, replace
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from swiftspec.config import EngineConfig
from swiftspec.llm_engine import LLMEngine
from swiftspec.params import SamplingParams
from tests.support.fuzz import Target
from tests.support.requests import VOCAB, a_request, a_shape
from tests.support.tiny_checkpoints import make_checkpoint

CONTEXT = 96
ODD = [
    10**4000,
    np.float16(2),
    np.int8(3),
    torch.tensor(1),
    torch.tensor([1.0]),
    np.zeros((2, 2)),
    Decimal(1),
    object(),
]
PLAIN = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3)
    | st.sampled_from(ODD)
)  # fmt: skip
ANYTHING = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.integers() | st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)
TREES = 6  # shapes that engines are made with
NAMES = [item.name for item in fields(SamplingParams)]


def take_parameters(values: dict[str, Any], folder: Path) -> None:
    """Accepted parameters are hashable and valid for an engine."""
    params = SamplingParams(**values)
    assert hash(params) == hash(replace(params)) and params == replace(params)
    answer = plain(torch.float64).generate([5, 17], replace(params, max_tokens=2))
    assert len(answer.token_ids) <= 2


@cache
def models() -> Path:
    """A target and a draft that native operators can run."""
    folder = Path(tempfile.mkdtemp())
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    for name, seed in (("target", 0), ("draft", 1)):
        make_checkpoint(
            folder / name, vocab=VOCAB, seed=seed, layers=2 - seed, max_position_embeddings=CONTEXT, **shape
        )
    return folder


@cache
def plain(dtype: torch.dtype) -> LLMEngine:
    return LLMEngine(models() / "target", dtype=dtype)


@cache
def serial(dtype: torch.dtype, tree: int) -> LLMEngine:
    config = EngineConfig(mode="serial", **a_shape(random.Random(tree)))
    return LLMEngine(models() / "target", models() / "draft", config, dtype=dtype)


def with_a_draft(dtype: torch.dtype) -> Callable[[random.Random, Path], None]:
    """Decodes with and without a draft: plain torch in float64, native operators in float32."""

    def run(dice: random.Random, folder: Path) -> None:
        speculating = serial(dtype, dice.randrange(TREES))
        prompt, values = a_request(dice)
        params = SamplingParams(**values)
        got, want = speculating.generate(prompt, params), plain(dtype).generate(prompt, params)
        assert (got.token_ids, got.finish_reason) == (want.token_ids, want.finish_reason)

    return run


DICE = st.randoms(use_true_random=False)
TARGETS = [
    Target("sampling parameters", st.dictionaries(st.sampled_from(NAMES), ANYTHING, max_size=3), take_parameters),
    Target("requests, plain torch", DICE, with_a_draft(torch.float64), cost=4),
    Target("requests, native operators", DICE, with_a_draft(torch.float32), cost=4),
]
