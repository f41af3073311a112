"""Recording of requests, and that it does not affect the output."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.engine import Stats
from swiftspec.errors import UserError
from swiftspec.llm_engine import LLMEngine
from swiftspec.messages import RequestStart, VerifyResult
from swiftspec.observe import recorder as module
from swiftspec.observe.recorder import Recorder
from swiftspec.observe.trace_format import RoundRecord, TraceEntry, to_record
from swiftspec.params import SamplingParams
from tests.support.proposals import draft_proposal
from tests.support.roles import drafter_of, restrict_executors, verifier_of

DEMO = Path(__file__).parents[2] / "swiftspec" / "demo"
PROMPT = [5, 6, 7, 8, 9]


def engine(mode: str, dtype: torch.dtype) -> LLMEngine:
    plan = EngineConfig(mode, population=PopulationConfig(particles=2, smc_draft_tokens=2))
    return LLMEngine(DEMO / "target", None if mode == "ar" else DEMO / "draft", plan, dtype=dtype)


class Listener(list[dict[str, Any]]):
    """A listener and the lines that it receives."""

    def __call__(self, noted: Sequence[TraceEntry]) -> None:
        self.extend(map(to_record, noted))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["ar", "serial", "smc"])
def test_a_listener_does_not_affect_the_output_or_later_requests(mode: str, dtype: torch.dtype) -> None:
    llm, received = engine(mode, dtype), Listener()
    sampling = SamplingParams(seed=3, max_tokens=24, ignore_eos=True)
    alone = llm.generate(PROMPT, sampling).token_ids
    llm.listen(received)
    stream = llm.stream(PROMPT, sampling)
    first = next(stream)
    llm.listen(None)  # from the next request on
    assert [*first.token_ids, *(token for chunk in stream for token in chunk.token_ids)] == alone
    assert llm.generate(PROMPT, sampling).token_ids == alone
    assert verifier_of(llm).runner.hooks == [] if mode != "smc" else True
    begin, *rounds, end = received
    assert begin["begin"]["prompt"] == (*PROMPT,) and begin["begin"]["sampling"]["seed"] == 3
    assert [token for line in rounds for token in line["tokens"]][: len(alone)] == alone
    assert (end["end"]["reason"], end["end"]["tokens"]) == ("length", 24)
    assert {line["request"] for line in received} == {2}
    llm.close()


def test_the_tree_contains_the_proposal_and_continues_in_the_next_round() -> None:
    llm, received = engine("serial", torch.float32), Listener()
    llm.listen(received)
    llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    trees = [line["draft"]["tree"] for line in received[1:-1]]
    for line, tree in zip(received[1:-1], trees, strict=True):
        proposal, named = line["proposal"], dict[tuple[int, int], int]()
        for node, (token, parent) in enumerate(zip(tree["tokens"].tolist(), tree["parents"].tolist())):
            assert parent < node and (parent, token) not in named
            named[parent, token] = node
        places = [named[-1, proposal["tokens"][0]]]
        for token, parent in zip(proposal["tokens"][1:], proposal["parents"][1:]):
            places.append(named[places[parent], token])
        assert tree["expanded"][0] and (tree["logprobs"] <= 0).all() and tree["logprobs"][0] == 0
    assert [tree["tokens"][0] for tree in trees[1:]] == [line["tokens"][-1] for line in received[1:-2]]
    llm.close()


def test_the_target_s_probabilities_are_its_softmax() -> None:
    """For the native executor and the eager one; the greedy token has the largest."""
    found: list[list[Any]] = []
    for name in ("native", "eager"):
        llm, received = engine("serial", torch.float32), Listener()
        restrict_executors(verifier_of(llm), name)
        llm.listen(received)
        llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
        found.append(received[1:-1])
        assert verifier_of(llm).executor.name == name
        llm.close()
    for native, eager in zip(*found, strict=True):
        assert native["proposal"]["tokens"] == eager["proposal"]["tokens"]
        assert native["proposal"]["p"][0] is None
        assert native["proposal"]["p"][1:] == pytest.approx(eager["proposal"]["p"][1:], abs=1e-4)
    assert sum(p for p in found[0][0]["proposal"]["p"][1:]) > 0.1


def test_the_end_of_a_request_is_recorded() -> None:
    llm, received = engine("serial", torch.float32), Listener()
    llm.listen(received)
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=24, ignore_eos=True))
    next(stream)
    stream.close()
    assert received[-1]["end"]["reason"] == "abort"
    drafter_of(llm).runner.cancel_check = _broken
    with pytest.raises(UserError, match="broken"):
        llm.generate([1, 2, 3], SamplingParams(max_tokens=24))
    assert received[-1]["end"] == {"at": received[-1]["end"]["at"], "reason": "error", "tokens": 0}
    llm.close()


def _broken() -> None:
    raise UserError("broken")


def verified(round_: int) -> RoundRecord:
    """A round of request 2 whose draft is in another process."""
    proposal, result = draft_proposal(2, round_, 1, (4,), (-1,)), VerifyResult(2, round_, 1, (0,), (5,))
    return RoundRecord(proposal, result, [float(at) for at in range(7)], True, 0.5, None, None)


def test_a_late_draft_timeline_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LISTENER_INTERVAL_S", 0.0)
    received, recorder, drained = Listener(), Recorder(), list[int]()
    recorder.listener, recorder.drain = received, drained.append
    recorder.begin(RequestStart(2, (1, 2), SamplingParams(), 2))
    recorder.add(verified(0))
    recorder.draft(1, 0, lambda: {"nodes": 1})
    recorder.draft(2, 1, lambda: {"nodes": 1})
    assert recorder.awaits_draft(0)
    recorder.draft(2, 0, lambda: {"nodes": 2})
    assert not recorder.awaits_draft(0)
    recorder.deliver()
    recorder.draft(2, 0, lambda: {"nodes": 3})
    recorder.add(verified(1))
    assert recorder.awaits_draft(1) and len(received) == 2
    recorder.end(Stats())
    assert drained == [1]
    root = {"tokens": (4,), "parents": (-1,), "sources": ["root"]}
    assert received[1:-1] == [
        {
            "request": 2, "round": 0, "wait": (2.0, 3.0), "proposal": root, "path": (0,),
            "tokens": (5,), "target": {"open": (1.0, 2.0), "verify": (4.0, 5.0), "forward": 0.5}, "draft": {"nodes": 2},
        },
        {
            "request": 2, "round": 1, "wait": (2.0, 3.0), "proposal": root, "path": (0,),
            "tokens": (5,), "target": {"verify": (4.0, 5.0), "forward": 0.5},
        },
    ]  # fmt: skip


def test_rounds_are_delivered_several_at_a_time() -> None:
    """The first line of a request immediately, rounds batched, all at its end; a trace file changes nothing."""
    recorder, received = Recorder(), list[int]()
    recorder.listener = lambda noted: received.append(len(noted))
    recorder.begin(RequestStart(2, (1, 2), SamplingParams(), 2))
    for round_ in range(3):
        recorder.add(verified(round_))
        recorder.deliver()
    recorder.end(Stats())
    assert received[0] == 1 and sum(received) == 5 and len(received) <= 5


def test_an_invalid_timeline_is_left_out() -> None:
    def read() -> dict[str, Any]:
        raise ValueError

    noted = verified(0)
    noted.draft = read
    assert "draft" not in to_record(noted)
