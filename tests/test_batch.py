"""The two messages survive their packed form; anything else is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftspec.batch import Proposal, VerifyResult

words = st.integers(0, 2**31 - 1)


@given(words, words, words, st.data())
def test_round_trip(request: int, round_: int, prefix: int, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 9))
    parents = (-1, *(data.draw(st.integers(0, i - 1)) for i in range(1, n)))
    tokens = tuple(data.draw(st.lists(words, min_size=n, max_size=n)))
    proposal = Proposal(request, round_, prefix, tokens, parents)
    assert proposal.pack().dtype == np.int32 and Proposal.unpack(proposal.pack()) == proposal
    result = VerifyResult(request, round_, prefix, tuple(range(n)), tokens)
    assert VerifyResult.unpack(result.pack()) == result


@pytest.mark.parametrize(
    "flat", [[1, 2, 3], [1, 2, 3, 0], [1, 2, 3, 2, 5, 5, -1], [1, 2, 3, 1, 7, 0], [1, 2, 3, 2, 5, 6, -1, 1]]
)
def test_a_malformed_proposal_is_refused(flat: list[int]) -> None:
    with pytest.raises(ValueError, match=r"proposal|nodes"):
        Proposal.unpack(np.array(flat, np.int32))


@pytest.mark.parametrize("flat", [[1, 2, 3], [1, 2, 3, 0], [1, 2, 3, 2, 0, 1, 5]])
def test_a_malformed_result_is_refused(flat: list[int]) -> None:
    with pytest.raises(ValueError, match="result"):
        VerifyResult.unpack(np.array(flat, np.int32))
