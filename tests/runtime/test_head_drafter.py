"""Draft heads as drafters: the text equals that of autoregressive decoding, the cache of the head follows from the
target's hidden states, and its proposals are those of the head in plain torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from swiftspec.backends.cpu import cpu
from swiftspec.backends.reference import reference
from swiftspec.builder.plan import Plan
from swiftspec.config import EngineConfig
from swiftspec.drafter_kinds import GRAFTED
from swiftspec.errors import UserError
from swiftspec.llm_engine import LLMEngine
from swiftspec.messages import NodeSource, merge_results
from swiftspec.model.draft_head import DraftHead
from swiftspec.model.loader import load_model
from swiftspec.params import SamplingParams
from swiftspec.runtime.drafter import NoDrafter
from tests.model.architectures.test_families import new_cache
from tests.support.cases import fast_first
from tests.support.draft_heads import add_mtp, eagle3_forward, make_eagle3
from tests.support.ranks import Pool
from tests.support.roles import drafter_of, request_start, verifier_of
from tests.support.tiny_checkpoints import chain, make_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9, seed=3)
PENALISED = replace(SEEDED, repetition_penalty=1.3, top_k=20, logprobs=2)
GUIDED = replace(SEEDED, guidance_scale=1.5, negative_prompt_ids=(4, 9, 11, 3))
PROMPT = [5, 17, 3, 29, 11, 8, 2]
IDS = (1, 2, 3)
OPTIONS: dict[str, Any] = {"dtype": torch.float64, "max_model_len": 200}
WIDE = EngineConfig("serial", verify_batch=24)  # accepts tokens of a random head, too

Pair = tuple[Path, Path | str]


@pytest.fixture(scope="module", params=fast_first(["eagle3", "qwen3_5_text", "qwen3_next"], 1))
def pair(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    return make_head_pair(folder, request.param)


def make_head_pair(folder: Path, kind: str, **shape: Any) -> Pair:
    if kind == "eagle3":
        make_checkpoint(folder / "target", layers=3, dtype=torch.float64, **shape)
        make_eagle3(folder / "head", layers=IDS, draft_vocab=50)
        return folder / "target", folder / "head"
    make_checkpoint(folder, family=kind, dtype=torch.float64)
    add_mtp(folder)
    return folder, "mtp"


SERIAL, GRAFTED_HEAD = EngineConfig("serial"), EngineConfig("serial", drafter=GRAFTED)
# every target, and every configuration with EAGLE-3 and with multi-token prediction
TEXTS = [
    ("eagle3", WIDE), ("qwen3_5_text", WIDE),
    ("eagle3", SERIAL), ("eagle3", GRAFTED_HEAD), ("qwen3_5_text", SERIAL), ("qwen3_next", GRAFTED_HEAD),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("pair", "config"), fast_first(TEXTS, 1, unpack=True), indirect=["pair"])
def test_the_text_equals_plain_decoding(pair: Pair, config: EngineConfig) -> None:
    plain, head = LLMEngine(pair[0], **OPTIONS), LLMEngine(*pair, config, **OPTIONS)
    short, long = [5], [*PROMPT, 40, 41] * 3
    requests = [(PROMPT, sampling) for sampling in (GREEDY, SEEDED, PENALISED, GUIDED)]
    for prompt, whole in (*requests, (short, SEEDED), (long, GREEDY), (short, GUIDED), (long, GUIDED)):
        sampling = replace(whole, max_tokens=40)
        answer = head.generate(prompt, sampling)
        assert answer.token_ids == plain.generate(prompt, sampling).token_ids
        assert answer.stats.drafter_lost is None and answer.stats.drafted > 30
        assert NodeSource.DRAFT_HEAD in {source for each in answer.stats.verified for source in each.sources}
        assert config is not WIDE or answer.stats.accepted > 0


@pytest.mark.slow
def test_the_last_token_of_the_context(pair: Pair) -> None:
    for length in (40, 41, 47):
        options: dict[str, Any] = OPTIONS | {"max_model_len": length}
        sampling = replace(SEEDED, max_tokens=None)
        want = LLMEngine(pair[0], **options).generate(PROMPT, sampling).token_ids
        answer = LLMEngine(*pair, WIDE, **options).generate(PROMPT, sampling)
        assert answer.token_ids == want and len(want) == length - len(PROMPT)


def check_cache(llm: LLMEngine, target: Path, tokens: list[int]) -> int:
    """Compares keys and values of the head with those that follow from a forward of the target over `tokens`. Returns
    the number of positions."""
    runner = drafter_of(llm).runner
    head, count = runner.model, runner.cache.prefix_len[0]
    assert isinstance(head, DraftHead)
    layers = verifier_of(llm).runner.model.hidden_layers
    model = load_model(target, dtype=torch.float64, ops=reference, max_positions=200, hidden_layers=layers)
    hidden = model.forward(chain(tokens[:count]), new_cache(model, reference, 200)).hidden
    assert hidden is not None
    cache = new_cache(head, reference, 200)
    cache.append_prefix(count)
    head.forward(replace(chain(tokens[1 : count + 1]), hidden=head.project(hidden)), cache, head=False)
    for name in ("k", "v"):
        mine, want = (getattr(each.kv, name)[:, 0, :, :count] for each in (runner.cache, cache))
        torch.testing.assert_close(mine, want, rtol=0, atol=1e-9)
    return count


def test_the_cache_follows_from_the_states_of_the_target(pair: Pair) -> None:
    """Also after requests that begin with an earlier text, or a part of it, and after one that did not use the head."""
    llm = LLMEngine(*pair, WIDE, **OPTIONS)
    first = llm.generate(PROMPT, GREEDY)
    text = [*PROMPT, *first.token_ids]
    assert check_cache(llm, pair[0], text) > 55
    longer = [*text, 33, 34, 35]
    second = llm.generate(longer, SEEDED)
    assert second.stats.cached_tokens > 50
    assert check_cache(llm, pair[0], [*longer, *second.token_ids]) > 115
    llm.generate([9, *PROMPT], replace(GREEDY, verify_batch=1))  # autoregressive: the head does not see this request
    third = llm.generate(text[:40], GREEDY)
    assert 0 < third.stats.cached_tokens < 40
    assert check_cache(llm, pair[0], [*text[:40], *third.token_ids]) > 85


def test_a_drafter_that_joins_a_request_late(pair: Pair) -> None:
    """As after autoregressive rounds: the context of the head begins where it has states of the target."""
    llm = LLMEngine(*pair, WIDE, **OPTIONS)
    drafter, verifier = drafter_of(llm), verifier_of(llm)
    prompt = [*PROMPT, *range(40, 60)]
    llm.generate(prompt, replace(GREEDY, max_tokens=1))  # so that the target's prefix cache supplies the prompt
    want = LLMEngine(pair[0], **OPTIONS).generate(prompt, replace(GREEDY, max_tokens=40)).token_ids
    start = request_start(prompt, GREEDY)
    assert verifier.open(start) == len(prompt) - 1
    plain, got = llm_rounds(verifier, start, 3)
    drafter.open(start)
    drafter.observe(plain)
    accepted = 0
    while len(got) < 40:
        proposal = drafter.propose()
        result = verifier.verify(proposal)
        drafter.observe(result)
        verifier.settle()
        got += result.tokens
        accepted += len(result.path) - 1
    assert got[:40] == want and accepted > 0
    count = drafter.runner.cache.prefix_len[0]
    assert count <= len(got) + 1  # without the prompt, whose states are unknown


def llm_rounds(verifier: Any, start: Any, count: int) -> tuple[Any, list[int]]:
    """Decodes `count` tokens without a draft. Returns the merged result, and the tokens."""
    plain, results = NoDrafter(), list[Any]()
    plain.open(start)
    for _ in range(count):
        results.append(verifier.verify(plain.propose()))
        plain.observe(results[-1])
        verifier.settle()
    return merge_results(results), [token for result in results for token in result.tokens]


def test_proposals_are_those_of_the_head(tmp_path: Path) -> None:
    """A chain of the most likely tokens: rows of verified tokens have states of the target, later ones outputs of the
    head."""
    target, folder = make_head_pair(tmp_path, "eagle3")
    assert isinstance(folder, Path)
    tensors = load_file(folder / "model.safetensors")
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    llm = LLMEngine(
        target,
        folder,
        EngineConfig("serial", verify_batch=5, draft_leaves=1, draft_steps=4, calibration=0.05),
        **OPTIONS,
    )
    drafter, verifier = drafter_of(llm), verifier_of(llm)
    model = load_model(target, dtype=torch.float64, ops=reference, max_positions=200, hidden_layers=(0, 1, 2))
    start, text = request_start(PROMPT, GREEDY), [*PROMPT]
    drafter.open(start)
    verifier.open(start)
    depths = list[int]()
    for _ in range(8):
        proposal = drafter.propose()
        hidden = model.forward(chain(text), new_cache(model, reference, 200)).hidden
        assert hidden is not None
        states = F.linear(hidden[:-1].flatten(1), tensors["fc.weight"])
        chosen = spine(proposal)
        assert chosen == drafted(tensors, embedding, text, states, len(chosen))
        depths.append(len(chosen))
        result = verifier.verify(proposal)
        drafter.observe(result)
        verifier.settle()
        text += result.tokens
    assert max(depths) == 4 and min(depths) > 1


def drafted(tensors: dict[str, Tensor], embedding: Tensor, text: list[int], states: Tensor, count: int) -> list[int]:
    """The most likely tokens after a text, one after the other."""
    ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
    tokens = text[1:]
    for _ in range(count):
        logits, outputs = eagle3_forward(tensors, embedding, tokens, states)
        tokens = [*tokens, int(ids[logits[-1].argmax()])]
        states = torch.cat((states, outputs[-1:]))
    return tokens[-count:]


def spine(proposal: Any) -> list[int]:
    """Tokens of the path that follows the first child of each node."""
    tokens, node = list[int](), 0
    while node in proposal.parents:
        node = proposal.parents.index(node)
        tokens.append(proposal.tokens[node])
    return tokens


@pytest.mark.parametrize("kind", ["eagle3", "qwen3_5_text"])
def test_ranks(tmp_path: Path, pool: Pool, kind: str) -> None:
    target, head = make_head_pair(tmp_path, kind)
    plain = LLMEngine(target, **OPTIONS)
    common = {"seed": 3, "max_tokens": 50, "ignore_eos": True}
    requests = [(PROMPT * times, {"temperature": t, **common}) for t in (0, 0.7) for times in (1, 3)]
    plan = {"mode": "serial", "target_tp": 2, "verify_batch": 24}
    answers = pool.run(2, "decode", target=str(target), draft=str(head), plan=plan, requests=requests)[0]
    for answer, (prompt, values) in zip(answers, requests, strict=True):
        assert answer["tokens"] == plain.generate(prompt, SamplingParams(**values)).token_ids
        assert answer["lost"] is None and answer["rounds"] < 50


@pytest.mark.sampled(1)
@pytest.mark.skipif(cpu.level() == "none", reason="there are no native operators here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_operators(tmp_path: Path, dtype: torch.dtype) -> None:
    target, folder = tmp_path / "target", tmp_path / "head"
    make_checkpoint(target, layers=6, hidden_size=64, dtype=torch.float64)
    make_eagle3(folder, layers=IDS, hidden=64, target_hidden=64, draft_vocab=40)
    options: dict[str, Any] = OPTIONS | {"dtype": dtype}
    plain, head = LLMEngine(target, **options), LLMEngine(target, folder, WIDE, **options)
    for sampling in (GREEDY, SEEDED, GUIDED):
        answer = head.generate(PROMPT, sampling)
        assert answer.token_ids == plain.generate(PROMPT, sampling).token_ids and answer.stats.accepted > 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EngineConfig("async", draft_tp=1), "is not supported in mode async; use mode serial"),
        (EngineConfig("serial", verify="reject"), "is not supported with verify reject"),
        (EngineConfig("smc"), "is not supported in mode smc"),
    ],
)
def test_what_does_not_support_draft_heads(tmp_path: Path, config: EngineConfig, message: str) -> None:
    pair = make_head_pair(tmp_path, "eagle3")

    class Two:
        size = local_size = 2
        local_rank = 0

    ranks: Any = Two() if config.num_ranks > 1 else None
    options: Any = OPTIONS
    with pytest.raises(UserError, match=message):
        Plan.create(*pair, config, ranks, options)
