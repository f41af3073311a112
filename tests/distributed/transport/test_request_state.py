"""A well-formed message that does not fit the request or the models is refused before it is applied."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from swiftspec.distributed.transport.request_state import ModelLimits, RequestState
from swiftspec.messages import DraftProbs, Proposal, RequestStart, VerifyResult
from swiftspec.params import SamplingParams
from tests.support.proposals import LOOKUP, draft_proposal

BOUNDS = ModelLimits(vocab_size=40, max_model_len=12, max_nodes=4)
OPENING = RequestStart(1, (3, 1, 4), SamplingParams(), 3)
PROPOSAL = draft_proposal(1, 0, 2, (4, 5, 6), (-1, 0, 0))
RESULT = VerifyResult(1, 0, 2, (0, 2), (6, 9))
DRAWN = DraftProbs(np.array([[5, 6]], np.int32), np.array([[0.5, 0.5]], np.float32))


def open_state(rejects: bool = False) -> RequestState:
    made = RequestState(BOUNDS, rejects)
    made.open(OPENING)
    return made


def test_valid_messages_are_accepted() -> None:
    state = open_state()
    state.check_proposal(PROPOSAL)
    state.advance(RESULT)
    assert (state.prefix_len, state.root) == (4, 9)
    state.check_proposal(draft_proposal(1, 1, 4, (9,), (-1,)))
    open_state(rejects=True).check_proposal(replace(PROPOSAL, draft_probs=DRAWN))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (replace(PROPOSAL, request=2), "for request 2 at 2"),
        (replace(PROPOSAL, prefix_len=1), "for request 1 at 1"),
        (replace(PROPOSAL, tokens=(4, 5, 40)), r"outside 0\.\.39"),
        (replace(PROPOSAL, tokens=(4, 5, -1)), r"outside 0\.\.39"),
        (replace(PROPOSAL, tokens=(7, 5, 6)), "has root token 7; expected 4"),
        (replace(PROPOSAL, tokens=(4, 5, 5)), "two children with the same token"),
        (draft_proposal(1, 0, 2, (4, 5, 6, 7, 8), (-1, 0, 1, 2, 3)), "5 nodes exceeds the limit of 4"),
        (replace(PROPOSAL, draft_probs=DraftProbs(DRAWN.tokens + 34, DRAWN.probs)), r"outside 0\.\.39"),
        (replace(PROPOSAL, draft_probs=DraftProbs(DRAWN.tokens + 1, DRAWN.probs)), "does not match the draft"),
        (replace(PROPOSAL, draft_probs=DRAWN, sources=(*PROPOSAL.sources[:2], LOOKUP)), "a deterministic source"),
        (replace(RESULT, prefix_len=3), "for request 1 at 3"),
        (replace(RESULT, tokens=(6, 99)), r"outside 0\.\.39"),
        (replace(RESULT, path=(1, 2)), "path"),
        (replace(RESULT, path=(0, 0)), "path"),
        (VerifyResult(1, 0, 2, tuple(range(15)), (1,) * 15), "longer than the context"),
    ],
)
def test_invalid_messages_are_refused(bad: Proposal | VerifyResult, message: str) -> None:
    state = open_state()
    with pytest.raises(ValueError, match=message):
        (state.check_proposal if isinstance(bad, Proposal) else state.advance)(bad)  # type: ignore[arg-type]
    assert (state.prefix_len, state.root) == (2, 4), "it stands where it stood"


def test_rejection_sampling_requires_the_draft_probabilities() -> None:
    with pytest.raises(ValueError, match="requires a proposal with draft distributions"):
        open_state(rejects=True).check_proposal(PROPOSAL)
    greedy = RequestState(BOUNDS, rejection_sampling=True)
    greedy.open(replace(OPENING, sampling=SamplingParams(temperature=0)))
    greedy.check_proposal(PROPOSAL)


@pytest.mark.parametrize(
    "bad",
    [
        replace(OPENING, tokens=(3, 40)),
        replace(OPENING, tokens=(1,) * 99),
        replace(OPENING, sampling=SamplingParams(verify_batch=9)),
        replace(OPENING, sampling=SamplingParams(draft_steps=65)),
        replace(OPENING, sampling=SamplingParams(logit_bias={-1: 1.0})),
        replace(OPENING, sampling=SamplingParams(negative_prompt_ids=(40,))),
    ],
)
def test_a_request_beyond_the_limits_of_the_models_is_refused(bad: RequestStart) -> None:
    state = open_state()
    with pytest.raises(ValueError, match=r"outside|longer|exceeds|must lie in"):
        state.open(bad)
    with pytest.raises(ValueError, match="no request is open"):
        state.check_proposal(PROPOSAL)


def test_a_text_ends_at_the_limit_of_the_context() -> None:
    state = RequestState(BOUNDS)
    state.open(RequestStart(1, (3,) * 12, SamplingParams(), 3))
    state.check_proposal(draft_proposal(1, 0, 11, (3, 5), (-1, 0)))
    state.open(RequestStart(1, (3,) * 13, SamplingParams(), 3))
    with pytest.raises(ValueError, match="beyond the context"):
        state.check_proposal(draft_proposal(1, 0, 12, (3, 5), (-1, 0)))
    guided = SamplingParams(guidance_scale=2.0, negative_prompt_ids=(7,) * 11)
    state.open(RequestStart(1, (3,) * 4, guided, 3))  # 12 tokens in the negative sequence
    state.check_proposal(draft_proposal(1, 0, 3, (3, 5), (-1, 0)))
    state.open(RequestStart(1, (3,) * 5, guided, 3))
    with pytest.raises(ValueError, match="beyond the context"):
        state.check_proposal(draft_proposal(1, 0, 4, (3, 5), (-1, 0)))
    with pytest.raises(ValueError, match="negative sequence of 17 tokens"):
        state.open(RequestStart(1, (3,) * 9, guided, 3))
