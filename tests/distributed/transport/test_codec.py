"""Messages are unchanged after packing and unpacking; invalid ones are refused."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftspec.distributed.transport.codec import (
    bytes_to_words,
    pack_message,
    text_to_words,
    unpack_proposal,
    unpack_request_start,
    unpack_result,
    words_to_text,
)  # fmt: skip
from swiftspec.messages import DraftProbs, Proposal, RequestStart, VerifyResult
from swiftspec.params import SamplingParams

words = st.integers(0, 2**31 - 1)


@given(words, words, words, st.data())
def test_round_trip(request: int, round_: int, prefix: int, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 9))
    parents = (-1, *(data.draw(st.integers(0, i - 1)) for i in range(1, n)))
    tokens = tuple(data.draw(st.lists(words, min_size=n, max_size=n)))
    proposal = Proposal(request, round_, prefix, tokens, parents)
    assert unpack_proposal(pack_message(proposal)) == proposal
    result = VerifyResult(request, round_, prefix, tuple(range(n)), tokens)
    assert unpack_result(pack_message(result)) == result


@pytest.mark.parametrize(
    "flat", [[1, 2, 3], [1, 2, 3, 0], [1, 2, 3, 2, 5, 5, -1], [1, 2, 3, 1, 7, 0], [1, 2, 3, 2, 5, 6, -1, 1]]
)
def test_a_malformed_proposal_is_refused(flat: list[int]) -> None:
    with pytest.raises(ValueError, match=r"proposal|nodes"):
        unpack_proposal(flat)


def test_the_draft_probabilities_are_sent_with_a_proposal() -> None:
    tokens = np.array([[4, 6, 9], [5, 1, 2]], np.int32)
    probs = np.array([[0.5, 0.25, 0.25], [1, 0, 0]], np.float32)
    proposal = Proposal(7, 3, 20, (4, 6, 4, 5), (-1, 0, 0, 1), DraftProbs(tokens, probs))
    flat = pack_message(proposal)
    assert len(flat) == 4 + 8 + 12
    unpacked = unpack_proposal(flat)
    assert unpacked.draft_probs is not None and (unpacked.tokens, unpacked.parents) == (
        proposal.tokens,
        proposal.parents,
    )
    assert np.array_equal(unpacked.draft_probs.tokens, tokens) and np.array_equal(unpacked.draft_probs.probs, probs)
    nan = np.full(2, np.float32("nan")).view(np.int32).tolist()
    for broken in (flat[:-1], flat[:-2] + nan, [*flat[:-3], 0, 0, 0]):
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
    text = json.dumps({"steps": "", "kept": None, "sampling": {**asdict(SamplingParams()), **values}}).encode()
    with pytest.raises(ValueError, match=f"{next(iter(values))}: expected"):
        unpack_request_start([1, 1, 1, 5, len(text), *bytes_to_words(text)])


def test_every_sampling_value_is_sent_with_a_request() -> None:
    sampling = SamplingParams(
        0.7, 0.9, 5, 0.1, 1.1, 0.5, -0.5, {3: -1.5, 12: 2.0}, 1.5, 2**64 - 1, 7, ("a", "é"), (4, 5), True, 3, None,
        "start: /é+/", (1, 2), 4, 2,
    )  # fmt: skip
    default, changed = asdict(SamplingParams()), set[str]()
    for sent in (sampling, replace(sampling, guidance_scale=1.0, prompt_logprobs=2)):  # one without the other
        unpacked = unpack_request_start(pack_message(RequestStart(3, (1, 2, 3), sent, 2, "eager", (2, 0))))
        assert unpacked == RequestStart(3, (1, 2, 3), sent, 2, "eager", (2, 0))
        changed |= {name for name, value in asdict(unpacked.sampling).items() if value != default[name]}
    assert changed == set(default)


@pytest.mark.parametrize("cached", [3, [-1], [1.0], [True], [2**31], [1, 1, 1], ["1"], {}])
def test_an_invalid_count_of_cached_tokens_is_refused(cached: object) -> None:
    text = json.dumps({"steps": "", "kept": cached, "sampling": asdict(SamplingParams())}).encode()
    with pytest.raises(ValueError, match="number of cached tokens is invalid"):
        unpack_request_start([1, 1, 1, 5, len(text), *bytes_to_words(text)])


def test_a_reason_is_one_line() -> None:
    assert words_to_text(text_to_words("out of memory\nat 0x1\x1b[2J\r\n")) == "out of memory at 0x1 [2J"
