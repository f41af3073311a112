"""Masked tokens: the draft never proposes them, in any mode and on any executor, and the text stays the target's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftspec.backends.cpu import cpu
from swiftspec.backends.reference import reference
from swiftspec.backends.unfused import unfused
from swiftspec.builder.load_options import LoadOptions
from swiftspec.cache.kv import KVCache
from swiftspec.cache.model_cache import ModelCache
from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.errors import UserError
from swiftspec.file_io import read_object
from swiftspec.llm_engine import LLMEngine
from swiftspec.messages import Proposal
from swiftspec.model.loader import load_model
from swiftspec.model.transformer import Transformer
from swiftspec.model.vocabulary import VocabularyIdentity
from swiftspec.params import SamplingParams
from swiftspec.runtime.verifier import Verifier
from tests.support.roles import drafter_of, replace_roles, restrict_executors, scheduler_of, tree_of, verifier_of
from tests.support.thread_group import on_ranks
from tests.support.tiny_checkpoints import chain, make_checkpoint
from tests.support.workers import client_on_workers, started

VOCAB, ROWS = 64, 72  # the last rows of both LM heads are padding
PROMPT = [5, 9, 11, 40, 8]
MASKED = tuple(range(1, VOCAB, 3))  # many, so that the target often draws one of them
SAMPLED = SamplingParams(max_tokens=24, temperature=1.0, seed=3, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
NATIVE = pytest.param(torch.float32, "auto", marks=pytest.mark.skipif(cpu.level() == "none", reason="needs AVX2"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target and draft at once: without a mask, everything would be accepted."""
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, vocab=ROWS, hidden_size=64, seed=4)
    return path


class ProposalLog:
    """A verifier that records the proposed tokens, without the root's."""

    def __init__(self, inner: Verifier) -> None:
        self._inner, self.tokens = inner, list[int]()

    def submit(self, proposal: Proposal) -> Any:
        self.tokens += [*proposal.tokens[1:]]
        return self._inner.submit(proposal)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def options(dtype: torch.dtype, ops: Any, **more: Any) -> LoadOptions:
    made = {"dtype": dtype, "ops": ops, "vocab_size": VOCAB, "max_model_len": 128, "device": "cpu", **more}
    return cast("LoadOptions", made)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("plan", "sampling"),
    [
        ({}, GREEDY),
        ({}, SAMPLED),
        ({"verify": "reject"}, SAMPLED),
        ({"verify": "match", "proposal": "sample"}, SAMPLED),
    ],
    ids=["greedy", "sampled", "reject", "drawn proposals"],
)
@pytest.mark.parametrize(("dtype", "ops"), [(torch.float64, "reference"), NATIVE])
def test_masked_tokens_are_never_proposed(
    model: Path, dtype: torch.dtype, ops: Any, plan: dict[str, Any], sampling: SamplingParams
) -> None:
    llm = LLMEngine(model, model, EngineConfig(draft_steps=2, **plan), **options(dtype, ops, masked_tokens=MASKED))
    log: Any = ProposalLog(verifier_of(llm))
    replace_roles(llm, verifier=log)
    result = llm.generate(PROMPT, sampling)
    assert len({*log.tokens}) > 8 and not {*log.tokens} & {*MASKED} and max(log.tokens) < VOCAB
    assert {*result.token_ids} & {*MASKED}, "the target draws them nevertheless"
    assert result.stats.accepted > 0
    if plan.get("verify") != "reject":
        plain = LLMEngine(model, **options(dtype, ops)).generate(PROMPT, sampling)
        assert result.token_ids == plain.token_ids


def logits_of(model: Transformer, tokens: list[int], ops: Any) -> torch.Tensor:
    """Logits [tokens, rows] of a forward over a text."""
    shape = len(model.spec.layers), model.kv_heads, 16, 64
    cache = ModelCache(KVCache(*shape, ops.make_slot_mover, dtype=model.dtype, device="cpu"))
    logits = model.forward(chain(tokens), cache).logits
    assert logits is not None
    return logits


@pytest.mark.parametrize("ops", [reference, unfused, cpu], ids=["reference", "unfused", "cpu"])
def test_the_other_logits_keep_their_bits(model: Path, ops: Any) -> None:
    if ops is cpu and cpu.level() == "none":
        pytest.skip("needs AVX2")
    whole = load_model(model, dtype=torch.float32, ops=ops, max_positions=64)
    masked = whole.with_masked_tokens(MASKED)
    assert whole.with_masked_tokens(()) is whole
    before, after = logits_of(whole, PROMPT, ops), logits_of(masked, PROMPT, ops)
    others = [token for token in range(ROWS) if token not in MASKED]
    assert torch.equal(before[:, others], after[:, others]) and before.isfinite().all()
    assert (after[:, list(MASKED)] == -torch.inf).all()


@pytest.mark.parametrize("name", ["native", "eager"])
def test_particles_have_exact_weights(model: Path, name: str) -> None:
    """In mode smc the draft's distribution q is that of the other tokens, normalised. If the two models are equal, a
    draft token therefore multiplies the weight by p / q, which is the target's probability of the other tokens."""
    if cpu.level() == "none" and name == "native":
        pytest.skip("needs AVX2")
    plan = EngineConfig("smc", population=PopulationConfig(particles=4, smc_draft_tokens=3, ess_threshold=0.0))
    llm = LLMEngine(model, model, plan, **options(torch.float32, "auto", masked_tokens=MASKED))
    restrict_executors(scheduler_of(llm), name)
    result = llm.generate(PROMPT, SamplingParams(max_tokens=12, temperature=1.0, seed=1, ignore_eos=True))
    target = load_model(model, dtype=torch.float64, ops=reference, max_positions=64)
    weights = list[float]()
    for particle in result.stats.population.particles:
        text = [*particle.tokens]
        assert len(text) == 12
        probs = logits_of(target, [*PROMPT, *text], reference)[len(PROMPT) - 1 : -1, :VOCAB].softmax(-1)
        drafted = [at for at in range(12) if at % 4 < 3]
        assert not {text[at] for at in drafted} & {*MASKED}
        outside = 1 - probs[:, list(MASKED)].sum(-1)
        assert outside.min() < 0.9, "the mask matters"
        weights.append(float(outside[drafted].log().sum()))
    shares = torch.tensor(weights, dtype=torch.float64).softmax(0)
    found = torch.tensor([particle.weight for particle in result.stats.population.particles], dtype=torch.float64)
    assert torch.allclose(found, shares, atol=1e-4)
    mean = torch.tensor(weights, dtype=torch.float64).logsumexp(0) - torch.tensor(4.0).log()
    assert result.stats.population.log_z == pytest.approx(float(mean), abs=1e-3)


def test_any_tp_size_has_the_same_masked_logits(model: Path) -> None:
    def work(group: Any) -> torch.Tensor:
        part = load_model(model, dtype=torch.float64, ops=reference, max_positions=64, group=group)
        return logits_of(part.with_masked_tokens(MASKED), PROMPT, reference)

    whole = load_model(model, dtype=torch.float64, ops=reference, max_positions=64).with_masked_tokens(MASKED)
    wanted = logits_of(whole, PROMPT, reference)
    for size in (2, 3):
        assert torch.allclose(torch.cat(on_ranks(size, work), -1)[:, :ROWS], wanted)


@pytest.fixture(scope="module")
def short(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model without the rows of the last tokens."""
    path, rows = tmp_path_factory.mktemp("short"), VOCAB - 5
    table = load_file(model / "model.safetensors")
    cut = {name: table[name][:rows].clone() for name in table if "embed" in name or "lm_head" in name}
    save_file({**table, **cut}, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps({**read_object(model / "config.json"), "vocab_size": rows}))
    return path


@pytest.mark.parametrize(("dtype", "ops"), [(torch.float64, "reference"), NATIVE])
def test_a_draft_with_fewer_rows_than_the_target(model: Path, short: Path, dtype: torch.dtype, ops: Any) -> None:
    """Tokens that it does not know have zero embeddings and are masked."""
    prompt, missing = [*PROMPT, VOCAB - 1], tuple(range(VOCAB - 5, VOCAB))
    with pytest.raises(UserError, match=f"the LM head of {short} has only 59 rows"):
        LLMEngine(model, short, **options(dtype, ops, masked_tokens=missing[1:]))
    llm = LLMEngine(model, short, EngineConfig(draft_steps=2), **options(dtype, ops, masked_tokens=missing))
    sampling = SamplingParams(max_tokens=32, seed=5, ignore_eos=True, logit_bias=dict.fromkeys(missing, 3.0))
    result = llm.generate(prompt, sampling)
    assert {*result.token_ids} & {*missing} and drafter_of(llm).runner.vocab == VOCAB
    assert result.token_ids == LLMEngine(model, **options(dtype, ops)).generate(prompt, sampling).token_ids
    with pytest.raises(UserError, match=r"masked_tokens must be token ids in 0\.\.63"):
        LLMEngine(model, model, **options(dtype, ops, masked_tokens=(64,)))


@pytest.fixture(scope="module")
def worker(model: Path) -> Iterator[Any]:
    with started("draft", model, added_tokens={10: "<x>", 20: "<y>", 30: "<same>"}) as draft:
        yield draft


@pytest.mark.parametrize("mode", ["serial", "async"])
def test_a_worker_masks_what_its_client_needs(model: Path, worker: Any, mode: str) -> None:
    """Names differ at two ids, and the target's vocabulary is smaller than the worker's LM head."""
    target = VocabularyIdentity("00" * 32, {10: "<other>", 30: "<same>"}, VOCAB)
    lines: list[str] = []
    config = EngineConfig(mode, draft_remote=True, draft_steps=2)
    address = replace(worker.client_address(), vocabulary=target)
    llm = LLMEngine(model, None, config, **options(torch.float64, "reference", draft_worker=address, note=lines.append))
    try:
        log: Any = ProposalLog(tree_of(llm).verifier)
        replace_roles(llm, verifier=log)
        for seed in range(3):
            sampling = SamplingParams(max_tokens=24, seed=seed, ignore_eos=True, logit_bias={10: 4.0, 20: 4.0})
            text = llm.generate(PROMPT, sampling).token_ids
            assert text == LLMEngine(model, **options(torch.float64, "reference")).generate(PROMPT, sampling).token_ids
        assert log.tokens and not {*log.tokens} & {10, 20} and max(log.tokens) < VOCAB
    finally:
        llm.close()
    assert ["2 special tokens" in line for line in lines] == [True]


def test_a_worker_with_other_ordinary_tokens_or_too_few_rows_is_refused(model: Path, worker: Any, short: Path) -> None:
    config = EngineConfig("serial", draft_remote=True)
    other = replace(worker.client_address(), vocabulary=VocabularyIdentity("11" * 32, {}, VOCAB))
    with pytest.raises(UserError, match="the ordinary tokens of their tokenizers differ"):
        LLMEngine(model, None, config, **options(torch.float64, "reference", draft_worker=other))
    with (
        started("draft", short) as small,
        pytest.raises(UserError, match="has 59 rows in its LM head, but the target has 64 tokens"),
    ):
        LLMEngine(model, None, config, **options(torch.float64, "reference", draft_worker=small.client_address()))


def test_a_client_with_a_target_worker_passes_its_added_tokens(model: Path, worker: Any) -> None:
    with (
        started("target", model, added_tokens={10: "<other>"}) as target,
        client_on_workers(target.client_address(), worker.client_address(), mode="serial", draft_steps=2) as running,
    ):
        assert len(running.generate(PROMPT, GREEDY).token_ids) == 24
        (session,) = worker.worker.sessions._sessions.values()
        assert session.masked == (10, 20, 30)
