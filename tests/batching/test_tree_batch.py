"""Several requests with a draft tree each: the output of a request does not depend on its company."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from operator import eq
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from greenlet import greenlet
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from swiftspec import _C
from swiftspec.batching.batch_request import BatchRequest
from swiftspec.batching.tree_batch import TreeBatchDecoding
from swiftspec.config import EngineConfig
from swiftspec.engine import TokenChunk
from swiftspec.errors import NonFiniteLogits, UserError
from swiftspec.llm_engine import LLMEngine
from swiftspec.params import SamplingParams
from tests.runtime.test_not_finite import damage
from tests.support.tiny_checkpoints import make_checkpoint, make_pair
from tests.support.toy_pair import byte_level_tokenizer, write_tokenizer

VOCAB, BAD_TOKEN = 320, 7  # the embedding of the latter is NaN in some tests
SHAPE = {"vocab": VOCAB, "head_dim": 16, "intermediate_size": 64}
DELTA_HEADS = {"qwen3_next": {"linear_key_head_dim": 16, "linear_value_head_dim": 16}}  # of the native operators
# of every kind: what only the logits change, what needs the host between forwards, and what changes the rounds
FEATURES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "logprobs": 2},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "prompt_logprobs": 1},
    {"temperature": 1.2, "logit_bias": {5: -3.0}, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.8, "guidance_scale": 1.5, "negative_prompt_ids": (9, 4, 2)},
    {"temperature": 0.8, "grammar": "start: /([a-c] )+/", "logprobs": 0},
    {"temperature": 0.6, "bad_words_ids": ((11,), (3, 4)), "min_tokens": 3},
    {"temperature": 0.7, "verify_batch": 1},
]
NATIVE = pytest.mark.skipif(_C.level() == "none", reason="this CPU has no AVX2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trees")


@pytest.fixture(scope="module")
def pair_of(folder: Path) -> Callable[[str], tuple[Path, Path]]:
    """Returns a dense pair, or one with another target of the same vocabulary."""
    made = dict[str, tuple[Path, Path]]()

    def pair(family: str) -> tuple[Path, Path]:
        if family not in made:
            target, draft = make_pair(folder / "dense", **SHAPE) if not made else made["dense"]
            if family != "dense":
                target = folder / family
                make_checkpoint(target, family=family, vocab=VOCAB, head_dim=16, **DELTA_HEADS.get(family, {}))
            write_tokenizer(target, byte_level_tokenizer())
            made[family] = target, draft
        return made[family]

    pair("dense")
    return pair


def requests_of(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts, some of which share prefixes, and parameters that differ in every feature and in length."""
    prompts = [[3 + i % 3 * j % 61 for j in range(1 + 31 * (i + 3) % 95)] for i in range(count)]
    ends = [
        {"max_tokens": 3 + 7 * i % 24, "ignore_eos": i % 2 > 0, "stop_token_ids": tuple(range(i, VOCAB, 40))}
        for i in range(count)
    ]
    return prompts, [SamplingParams(seed=i, **{**FEATURES[i % 8], **end}) for i, end in enumerate(ends)]


def engine(pair: tuple[Path, Path], draft: str | None, requests: int, **options: Any) -> LLMEngine:
    """`draft`: "model", "suffix" or None."""
    config = EngineConfig("serial" if draft else "ar", max_num_seqs=requests, **options.pop("config", {}))
    return LLMEngine(pair[0], pair[1] if draft == "model" else draft, config, max_model_len=128, **options)


def read(llm: LLMEngine, prompts: list[list[int]], sampling: list[SamplingParams]) -> list[list[Any]]:
    """Tokens, finish reason and log-probabilities of each request, decoded together."""
    found: list[list[Any]] = [[[], None, [], None] for _ in prompts]
    for index, chunk in llm.stream_batch(prompts, sampling):
        mine = found[index]
        mine[0] += chunk.token_ids
        mine[1] = chunk.finish_reason
        mine[2] += chunk.logprobs or ()
        mine[3] = mine[3] or chunk.prompt_logprobs
    return found


def decoding_of(llm: LLMEngine) -> TreeBatchDecoding:
    decoding = llm.decoding
    assert isinstance(decoding, TreeBatchDecoding)
    return decoding


def assert_idle(llm: LLMEngine) -> None:
    for pool in decoding_of(llm).pools:
        assert pool.num_free == llm.max_num_seqs, "a sequence was not given back"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("family", "dtype", "draft", "counts"),
    [
        ("dense", torch.float64, "model", (3,)),
        ("dense", torch.float64, "suffix", (4,)),
        pytest.param("dense", torch.bfloat16, "model", (2, 8), marks=NATIVE),
        pytest.param("dense", torch.float32, "suffix", (4,), marks=NATIVE),
        pytest.param("dense", torch.bfloat16, None, (4,), marks=NATIVE),
        pytest.param("qwen3_next", torch.float32, "model", (4,), marks=NATIVE),  # delta layers and experts
        pytest.param("qwen3_moe", torch.bfloat16, "model", (8,), marks=NATIVE),
    ],
    ids=str,
)
def test_requests_decoded_together_equal_each_alone(
    pair_of: Callable[[str], tuple[Path, Path]],
    family: str,
    dtype: torch.dtype,
    draft: str | None,
    counts: tuple[int, ...],
) -> None:
    """Also bit by bit, in log-probabilities, where the operators make the rows of a product independent."""
    prompts, sampling = requests_of(12)
    pair = pair_of(family)
    alone = LLMEngine(pair[0], config=EngineConfig("ar"), max_model_len=128, dtype=dtype)
    wanted = [read(alone, [prompt], [each])[0] for prompt, each in zip(prompts, sampling, strict=True)]
    assert {each[1] for each in wanted} == {"stop", "length"}
    for requests in counts:
        together = engine(pair, draft, requests, dtype=dtype)
        for _ in range(2):  # the second time prompts are found in the cache
            found = read(together, prompts, sampling)
            assert [each[:2] for each in found] == [each[:2] for each in wanted]
            if dtype != torch.float64:
                assert [each[2:] for each in found] == [each[2:] for each in wanted]
            assert_idle(together)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("family", "dtype", "counts"),
    [
        ("dense", torch.float64, (3,)),
        pytest.param("dense", torch.bfloat16, (2, 8), marks=NATIVE),
        pytest.param("qwen3_next", torch.float32, (4,), marks=NATIVE),
    ],
    ids=str,
)
def test_rejection_sampled_requests_equal_each_alone(
    pair_of: Callable[[str], tuple[Path, Path]], family: str, dtype: torch.dtype, counts: tuple[int, ...]
) -> None:
    """Also bit by bit, in log-probabilities: the noise of a tree does not depend on its company either."""
    prompts, sampling = requests_of(12)
    sampling = [replace(each, temperature=each.temperature or 0.5) for each in sampling]
    pair, config = pair_of(family), {"verify": "reject", "draft_steps": 2}
    alone = engine(pair, "model", 1, dtype=dtype, config=config)
    wanted = [read(alone, [prompt], [each])[0] for prompt, each in zip(prompts, sampling, strict=True)]
    for requests in counts:
        together = engine(pair, "model", requests, dtype=dtype, config=config)
        for _ in range(2):
            found = read(together, prompts, sampling)
            assert [each[:2] for each in found] == [each[:2] for each in wanted]
            if dtype != torch.float64:
                assert [each[2:] for each in found] == [each[2:] for each in wanted]
            assert_idle(together)


@NATIVE
@pytest.mark.parametrize("options", [{"self_switch": True, "adapt_steps": True, "adapt_batch": True}, {}], ids=str)
def test_rounds_that_follow_measurements_give_the_same_output(
    pair_of: Callable[[str], tuple[Path, Path]], options: dict[str, bool]
) -> None:
    """With grafting and probes; also of requests that come after others had company."""
    prompts, sampling = requests_of(12)
    sampling = [each for each in sampling if each.verify_batch is None]
    prompts = prompts[: len(sampling)]
    pair = pair_of("dense")
    plain = LLMEngine(pair[0], config=EngineConfig("ar"), max_model_len=128, dtype=torch.float32)
    wanted = [read(plain, [prompt], [each])[0][:2] for prompt, each in zip(prompts, sampling, strict=True)]
    llm = engine(pair, "model", 4, dtype=torch.float32, config=options)
    assert [each[:2] for each in read(llm, prompts, sampling)] == wanted
    alone = [llm.generate(prompt, each) for prompt, each in zip(prompts, sampling, strict=True)]
    assert [[each.token_ids, each.finish_reason] for each in alone] == wanted
    assert_idle(llm)


@NATIVE
def test_a_short_prompt_behind_a_long_one_waits_for_two_chunks(
    pair_of: Callable[[str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine(pair_of("dense"), None, 2, dtype=torch.float32)
    pool = decoding_of(llm).pools[0]
    monkeypatch.setattr(pool.runner.ops, "PREFILL_CHUNK_ROWS", 8)
    rows = list[int]()
    pool.runner.hooks.append(lambda began, count: rows.append(count))
    chunks = llm.stream_batch([[5] * 80, [6] * 5], SamplingParams(max_tokens=2, ignore_eos=True))
    assert next(chunks)[0] == 1 and rows == [8, 4, 8, 1], "two chunks of the long one"
    chunks.close()
    assert_idle(llm)


@NATIVE
def test_a_request_waits_for_the_prefill_of_a_prompt_that_it_shares(
    pair_of: Callable[[str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own prefill is then that of its last tokens. A request with another prompt does not wait behind it."""
    llm = engine(pair_of("dense"), None, 3, dtype=torch.float32)
    pool = decoding_of(llm).pools[0]
    monkeypatch.setattr(pool.runner.ops, "PREFILL_CHUNK_ROWS", 8)
    rows = list[int]()
    pool.runner.hooks.append(lambda began, count: rows.append(count))
    prompts = [[*[5] * 80, last] for last in (6, 7)]
    begun, chunks = list[int](), llm.stream_batch([*prompts, [9] * 5], SamplingParams(max_tokens=2, ignore_eos=True))
    for index, _ in chunks:
        begun += [] if index in begun else [index]
    assert begun == [2, 0, 1] and sum(rows) < 81 + 5 + 20
    assert_idle(llm)


@NATIVE
def test_a_cancelled_request_does_not_end_one_that_is_prefilled(
    pair_of: Callable[[str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine(pair_of("dense"), None, 2, dtype=torch.float32)
    monkeypatch.setattr(decoding_of(llm).pools[0].runner.ops, "PREFILL_CHUNK_ROWS", 8)
    begun, ends = set[int](), dict[int, str | None]()
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    for index, chunk in llm.stream_batch([[5] * 80, [6] * 5], sampling, lambda index: index == 1 and 1 in begun):
        begun.add(index)
        ends[index] = chunk.finish_reason
    assert ends == {0: "length", 1: "abort"}


@NATIVE
def test_a_guided_request_waits_until_two_sequences_are_free(pair_of: Callable[[str], tuple[Path, Path]]) -> None:
    """In the order of arrival: the request behind it waits too, and one that is cancelled meanwhile ends at once."""
    llm = engine(pair_of("dense"), "model", 2, dtype=torch.float32)
    plain = SamplingParams(0.8, max_tokens=9, ignore_eos=True)
    sampling = [plain, replace(plain, guidance_scale=2.0), plain]
    orders: dict[int | None, list[int]] = {None: [0, 1, 2], 1: [1, 0, 2]}
    for cancelled, order in orders.items():
        ends, begun = dict[int, str | None](), list[int]()
        for index, chunk in llm.stream_batch([[5, 6]] * 3, sampling, partial(eq, cancelled)):
            begun += [] if index in begun else [index]
            ends |= {index: chunk.finish_reason} if chunk.finish_reason else {}
        assert [*ends] == order and all((ends[i] == "abort") == (i == cancelled) for i in ends)
        assert cancelled is not None or begun == order
        assert_idle(llm)


@NATIVE
def test_both_sequences_of_a_guided_request_reuse_prefixes(pair_of: Callable[[str], tuple[Path, Path]]) -> None:
    """The second time the target prefills neither of its prompts; the draft does not read the negative one."""
    llm = engine(pair_of("dense"), "model", 4, dtype=torch.float32)
    rows, guided = {"target": [0], "draft": [0]}, {"guidance_scale": 2.0, "negative_prompt_ids": tuple(range(7, 52))}
    for mine, pool in zip(rows.values(), decoding_of(llm).pools, strict=True):
        pool.runner.hooks.append(lambda began, count, mine=mine: mine.append(count))
    prompt, sampling = [3 + i % 50 for i in range(50)], SamplingParams(0.7, max_tokens=12, ignore_eos=True, **guided)
    texts, spent, cached = list[list[int]](), list[list[int]](), list[int]()
    for _ in range(2):
        answer = llm.generate(prompt, sampling)
        texts.append(answer.token_ids)
        cached.append(answer.stats.cached_tokens)
        spent.append([sum(each) for each in rows.values()])
        for each in rows.values():
            each.clear()
    assert texts[0] == texts[1] and cached == [0, 49]
    assert [first - second for first, second in zip(*spent, strict=True)] == [49 + 44, 49]


@NATIVE
def test_greenlets_of_an_application_are_no_coroutines_of_requests(
    pair_of: Callable[[str], tuple[Path, Path]],
) -> None:
    llm = engine(pair_of("dense"), "model", 2, dtype=torch.float32)
    sampling = SamplingParams(max_tokens=9)
    found = greenlet(lambda: llm.generate([5, 6], sampling).token_ids).switch()
    assert found == llm.generate([5, 6], sampling).token_ids


@NATIVE
def test_another_thread_may_close_a_batch_but_not_read_it(pair_of: Callable[[str], tuple[Path, Path]]) -> None:
    llm = engine(pair_of("dense"), "model", 2, dtype=torch.float32)
    sampling, wanted = (
        SamplingParams(max_tokens=20, ignore_eos=True),
        llm.generate([5, 6], SamplingParams(max_tokens=9)),
    )
    chunks, errors = llm.stream_batch([[5] * 9, [6] * 9], sampling), list[Exception]()
    next(chunks)

    def read_and_close() -> None:
        try:
            next(chunks)
        except UserError as error:
            errors.append(error)

    thread = Thread(target=read_and_close)
    thread.start()
    thread.join()
    assert [str(error) for error in errors] == [
        "these requests run in another thread: read all of a batch in one thread"
    ]
    assert_idle(llm)
    assert llm.generate([5, 6], SamplingParams(max_tokens=9)).token_ids == wanted.token_ids


class Arrivals(RuleBasedStateMachine):
    """Requests arrive, are cancelled, fail and end in any order."""

    llm: LLMEngine
    expected: list[list[int]]
    prompts, sampling = requests_of(8)

    def __init__(self) -> None:
        super().__init__()
        self.waiting, self.cancelled = list[BatchRequest](), set[int]()
        self.kind = dict[int, int]()  # of each request, below 0 for one that fails, -2 for its negative prompt
        self.text, self.ended = dict[int, list[int]](), dict[int, str]()
        self.chunks: Generator[tuple[BatchRequest, TokenChunk]] | None = None

    @rule(kind=st.integers(-2, 7))
    def arrive(self, kind: int) -> None:
        number, sampling = len(self.kind), self.sampling[max(kind, 0)]
        prompt = [5, BAD_TOKEN, 3] if kind == -1 else self.prompts[max(kind, 0)]
        if kind == -2:
            sampling = replace(sampling, guidance_scale=2.0, negative_prompt_ids=(5, BAD_TOKEN, 3))
        self.waiting.append(self.llm.request(number, prompt, sampling))
        self.kind[number], self.text[number] = kind, []

    @precondition(lambda self: self.kind)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.cancelled.add(data.draw(st.sampled_from(sorted(self.kind))))

    @rule(count=st.integers(1, 12))
    def decode(self, count: int) -> None:
        for _ in range(count):
            if self.chunks is None:
                following = lambda: self.waiting.pop(0) if self.waiting else None  # noqa: E731
                self.chunks = self.llm.run_batch(following, lambda each: each.number in self.cancelled)
            found = next(self.chunks, None)
            if found is None:
                self.chunks = None
                return
            self._receive(*found)

    def _receive(self, request: BatchRequest, chunk: TokenChunk) -> None:
        number = request.number
        assert number not in self.ended
        self.text[number] += chunk.token_ids
        kind = self.kind[number]
        if kind >= 0:
            assert self.text[number] == self.expected[kind][: len(self.text[number])]
        if chunk.finish_reason is None:
            return
        self.ended[number] = chunk.finish_reason
        if chunk.finish_reason == "abort":
            assert number in self.cancelled
        elif kind < 0:
            assert chunk.finish_reason == "error" and isinstance(request.error, NonFiniteLogits)
        else:
            assert self.text[number] == self.expected[kind]

    @invariant()
    def idle_sequences_are_free(self) -> None:
        if self.chunks is None:
            assert_idle(self.llm)

    def teardown(self) -> None:
        self.decode(10_000)
        assert {*self.ended} == {*self.kind}
        if self.chunks is not None:
            self.chunks.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("draft", "dtype"),
    [("model", torch.float64), pytest.param("model", torch.float32, marks=NATIVE), ("suffix", torch.float64)],
    ids=str,
)
def test_arrivals_cancellations_errors_and_ends(
    pair_of: Callable[[str], tuple[Path, Path]], draft: str, dtype: torch.dtype
) -> None:
    target, model = pair_of("dense")
    damaged = target.parent / f"damaged {draft} {dtype}"
    shutil.copytree(target, damaged)
    damage(damaged, "model.embed_tokens.weight", lambda rows: rows[BAD_TOKEN].fill_(math.nan))
    llm = engine((damaged, model), draft, 3, dtype=dtype)
    prompts, sampling = requests_of(8)
    prompts = [[token for token in prompt if token != BAD_TOKEN] for prompt in prompts]
    allowed = [replace(each, logit_bias={**each.logit_bias, BAD_TOKEN: -1e9}) for each in sampling]
    machine = type("Machine", (Arrivals,), {"llm": llm, "prompts": prompts, "sampling": allowed})
    machine.expected = [llm.generate(*each).token_ids for each in zip(prompts, allowed, strict=True)]
    run: Any = machine.TestCase
    run.settings = settings(max_examples=6, stateful_step_count=12, deadline=None)
    run("runTest").runTest()
