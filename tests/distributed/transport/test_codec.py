"""Messages are unchanged after packing and unpacking; invalid ones are refused."""

import json
from dataclasses import asdict, replace
from math import inf, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftspec.distributed.transport.codec import (
    MAX_ERROR_CHARS,
    bytes_to_words,
    pack_message,
    text_to_words,
    unpack_proposal,
    unpack_request_start,
    unpack_result,
    words_to_error,
    words_to_text,
)  # fmt: skip
from swiftspec.messages import DraftProbs, NodeSource, Proposal, RequestStart, VerifyResult
from swiftspec.params import SamplingParams
from tests.support.proposals import draft_proposal, proposals

words = st.integers(0, 2**31 - 1)


@settings(deadline=None)
@given(proposals())
def test_a_proposal_is_unchanged(proposal: Proposal) -> None:
    unpacked = unpack_proposal(pack_message(proposal))
    assert unpacked == proposal and all(type(source) is NodeSource for source in unpacked.sources)


@given(words, words, words, st.lists(words, min_size=1, max_size=9))
def test_a_result_is_unchanged(request: int, round_: int, prefix: int, tokens: list[int]) -> None:
    result = VerifyResult(request, round_, prefix, tuple(range(len(tokens))), tuple(tokens))
    assert unpack_result(pack_message(result)) == result


@pytest.mark.parametrize("flat", [[1, 2, 3], [1, 2, 3, 0], [1, 2, 3, 2, 5, 5, -1], [1, 2, 3, 1, 7, -1, 0]])
def test_a_proposal_of_the_wrong_length_is_refused(flat: list[int]) -> None:
    with pytest.raises(ValueError, match=r"proposal of \d+ words"):
        unpack_proposal(flat)


MODEL = NodeSource.DRAFT_MODEL


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"parents": (0, 0, 1)}, "not a root"),
        ({"parents": (-1, 1, 1)}, "topological order"),
        ({"parents": (-1, -1, 1)}, "topological order"),
        ({"weights": (-1.0, -1.0, -2.0)}, "not a root of weight 0"),
        ({"weights": (0.0, 1.0, -2.0)}, "exceeds that of its parent"),
        ({"weights": (0.0, -2.0, -1.0)}, "exceeds that of its parent"),
        ({"weights": (0.0, -1.0, -inf)}, "not finite"),
        ({"weights": (0.0, nan, -1.0)}, "not finite"),
        ({"weights": (nan, -1.0, -2.0)}, "not a root of weight 0"),
        ({"sources": (NodeSource.ROOT, MODEL, 99)}, "unknown source 99"),
        ({"sources": (MODEL, MODEL, MODEL)}, "only root"),
        ({"sources": (NodeSource.ROOT, NodeSource.ROOT, MODEL)}, "only root"),
    ],
)
def test_an_invalid_node_is_refused(change: dict[str, Any], reason: str) -> None:
    valid = draft_proposal(1, 2, 3, (5, 6, 7), (-1, 0, 1))
    assert unpack_proposal(pack_message(valid)) == valid
    broken = replace(valid, **change)
    with pytest.raises(ValueError, match=reason):
        unpack_proposal(pack_message(broken))


def test_the_draft_probabilities_are_sent_with_a_proposal() -> None:
    tokens = np.array([[4, 6, 9], [5, 1, 2]], np.int32)
    probs = np.array([[0.5, 0.25, 0.25], [1, 0, 0]], np.float32)
    proposal = draft_proposal(7, 3, 20, (4, 6, 4, 5), (-1, 0, 0, 1), DraftProbs(tokens, probs))
    flat = pack_message(proposal)
    assert len(flat) == 4 + 4 * 4 + 12
    unpacked = unpack_proposal(flat)
    assert unpacked.draft_probs is not None and (unpacked.tokens, unpacked.parents) == (
        proposal.tokens,
        proposal.parents,
    )
    assert np.array_equal(unpacked.draft_probs.tokens, tokens) and np.array_equal(unpacked.draft_probs.probs, probs)
    nan = np.full(2, np.float32("nan")).view(np.int32).tolist()
    for broken in (flat[:-1], [*flat[:-2], *nan], [*flat[:-3], 0, 0, 0]):
        with pytest.raises(ValueError, match="distribution"):
            unpack_proposal(broken)


@pytest.mark.parametrize("flat", [[1, 2, 3], [1, 2, 3, 0], [1, 2, 3, 2, 0, 1, 5]])
def test_a_malformed_result_is_refused(flat: list[int]) -> None:
    with pytest.raises(ValueError, match="result"):
        unpack_result(flat)


@pytest.mark.parametrize(
    "values",
    [{"seed": 1.5}, {"top_k": 5.0}, {"stop": [1]}, {"stop_token_ids": ["1"]}, {"ignore_eos": 1}, {"top_p": "1"}],
)
def test_sampling_values_of_another_type_are_refused(values: dict[str, object]) -> None:
    text = json.dumps(
        {"executor": "", "num_cached_tokens": None, "sampling": {**asdict(SamplingParams()), **values}}
    ).encode()
    with pytest.raises(ValueError, match=f"{next(iter(values))}: expected"):
        unpack_request_start([1, 1, 1, 5, len(text), *bytes_to_words(text)])


# Fields from which the layer above the engine makes token ids, grammars and several requests.
TEXT_FIELDS = {
    "n",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "detokenize",
    "bad_words",
    "structured_outputs",
}


def test_every_sampling_value_is_sent_with_a_request() -> None:
    sampling = SamplingParams(
        0.7, 0.9, 5, 0.1, 1.1, 0.5, -0.5, {3: -1.5, 12: 2.0}, 1.5, 2**64 - 1, 7, ("a", "é"), (4, 5), True, 3, None,
        "start: /é+/", (1, 2), 4, 2, False, 6, (5, 9), ((7,), (8, 9)), (0, 31),
    )  # fmt: skip
    default, changed = asdict(SamplingParams()), set[str]()
    for sent in (sampling, replace(sampling, guidance_scale=1.0, prompt_logprobs=2)):  # one without the other
        unpacked = unpack_request_start(pack_message(RequestStart(3, (1, 2, 3), sent, 2, "eager", (2, 0))))
        assert unpacked == RequestStart(3, (1, 2, 3), sent, 2, "eager", (2, 0))
        changed |= {name for name, value in asdict(unpacked.sampling).items() if value != default[name]}
    assert changed == set(default) - TEXT_FIELDS


@pytest.mark.parametrize("cached", [3, [-1], [1.0], [True], [2**31], [1, 1, 1], ["1"], {}])
def test_an_invalid_count_of_cached_tokens_is_refused(cached: object) -> None:
    text = json.dumps({"executor": "", "num_cached_tokens": cached, "sampling": asdict(SamplingParams())}).encode()
    with pytest.raises(ValueError, match="number of cached tokens is invalid"):
        unpack_request_start([1, 1, 1, 5, len(text), *bytes_to_words(text)])


def test_a_reason_is_one_short_line() -> None:
    assert words_to_text(text_to_words("out of memory\nat 0x1\x1b[2J\r\n")) == "out of memory at 0x1 [2J"
    assert words_to_error(text_to_words("it is\nfull")) == "it is full"
    for character in ("x", "\u20ac", "\U0001d11e"):
        assert words_to_error(text_to_words(character * 5000)) == character * MAX_ERROR_CHARS
