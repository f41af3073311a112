"""Drafting with a block head (DFlash): the text equals that of plain decoding, and the cache of the head equals a
recomputation, whatever the request, the prefix cache and the ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from swiftspec.backends.cpu import cpu
from swiftspec.backends.reference import reference
from swiftspec.config import EngineConfig
from swiftspec.llm_engine import LLMEngine
from swiftspec.messages import NodeSource, Proposal, VerifyResult, merge_results
from swiftspec.model.batch import HostBatch
from swiftspec.model.block_head import BlockHead
from swiftspec.model.loader import load_model
from swiftspec.params import SamplingParams
from swiftspec.runtime.executors.block import BlockExecutor
from swiftspec.runtime.head_drafter import BlockDrafter
from swiftspec.tree.marginals import add_likely_paths
from swiftspec.tree.tree import DraftTree
from tests.model.architectures.test_families import new_cache
from tests.support.cases import fast_first
from tests.support.draft_heads import make_dflash
from tests.support.ranks import Pool
from tests.support.roles import drafter_of, request_start, verifier_of
from tests.support.tiny_checkpoints import chain, make_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.7, seed=11)
REQUESTS = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "filters": replace(SEEDED, top_k=5),
    "penalties": replace(SEEDED, repetition_penalty=1.3, presence_penalty=0.2),
    "guidance": replace(SEEDED, guidance_scale=1.5, negative_prompt_ids=(9, 4, 40)),
    "path rules": replace(SEEDED, min_tokens=20, bad_words_ids=((7, 9), (3,))),
    "fixed shape": replace(GREEDY, verify_batch=4, draft_steps=2),
}
PROMPT = [5, 17, 3, 29, 11, 8, 2, 30]
IDS = (0, 2, 3)
OPTIONS: dict[str, Any] = {"dtype": torch.float64, "max_model_len": 200}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    make_checkpoint(folder / "target", layers=6, dtype=torch.float64)
    make_dflash(folder / "head", ids=IDS)
    return folder / "target", folder / "head"


def plain(target: Path, prompt: Sequence[int], sampling: SamplingParams, **options: Any) -> list[int]:
    """The text of autoregressive decoding."""
    alone = replace(sampling, verify_batch=None, draft_steps=None)
    return alone_on(target, **options).generate([*prompt], alone).token_ids


@cache
def alone_on(target: Path, **options: Any) -> LLMEngine:
    """An engine without a draft."""
    return LLMEngine(target, **OPTIONS | options)


def draft_well(llm: LLMEngine, text: Sequence[int], missed: int = 0) -> None:
    """Makes the head draft `text`, as second choice at every position that `missed` divides."""
    executor: Any = drafter_of(llm).executors[0]
    forward = executor.forward

    def knowing(batch: HostBatch) -> Tensor:
        logits = forward(batch)
        logits.fill_(0)
        for row, at in enumerate(range(int(batch.positions[0]) + 1, int(batch.positions[0]) + 1 + len(logits))):
            right = text[at] if at < len(text) else 0
            logits[row, right] = 30
            if missed and at % missed == 0:
                logits[row, (right + 1) % 64] = 31
        return logits

    executor.forward = knowing


def check_cache(target: Path, llm: LLMEngine, text: Sequence[int], ids: tuple[int, ...] = IDS) -> None:
    """The live cache of the head equals that of the whole text, written in one forward."""
    runner = drafter_of(llm).runner
    head = runner.model
    assert isinstance(head, BlockHead)
    count = runner.cache.prefix_len[0]
    assert 0 < count < len(text)
    model = load_model(target, dtype=torch.float64, ops=reference, max_positions=256, hidden_layers=ids)
    states = model.forward(chain([*text[:count]]), new_cache(model, reference, 256)).hidden
    assert states is not None
    cache = new_cache(head, reference, 256)
    cache.append_prefix(count)
    head.forward(replace(chain([*text[:count]]), hidden=head.project(states)), cache)
    for mine, theirs in ((runner.cache.kv.k, cache.kv.k), (runner.cache.kv.v, cache.kv.v)):
        torch.testing.assert_close(mine[:, 0, :, :count], theirs[:, 0, :, :count], rtol=0, atol=1e-9)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("window", "name"), fast_first(product((None, 6), REQUESTS), len(REQUESTS) + 1, unpack=True))
def test_the_text_equals_plain_decoding(tmp_path: Path, pair: tuple[Path, Path], name: str, window: int | None) -> None:
    target, head = pair
    if window is not None:
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        head = tmp_path
        make_dflash(head, ids=IDS, layer_types=kinds, use_sliding_window=True, sliding_window=window)
    llm, sampling = LLMEngine(target, head, **OPTIONS), REQUESTS[name]
    assert isinstance(drafter_of(llm), BlockDrafter) and llm.config.initial_draft_steps == 5
    answer = llm.generate(PROMPT, sampling)
    assert answer.token_ids == plain(target, PROMPT, sampling)
    found = {source for each in answer.stats.verified for source in each.sources}
    assert found == {NodeSource.ROOT, NodeSource.DRAFT_HEAD} and answer.stats.drafter_lost is None
    check_cache(target, llm, [*PROMPT, *answer.token_ids])


@pytest.mark.parametrize(("name", "missed"), [("greedy", 0), ("seeded", 3), ("guidance", 3), ("path rules", 0)])
def test_accepted_paths(pair: tuple[Path, Path], name: str, missed: int) -> None:
    """Of a head that drafts the text: most rounds accept several nodes, second choices included."""
    target, head = pair
    llm, sampling = LLMEngine(target, head, EngineConfig(verify_batch=12), **OPTIONS), REQUESTS[name]
    want = plain(target, PROMPT, sampling)
    draft_well(llm, [*PROMPT, *want], missed)
    answer = llm.generate(PROMPT, sampling)
    assert answer.token_ids == want
    assert answer.stats.rounds <= (8 if missed == 0 else 16)
    if missed:
        assert any(node != at for each in answer.stats.verified for at, node in enumerate(each.path))
    check_cache(target, llm, [*PROMPT, *answer.token_ids])


@pytest.mark.slow
def test_prefixes_are_reused(pair: tuple[Path, Path]) -> None:
    """By target and head alike, from the live cache and from the prefix cache."""
    target, head = pair
    llm, other = LLMEngine(target, head, **OPTIONS), [*range(40, 62)] * 3
    first = [*PROMPT * 4, 9]
    text = [*first, *llm.generate(first, GREEDY).token_ids]
    for prompt in ([*text[:60], 12, 13], [*other, 3], [*text[:50], 14], other, text[:20]):
        answer = llm.generate(prompt, SEEDED)
        assert answer.token_ids == plain(target, prompt, SEEDED)
        check_cache(target, llm, [*prompt, *answer.token_ids])
        cached = max(len(prompt) - 20, 0) if prompt[:20] == text[:20] else 0
        assert answer.stats.cached_tokens >= cached


@pytest.mark.slow
def test_hybrids(tmp_path: Path) -> None:
    """A target with gated delta layers, whose prefix cache keeps snapshots."""
    target, head = tmp_path / "target", tmp_path / "head"
    make_checkpoint(target, family="qwen3_5_text", dtype=torch.float64)
    make_dflash(head, ids=(0, 2), num_target_layers=4)
    llm, text = LLMEngine(target, head, EngineConfig(verify_batch=24), **OPTIONS), [*PROMPT]
    for sampling in (GREEDY, SEEDED, GREEDY):
        answer = llm.generate(text, sampling)
        assert answer.token_ids == plain(target, text, sampling) and answer.stats.drafter_lost is None
        text += answer.token_ids
        check_cache(target, llm, text, (0, 2))
    assert answer.stats.cached_tokens > 40


def test_the_shortest_prompt_and_the_longest_text(pair: tuple[Path, Path]) -> None:
    target, head = pair
    llm = LLMEngine(target, head, EngineConfig(verify_batch=16), dtype=torch.float64, max_model_len=20)
    for prompt in ([5], [5], PROMPT, [*PROMPT, *PROMPT, 9, 4, 40], [5]):
        sampling = replace(GREEDY, max_tokens=None)
        want = plain(target, prompt, sampling, max_model_len=20)
        assert llm.generate(prompt, sampling).token_ids == want
        assert len(prompt) + len(want) == 20


def test_a_request_that_begins_without_the_drafter(pair: tuple[Path, Path]) -> None:
    """The target has no states of cached tokens; the context of the head then begins after them."""
    target, head = pair
    llm, prompt = LLMEngine(target, head, **OPTIONS), [*PROMPT * 4, 9]
    want = [*prompt, *llm.generate(prompt, GREEDY).token_ids]
    drafter, verifier, start = drafter_of(llm), verifier_of(llm), request_start(prompt, GREEDY)
    assert verifier.open(start) == len(prompt) - 1
    results = list[VerifyResult]()
    for at in range(3):
        root = Proposal.root_only(start.request, at, len(prompt) - 1 + at, want[len(prompt) - 1 + at])
        results.append(verifier.verify(root))
        verifier.settle()
    drafter.open(replace(start, num_cached_tokens=(0,)))
    drafter.observe(merge_results(results))
    for _ in range(5):
        proposal = drafter.propose()
        assert len(proposal.tokens) == 8 and proposal.prefix_len >= len(prompt) + 2
        result = verifier.verify(proposal)
        verifier.settle()
        drafter.observe(result)
        results.append(result)
    (executor,) = drafter.executors
    assert isinstance(executor, BlockExecutor) and executor.offset == len(prompt) - 1
    tokens = [token for result in results for token in result.tokens]
    assert tokens == want[len(prompt) :][: len(tokens)]
    drafter.close()
    verifier.close()
    assert llm.generate(prompt, GREEDY).token_ids == want[len(prompt) :]


def test_ranks(pair: tuple[Path, Path], pool: Pool) -> None:
    target, head = pair
    values = {"seed": 3, "max_tokens": 30, "ignore_eos": True}
    requests = [(PROMPT * 2, {"temperature": t, **values}) for t in (0, 0.7)]
    plan = {"mode": "serial", "target_tp": 2}
    answers = pool.run(2, "decode", target=str(target), draft=str(head), plan=plan, requests=requests * 2)[0]
    for answer, (prompt, fields) in zip(answers, requests * 2, strict=True):
        assert answer["tokens"] == plain(target, prompt, SamplingParams(**fields)) and answer["lost"] is None


@pytest.mark.skipif(cpu.level() == "none", reason="there are no native operators here")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_native_operators(tmp_path: Path, dtype: torch.dtype) -> None:
    target, head, options = tmp_path / "target", tmp_path / "head", {"dtype": dtype, "max_model_len": 200}
    make_checkpoint(target, layers=6, hidden_size=64, dtype=torch.float64)
    make_dflash(head, ids=IDS, hidden=64)
    llm = LLMEngine(target, head, **options)
    assert drafter_of(llm).runner.ops is cpu
    for prompt in (PROMPT, PROMPT * 5):
        for sampling in (GREEDY, SEEDED):
            answer = llm.generate(prompt, sampling)
            assert answer.token_ids == plain(target, prompt, sampling, **options)
            assert answer.stats.drafted > answer.stats.rounds


@pytest.mark.sampled(1)
@pytest.mark.parametrize("drafter", ["model", "model+suffix"])
def test_adaptation_keeps_the_depth(pair: tuple[Path, Path], drafter: str) -> None:
    target, head = pair
    config = EngineConfig(self_switch=True, adapt_steps=True, adapt_batch=True, drafter=drafter)
    llm = LLMEngine(target, head, config, **OPTIONS)
    assert not llm.config.adapt_steps and not llm.config.time_rows
    for sampling in (GREEDY, replace(SEEDED, max_tokens=80), GREEDY):
        answer = llm.generate(PROMPT, sampling)
        assert answer.token_ids == plain(target, PROMPT, sampling)
        assert answer.stats.drafter_lost is None and answer.stats.policy.steps == 5


def test_depth(pair: tuple[Path, Path]) -> None:
    """d limits the depth of the proposals, up to the drafted positions of a block."""
    target, head = pair
    for steps, depth in ((1, 1), (3, 3), (9, 5)):
        llm = LLMEngine(target, head, EngineConfig(verify_batch=32, draft_steps=steps), **OPTIONS)
        assert llm.config.initial_draft_steps == depth
        want = plain(target, PROMPT, GREEDY)
        draft_well(llm, [*PROMPT, *want])
        rounds = llm.generate(PROMPT, GREEDY).stats.verified
        assert max(len(each.path) for each in rounds) == depth + 1


def test_traces(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    """The rows of a block are not nodes, and the root's keys and values are computed again."""
    llm = LLMEngine(*pair, trace=tmp_path / "trace.jsonl", **OPTIONS)
    answer = llm.generate(PROMPT, GREEDY)
    llm.close()
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    drafts = [line["draft"] for line in lines if "path" in line]
    assert len(drafts) == answer.stats.rounds
    assert {(draft["nodes"], draft["expanded"], draft["reused"]) for draft in drafts} == {(8, 1, 0)}
    assert [draft["wasted"] for draft in drafts] == [0, *[1] * (len(drafts) - 1)]
    assert [rows for _, _, rows in drafts[0]["forwards"]] == [len(PROMPT) - 1, 6]


def test_likely_paths_equal_an_enumeration() -> None:
    noise = np.random.default_rng(4)
    depths, count = 4, 3
    weights = -np.sort(noise.exponential(size=(depths, count)))
    weights[2, 2] = -np.inf
    tokens = noise.permutation(64)[: depths * count].reshape(depths, count)
    every: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for depth in range(1, depths + 1):
        for path in product(range(count), repeat=depth):
            weight = sum(weights[at, rank] for at, rank in enumerate(path))
            every.append((weight, tuple(int(tokens[at, rank]) for at, rank in enumerate(path))))
    every = sorted((each for each in every if each[0] > -np.inf), key=lambda each: -each[0])
    for size in (1, 2, 9, 40, len(every), len(every) + 5):
        tree = DraftTree(size, 1)
        tree.reset(7)
        tree.best_leaves(1)
        add_likely_paths(tree, tokens, weights)
        assert tree.count == min(size, len(every))
        paths = [tuple(path) for path in tree.path_tokens(range(tree.count))]
        assert paths == [path for _, path in every[: tree.count]]
        want = [weight for weight, _ in every[: tree.count]]
        np.testing.assert_allclose(tree.logprob[: tree.count], want)
        assert tree.best_subtree(size)[0] == [*range(tree.count)]
