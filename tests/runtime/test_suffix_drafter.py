"""Suffix lookup as the drafter: the text equals that of autoregressive decoding, in fewer rounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swiftspec.config import EngineConfig
from swiftspec.drafter_kinds import SUFFIX_LOOKUP
from swiftspec.errors import DrafterLost
from swiftspec.llm_engine import LLMEngine
from swiftspec.messages import NodeSource, Proposal, VerifyResult
from swiftspec.params import SamplingParams
from swiftspec.runtime.drafter import NoDrafter
from swiftspec.runtime.suffix_drafter import SuffixDrafter
from swiftspec.startup.built_in_models import DEMO_MODELS
from swiftspec.text.codec import TextCodec
from tests.support.cases import fast_first
from tests.support.ranks import Pool
from tests.support.roles import replace_roles, request_start, tree_of
from tests.support.tiny_checkpoints import make_checkpoint, make_pair

PROMPT = [5, 17, 3, 29, 11, 8, 2, 30]
GREEDY = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.7, seed=11)
GUIDED = replace(SEEDED, guidance_scale=1.5, negative_prompt_ids=(9, 4, 40))
CODE = "def read_lines(path):\n    with open(path) as file:\n        return file.read()\n\n\n"


def proposals_equal_plain(target: Path, prompt: list[int], kinds: list[SamplingParams], **options: Any) -> list[float]:
    """Checks the texts of suffix lookup. Returns the tokens per round of each."""
    plain, lookup = LLMEngine(target, **options), LLMEngine(target, SUFFIX_LOOKUP, EngineConfig(), **options)
    found = []
    for sampling in kinds:
        answer = lookup.generate(prompt, sampling)
        assert answer.token_ids == plain.generate(prompt, sampling).token_ids
        assert answer.stats.drafter_lost is None
        sources = {source for each in answer.stats.verified for source in each.sources}
        assert sources <= {NodeSource.ROOT, NodeSource.SUFFIX}
        found.append(answer.stats.tokens / answer.stats.rounds)
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ops", fast_first(["auto", "reference"], 1))
def test_the_text_equals_plain_decoding(ops: Any) -> None:
    lines = "".join(f"    self.value_{name} = value_{name}\n" for name in "abcdefgh")
    prompt = TextCodec(DEMO_MODELS.target).encode(lines)
    greedy, _ = proposals_equal_plain(DEMO_MODELS.target, prompt, [GREEDY, SEEDED], ops=ops)
    assert greedy > 1.5, "the answer repeats lines of the prompt"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_the_text_of_random_models_equals_plain_decoding(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, family=family, dtype=torch.float64)
    options: dict[str, Any] = {"dtype": torch.float64, "max_model_len": 200}
    repeated = PROMPT * 6  # many proposals, most of which are rejected
    proposals_equal_plain(tmp_path, repeated, [GREEDY, SEEDED, GUIDED], **options)


def test_ranks_verify_the_proposals_of_rank_0(tmp_path: Path, pool: Pool) -> None:
    make_checkpoint(tmp_path, dtype=torch.float64, num_attention_heads=8, hidden_size=64)
    plain = LLMEngine(tmp_path, dtype=torch.float64)
    shared = {"seed": 3, "max_tokens": 60, "ignore_eos": True}
    requests = [(PROMPT * 4, {"temperature": t, **shared}) for t in (0, 0.7, 0.7)]
    plan = {"mode": "serial", "target_tp": 2}
    answers = pool.run(2, "decode", target=str(tmp_path), draft=SUFFIX_LOOKUP, plan=plan, requests=requests)[0]
    for answer, (prompt, values) in zip(answers, requests, strict=True):
        assert answer["tokens"] == plain.generate(prompt, SamplingParams(**values)).token_ids
        assert answer["lost"] is None
    assert answers[2]["rounds"] < 20, "the text of the request before is copied"


def test_measured_rows_do_not_change_the_text() -> None:
    """On a CPU the number of nodes follows from the measured time of a row."""
    prompt = TextCodec(DEMO_MODELS.target).encode(CODE + "def read_lines(path):\n")
    plain = LLMEngine(DEMO_MODELS.target).generate(prompt, GREEDY)
    adaptive = LLMEngine(DEMO_MODELS.target, SUFFIX_LOOKUP, EngineConfig(self_switch=True, adapt_batch=True))
    assert adaptive.config.time_rows and adaptive.config.max_nodes > adaptive.config.verify_batch
    assert adaptive.generate(prompt, GREEDY).token_ids == plain.token_ids


def test_a_later_request_copies_from_an_earlier_one(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, dtype=torch.float64)
    llm = LLMEngine(tmp_path, SUFFIX_LOOKUP, EngineConfig(), dtype=torch.float64)
    first, again = (llm.generate(PROMPT, SEEDED) for _ in range(2))
    assert first.token_ids == again.token_ids
    assert again.stats.rounds < 20 < first.stats.rounds
    alone = replace(SEEDED, seed=12, suffix_memory=False)
    rounds = [llm.generate(PROMPT, each).stats.rounds for each in (alone, alone, replace(alone, suffix_memory=True))]
    assert min(rounds) > 20, "requests with suffix_memory=False read no earlier text, and keep none"
    assert llm.generate(PROMPT, SEEDED).stats.rounds < 20


def drafter_after(tokens: list[int], **sampling: Any) -> SuffixDrafter:
    drafter = SuffixDrafter(8, 256)
    drafter.open(request_start(tokens, replace(GREEDY, **sampling)))
    return drafter


def test_a_conversation_is_indexed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that begins like the latest text appends the rest, and the tokens before it that a match can have."""
    drafter, appended = drafter_after([*range(300)]), list[list[int]]()
    index: Any = SimpleNamespace(
        begin_text=lambda: None, append=lambda tokens: appended.append([*tokens]), query=lambda *_: ([],) * 5
    )
    monkeypatch.setattr(drafter, "_index", index)
    drafter.propose()
    drafter.observe(VerifyResult(1, 0, 299, (0, 1), (7, 8)))
    drafter.open(request_start([*range(300), 7, 9, 5], GREEDY))  # the last token of the output was cut
    drafter.open(request_start([4, 5], GREEDY))
    assert appended == [[7, 8], [*range(237, 300), 7, 9, 5], [4, 5]]


def test_a_text_without_repetition_has_no_proposals() -> None:
    proposal = drafter_after([*range(50)]).propose()
    assert proposal == Proposal.root_only(1, 0, 49, 49)


def test_a_repeated_token_continues() -> None:
    proposal = drafter_after([7] * 100).propose()
    assert proposal.tokens == (7,) * 8 and proposal.parents == tuple(range(-1, 7))
    assert all(below <= above for above, below in zip(proposal.weights, proposal.weights[1:], strict=False))


def test_siblings_have_different_tokens() -> None:
    drafter = drafter_after([1, 2, 3, 1, 2, 4, 1, 2, 3, 5, 1, 2])
    for _ in range(40):  # short matches were always right, so their nodes pay
        for length in range(2, 9):
            drafter.acceptance.add(length, 1.0, accepted=True)
    proposal = drafter.propose()
    assert len(proposal.tokens) > 2
    assert len({*zip(proposal.parents, proposal.tokens, strict=True)}) == len(proposal.tokens)


def test_a_request_limits_the_nodes() -> None:
    assert len(drafter_after([7] * 100, verify_batch=3).propose().tokens) == 3


def test_rows_are_verified_only_if_they_pay() -> None:
    """With free rows all nodes are verified, with rows that cost a forward each none."""
    for seconds, nodes in (([1.0] * 8, 8), ([float(rows) for rows in range(1, 9)], 1)):
        drafter = SuffixDrafter(8, 256, seconds)
        drafter.open(request_start([7] * 20, GREEDY))
        assert len(drafter.propose().tokens) == nodes


def test_wrong_matches_are_not_proposed_again() -> None:
    drafter = drafter_after([1, 2, 3, 4, 5, 6, 7, 8] * 20)
    sizes, at, last = [], 159, 8
    for round_ in range(60):  # a new token, which no proposal has, and the text begins to repeat again
        proposal = drafter.propose()
        sizes.append(len(proposal.tokens))
        drafter.observe(VerifyResult(1, round_, at, (0,), (9 + round_,)))
        drafter.observe(VerifyResult(1, round_, at + 1, (0,), (1,)))
        for token in (2, 3, 4, 5, 6, 7, last):
            drafter.observe(VerifyResult(1, round_, at + token, (0,), (token,)))
        at += 9
    assert sizes[0] == 8 and sizes[-1] == 1


def test_a_node_without_a_known_successor_is_not_measured() -> None:
    """If the verified proposal is another one, the bonus token may be a node with children."""
    drafter, counted = drafter_after([7] * 100), list[bool]()
    measured: Any = SimpleNamespace(
        table=drafter.acceptance.table, add=lambda length, share, *, accepted: counted.append(accepted)
    )
    drafter.acceptance = measured
    assert drafter.propose().tokens == (7,) * 8
    drafter.observe(VerifyResult(1, 0, 99, (0, 1), (7, 7)))
    assert counted == [True, True]


class FailingDrafter(NoDrafter):
    """A drafter that is lost at its third proposal."""

    calls = 0

    def propose(self) -> Proposal:
        self.calls += 1
        if self.calls > 2:
            raise DrafterLost("the draft model left")
        return super().propose()


def test_suffix_lookup_replaces_a_lost_draft(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    llm = LLMEngine(*pair, EngineConfig("serial"), dtype=torch.float64)
    prompt = PROMPT * 2
    text = LLMEngine(pair[0], dtype=torch.float64).generate(prompt, GREEDY).token_ids
    prompt += text  # contains the answer to its beginning
    replace_roles(llm, FailingDrafter(), spare=SuffixDrafter(8, 512))
    answer = llm.generate(prompt, GREEDY)
    assert answer.token_ids == LLMEngine(pair[0], dtype=torch.float64).generate(prompt, GREEDY).token_ids
    assert answer.stats.drafter_lost == "the draft model left"
    sources = [source for each in answer.stats.verified for source in each.sources]
    assert NodeSource.SUFFIX in sources


def test_mode_ar_has_no_lookup(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, dtype=torch.float64)
    llm = LLMEngine(tmp_path, SUFFIX_LOOKUP, EngineConfig("ar"), dtype=torch.float64)
    assert not isinstance(tree_of(llm).drafter, SuffixDrafter)
    assert llm.generate(PROMPT, GREEDY).stats.drafted == 0
