"""Log-probabilities equal those of the whole unmodified distribution, for any sampling parameters and any mode."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swiftspec.builder.roles import EngineLimits
from swiftspec.config import EngineConfig
from swiftspec.engine import TokenChunk
from swiftspec.errors import UserError
from swiftspec.llm_engine import LLMEngine
from swiftspec.messages import SampledLogprob
from swiftspec.params import SamplingParams
from swiftspec.runtime.runner import PREFILL_CHUNK_TOKENS
from swiftspec.sampling.logprobs import token_logprobs
from swiftspec.sampling.sampler import Sampler
from swiftspec.sampling.vocab import VocabShard
from tests.support.roles import make_drafter, replace_roles, verifier_of
from tests.support.thread_group import on_ranks
from tests.support.tiny_checkpoints import make_checkpoint

VOCAB = 64
PROMPT = [(7 * i + i // 9) % VOCAB for i in range(PREFILL_CHUNK_TOKENS + 40)]
PARAMS = SamplingParams(max_tokens=21, ignore_eos=True, logprobs=3, prompt_logprobs=2)
SHAPED = replace(PARAMS, temperature=0.7, seed=5, top_p=0.9, presence_penalty=0.8, logit_bias={4: 2.0})
REQUESTS = [replace(PARAMS, temperature=0), SHAPED]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    for name, seed in (("target", 0), ("draft", 0)):
        make_checkpoint(folder / name, seed=seed, vocab=VOCAB, dtype=torch.float64)
    return folder / "target", folder / "draft"


def make(pair: tuple[Path, Path], mode: str, **config: Any) -> LLMEngine:
    """An engine; mode "ahead" has a lookahead drafter in the same process."""
    plan = EngineConfig("serial" if mode == "ahead" else mode, **config)
    llm = LLMEngine(pair[0], None if mode == "ar" else pair[1], plan, dtype=torch.float64)
    if mode == "ahead":
        drafter: Any = llm.roles.inner_roles
        replace_roles(llm, make_drafter(drafter.drafter.runner, plan, ahead=True))
    return llm


def rows_of(pair: tuple[Path, Path], text: list[int]) -> Tensor:
    """Log-probabilities [n - 1, V] by transformers of each token of a text except the first."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float64)
    with torch.no_grad():
        return model(torch.tensor([text])).logits[0, :-1].log_softmax(-1)


def check(found: tuple[SampledLogprob, ...] | None, tokens: list[int], rows: Tensor, k: int) -> None:
    assert found is not None and len(found) == len(tokens) == len(rows)
    for likelihood, token, row in zip(found, tokens, rows):  # transformers normalises in float32
        assert likelihood.logprob == pytest.approx(float(row[token]), abs=1e-5)
        values, ids = row.topk(k)
        assert [token for token, _ in likelihood.top] == ids.tolist()
        assert [value for _, value in likelihood.top] == pytest.approx(values.tolist(), abs=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["ar", "serial", "ahead"])
@pytest.mark.parametrize("sampling", REQUESTS, ids=["greedy", "shaped"])
def test_log_probabilities_equal_those_of_transformers(
    pair: tuple[Path, Path], mode: str, sampling: SamplingParams
) -> None:
    """The draft is the target, so that rounds are long; the last one is cut at the token limit."""
    chunks = list(make(pair, mode).stream(PROMPT, sampling))
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    rows = rows_of(pair, [*PROMPT, *tokens])
    for chunk in chunks:
        assert chunk.logprobs is not None and len(chunk.logprobs) == len(chunk.token_ids)
    answer = tuple(likelihood for chunk in chunks for likelihood in chunk.logprobs or ())
    check(answer, tokens, rows[len(PROMPT) - 1 :], 3)
    check(chunks[0].prompt_logprobs, PROMPT[1:], rows[: len(PROMPT) - 1], 2)
    assert all(chunk.prompt_logprobs is None for chunk in chunks[1:])
    assert len(tokens) == 21 and (mode == "ar" or len(chunks) < 15)


def test_the_tokenizer_is_returned_only_on_request(pair: tuple[Path, Path]) -> None:
    llm = make(pair, "serial")
    plain = replace(SHAPED, logprobs=None, prompt_logprobs=None)
    for params in (SHAPED, replace(SHAPED, prompt_logprobs=None), replace(SHAPED, logprobs=None)):
        want = llm.generate(PROMPT, plain).token_ids
        chunks = list(llm.stream(PROMPT, params))
        assert [token for chunk in chunks for token in chunk.token_ids] == want
        assert all((chunk.logprobs is not None) == (params.logprobs is not None) for chunk in chunks)
        assert (chunks[0].prompt_logprobs is not None) == (params.prompt_logprobs is not None)
    for chunk in llm.stream(PROMPT, plain):
        assert chunk == TokenChunk(chunk.token_ids, chunk.accepted, chunk.finish_reason)


def test_prompt_log_probabilities_ignore_the_prefix_cache(pair: tuple[Path, Path]) -> None:
    llm = make(pair, "serial")
    first, second = (next(iter(llm.stream(PROMPT, PARAMS))).prompt_logprobs for _ in range(2))
    assert first == second and len(first or ()) == len(PROMPT) - 1
    assert llm.stats.cached_tokens == 0
    llm.generate(PROMPT, replace(PARAMS, prompt_logprobs=None))
    assert llm.stats.cached_tokens == len(PROMPT) - 1


def test_a_prompt_of_one_token_has_no_log_probabilities(pair: tuple[Path, Path]) -> None:
    assert next(iter(make(pair, "ar").stream([5], PARAMS))).prompt_logprobs == ()


def test_zero_log_probabilities_return_only_the_token_itself(pair: tuple[Path, Path]) -> None:
    zero = next(iter(make(pair, "ar").stream(PROMPT[:5], replace(PARAMS, logprobs=0))))
    assert zero.logprobs is not None and zero.logprobs[0].top == () and zero.logprobs[0].logprob < 0


@pytest.mark.parametrize("mode", ["ar", "serial"])
def test_log_probabilities_of_all_tokens_and_of_requested_ones(pair: tuple[Path, Path], mode: str) -> None:
    llm, params = make(pair, mode), replace(SHAPED, logprobs=-1, prompt_logprobs=-1, max_tokens=9)
    for wanted in ((), (9, 0, 63)):
        chunks = list(llm.stream(PROMPT[:7], replace(params, logprob_token_ids=wanted)))
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        rows = rows_of(pair, [*PROMPT[:7], *tokens])
        found = [*(chunks[0].prompt_logprobs or ()), *(one for chunk in chunks for one in chunk.logprobs or ())]
        for place, (one, token, row) in enumerate(zip(found, [*PROMPT[1:7], *tokens], rows, strict=True)):
            order = row.argsort(descending=True).tolist()
            assert order[one.rank - 1] == token and one.logprob == pytest.approx(float(row[token]), abs=1e-5)
            assert [other for other, _ in one.top] == (list(wanted) if wanted and place >= 6 else order)
            assert [value for _, value in one.top] == pytest.approx([float(row[t]) for t, _ in one.top], abs=1e-5)


def test_the_size_of_prompt_log_probabilities_is_limited(pair: tuple[Path, Path]) -> None:
    with pytest.raises(UserError, match="more than the limit of 1048576 values"):
        EngineLimits(2**20, VOCAB, (), lambda sampling: None).check([1] * 16385, SamplingParams(prompt_logprobs=-1))


def test_log_probabilities_end_with_the_stop_token(pair: tuple[Path, Path]) -> None:
    llm = make(pair, "serial")
    tokens = llm.generate(PROMPT, REQUESTS[0]).token_ids
    ended = list(llm.stream(PROMPT, replace(REQUESTS[0], stop_token_ids=(tokens[2],))))
    assert sum(len(chunk.logprobs or ()) for chunk in ended) == tokens.index(tokens[2]) + 1


def test_only_verifications_need_another_executor(pair: tuple[Path, Path]) -> None:
    llm = LLMEngine(*pair, EngineConfig("serial"), dtype=torch.float32)
    verifier, params = verifier_of(llm), SamplingParams(temperature=0, logprobs=1)
    assert "log-probabilities" in verifier.required_features(params)
    assert "log-probabilities" not in verifier.required_features(replace(params, logprobs=None, prompt_logprobs=1))


def test_a_token_has_the_same_log_probability_as_in_the_list() -> None:
    """Clients compare the two for equality to see whether a token was the most likely one."""
    logits = 30 * torch.randn(64, 500, generator=torch.Generator().manual_seed(1))
    sampler, best = Sampler(SamplingParams(), (), 500, "cpu"), logits.argmax(-1).tolist()
    for token, one in zip(best, token_logprobs(sampler, logits, best, 3), strict=True):
        assert one.top[0] == (token, one.logprob) and one.rank == 1
    worst = logits.argmin(-1).tolist()
    for token, one in zip(worst, token_logprobs(sampler, logits, worst, -1), strict=True):
        assert one.top[-1] == (token, one.logprob) and one.rank == 500


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("k", [0, 4, 20, -1])
def test_a_sharded_vocabulary_gives_the_log_probabilities_of_one_rank(size: int, k: int) -> None:
    vocab, rows, params = 23, 4, SamplingParams()
    logits = 3 * torch.randn(rows, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    tokens = [0, 22, 7, 11]
    others = (22, 3) if k == 0 else ()
    want = token_logprobs(Sampler(params, (), vocab, "cpu"), logits, tokens, k, others)
    width = -(-vocab // size)
    padded = torch.nn.functional.pad(logits, (0, size * width - vocab))

    def on_rank(group: Any) -> tuple[SampledLogprob, ...]:
        sampler = Sampler(params, (), vocab, "cpu", shard=VocabShard(group, width, vocab))
        return token_logprobs(sampler, padded[:, group.rank * width : (group.rank + 1) * width], tokens, k, others)

    ranks = on_ranks(size, on_rank)
    assert all(rank == ranks[0] for rank in ranks)
    for one, other in zip(want, ranks[0], strict=True):
        assert one.logprob == pytest.approx(other.logprob) and len(one.top) == (len(others) or (vocab if k < 0 else k))
        assert [token for token, _ in one.top] == [token for token, _ in other.top] and one.rank == other.rank


WRONG: list[dict[str, Any]] = [
    {"logprobs": 21}, {"prompt_logprobs": -2}, {"prompt_logprobs": 1, "guidance_scale": 2}, {"logprob_token_ids": (3,)},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_invalid_counts_of_log_probabilities_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="logprobs"):
        SamplingParams(**wrong)
