"""What is on record, and that nothing of it shows in the answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.engine import Stats
from swiftspec.errors import UserError
from swiftspec.llm import LLM
from swiftspec.messages import Opening
from swiftspec.observe.lines import opened
from swiftspec.observe.recorder import Recorder
from swiftspec.params import SamplingParams
from tests.support.roles import drafter_of, verifier_of

DEMO = Path(__file__).parents[2] / "swiftspec" / "demo"
PROMPT = [5, 6, 7, 8, 9]


def engine(mode: str, dtype: torch.dtype) -> LLM:
    plan = EngineConfig(mode, population=PopulationConfig(particles=2, smc_draft_tokens=2))
    return LLM(DEMO / "target", None if mode == "ar" else DEMO / "draft", plan, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["ar", "serial", "smc"])
def test_a_listener_changes_nothing_and_costs_nothing_once_gone(mode: str, dtype: torch.dtype) -> None:
    llm, heard = engine(mode, dtype), list[dict[str, Any]]()
    sampling = SamplingParams(seed=3, max_tokens=24, ignore_eos=True)
    alone = llm.generate(PROMPT, sampling).token_ids
    llm.listen(heard.append)
    stream = llm.stream(PROMPT, sampling)
    first = next(stream)
    llm.listen(None)  # from the next request on
    assert [*first.token_ids, *(token for chunk in stream for token in chunk.token_ids)] == alone
    assert llm.generate(PROMPT, sampling).token_ids == alone
    assert verifier_of(llm).runner.hooks == [] if mode != "smc" else True
    begin, *rounds, end = heard
    assert begin["begin"]["prompt"] == (*PROMPT,) and begin["begin"]["sampling"]["seed"] == 3
    assert [token for line in rounds for token in line["tokens"]][: len(alone)] == alone
    assert (end["end"]["reason"], end["end"]["tokens"]) == ("length", 24)
    assert {line["request"] for line in heard} == {2}
    llm.close()


def test_the_tree_holds_the_proposal_and_goes_on_in_the_next_round() -> None:
    llm, heard = engine("serial", torch.float32), list[dict[str, Any]]()
    llm.listen(heard.append)
    llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    trees = [opened(line)["draft"]["tree"] for line in heard[1:-1]]
    for line, tree in zip(heard[1:-1], trees, strict=True):
        proposal, named = line["proposal"], dict[tuple[int, int], int]()
        for node, (token, parent) in enumerate(zip(tree["tokens"].tolist(), tree["parents"].tolist())):
            assert parent < node and (parent, token) not in named
            named[parent, token] = node
        places = [named[-1, proposal["tokens"][0]]]
        for token, parent in zip(proposal["tokens"][1:], proposal["parents"][1:]):
            places.append(named[places[parent], token])
        assert tree["expanded"][0] and (tree["logprobs"] <= 0).all() and tree["logprobs"][0] == 0
    assert [tree["tokens"][0] for tree in trees[1:]] == [line["tokens"][-1] for line in heard[1:-2]]
    llm.close()


def test_the_target_s_probabilities_are_its_softmax() -> None:
    """Of native steps as of those on plain torch, and for the tokens that it draws greedily the largest."""
    found: list[list[Any]] = []
    for penalty in (1.0, 1.0001):  # which is for eager steps
        llm, heard = engine("serial", torch.float32), list[dict[str, Any]]()
        llm.listen(heard.append)
        llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, repetition_penalty=penalty))
        found.append(heard[1:-1])
        assert verifier_of(llm).steps.name == ("eager" if penalty > 1 else "native")
        llm.close()
    for native, eager in zip(*found, strict=True):
        assert native["proposal"]["tokens"] == eager["proposal"]["tokens"]
        assert native["proposal"]["p"][0] is None
        assert native["proposal"]["p"][1:] == pytest.approx(eager["proposal"]["p"][1:], abs=1e-4)
    assert sum(p for p in found[0][0]["proposal"]["p"][1:]) > 0.1


def test_how_a_request_ends() -> None:
    llm, heard = engine("serial", torch.float32), list[dict[str, Any]]()
    llm.listen(heard.append)
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=24, ignore_eos=True))
    next(stream)
    stream.close()
    assert heard[-1]["end"]["reason"] == "abort"
    drafter_of(llm).runner.pause = _broken
    with pytest.raises(UserError, match="broken"):
        llm.generate([1, 2, 3], SamplingParams(max_tokens=24))
    assert heard[-1]["end"] == {"at": heard[-1]["end"]["at"], "reason": "error", "tokens": 0}
    llm.close()


def _broken() -> None:
    raise UserError("broken")


def test_what_the_draft_says_late_is_dropped() -> None:
    heard: list[dict[str, Any]] = []
    recorder = Recorder()
    recorder.listener = heard.append
    recorder.begin(Opening(2, (1, 2), SamplingParams(), 2))
    recorder.add(0, tokens=(5,))
    recorder.draft(1, 0, {"nodes": 1})
    assert recorder.lacks(0)
    recorder.draft(2, 0, {"nodes": 2})
    recorder.add(1, wait=(0, 1))
    recorder.release(1)
    recorder.draft(2, 0, {"nodes": 3})
    assert not recorder.lacks(0) and recorder.lacks(1)
    recorder.end(Stats())
    assert heard[1:-1] == [{"request": 2, "round": 0, "tokens": (5,), "draft": {"nodes": 2}}]
