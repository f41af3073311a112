"""Sampling parameters convert valid values and refuse invalid ones by name."""

from __future__ import annotations

import math
import pickle
from dataclasses import fields, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.errors import UserError
from swiftspec.params import FILTERS, PENALTIES, SamplingParams
from swiftspec.serve.api.sampling import PASSED_THROUGH
from swiftspec.serve.schema import SamplingFields
from tests.support.cases import examples


@pytest.mark.parametrize(
    ("given_", "meant"),
    [
        ({"temperature": 1}, {"temperature": 1.0}),
        ({"temperature": np.float32(0.5)}, {"temperature": 0.5}),
        ({"temperature": torch.tensor(0.5)}, {"temperature": 0.5}),
        ({"temperature": Fraction(1, 2)}, {"temperature": 0.5}),
        ({"top_k": np.int64(5)}, {"top_k": 5}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": torch.tensor(5)}, {"top_k": 5}),
        ({"seed": np.uint64(2**64 - 1)}, {"seed": 2**64 - 1}),
        ({"stop": "abc"}, {"stop": ("abc",)}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"stop_token_ids": 7}, {"stop_token_ids": (7,)}),
        ({"stop_token_ids": [1, np.int32(2)]}, {"stop_token_ids": (1, 2)}),
        ({"stop_token_ids": torch.tensor([1, 2])}, {"stop_token_ids": (1, 2)}),
        ({"negative_prompt_ids": np.array([1, 2])}, {"negative_prompt_ids": (1, 2)}),
        ({"logit_bias": {42: -5}}, {"logit_bias": {42: -5.0}}),
        ({"ignore_eos": np.bool_(True)}, {"ignore_eos": True}),
    ],
)
def test_valid_values_are_converted(given_: dict[str, Any], meant: dict[str, Any]) -> None:
    ours, want = SamplingParams(**given_), SamplingParams(**meant)
    assert ours == want and hash(ours) == hash(want)
    for item in fields(ours):
        value, plain = getattr(ours, item.name), getattr(want, item.name)
        assert type(value) is type(plain)
        if isinstance(value, tuple):
            assert [type(part) for part in value] == [type(part) for part in plain]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seed": 1.5}, "seed: expected a whole number, not 1.5"),
        ({"top_k": 5.0}, "top_k: expected a whole number, not 5.0"),
        ({"top_k": True}, "top_k: expected a whole number, not True"),
        ({"temperature": "1"}, "temperature: expected a number, not '1'"),
        ({"temperature": None}, "temperature: expected a number, not None"),
        ({"temperature": Decimal(1)}, r"temperature: expected a number, not Decimal\('1'\)"),
        ({"temperature": np.array([1.0])}, "temperature: expected a number, not array"),
        ({"temperature": 10**400}, "temperature must be a finite number"),
        ({"temperature": -(10**400)}, "temperature must be a finite number"),
        ({"top_p": math.nan}, "top_p must be a finite number"),
        ({"stop": 5}, "stop: expected a string, not 5"),
        ({"stop": [b"a"]}, "stop: expected a string, not b'a'"),
        ({"stop": ""}, "a stop string must not be empty"),
        ({"stop_token_ids": "7"}, "stop_token_ids: expected a whole number, not '7'"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids: expected a whole number, not 1.5"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must not be negative"),
        ({"logit_bias": [1]}, r"logit_bias: expected a mapping from token id to number, not \[1\]"),
        ({"logit_bias": {"42": 1}}, "logit_bias: expected a whole number, not '42'"),
        ({"logit_bias": {42: "x"}}, "logit_bias: expected a number, not 'x'"),
        ({"logit_bias": {42: math.nan}}, "logit_bias must lie in"),
        ({"logit_bias": {42: 10**400}}, "logit_bias must lie in"),
        ({"ignore_eos": 1}, "ignore_eos: expected true or false, not 1"),
        ({"max_tokens": 0}, "max_tokens must lie in 1.*, not 0"),
        ({"max_tokens": 10**5000}, "max_tokens must lie in .*, not a number with too many digits"),
        ({"seed": "x" * 1000}, r"seed: expected a whole number, not 'x{59}\.\.\.x{9}'$"),
    ],
)
def test_invalid_values_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SamplingParams(**values)


@pytest.mark.parametrize("name", FILTERS + PENALTIES)
def test_filters_and_penalties_follow_from_their_declarations(name: str) -> None:
    """The row of the capability table, the field of requests with its limits, and the draft's parameters."""
    value = {"top_k": 3, "top_p": 0.5, "min_p": 0.5}.get(name, 1.5)
    params = SamplingParams(**{name: value})
    feature = "filters" if name in FILTERS else "penalties"
    assert {"filters", "penalties"} & params.features == {feature}
    assert "filters" not in replace(params, temperature=0).features
    assert params.without(FILTERS + PENALTIES) == SamplingParams()
    for wrong in (2**31, -7.0):
        with pytest.raises(ValidationError, match=name):
            SamplingFields.model_validate({name: wrong})
    body = SamplingFields.model_validate({name: value})
    assert getattr(body, name) == value and name in PASSED_THROUGH


def test_parameters_are_hashable() -> None:
    one, other = (SamplingParams(logit_bias=bias) for bias in ({1: 2.0, 3: 4.0}, {3: 4.0, 1: 2.0}))
    assert one == other and hash(one) == hash(other) and len({one, other, SamplingParams()}) == 2
    assert hash(replace(one, seed=5)) != hash(one)
    assert pickle.loads(pickle.dumps(one)) == one


def test_the_callers_dictionary_is_copied() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 3.0
    assert params.logit_bias == {1: 2.0}


def test_other_configs_convert_and_refuse_values() -> None:
    assert EngineConfig(verify_batch=np.int64(4)) == EngineConfig(verify_batch=4)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"verify_batch: expected a whole number, not 4\.0"):
        EngineConfig(verify_batch=4.0)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="target_tp: expected a whole number, not 'x'"):
        EngineConfig(target_tp="x")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="population: expected a PopulationConfig, not 5"):
        EngineConfig(population=5)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="power: expected a number"):
        PopulationConfig(power=[])  # type: ignore[arg-type]


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3)
    | st.sampled_from([10**4000, np.float16(2), np.int8(3), torch.tensor(1), torch.tensor([1.0]), object()]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.integers() | st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip


@settings(max_examples=examples(300))
@given(st.dictionaries(st.sampled_from([item.name for item in fields(SamplingParams)]), ANYTHING, max_size=3))
def test_any_value_is_accepted_or_a_user_error(values: dict[str, Any]) -> None:
    try:
        params = SamplingParams(**values)
    except UserError as error:
        assert len(str(error)) < 250 and "\n" not in str(error)
    else:
        assert hash(params) == hash(replace(params))
